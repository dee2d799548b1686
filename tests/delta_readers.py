"""Delta readers that know nothing of Rollhouse, each giving a table's rows as Arrow."""

from pathlib import Path

import duckdb
import polars
import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder

from tasks.lake.reader import create_secret, load_httpfs
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
