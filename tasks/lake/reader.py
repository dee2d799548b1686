"""Rows of a table through DuckDB's own Parquet reader, and the table's checks over new rows.

The current files are read as `<empty table of today's schema> UNION ALL BY NAME read_parquet(...)`:
an empty table keeps its types and an old file gets its new columns as NULL, while filters still
reach the files. DuckDB over Delta's Arrow dataset or `delta_scan` is 1.7 and 4 times slower.
"""

import re
import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from schemas.tables import Table
from tasks.storage import Storage, explain_errors

HTTP_SETTINGS = {"http_retries": 6, "http_retry_wait_ms": 250, "http_retry_backoff": 2}
"""Six tries in 16 s; queries of people have no other patience."""


class Database:
    """An in-memory DuckDB that may read a lake's files, on a disk or in S3.

    It never fetches an extension over the network: the one for S3 comes as a package. Credentials
    are handed over anew whenever they were renewed, as a secret bound to the lake's address.
    """

    def __init__(self, storage: Storage):
        self.connection = duckdb.connect(config={"autoinstall_known_extensions": False})
        self._storage = storage
        self._granted: dict[str, str] = {}
        self._lock = threading.Lock()
        if storage.uri.startswith("s3://"):
            load_httpfs(self.connection)
        self.grant()

    def grant(self) -> None:
        """Hands over the storage's credentials of this moment, if they are new."""
        options = self._storage.options()
        with self._lock:
            if options != self._granted:
                create_secret(self.connection, self._storage.uri, options)
                self._granted = options

    def read_files(
        self,
        table: Table,
        files: Sequence[str],
        *,
        columns: Sequence[str] | None = None,
        where: str | None = None,
        params: Sequence[object] = (),
        write_ids: Collection[str] | None = None,
        order_by: str | None = None,
    ) -> pa.Table:
        """Rows of the files, typed by the table's schema, in `order_by` or else the table's order.

        `where` is DuckDB SQL over the table's columns with `?` for `params`; `write_ids`, if given,
        keeps only the rows of those writes.

        Raises:
            ValueError: `columns` names one that the table does not have.
        """
        names = table.schema.names if columns is None else list(columns)
        unknown = [name for name in names if name not in table.schema.names]
        if unknown:
            raise ValueError(
                f"Table {table.name} has no columns {unknown}; `rollhouse describe {table.name}` "
                "lists those it has."
            )
        arguments: list[Any] = []
        source = "SELECT * FROM today"
        if files:
            source += (
                " UNION ALL BY NAME SELECT * FROM read_parquet(?, union_by_name = true,"
                " hive_partitioning = true, hive_types = {'run_id': VARCHAR, 'cycle': BIGINT})"
            )
            arguments.append(list(files))
        terms = []
        if where is not None:
            terms.append(f"({where})")
            arguments.extend(params)
        self.grant()
        with explained_reading(table, self._storage.uri), self.connection.cursor() as cursor:
            cursor.register("today", table.schema.empty_table())
            if write_ids is not None:
                ids = pa.array(list(write_ids), pa.string())
                cursor.register("wanted", pa.table({"write_id": ids}))
                terms.append("write_id IN (SELECT write_id FROM wanted)")
            condition = " AND ".join(terms) or "true"
            query = (
                f"SELECT {', '.join(names)} FROM ({source}) WHERE {condition}"
                f" ORDER BY {order_by or ', '.join(table.sort_by)}"
            )
            rows = self._storage.patiently(
                lambda: cursor.execute(query, arguments).to_arrow_table()
            )
        return rows.cast(pa.schema([table.schema.field(name) for name in names]))


def load_httpfs(connection: duckdb.DuckDBPyConnection) -> None:
    """Loads DuckDB's S3 reader from its package."""
    import duckdb_extension_httpfs

    folder = Path(duckdb_extension_httpfs.__file__).parent / "extensions" / f"v{duckdb.__version__}"
    extension = folder / "httpfs.duckdb_extension"
    if not extension.exists():
        raise RuntimeError(
            f"duckdb-extension-httpfs does not fit duckdb {duckdb.__version__}; install the same "
            f"version: pip install duckdb-extension-httpfs=={duckdb.__version__}."
        )
    connection.load_extension(str(extension))
    # It copies credentials from the environment into settings that any query can read.
    for name in ("s3_access_key_id", "s3_secret_access_key", "s3_session_token"):
        connection.execute(f"SET GLOBAL {name} = ''")
    for name, value in HTTP_SETTINGS.items():
        connection.execute(f"SET GLOBAL {name} = {value}")


def create_secret(
    connection: duckdb.DuckDBPyConnection, uri: str, options: Mapping[str, str]
) -> None:
    """Lets a connection read below an S3 address with these credentials and nowhere else."""
    endpoint = options.get("AWS_ENDPOINT_URL", "")
    values = {
        "KEY_ID": options["AWS_ACCESS_KEY_ID"],
        "SECRET": options["AWS_SECRET_ACCESS_KEY"],
        "SESSION_TOKEN": options.get("AWS_SESSION_TOKEN", ""),
        "REGION": options["AWS_REGION"],
        "SCOPE": f"{uri}/",
    }
    if endpoint:
        values |= {"ENDPOINT": endpoint.split("://")[1], "URL_STYLE": "path"}
    listed = ", ".join(f"{name} {quoted(value)}" for name, value in values.items() if value)
    use_ssl = "false" if endpoint.startswith("http://") else "true"
    connection.execute(f"CREATE OR REPLACE SECRET lake (TYPE s3, {listed}, USE_SSL {use_ssl})")


def quoted(text: str) -> str:
    """A SQL string literal."""
    return "'" + text.replace("'", "''") + "'"


def explained_reading(table: Table, uri: str):
    return explain_errors(f"read table {table.name} at {uri}", uri, duckdb.IOException)


def check_rows(database: duckdb.DuckDBPyConnection, table: Table, rows: pa.Table) -> None:
    """Evaluates the table's CHECK expressions over rows that are about to be written.

    Raises:
        ValueError: an expression is false or NULL for some row, as in a Delta CHECK constraint.
    """
    if not table.checks:
        return
    counts = ", ".join(
        f"count(*) FILTER (WHERE ({expression}) IS NOT TRUE)"
        for expression in table.checks.values()
    )
    words = {word for sql in table.checks.values() for word in re.findall(r"\w+", sql)}
    checked = rows.select([name for name in rows.column_names if name in words])
    with database.cursor() as cursor:
        # Without the lists that no check names: handing them over costs more than the scan.
        failed = cursor.from_arrow(checked).aggregate(counts).fetchone()
    assert failed is not None
    for (name, expression), count in zip(table.checks.items(), failed, strict=True):
        if count:
            raise ValueError(
                f"{count} of {rows.num_rows} rows for table {table.name} violate the check "
                f"{name} ({expression}); nothing was written. Correct the rows at their source."
            )
