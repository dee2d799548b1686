"""Questions to a lake: a DuckDB connection with every table and view, and nothing else.

Each table appears as it counts (rows that a ledger names) and, as `<table>_all`, as it lies on
disk. The connection reads below the lake's own address and nothing else.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import duckdb
import pyarrow as pa

from schemas.tables import ALWAYS_COUNTED, TABLES
from schemas.views import view_sources
from tasks.lake.delta_log import TableLog
from tasks.lake.lake import Lake
from tasks.lake.reader import Database, quoted


class QueryRefused(ValueError):
    """The text is not one read-only query."""


def connect(lake: Lake) -> duckdb.DuckDBPyConnection:
    """A connection over the lake as it is now: tables, `<table>_all` and views."""
    visible = {
        write_id for run in lake.run_ids() for write_id in lake.ledger(run).visible_write_ids
    }
    return open_connection(lake, visible, {name: lake.files(name) for name in TABLES})


def connect_as_of(lake: Lake, run_id: str, seq: int) -> duckdb.DuckDBPyConnection:
    """A connection over one run as it stood when row `seq` was its ledger's last.

    Every table shows what the rows up to there name, so all agree. `<table>_all` is what lies in
    the run's files today.

    Raises:
        ValueError: the ledger has no such row.
    """
    entries = lake.ledger(run_id).entries
    if not 0 <= seq < len(entries):
        raise ValueError(
            f"The ledger of run {run_id} has rows 0 to {len(entries) - 1}, not {seq}; "
            '`rollhouse sql "SELECT seq, kind, committed_at FROM ledger"` lists them.'
        )
    visible = {write_id for entry in entries[: seq + 1] for write_id in entry.write_ids}
    files = {name: lake.files(name, run_id=run_id) for name in TABLES}
    return open_connection(lake, visible, files, last_seq=seq)


def open_connection(
    lake: Lake, visible: set[str], files: dict[str, list[str]], *, last_seq: int | None = None
) -> duckdb.DuckDBPyConnection:
    """A locked connection in which the rows of `visible` writes count, up to ledger row `last_seq`;
    `files` are the Parquet files of each table."""
    connection = Database(lake.storage).connection
    _define(connection, visible, files, last_seq)
    connection.sql(f"SET allowed_directories = [{quoted(lake.uri + '/')}]")
    connection.sql("SET enable_external_access = false")
    connection.sql("SET lock_configuration = true")
    return connection


def _define(
    connection: duckdb.DuckDBPyConnection,
    visible: set[str],
    paths: dict[str, list[str]],
    last_seq: int | None = None,
) -> None:
    connection.sql("SET TimeZone = 'UTC'")
    recorded = pa.table({"write_id": pa.array(sorted(visible), pa.string())})
    create_table(connection, "recorded_writes", recorded)
    for name, table in TABLES.items():
        _create_table_views(connection, name, table.schema, paths.get(name, []), last_seq)
    for name, sql in view_sources().items():
        connection.sql(f"CREATE VIEW {name} AS {sql}")


def create_table(connection: duckdb.DuckDBPyConnection, name: str, rows: pa.Table) -> None:
    """Copies an Arrow table into DuckDB, whose joins push filters down that Arrow scans lack."""
    connection.register("copied", rows)
    connection.execute(f"CREATE TABLE {name} AS FROM copied")
    connection.unregister("copied")


def _create_table_views(
    connection: duckdb.DuckDBPyConnection,
    name: str,
    schema: pa.Schema,
    paths: list[str],
    last_seq: int | None,
) -> None:
    # The empty table of today's schema gives old files their new columns and no files their types.
    create_table(connection, f"{name}_schema", schema.empty_table())
    source = f"SELECT * FROM {name}_schema"
    if paths:
        listed = ", ".join(map(quoted, paths))
        source += (
            f" UNION ALL BY NAME SELECT * FROM read_parquet([{listed}], union_by_name = true,"
            " hive_partitioning = true, hive_types = {'run_id': VARCHAR, 'cycle': BIGINT})"
        )
    connection.sql(f"CREATE VIEW {name}_all AS {source}")
    # A ledger row names the others; these count as a whole.
    where = "" if name in ALWAYS_COUNTED else " SEMI JOIN recorded_writes USING (write_id)"
    if name == "ledger" and last_seq is not None:
        where = f" WHERE seq <= {last_seq}"
    connection.sql(f"CREATE VIEW {name} AS SELECT * FROM {name}_all{where}")


def run_query(
    connection: duckdb.DuckDBPyConnection, sql: str
) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Column names and rows of one SELECT.

    Raises `QueryRefused` for anything else, and for a query that does not parse or run.
    """
    with _refusing():
        relation = _select(connection, sql)
        return relation.columns, relation.fetchall()


