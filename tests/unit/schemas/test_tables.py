"""Tables keep the promises that every reader relies on."""

import duckdb
import pyarrow as pa
import pytest

from schemas.tables import TABLES, Table

TABLE_LIST = list(TABLES.values())


def leaf_types(kind: pa.DataType) -> list[pa.DataType]:
    if isinstance(kind, pa.MapType):
        return [kind, *leaf_types(kind.key_type), *leaf_types(kind.item_type)]
    if isinstance(kind, pa.ListType):
        return [kind, *leaf_types(kind.value_type)]
    if isinstance(kind, pa.StructType):
        return [kind, *(t for i in range(kind.num_fields) for t in leaf_types(kind.field(i).type))]
    return [kind]


@pytest.mark.parametrize("table", TABLE_LIST, ids=lambda t: t.name)
def test_every_column_says_what_it_means(table: Table):
    for column in table.all_columns:
        assert column.description.endswith("."), column.name
        if column.nullable:
            assert "NULL" in column.description, f"{table.name}.{column.name}: when is it NULL?"
    assert len({column.name for column in table.all_columns}) == len(table.all_columns)
    assert set(table.sort_by) <= {column.name for column in table.all_columns}


@pytest.mark.parametrize("table", TABLE_LIST, ids=lambda t: t.name)
def test_types_are_ones_that_every_reader_keeps(table: Table):
    for column in table.all_columns:
        for kind in leaf_types(column.type):
            assert not pa.types.is_unsigned_integer(kind), column.name
            assert not pa.types.is_fixed_size_list(kind), column.name


@pytest.mark.parametrize("table", TABLE_LIST, ids=lambda t: t.name)
def test_no_column_needs_quoting(table: Table):
    row = duckdb.sql(
        "SELECT list(keyword_name) FROM duckdb_keywords() WHERE keyword_category = 'reserved'"
    ).fetchone()
    assert row is not None
    for column in table.all_columns:
        assert column.name.isidentifier() and column.name.islower()
        assert column.name not in row[0]


def test_check_constraints_let_null_pass():
    for table in TABLE_LIST:
        for name, check in table.checks.items():
            assert " IS NULL OR " in check, f"{table.name}.{name}: NULL would fail it"
