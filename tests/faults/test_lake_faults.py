"""The lake under kills, races and full disks: real processes, real signals, real limits."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from deltalake import DeltaTable

from tasks.lake import Lake, LeaseHeld, LeaseLost, Ledger, take_lease
from tasks.storage import StorageError
from tests.tables import decisions

RUN = "demo"
ROOT = Path(__file__).parents[2]

PRELUDE = """
import sys
import pyarrow as pa
from tasks.lake import *
uri, *arguments = sys.argv[1:]
def decisions(number):
    when = pa.array([number], pa.timestamp("us", "UTC"))
    return pa.table({"decision": ["approve"], "refusal": [number], "admission": [number],
                     "rule": ["r"],
                     "reviewer": ["me"], "reason": ["x"], "decided_at": when})
def say(text):
    print(text, flush=True)
"""


def start(script: str, *arguments: object, wrapper: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    command = [*wrapper, sys.executable, "-c", PRELUDE + script, *map(str, arguments)]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture
def shared_lake(lake_uri: str) -> Lake:
    return Lake.create(lake_uri)


@pytest.fixture
def shared_ledger(shared_lake: Lake) -> Ledger:
    return created(shared_lake)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "lake")


@pytest.fixture
def ledger(lake: Lake) -> Ledger:
    return created(lake)


def created(lake: Lake) -> Ledger:
    ledger = lake.ledger(RUN)
    ledger.append("run_created", lease=0)
    return ledger


HOLDER = """
ledger = Lake.open(uri).ledger("demo")
say(take_lease(ledger))
sys.stdin.read()
"""


@pytest.fixture
def holder(shared_lake: Lake, shared_ledger: Ledger) -> Iterator[subprocess.Popen[str]]:
    process = start(HOLDER, shared_lake.uri)
    assert line_of(process) == "1"
    yield process
    process.kill()
    process.communicate()


def test_lease_of_a_living_process_is_held(shared_ledger: Ledger, holder: subprocess.Popen[str]):
    with pytest.raises(LeaseHeld, match=f"held by process {holder.pid} on host"):
        take_lease(shared_ledger)
    assert [entry.kind for entry in shared_ledger.entries] == ["run_created", "lease_taken"]


@pytest.mark.parametrize("reaped", [False, True])
def test_lease_of_a_killed_process_is_free_at_once(
    shared_ledger: Ledger, holder: subprocess.Popen[str], reaped: bool
):
    holder.send_signal(signal.SIGKILL)
    # Waits for the end without reaping: until then the process table still lists a zombie.
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
    if reaped:
        holder.wait()
    assert take_lease(shared_ledger) == 2


ZOMBIE = """
lake = Lake.open(uri)
ledger = lake.ledger("demo")
lease = take_lease(ledger)
say(lease)
sys.stdin.readline()
write_id = lake.append("decisions", decisions(1), run_id="demo", cycle=0, lease=lease)
try:
    ledger.append("decision_adopted", lease=lease, write_ids=[write_id])
except LeaseLost as error:
    say(error)
"""


def test_a_controller_that_slept_through_a_take_over_is_refused(
    shared_lake: Lake, shared_ledger: Ledger
):
    zombie = start(ZOMBIE, shared_lake.uri)
    assert line_of(zombie) == "1"
    lease = take_lease(shared_ledger, take_over=True)
    stdout, stderr = zombie.communicate("\n")
    assert "Lease 1 of run demo is no longer the newest" in stdout, stderr
    shared_ledger.append("cycle_opened", lease=lease)
    assert shared_lake.read("decisions", run_id=RUN).num_rows == 0
    assert shared_lake.read("decisions", run_id=RUN, write_ids="all").num_rows == 1


CONTENDER = """
ledger = Lake.open(uri).ledger("demo")
say("ready")
sys.stdin.readline()
try:
    say(take_lease(ledger))
except LeaseHeld:
    say("held")
