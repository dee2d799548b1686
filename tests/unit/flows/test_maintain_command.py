"""`rollhouse maintain` as a person meets it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.lake import Lake
from tests.small_run import RUN, SmallRun
from tests.stored_run import StoredRun


@pytest.fixture
def run(tmp_path: Path) -> SmallRun:
    return SmallRun.create(Lake.create(tmp_path / "lake"))


def maintain(run: SmallRun, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from flows.cli import main; main()", "maintain", *options]
    return subprocess.run(
        command,
        env={"PATH": "/usr/bin:/bin", "ROLLHOUSE_LAKE": run.lake.uri, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--run", "other"], "has no run other; it has demo"),
        (["--set", "maintenance.token_days=1"], "unknown key maintenance.token_days"),
        (
            ["--set", "maintenance.tokens_days=0"],
            "maintenance.tokens_days: input should be greater",
        ),
        (
            ["--set", "maintenance.keep_checkpoints=0"],
            "maintenance.keep_checkpoints: input should be greater",
        ),
        (["--set", "maintenance.grace_hours=0.5"], "maintenance.grace_hours: input should be"),
        (["--set", "run.seed=1"], "only keys of [maintenance] can be set here"),
    ],
)
def test_bad_input_is_one_sentence_and_changes_nothing(
    run: SmallRun, options: list[str], sentence: str
):
    run.whole_cycle()
    files = run.lake.files("ledger")
    done = maintain(run, *options)
    assert done.returncode == 2 and sentence in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 1
    assert run.lake.files("ledger") == files


def test_it_prints_what_it_did_to_each_table(run: SmallRun):
    run.whole_cycle()
    planned = maintain(run, "--dry-run")
    assert planned.returncode == 0, planned.stderr
    assert "Run demo (dry run, nothing was changed)" in planned.stdout
    assert "tokens_days kept for good" in planned.stdout and "grace_hours 168" in planned.stdout
    assert "keep_checkpoints all" in planned.stdout
    assert len(run.lake.files("segments", run_id=RUN)) == 2
    done = maintain(run, "--json")
    assert done.returncode == 0, done.stderr
    (segments,) = [row for row in json.loads(done.stdout) if row["table"] == "segments"]
    assert (segments["files_before"], segments["files_after"]) == (2, 1)
    assert len(run.lake.files("segments", run_id=RUN)) == 1


def test_as_a_flow_it_does_the_same(run: SmallRun, tmp_path: Path):
    run.whole_cycle()
    done = maintain(run, "--prefect", "--json", PREFECT_HOME=str(tmp_path / "prefect"))
    assert done.returncode == 0, done.stderr
    assert len(run.lake.files("segments", run_id=RUN)) == 1
    assert {row["files_skipped"] for row in json.loads(done.stdout)} == {0}


@pytest.mark.parametrize("options", [(), ("--prefect",)])
def test_checkpoints_go_by_policy(tmp_path: Path, options: tuple[str, ...]):
    stored = StoredRun.create(tmp_path)
    stored.train(1, 2, 3)
    keep = ("--set", "maintenance.keep_checkpoints=1")
    environment = {"PREFECT_HOME": str(tmp_path / "prefect")}
    done = maintain(stored.run, *keep, *options, "--json", **environment)
    assert done.returncode == 0, done.stderr
    (report,) = [row for row in json.loads(done.stdout) if row["table"] == "checkpoints"]
    assert (report["files_before"], report["files_after"], report["files_deleted"]) == (9, 3, 6)
    assert stored.whole() == {3}


def test_a_store_elsewhere_is_one_sentence(tmp_path: Path):
    stored = StoredRun.create(tmp_path)
    stored.train(1, 2)
    done = maintain(
        stored.run, "--set", "maintenance.keep_checkpoints=1", "--store", str(tmp_path / "other")
    )
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "other does not hold the checkpoint of batch 2, which run demo goes on" in done.stderr
    assert stored.whole() == {1, 2}
