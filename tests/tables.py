"""Rows for any table, made from its schema alone."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa

from schemas.tables import TABLES


def value(kind: pa.DataType, index: int) -> Any:
    """A value of an Arrow type that differs by index."""
    if pa.types.is_boolean(kind):
        return index % 2 == 0
    if pa.types.is_integer(kind):
        return index
    if pa.types.is_floating(kind):
        return index + 0.25
    if pa.types.is_string(kind):
        return f"text {index}"
    if pa.types.is_binary(kind):
        return bytes([index, 0, 255])
    if pa.types.is_timestamp(kind):
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(microseconds=index)
    if pa.types.is_map(kind):
        return [("a", value(kind.item_type, index)), ("b", value(kind.item_type, index + 1))]
    if pa.types.is_struct(kind):
        return {field.name: value(field.type, index) for field in kind}
    assert pa.types.is_list(kind)
    return [value(kind.value_type, index + offset) for offset in range(3)]


ALLOWED = {
    "action": "drop",
    "origin": "verl",
    "kind": "action",
    "status": "completed",
    "split": "train",
    "drift": "clean",
}


def rows_of(table: str, count: int) -> pa.Table:
    """Rows in the table's order, each value another one where the checks allow it."""
    schema = TABLES[table].own_schema
    rows = [
        {f.name: ALLOWED.get(f.name, value(f.type, index)) for f in schema}
        for index in range(count)
    ]
    return pa.Table.from_pylist(rows, schema=schema)


def decisions(number: int) -> pa.Table:
    """One row of `decisions`, told from others by its number."""
    when = pa.array([number], pa.timestamp("us", "UTC"))
    columns = {
        "decision": ["approve"],
        "refusal": [number],
        "admission": [number],
        "rule": ["r"],
        "reviewer": ["me"],
    }
    return pa.table({**columns, "reason": ["x"], "decided_at": when})
