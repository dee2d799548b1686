"""Delta readers that know nothing of Rollhouse see what `rollhouse sql` sees, in every table."""

import math
from datetime import UTC, datetime

import pyarrow as pa
import pytest

from schemas.tables import TABLES
from tasks.lake import Lake
from tests.delta_readers import READERS, assert_agree
from tests.tables import ALLOWED, rows_of

RUNS = ("demo", "a b/ü%=x")
NUM_WRITES = 7
"""Of each run, so that the log holds a checkpoint and commits after it."""


def with_nulls(table: str) -> pa.Table:
    """Rows with a NULL in every column that has no check, with NULL and NaN in lists, and empty
    lists."""
    rows = rows_of(table, 4).to_pylist()
    key = TABLES[table].sort_by
    for field in TABLES[table].own_schema:
        if field.name in ALLOWED or field.name in key:
            continue
        rows[1][field.name] = None
        if pa.types.is_list(field.type):
            rows[2][field.name] = []
            rows[3][field.name][1] = None
            if pa.types.is_floating(field.type.value_type):
                rows[3][field.name][0] = math.nan
        if pa.types.is_map(field.type):
            rows[2][field.name] = []
        if pa.types.is_struct(field.type):
            rows[2][field.name]["top_k"] = None
        if pa.types.is_timestamp(field.type):
            rows[3][field.name] = datetime(1969, 12, 31, 23, 59, 59, 999999, UTC)
    return pa.Table.from_pylist(rows, schema=TABLES[table].own_schema)


@pytest.fixture
def full_lake(lake_uri: str) -> str:
    """Rows in every table, of two runs and several cycles."""
    lake = Lake.create(lake_uri)
    for run_id in RUNS:
        ledger = lake.ledger(run_id)
        ledger.append("run_created", lease=0, details={"config": {}})
        for cycle in range(NUM_WRITES):
            write_ids = [
                lake.append(name, with_nulls(name), run_id=run_id, cycle=cycle, lease=0)
                for name in TABLES
                if name != "ledger" and (name == "evals" or cycle < 2)
            ]
            ledger.append("rollouts_recorded", lease=0, cycle=cycle, write_ids=write_ids)
    return lake_uri


def test_every_reader_sees_every_row(full_lake: str):
    for reader in READERS:
        assert_agree(full_lake, reader)
