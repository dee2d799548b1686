"""Delta readers that know nothing of Rollhouse, each giving a table's rows as Arrow."""

import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import polars
import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder

from schemas.tables import TABLES
from tasks.lake import Lake
from tasks.lake.reader import create_secret, load_httpfs
from tasks.query import connect
from tasks.storage import open_storage


def _delta_table(uri: str, table: str) -> DeltaTable:
    storage = open_storage(uri).child(table)
    return DeltaTable(storage.uri, storage_options=storage.options())


def pyarrow_dataset(uri: str, table: str) -> pa.Table:
    return _delta_table(uri, table).to_pyarrow_dataset().to_table()


def pyarrow_table(uri: str, table: str) -> pa.Table:
    return _delta_table(uri, table).to_pyarrow_table()


def polars_scan(uri: str, table: str) -> pa.Table:
    """polars opens the log and the files by itself."""
    storage = open_storage(uri).child(table)
    return polars.scan_delta(storage.uri, storage_options=storage.options()).collect().to_arrow()


def data_fusion(uri: str, table: str) -> pa.Table:
    builder = QueryBuilder().register("rows", _delta_table(uri, table))
    return pa.table(builder.execute("SELECT * FROM rows").read_all())


def delta_scan(uri: str, table: str) -> pa.Table:
    """DuckDB's own Delta extension, from its package."""
    import duckdb_extension_delta

    storage = open_storage(uri)
    folder = Path(duckdb_extension_delta.__file__).parent / "extensions" / f"v{duckdb.__version__}"
    with duckdb.connect(config={"autoinstall_known_extensions": False}) as connection:
        if uri.startswith("s3://"):
            load_httpfs(connection)
            create_secret(connection, storage.uri, storage.options())
        connection.load_extension(str(folder / "delta.duckdb_extension"))
        connection.sql("SET TimeZone = 'UTC'")
        scan = connection.sql(f"FROM delta_scan('{storage.child(table).uri}')")
        return scan.to_arrow_table()


READERS = {
    "pyarrow dataset": pyarrow_dataset,
    "pyarrow table": pyarrow_table,
    "polars": polars_scan,
    "DataFusion": data_fusion,
    "delta_scan": delta_scan,
}


def comparable(value: Any) -> Any:
    """Equal for equal values: NaN is one, an entry of a map is a pair, a moment is in UTC."""
    match value:
        case float() if math.isnan(value):
            return "NaN"
        case datetime():
            return value.astimezone(UTC).isoformat()
        case {"key": key, "value": item}:
            return [key, comparable(item)]
        case dict():
            return {name: comparable(item) for name, item in value.items()}
        case list() | tuple():
            return [comparable(item) for item in value]
    return value


def sorted_rows(rows: pa.Table) -> list[dict[str, Any]]:
    names = sorted(rows.column_names)
    found = [{name: comparable(row[name]) for name in names} for row in rows.to_pylist()]
    return sorted(found, key=repr)


def assert_agree(uri: str, reader: str) -> None:
    """Whether a reader gives the rows of `rollhouse sql`, in every table."""
    connection = connect(Lake.open(uri))
    for table in TABLES:
        expected = sorted_rows(connection.sql(f"FROM {table}_all").to_arrow_table())
        found = sorted_rows(READERS[reader](uri, table))
        assert len(found) == len(expected), table
        for ours, theirs in zip(expected, found, strict=True):
            assert ours == theirs, table
