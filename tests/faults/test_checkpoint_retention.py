"""Deleting checkpoints under kills: what is left never looks whole, and running again finishes."""

import os
import shutil
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from schemas.config import MaintenanceSection
from tasks.lake import Lake
from tasks.maintain import maintain_run
from tasks.maintain.checkpoints import expired_checkpoints
from tests.faults.kill_proxy import KillingProxy
from tests.faults.kill_runs import can_trace
from tests.s3_server import S3Server
from tests.small_run import RUN
from tests.stored_run import StoredRun
from tests.tiny_run import REPOSITORY

KEEP = MaintenanceSection(keep_checkpoints=2)

MAINTAINER = """
import sys
from datetime import UTC, datetime
from schemas.config import MaintenanceSection
from tasks.lake import Lake
from tasks.maintain import maintain_run
lake = Lake.open(sys.argv[1])
policy = MaintenanceSection(keep_checkpoints=2)
maintain_run(lake, "demo", policy, now=datetime.now(UTC), store_uri=sys.argv[2])
print("done", flush=True)
"""


def start(*places: object, wrapper: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*wrapper, sys.executable, "-c", MAINTAINER, *map(str, places)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def assert_finishes(stored: StoredRun, lake: Lake) -> None:
    """What a killed maintenance of five batches left, and what the next one makes of it."""
    whole, expired = stored.whole(), expired_checkpoints(lake, RUN)
    assert {4, 5} <= whole, "the newest stay whatever happens"
    gone = {1, 2, 3} - whole
    assert gone in (set(), {1}, {1, 2}, {1, 2, 3}), "the oldest go first"
    assert {stored.path(batch) for batch in gone} <= expired, "what is gone was recorded before"
    store = stored.config.run.store
    maintain_run(lake, RUN, KEEP, now=datetime.now(UTC), store_uri=store)
    assert stored.whole() == {4, 5} and stored.stored().keys() == {stored.path(b) for b in (4, 5)}
    rows = lake.read("maintenance", run_id=RUN)
    assert rows.column("checkpoints").to_pylist() == [[stored.path(b) for b in (1, 2, 3)]]


@pytest.mark.skipif(not can_trace(), reason="needs strace and the right to trace")
@pytest.mark.parametrize(
    ("call", "step"),
    [("unlink,unlinkat,rmdir", 1), ("fsync", 3), ("linkat,link,rename,renameat2", 1)],
)
def test_killed_at_any_system_call_it_leaves_nothing_that_looks_whole(
    tmp_path: Path, call: str, step: int
):
    template = StoredRun.create(tmp_path)
    template.train(1, 2, 3, 4, 5)
    for nth in range(1, 200, step):
        root = tmp_path / f"copy-{nth}"
        for name in ("lake", "store"):
            shutil.copytree(tmp_path / name, root / name)
        trace = ("strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={call}")
        inject = ("-e", f"inject={call}:signal=SIGKILL:when={nth}")
        process = start(root / "lake", root / "store", wrapper=(*trace, *inject))
        stdout, stderr = process.communicate()
        run = template.config.run.model_copy(update={"store": str(root / "store")})
        survivor = StoredRun(template.run, template.config.model_copy(update={"run": run}))
        assert_finishes(survivor, Lake.open(root / "lake"))
        if "done" in stdout:
            assert nth > 1, "nothing was ever killed"
            return
        assert process.returncode != 0, stderr
    pytest.fail("the process was killed at every count")


@pytest.mark.parametrize(
    ("moment", "nth"),
    # Two requests for each of three folders: the manifest, then the rest.
    [
        ("before", 1),
        ("answered", 1),
        ("before", 2),
        ("answered", 2),
        ("answered", 3),
        ("before", 6),
    ],
)
def test_killed_at_a_request_that_deletes_it_leaves_nothing_that_looks_whole(
    tmp_path: Path,
    s3_uri: str,
    s3_server: S3Server,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
    nth: int,
):
    stored = StoredRun.create(tmp_path, s3_uri)
    stored.train(1, 2, 3, 4, 5)
    process: list[subprocess.Popen[str]] = []
    proxy = KillingProxy(
        s3_server.endpoint, r"POST \S*\?delete", moment, nth, lambda: process[0].pid
    )
    with monkeypatch.context() as surroundings:
        surroundings.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        process.append(start(stored.config.run.lake, stored.config.run.store))
    assert "done" not in process[0].communicate()[0] and process[0].returncode == -signal.SIGKILL
    proxy.close()
    # Folder n goes with requests 2 n - 1, after which it is not whole, and 2 n.
    num_seen = nth - (moment == "before")
    assert stored.whole() == set(range(1 + (num_seen + 1) // 2, 6))
    assert_finishes(stored, Lake.open(stored.config.run.lake))


def test_two_maintenances_at_once_delete_the_same_checkpoints(tmp_path: Path):
    stored = StoredRun.create(tmp_path)
    stored.train(*range(1, 21))
    both = [start(stored.config.run.lake, stored.config.run.store) for _ in range(2)]
    errors = [one.communicate()[1] for one in both]
    assert [one.returncode for one in both] == [0, 0], errors
    assert stored.whole() == {19, 20} and len(stored.stored()) == 2
