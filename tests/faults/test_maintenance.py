"""Maintenance under kills and races: real processes, real signals, a disk and a real S3 server."""

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from flows.inspection import trajectory_tokens
from schemas.config import MaintenanceSection
from schemas.views import view_sources
from tasks.lake import Lake, take_lease
from tasks.maintain import maintain_run
from tasks.query import connect
from tests.small_run import RUN, SmallRun, rows_of
from tests.tiny_run import REPOSITORY, ROLLHOUSE, RUN_ID, TinyRun, count

MAINTAINER = """
import sys
from datetime import UTC, datetime, timedelta
from schemas.config import MaintenanceSection
from tasks.lake import Lake
from tasks.maintain import maintain_run
uri, days, times = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
lake = Lake.open(uri)
print("ready", flush=True)
if times == 0:
    sys.stdin.readline()
policy = MaintenanceSection(routing_days=1)
for _ in range(max(times, 1)):
    maintain_run(lake, "demo", policy, now=datetime.now(UTC) + timedelta(days=days))
print("done", flush=True)
"""


def start(script: str, *arguments: object, wrapper: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*wrapper, sys.executable, "-c", script, *map(str, arguments)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_maintenance_races_with_a_controller_and_with_another_maintenance(lake_uri: str):
    run = SmallRun.create(Lake.create(lake_uri))
    run.whole_cycle()
    others = [start(MAINTAINER, lake_uri, 0, 6) for _ in range(2)]
    for other in others:
        assert other.stdout is not None and other.stdout.readline() == "ready\n"
    for _ in range(4):
        run.whole_cycle()
    errors = [other.communicate()[1] for other in others]
    assert [other.returncode for other in others] == [0, 0], errors
    maintain_run(run.lake, RUN, MaintenanceSection(), now=datetime.now(UTC))
    survivor = Lake.open(lake_uri)
    assert survivor.ledger(RUN).entries == run.ledger.entries
    assert len(run.ledger.entries) == 4 + 5 * (2 * 5 + 2)
    for table, expected in {"trajectories": 20, "segments": 40, "scores": 20}.items():
        rows = survivor.read(table, run_id=RUN, write_ids="all")
        assert rows.num_rows == survivor.read(table, run_id=RUN).num_rows == expected
        names = rows.column("trajectory_id").to_pylist()
        assert set(names) == {f"{g:08d}-{s:03d}-0" for g in range(1, 11) for s in range(2)}
        assert len(survivor.files(table)) == 5, "each cycle was compacted"


def test_of_two_maintenances_at_once_each_file_is_replaced_by_one(lake_uri: str):
    run = SmallRun.create(Lake.create(lake_uri))
    run.whole_cycle(batches=4)
    rows = rows_of(run.lake)
    expired = [rows.pop(table) for table in ("routing", "maintenance")]
    assert [len(table) for table in expired] == [16, 0]
    both = [start(MAINTAINER, lake_uri, 2, 0) for _ in range(2)]
    for one in both:
        assert one.stdout is not None and one.stdout.readline() == "ready\n"
    for one in both:
        assert one.stdin is not None
        one.stdin.write("\n")
        one.stdin.flush()
    errors = [one.communicate()[1] for one in both]
    assert [one.returncode for one in both] == [0, 0], errors
    after = rows_of(Lake.open(lake_uri))
    assert after.pop("routing") == []
    assert {r["table_name"] for r in after.pop("maintenance")} == {"routing"}
    assert after == rows


def can_trace() -> bool:
    if shutil.which("strace") is None:
        return False
    trial = subprocess.run(["strace", "-qq", "-e", "trace=none", "true"], check=False)
    return trial.returncode == 0


@pytest.mark.skipif(not can_trace(), reason="needs strace and the right to trace")
@pytest.mark.parametrize(
    ("call", "step"), [("fsync", 17), ("linkat,link,rename,renameat2", 3), ("unlink,unlinkat", 9)]
)
def test_killed_at_any_system_call_it_loses_nothing_and_finishes_when_run_again(
    tmp_path: Path, call: str, step: int
):
    """Killed on entry to its n-th fsync, link or unlink, for every step-th n until it ends."""
    template = SmallRun.create(Lake.create(tmp_path / "template"))
    template.whole_cycle()
    now = datetime.now(UTC)
    maintain_run(template.lake, RUN, MaintenanceSection(), now=now)
    # The traced maintenance expires rows of both cycles, compacts this one, and deletes what the
    # other's compaction left.
    template.whole_cycle()
    rows = rows_of(template.lake)
    kept = {name: r for name, r in rows.items() if name not in ("routing", "maintenance")}
    for nth in range(1, 400, step):
        uri = tmp_path / f"lake-{nth}"
        shutil.copytree(template.lake.uri, uri)
        trace = ("strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={call}")
        inject = ("-e", f"inject={call}:signal=SIGKILL:when={nth}")
        process = start(MAINTAINER, uri, 8, 1, wrapper=(*trace, *inject))
        stdout, stderr = process.communicate()
        survivor = Lake.open(uri)
        found = rows_of(survivor)
        routing, records = found.pop("routing"), found.pop("maintenance")
        assert found == kept
        # What is gone was recorded before.
        told = {i for record in records for i in record["expired_write_ids"]}
        present = {row["write_id"] for row in routing}
        assert {row["write_id"] for row in rows["routing"]} - present <= told
        later = now + timedelta(days=8)
        maintain_run(survivor, RUN, MaintenanceSection(routing_days=1), now=later)
        maintain_run(survivor, RUN, MaintenanceSection(), now=later + timedelta(days=8))
        found = rows_of(survivor)
        assert found.pop("routing") == [] and len(found.pop("maintenance")) == 2
        assert found == kept
        for table in ("segments", "ledger", "routing"):
            storage = survivor.tables[table].storage
            files = [f for f in storage.walk(f"run_id={RUN}") if f.path.endswith(".parquet")]
            assert len(files) == len(survivor.files(table)), "no file is left over"
        take_lease(survivor.ledger(RUN))
        if "done" in stdout:
            assert nth > 1, "nothing was ever killed"
            return
        assert process.returncode != 0, stderr
    pytest.fail("the process was killed at every count")


def maintain(run: TinyRun, *options: str) -> str:
    done = subprocess.run(
        [*ROLLHOUSE, "maintain", "--lake", str(run.root / "lake"), *options],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


Answers = dict[str, list[tuple[Any, ...]]]


def answers(run: TinyRun) -> Answers:
    """Every view's rows in order."""
    connection = connect(run.lake)
    found: Answers = {}
    for name in view_sources():
        columns = [c for c, *_ in connection.sql(f"DESCRIBE {name}").fetchall()]
        found[name] = connection.sql(
            f"SELECT * FROM {name} ORDER BY {', '.join(columns)}"
        ).fetchall()
    return found


def assert_same(given: Answers, expected: Answers) -> None:
    """Floats to nine digits, or to 1e-12 where terms of both signs cancel: DuckDB's threads add up
    in another order each time."""
    assert given.keys() == expected.keys()
    for name in given:
        for row, other in zip(given[name], expected[name], strict=True):
            for a, b in zip(row, other, strict=True):
                if isinstance(a, float) and isinstance(b, float):
                    assert math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12), (name, row, other)
                else:
                    assert a == b, (name, row, other)


def test_a_run_goes_on_after_maintenance_as_if_nothing_had_been(
    tiny_run: Callable[..., TinyRun],
):
    run = tiny_run()
    first = run.run("--no-prefect", "--until-cycle", "1")
    assert first.returncode == 0, first.stderr
    before, tokens = answers(run), trajectory_tokens(run.lake, RUN_ID, None)
    assert all(before.values())
    maintain(run, "--json", "--set", "maintenance.keep_checkpoints=1")
    assert len(run.lake.files("ledger", run_id=RUN_ID, cycle=0)) == 1
    (kept,) = (run.root / "store" / RUN_ID / "checkpoints").iterdir()
    assert kept.name.startswith("b00000002-") and run.broken_invariants() == []
    assert_same(answers(run), before)
    assert trajectory_tokens(run.lake, RUN_ID, None) == tokens
    settings = ("maintenance.tokens_days=90", "maintenance.routing_days=7")
    changed = TinyRun(run.root, run.policies, settings)
    second = changed.run("--no-prefect")
    assert second.returncode == 0, second.stderr
    assert run.trained_twice() == [] and count(run.entries, "batch_trained") == 4
    # The new policy is the run's; nobody has to repeat it.
    assert "routing_days 7, tokens_days 90, requests_days kept for good" in maintain(
        run, "--dry-run"
    )
    assert len(list(kept.parent.iterdir())) == 3 and run.broken_invariants() == []
    expiry = MaintenanceSection(tokens_days=1)
    maintain_run(run.lake, RUN_ID, expiry, now=datetime.now(UTC) + timedelta(days=2))
    with pytest.raises(ValueError, match=r"expired on .* \(maintenance.tokens_days = 1\)"):
        trajectory_tokens(run.lake, RUN_ID, None)
    steps = "signals_by_step"
    assert_same({steps: answers(run)[steps][: len(before[steps])]}, {steps: before[steps]})
