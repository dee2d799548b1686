"""A lake that an older Rollhouse made: read as it is, and brought up to date for every reader."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars
import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder, write_deltalake
from deltalake.exceptions import DeltaError

from schemas.tables import SCHEMA_VERSION, TABLES
from tasks.invariants import check_lake
from tasks.lake import Lake
from tasks.query import connect, run_query
from tasks.storage import StorageError, open_storage
from tests.delta_readers import delta_scan
from tests.s3_server import READER_KEYS
from tests.tables import rows_of

RUN = "demo"
NEW_COLUMNS = {"steps": "metrics", "trajectories": "sampling", "segments": "kv_version_min"}
"""A map, a struct and a number that the older Rollhouse did not know."""

NEW_CHECK = {"segments": "kind_known"}


@contextmanager
def older_tables() -> Iterator[None]:
    """The tables without some columns, a check and a table. Their order is part of what is put
    back: the ledger must be the last."""
    newer = dict(TABLES)
    del TABLES["evals"]
    for name, column in NEW_COLUMNS.items():
        table = TABLES[name]
        columns = tuple(c for c in table.columns if c.name != column)
        dictionary = tuple(c for c in table.dictionary if c != column)
        TABLES[name] = replace(table, columns=columns, dictionary=dictionary)
    for name, check in NEW_CHECK.items():
        checks = {k: v for k, v in TABLES[name].checks.items() if k != check}
        TABLES[name] = replace(TABLES[name], checks=checks)
    status = TABLES["trajectories"].checks | {"status_known": "status IS NOT NULL"}
    TABLES["trajectories"] = replace(TABLES["trajectories"], checks=status)
    try:
        yield
    finally:
        TABLES.clear()
        TABLES.update(newer)


@pytest.fixture
def old_lake(lake_uri: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A lake of the older version with rows in every table."""
    with older_tables(), monkeypatch.context() as patch:
        for module in ("creation", "delta"):
            patch.setattr(f"tasks.lake.{module}.SCHEMA_VERSION", SCHEMA_VERSION - 1)
        lake = Lake.create(lake_uri)
        ledger = lake.ledger(RUN)
        ledger.append("run_created", lease=0)
        for name in TABLES:
            if name != "ledger":
                write_id = lake.append(name, rows_of(name, 3), run_id=RUN, cycle=0, lease=0)
                ledger.append("rollouts_recorded", lease=0, write_ids=[write_id])
    return lake_uri


def delta_table(uri: str, name: str) -> DeltaTable:
    storage = open_storage(uri).child(name)
    return DeltaTable(storage.uri, storage_options=storage.options())


def new_column(lake: Lake, name: str) -> list[Any]:
    rows = lake.read(name, run_id=RUN, write_ids="all")
    return rows.column(NEW_COLUMNS[name]).to_pylist()


def test_an_older_lake_is_read_as_it_is(old_lake: str):
    before = sorted(f.path for f in open_storage(old_lake).walk())
    lake = Lake.open(old_lake)
    for name in NEW_COLUMNS:
        assert new_column(lake, name) == [None] * 3
    assert lake.read("evals", run_id=RUN).schema.equals(TABLES["evals"].schema)
    assert lake.files("evals") == []
    connection = connect(lake)
    assert run_query(connection, "SELECT count(*), count(metrics) FROM steps")[1] == [(3, 0)]
    assert run_query(connection, "FROM evals")[1] == []
    assert run_query(connection, "FROM signals_by_step")[1] != []
    for table in ("steps", "evals"):
        with pytest.raises(ValueError, match=r"`rollhouse run RUN\.toml`"):
            lake.append(table, rows_of(table, 1), run_id=RUN, cycle=0, lease=0)
    (tables, *_) = check_lake(lake)
    assert tables.ok and f"brings 14 of them to {SCHEMA_VERSION}" in tables.found
    assert sorted(f.path for f in open_storage(old_lake).walk()) == before