sys.stdin.read()
"""


def test_one_of_many_contenders_gets_the_lease(shared_lake: Lake, shared_ledger: Ledger):
    contenders = [start(CONTENDER, shared_lake.uri) for _ in range(4)]
    assert [line_of(contender) for contender in contenders] == ["ready"] * 4
    for contender in contenders:
        assert contender.stdin is not None
        contender.stdin.write("\n")
        contender.stdin.flush()
    outcomes = [line_of(contender) for contender in contenders]
    for contender in contenders:
        contender.communicate()
    assert sorted(outcomes) == ["1", "held", "held", "held"]


APPENDER = """
lake = Lake.create(uri)
for number in range(100):
    options = {"run_id": "demo", "cycle": number % 3, "lease": int(arguments[0])}
    lake.append("decisions", decisions(number), **options)
"""


def test_many_processes_append_each_row_once(lake_uri: str):
    # They race to create the lake as well.
    appenders = [start(APPENDER, lake_uri, number) for number in range(4)]
    errors = [appender.communicate()[1] for appender in appenders]
    assert [appender.returncode for appender in appenders] == [0] * 4, errors
    rows = Lake.open(lake_uri).read("decisions", run_id=RUN, write_ids="all")
    found = sorted(
        (int(write_id[:6]), number)
        for write_id, number in zip(
            rows.column("write_id").to_pylist(), rows.column("admission").to_pylist(), strict=True
        )
    )
    assert found == [(lease, number) for lease in range(4) for number in range(100)]


def test_threads_share_a_lake(shared_lake: Lake, shared_ledger: Ledger):
    lease = take_lease(shared_ledger)

    def work(first: int) -> None:
        for number in range(first, first + 5):
            options = {"run_id": RUN, "cycle": 0, "lease": lease}
            write_id = shared_lake.append("decisions", decisions(number), **options)
            shared_ledger.append("decision_adopted", lease=lease, write_ids=[write_id])

    threads = [threading.Thread(target=work, args=[5 * index]) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [entry.seq for entry in shared_ledger.entries] == list(range(22))
    rows = shared_lake.read("decisions", run_id=RUN, order_by="admission")
    assert rows.column("admission").to_pylist() == list(range(20))


CYCLE = """
lake = Lake.open(uri)
ledger = lake.ledger("demo")
lease = take_lease(ledger)
for number in range(2):
    write_id = lake.append("decisions", decisions(number), run_id="demo", cycle=0, lease=lease)
    ledger.append("decision_adopted", lease=lease, write_ids=[write_id])
say("done")
"""


def can_trace() -> bool:
    if shutil.which("strace") is None:
        return False
    return (
        subprocess.run(["strace", "-qq", "-e", "trace=none", "true"], check=False).returncode == 0
    )


@pytest.mark.skipif(not can_trace(), reason="needs strace and the right to trace")
@pytest.mark.parametrize("call", ["fsync", "linkat,link,rename,renameat2", "mkdir"])
def test_kill_at_each_system_call(tmp_path: Path, call: str):
    """Killed on entry to its n-th fsync, link or mkdir, for every third n until it ends."""
    for count in range(1, 60, 3):
        lake = Lake.create(tmp_path / f"lake-{count}")
        ledger = lake.ledger(RUN)
        ledger.append("run_created", lease=0)
        trace = ("strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={call}")
        inject = ("-e", f"inject={call}:signal=SIGKILL:when={count}")
        process = start(CYCLE, lake.uri, wrapper=(*trace, *inject))
        stdout, stderr = process.communicate()
        survivor = Lake.open(lake.uri)
        resumed = survivor.ledger(RUN)
        named = [entry for entry in resumed.entries if entry.kind == "decision_adopted"]
        assert survivor.read("decisions", run_id=RUN).num_rows == len(named)
        lease = take_lease(resumed)
        options = {"run_id": RUN, "cycle": 0, "lease": lease}
        write_id = survivor.append("decisions", decisions(9), **options)
        resumed.append("decision_adopted", lease=lease, write_ids=[write_id])
        assert survivor.read("decisions", run_id=RUN).num_rows == len(named) + 1
        if "done" in stdout:
            assert len(named) == 2
            assert count > 1, "nothing was ever killed"
            return
        assert process.returncode != 0, stderr
    pytest.fail("the process was killed at every count")


FULL = """
import resource
lake = Lake.open(uri)
ledger = lake.ledger("demo")
resource.setrlimit(resource.RLIMIT_FSIZE, (int(arguments[0]), resource.RLIM_INFINITY))
try:
    write_id = lake.append("decisions", decisions(1), run_id="demo", cycle=0, lease=0)
