"""A whole run whose lake and store are in a bucket."""

import shutil

import pytest

from tests.tiny_run import RUN_ID, count

pytestmark = pytest.mark.slow


def test_a_run_in_a_bucket_ends_as_on_a_disk(finished_run, tiny_run, s3_uri: str):
    tiny = tiny_run(place=s3_uri)
    first = tiny.run("--no-prefect", "--until-cycle", "1")
    assert first.returncode == 0, first.stderr
    # What a machine keeps is a copy: the next cycle may run on another one.
    shutil.rmtree(tiny.root / "cache")
    second = tiny.run("--no-prefect")
    assert second.returncode == 0, second.stderr
    assert count(tiny.entries, "cycle_closed") == 2
    assert tiny.broken_invariants() == []
    on_disk, _ = finished_run
    assert tiny.canonical_ledger() == on_disk.canonical_ledger()
    assert not (tiny.root / "lake").exists() and not (tiny.root / "store").exists()
    for table in ("trajectories", "segments", "scores", "steps"):
        theirs = on_disk.lake.read(table, run_id=RUN_ID).num_rows
        assert tiny.lake.read(table, run_id=RUN_ID).num_rows == theirs > 0
