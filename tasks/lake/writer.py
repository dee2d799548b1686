"""Rollhouse's own Parquet writer: one file a write, with statistics for pruning.

Sorted by the table's key, Zstandard level 1, dictionaries only where values repeat, token ids plain
and BYTE_STREAM_SPLIT on floats alone, since DuckDB cannot read it on integers. delta-rs's own
writer is slower and cannot encode the elements of a list apart from other columns.
"""

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from schemas.tables import Table

MAX_STRING_STATISTIC_BYTES = 64
"""Longer minima and maxima are left out: a truncated maximum would have to be rounded up."""


VALUES_PER_BATCH = 1 << 20


def file_rows(table: Table, rows: pa.Table, write_id: str) -> pa.Table:
    """The rows as a file holds them: today's columns in order, sorted, with their write id.

    `rows` has exactly the table's own columns, in any order and of castable types.

    Raises:
        ValueError: a column is missing or unknown, or a value does not fit its type.
    """
    own = table.own_schema
    missing = [name for name in own.names if name not in rows.column_names]
    unknown = [name for name in rows.column_names if name not in own.names]
    if missing or unknown:
        raise ValueError(
            f"Rows for table {table.name} lack columns {missing} and have unknown columns "
            f"{unknown}; write exactly the columns that `rollhouse describe {table.name}` lists."
        )
    try:
        typed = rows.select(own.names).cast(own)
    except pa.ArrowInvalid as error:
        raise ValueError(f"Rows for table {table.name} do not fit its types: {error}") from error
    keys = [(key, "ascending") for key in table.sort_by]
    order = pc.call_function("sort_indices", [typed], pc.SortOptions(sort_keys=keys)).to_numpy()
    if not np.array_equal(order, np.arange(len(order))):
        typed = typed.take(order)
    ids = pa.repeat(pa.scalar(write_id, pa.string()), typed.num_rows)
    return typed.append_column("write_id", ids).select(table.file_schema.names)


def parquet_bytes(table: Table, rows: pa.Table) -> memoryview:
    """The rows of `file_rows` as a Parquet file."""
    options: dict[str, Any] = {
        "compression": "zstd",
        "compression_level": 1,
        "use_dictionary": [*table.dictionary, "write_id"],
        "use_byte_stream_split": list(table.byte_stream_split),
        "write_statistics": [f.name for f in rows.schema if not pa.types.is_nested(f.type)],
        "store_schema": False,
        # Pages end at batches: long ones compress better, and lists cost less in few.
        "write_batch_size": VALUES_PER_BATCH,
    }
    bare = rows.cast(pa.schema([_as_stored(rows, field) for field in rows.schema]))
    file = pa.BufferOutputStream()
    pq.write_table(bare, file, **options)
    return memoryview(file.getvalue())


def _as_stored(rows: pa.Table, field: pa.Field) -> pa.Field:
    """The field without its description, and required where these rows hold no NULL.

    Descriptions live in the Delta schema; in each small file they would outweigh the rows. Levels
    that say which values are NULL are a sixth of the time to write a list; readers take a required
    column for a nullable one that happens to be full.
    """
    column = rows.column(field.name)
    kind = field.type
    if pa.types.is_list(kind) and not any(
        pc.call_function("list_flatten", [chunk]).null_count for chunk in column.chunks
    ):
        kind = pa.list_(kind.value_field.with_nullable(False))
    return pa.field(field.name, kind, nullable=column.null_count > 0)


def delta_statistics(rows: pa.Table) -> str:
    """The `stats` text of a Delta add action: numRecords, and minima, maxima and null counts.

    Only scalar columns have them. A minimum or maximum is left out where it could prune wrongly:
    floats with NaN or infinity, long strings, booleans and binary. Timestamps are rounded outward
    to milliseconds, the resolution that the Delta protocol gives statistics.
    """
    minima: dict[str, Any] = {}
    maxima: dict[str, Any] = {}
    null_counts: dict[str, int] = {}
    for field in rows.schema:
        if pa.types.is_nested(field.type):
            continue
        column = rows.column(field.name)
        null_counts[field.name] = column.null_count
        bounds = _bounds(column)
        if bounds is not None:
            minima[field.name], maxima[field.name] = bounds
    statistics = {
        "numRecords": rows.num_rows,
        "minValues": minima,
        "maxValues": maxima,
        "nullCount": null_counts,
    }
    return json.dumps(statistics, allow_nan=False)


def _bounds(column: pa.ChunkedArray) -> tuple[Any, Any] | None:
    kind = column.type
    if pa.types.is_boolean(kind) or pa.types.is_binary(kind):
        return None
    if pa.types.is_floating(kind) and not np.isfinite(column.drop_null().to_numpy()).all():
        return None
    bounds: Mapping[str, Any] = pc.call_function("min_max", [column]).as_py()
    low, high = bounds["min"], bounds["max"]
    if low is None:
        return None
    if isinstance(low, datetime):
        return _milliseconds(low, up=False), _milliseconds(high, up=True)
    if isinstance(low, str):
        longest = max(len(low.encode()), len(high.encode()))
        return None if longest > MAX_STRING_STATISTIC_BYTES else (low, high)
    return low, high


def _milliseconds(moment: datetime, *, up: bool) -> str:
    excess = timedelta(microseconds=moment.microsecond % 1000)
    rounded = moment - excess
    if up and excess:
        rounded += timedelta(milliseconds=1)
    return rounded.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