except OSError as error:
    say(error)
"""


def test_a_write_cut_short_leaves_nothing(lake: Lake, ledger: Ledger):
    # A file size limit fails as a full disk does: in the middle of a write.
    stdout, stderr = start(FULL, lake.uri, 1000).communicate()
    assert "Cannot write" in stdout and "/decisions/" in stdout, stderr
    assert "Free disk space" in stdout
    assert [path for path in Path(lake.uri).rglob("*.parquet") if "decisions" in str(path)] == []
    lake.append("decisions", decisions(1), run_id=RUN, cycle=0, lease=0)
    assert lake.read("decisions", run_id=RUN, write_ids="all").num_rows == 1


def test_a_commit_that_cannot_be_written_leaves_nothing_visible():
    # Permissions do not bind root; `nobody` stands in.
    user = 65534 if os.geteuid() == 0 else os.geteuid()
    with tempfile.TemporaryDirectory() as folder:
        lake = Lake.create(f"{folder}/lake")
        ledger = lake.ledger(RUN)
        ledger.append("run_created", lease=0)
        for path in [Path(folder), *Path(folder).rglob("*")]:
            path.chmod(0o777 if path.is_dir() and path.name != "_delta_log" else 0o555)
        os.seteuid(user)
        try:
            with pytest.raises(StorageError, match="Cannot commit to table decisions"):
                lake.append("decisions", decisions(1), run_id=RUN, cycle=0, lease=0)
            with pytest.raises(StorageError, match="Cannot commit to table ledger"):
                ledger.append("lease_taken", lease=1)
        finally:
            os.seteuid(os.getuid())
            for path in [Path(folder), *Path(folder).rglob("*")]:
                path.chmod(0o755)
        survivor = Lake.open(lake.uri)
        assert survivor.read("decisions", run_id=RUN, write_ids="all").num_rows == 0
        resumed = survivor.ledger(RUN)
        assert len(resumed.entries) == 1
        lease = take_lease(resumed)
        write_id = survivor.append("decisions", decisions(1), run_id=RUN, cycle=0, lease=lease)
        resumed.append("decision_adopted", lease=lease, write_ids=[write_id])
        assert survivor.read("decisions", run_id=RUN).num_rows == 1


def test_commits_stay_flat(lake: Lake, ledger: Ledger):
    lease = take_lease(ledger)
    for _ in range(60):
        ledger.append("lease_renewed", lease=lease)
    log = Path(lake.uri) / "ledger" / "_delta_log"
    checkpoints = sorted(log.glob("*.checkpoint.parquet"))
    assert len(checkpoints) == 6
    # What a new reader must replay: commits after the last checkpoint, whatever came before.
    newest = int(checkpoints[-1].name[:20])
    assert sum(int(file.stem) > newest for file in log.glob("*.json")) < 10


def test_ledger_of_a_restored_table_is_refused(lake: Lake, ledger: Ledger):
    lease = take_lease(ledger)
    ledger.append("cycle_opened", lease=lease)
    # Restoring drops rows but keeps transaction ids: seq 2 could never be committed again.
    DeltaTable(f"{lake.uri}/ledger").restore(2)
    restored = Lake.open(lake.uri).ledger(RUN)
    with pytest.raises((ValueError, LeaseLost), match="has 2 rows, but its transaction log"):
        restored.append("lease_renewed", lease=lease)