def test_every_reader_sees_new_columns_as_null(old_lake: str):
    reader = Lake.open(old_lake)
    lake = Lake.create(old_lake)
    assert lake.read("evals", run_id=RUN).num_rows == 0
    for writer in (lake, reader):
        for name in (*NEW_COLUMNS, "batches"):
            writer.append(name, rows_of(name, 1), run_id=RUN, cycle=1, lease=0)
    for name, column in NEW_COLUMNS.items():
        expected = [*[None] * 3, *rows_of(name, 1).column(column).to_pylist() * 2]
        assert sorted(new_column(lake, name), key=str) == sorted(expected, key=str)
        found = delta_table(old_lake, name)
        nulls = {
            "pyarrow": found.to_pyarrow_table().column(column).null_count,
            "polars": polars.scan_delta(found).select(polars.col(column).is_null().sum())
            .collect().item(),
            "DataFusion": pa.table(
                QueryBuilder().register("t", found)
                .execute(f"SELECT count(*) AS n FROM t WHERE {column} IS NULL").read_all()
            ).column("n").to_pylist()[0],
            "delta_scan": sum(
                row[column] is None for row in delta_scan(old_lake, name).to_pylist()
            ),
        }  # fmt: skip
        assert set(nulls.values()) == {3}, (name, nulls)
        assert found.to_pyarrow_table().num_rows == 5
    pruned = lake.files("segments", run_id=RUN, predicate="kv_version_min = 0")
    assert len(pruned) == 3, "a file without statistics of the column stays"
    (tables, *_) = check_lake(lake)
    assert tables.ok and "brings" not in tables.found, tables


def test_new_constraints_bind_other_writers(old_lake: str):
    Lake.create(old_lake)
    segments, trajectories = (delta_table(old_lake, t) for t in ("segments", "trajectories"))
    row = rows_of("segments", 1).to_pylist()[0] | {"kind": "acton", "run_id": RUN, "cycle": 0}
    with pytest.raises(DeltaError, match="failed validation"):
        write_deltalake(
            segments, pa.Table.from_pylist([row], schema=TABLES["segments"].schema), mode="append"
        )
    changed = trajectories.metadata().configuration["delta.constraints.status_known"]
    assert changed == TABLES["trajectories"].checks["status_known"]


@pytest.mark.parametrize("steps", range(5))
def test_killed_in_between_is_finished_next_time(
    old_lake: str, monkeypatch: pytest.MonkeyPatch, steps: int
):
    """The process ends before the commit after `steps` others."""
    done = 0

    def counting(method: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any, **options: Any) -> None:
            nonlocal done
            if done == steps:
                raise KeyboardInterrupt
            done += 1
            method(*arguments, **options)

        return call

    from deltalake.table import TableAlterer

    with monkeypatch.context() as patch:
        names = ("add_columns", "add_constraint", "drop_constraint", "set_table_properties")
        for name in names:
            patch.setattr(TableAlterer, name, counting(getattr(TableAlterer, name)))
        with pytest.raises(KeyboardInterrupt):
            Lake.create(old_lake)
    assert Lake.open(old_lake).read("steps", run_id=RUN).num_rows == 3
    lake = Lake.create(old_lake)
    assert {table.is_older for table in lake.tables.values()} == {False}
    assert new_column(lake, "steps") == [None] * 3
    (tables, *_) = check_lake(lake)
    assert tables.ok, tables


def test_two_processes_may_migrate_at_once(old_lake: str):
    barrier, failures = threading.Barrier(3), []

    def create() -> None:
        barrier.wait()
        try:
            Lake.create(old_lake)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=create) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    (tables, *_) = check_lake(Lake.open(old_lake))
    assert tables.ok and "brings" not in tables.found, tables
    names = [field.name for field in delta_table(old_lake, "steps").schema().fields]
    assert sorted(names) == sorted(TABLES["steps"].schema.names)


def test_rows_that_break_a_new_constraint_stop_the_migration(
    old_lake: str, monkeypatch: pytest.MonkeyPatch
):
    table = TABLES["batches"]
    monkeypatch.setitem(TABLES, "batches", replace(table, checks={"late": "batch > 1"}))
    with pytest.raises(StorageError, match="Cannot migrate table batches"):
        Lake.create(old_lake)


def test_a_bucket_without_write_permission_is_read(
    request: pytest.FixtureRequest, old_lake: str, monkeypatch: pytest.MonkeyPatch
):
    if not old_lake.startswith("s3://"):
        pytest.skip("test_a_read_only_lake_says_so has the disk's case")
    for name, value in READER_KEYS.items():
        monkeypatch.setenv(name, value)
    repository = Path(__file__).parents[3]
    command = [sys.executable, "-c", "from flows.cli import main; main()", "sql"]
    done = subprocess.run(
        [*command, "SELECT count(*) AS n FROM steps", "--lake", old_lake, "--json"],
        env=os.environ | {"PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout.strip()) == (0, '[{"n": 3}]'), done.stderr
    with pytest.raises(StorageError, match="Cannot"):
        Lake.create(old_lake)
