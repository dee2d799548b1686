"""Which checkpoints `maintenance.keep_checkpoints` lets go, in a directory and in a bucket."""

import os
import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from schemas.config import MaintenanceSection
from tasks.lake import Lake, take_lease
from tasks.maintain import TableReport, maintain_run
from tasks.maintain.checkpoints import expired_checkpoints
from tasks.weights.checkpoints import MANIFEST
from tests.small_run import RUN
from tests.stored_run import SHARDS, StoredRun

ALL_FILES = {MANIFEST, *SHARDS}


@pytest.fixture(params=["disk", "s3"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], StoredRun]:
    place = request.getfixturevalue("s3_uri") if request.param == "s3" else None
    return lambda: StoredRun.create(tmp_path, place)


def maintain(
    stored: StoredRun, keep: int | None, *, after: timedelta = timedelta(), **options: Any
) -> dict[str, TableReport]:
    policy = MaintenanceSection(keep_checkpoints=keep)
    lake, now = Lake.open(stored.config.run.lake), datetime.now(UTC) + after
    return {r.table: r for r in maintain_run(lake, RUN, policy, now=now, **options)}


def records(stored: StoredRun) -> list[dict[str, Any]]:
    rows = Lake.open(stored.config.run.lake).read("maintenance", run_id=RUN).to_pylist()
    return [row for row in rows if row["table_name"] == "checkpoints"]


def test_the_newest_stay_and_what_goes_is_recorded(make: Callable[[], StoredRun]):
    stored = make()
    stored.train(1, 2, 3, 4, 5)
    planned = maintain(stored, 2, dry_run=True)
    assert stored.whole() == {1, 2, 3, 4, 5} and records(stored) == []
    done = maintain(stored, 2)
    assert planned["checkpoints"] == done["checkpoints"]
    assert stored.stored() == {stored.path(b): ALL_FILES for b in (4, 5)}
    size = sum(len(data) for data in SHARDS.values())
    report = done["checkpoints"]
    assert (report.files_before, report.files_after, report.files_deleted) == (15, 6, 9)
    assert 3 * size < report.bytes_freed < 3 * (size + 400)
    (row,) = records(stored)
    assert row["checkpoints"] == [stored.path(b) for b in (1, 2, 3)]
    assert (row["action"], row["policy"]) == ("expire", "maintenance.keep_checkpoints = 2")
    assert (row["num_files"], row["num_bytes"]) == (9, report.bytes_freed)
    assert row["expired_write_ids"] == [] and row["num_rows"] == 0
    trained = {e.batch: e for e in stored.run.ledger.entries if e.kind == "batch_trained"}
    assert row["cutoff"] == trained[4].committed_at
    again = maintain(stored, 2)["checkpoints"]
    assert again.files_deleted == 0 and len(records(stored)) == 1
    stored.train(6)
    maintain(stored, 2)
    assert stored.whole() == {5, 6}
    assert expired_checkpoints(stored.run.lake, RUN) == {stored.path(b) for b in (1, 2, 3, 4)}
    if stored.config.run.store.startswith("s3://"):
        copies = {path.name for path in (stored.store.folder / "checkpoints").iterdir()}
        assert copies == {Path(stored.path(b)).name for b in (5, 6)}
    else:
        assert sorted(os.listdir(stored.store.folder / "checkpoints")) == [
            Path(stored.path(b)).name for b in (5, 6)
        ]


def test_one_whose_version_is_not_published_stays(make: Callable[[], StoredRun]):
    stored = make()
    stored.train(1, 2)
    stored.train(3, publish=False)
    maintain(stored, 1)
    assert stored.whole() == {3}
    stored.train(4, 5)
    maintain(stored, 1)
    assert stored.whole() == {3, 5}


def test_without_the_key_all_stay_and_the_store_is_not_touched(tmp_path: Path):
    stored = StoredRun.create(tmp_path)
    stored.train(1, 2)
    assert "checkpoints" not in maintain(stored, None)
    assert stored.whole() == {1, 2}
    shutil.rmtree(tmp_path / "store")
    assert "checkpoints" not in maintain(stored, None, after=timedelta(days=30))


def test_a_run_that_has_trained_nothing_has_nothing_to_lose(tmp_path: Path):
    stored = StoredRun.create(tmp_path)
    assert "checkpoints" not in maintain(stored, 1)
    assert records(stored) == []


def test_nothing_goes_where_the_newest_is_missing(tmp_path: Path):
    stored = StoredRun.create(tmp_path)
    stored.train(1, 2, 3)
    (tmp_path / "store" / RUN / stored.path(3) / MANIFEST).unlink()
    files = stored.run.lake.files("ledger")
    with pytest.raises(ValueError, match=r"does not hold the checkpoint of batch 3, .*--store"):
        maintain(stored, 1)
    assert stored.whole() == {1, 2} and records(stored) == []
    assert stored.run.lake.files("ledger") == files


def test_a_store_that_was_moved_is_named(tmp_path: Path):
    stored = StoredRun.create(tmp_path)
    stored.train(1, 2)
    shutil.move(tmp_path / "store", tmp_path / "moved")
    with pytest.raises(ValueError, match="pass --store with where the run's store is now"):
        maintain(stored, 1)
    maintain(stored, 1, store_uri=str(tmp_path / "moved"))
    assert os.listdir(tmp_path / "moved" / RUN / "checkpoints") == [Path(stored.path(2)).name]


def test_what_the_ledger_never_named_goes_after_the_grace_period(make: Callable[[], StoredRun]):
    stored = make()
    stored.train(1)
    killed = stored.path(2)
    stored.save(killed)
    stored.run.lease = take_lease(stored.run.ledger, take_over=True)
    stored.train(2)
    stored.save(stored.path(3))
    other = "checkpoints/notes"
    stored.save(other)
    later = timedelta(days=8)
    assert maintain(stored, 5)["checkpoints"].files_deleted == 0
    assert "checkpoints" not in maintain(stored, None, after=later)
    assert maintain(stored, 5, after=later)["checkpoints"].files_deleted == 3
    kept = {stored.path(1, lease=1), stored.path(2), stored.path(3), other}
    assert stored.stored().keys() == kept, "what the newest lease left may yet be named"
    (row,) = records(stored)
    assert (row["action"], row["checkpoints"]) == ("drop", [killed])
    assert expired_checkpoints(stored.run.lake, RUN) == frozenset()


def test_what_a_killed_trainer_left_under_another_name_goes_too(tmp_path: Path):
    stored = StoredRun.create(tmp_path)
    half = tmp_path / "store" / RUN / "checkpoints" / f".{Path(stored.path(1)).name}.tmp"
    half.mkdir(parents=True)
    (half / "shard").write_bytes(b"half")
    stored.run.lease = take_lease(stored.run.ledger, take_over=True)
    stored.train(1)
    maintain(stored, 1, after=timedelta(days=8))
    assert not half.exists() and stored.whole() == {1}


def test_an_interrupted_deletion_is_finished_whatever_the_policy_is_now(
    make: Callable[[], StoredRun],
):
    stored = make()
    stored.train(1, 2, 3)
    maintain(stored, 2)
    stored.save(stored.path(1))
    assert stored.whole() == {1, 2, 3}
    maintain(stored, 3)
    assert stored.whole() == {2, 3} and len(records(stored)) == 1