def stream_query(
    connection: duckdb.DuckDBPyConnection, sql: str, *, rows_per_batch: int
) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Schema of one SELECT's result, and its rows as they are computed.

    Raises as `run_query` does, also while the batches are taken.
    """
    with _refusing():
        reader = _select(connection, sql).to_arrow_reader(rows_per_batch)

    def batches() -> Iterator[pa.RecordBatch]:
        with _refusing():
            yield from reader

    return reader.schema, batches()


def _select(connection: duckdb.DuckDBPyConnection, sql: str) -> duckdb.DuckDBPyRelation:
    try:
        statements = connection.extract_statements(sql)
    except duckdb.Error as error:
        raise QueryRefused(f"The query does not parse: {error}") from None
    if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
        raise QueryRefused(
            "Give one SELECT (or FROM ..., SUMMARIZE, DESCRIBE): the lake is read-only here."
        )
    return connection.sql(sql)


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except duckdb.Error as error:
        raise QueryRefused(
            f"The query cannot run: {error}\n`rollhouse views` and `rollhouse describe TABLE` show "
            "what there is."
        ) from None


def table_history(lake: Lake, name: str) -> list[dict[str, Any]]:
    """The Delta versions of a table, newest first: version, committed_at, operation, writer.

    Versions whose log was cleaned up are not listed. Raises `ValueError` if the lake has no such
    table.
    """
    if name not in lake.tables:
        raise ValueError(f"The lake has no table {name}; it has {', '.join(lake.tables)}.")
    return TableLog(lake.storage.child(name)).history()


def describe_columns(name: str) -> Iterator[tuple[str, str, str]]:
    """(column, type, description) of a table or view.

    Raises `ValueError` if there is none of that name.
    """
    table = TABLES.get(name.removesuffix("_all"))
    if table is not None:
        for column in table.all_columns:
            yield column.name, str(column.type), column.description
        return
    if name not in view_sources():
        known = ", ".join([*TABLES, *view_sources()])
        raise ValueError(f"The lake has no table or view {name}; it has {known}.")
    texts = _view_columns(view_sources()[name])
    if name == "tokens":
        texts = _view_columns(view_sources()["tokens_all"])
    connection = duckdb.connect()
    _define(connection, set(), {})
    for column, kind, *_ in connection.sql(f"DESCRIBE {name}").fetchall():
        yield column, kind, texts.get(column) or _table_column(column)


def _table_column(name: str) -> str:
    """The text of a table's column that a view passes on under its own name."""
    for table in TABLES.values():
        for column in table.all_columns:
            if column.name == name:
                return column.description
    return ""


def _view_columns(sql: str) -> dict[str, str]:
    """Column texts in a view's header: lines `-- name, name   text`."""
    texts = {}
    for line in sql.splitlines():
        body = line.removeprefix("--").strip()
        names, gap, text = body.partition("  ")
        if line.startswith("--") and gap:
            texts |= {name.strip(): text.strip() for name in names.split(",")}
    return texts
