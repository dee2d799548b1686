"""What a person sees when processes of a run die under their real launchers, and when two
controllers want one run; `test_kill_matrix` has every point of death."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.lake.ledger import Entry
from tasks.query import connect
from tests.tiny_run import TinyRun, count

Reached = Callable[[list[Entry]], bool]


def after(kind: str, number: int) -> Reached:
    return lambda entries: count(entries, kind) >= number


@pytest.fixture(scope="module")
def uninterrupted(finished_run):
    tiny, _ = finished_run
    return tiny.canonical_ledger()


def rank_processes(tiny: TinyRun) -> list[int]:
    """Ids of the trainer ranks of this run, found by their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"trainers.job" in arguments and str(tiny.root / "lake").encode() in arguments:
            found.append(int(folder.name))
    return found


def run_to_its_end(tiny: TinyRun) -> None:
    result = tiny.run("--no-prefect")
    assert result.returncode == 0, result.stderr


def assert_ended_like(tiny: TinyRun, uninterrupted: list) -> None:
    assert tiny.canonical_ledger() == uninterrupted
    connection = connect(tiny.lake)
    ends = connection.sql("SELECT ended, count(*) FROM trajectory_ends GROUP BY 1").fetchall()
    assert ends == [("trained", 128)]
    assert tiny.trained_twice() == []
    assert tiny.broken_invariants() == []


def test_kill_of_the_trainer(tiny_run, uninterrupted):
    tiny = tiny_run()
    with tiny.start("--no-prefect") as process:
        tiny.wait_for(after("batch_admitted", 1))
        ranks = rank_processes(tiny)
        assert ranks
        for rank in ranks:
            os.kill(rank, signal.SIGKILL)
        _, stderr = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "The trainer job ended" in stderr and "Run the same command again" in stderr
    run_to_its_end(tiny)
    assert_ended_like(tiny, uninterrupted)


def test_the_trainer_ends_when_its_controller_is_gone(tiny_run):
    tiny = tiny_run()
    with tiny.start("--no-prefect") as process:
        tiny.wait_for(after("batch_admitted", 1))
        assert rank_processes(tiny)
        process.kill()
        process.communicate()
    for _ in range(200):
        if not rank_processes(tiny):
            break
        time.sleep(0.1)
    assert rank_processes(tiny) == []


def test_two_controllers_on_one_run(tiny_run, uninterrupted, lake_uri: str):
    """The second is told who holds the run. One that takes over ends the run; the first, which
    hung, wakes up to find its next ledger write refused."""
    tiny = tiny_run(place=lake_uri)
    one_cycle = ("--no-prefect", "--until-cycle", "1")
    with tiny.start(*one_cycle) as first:
        tiny.wait_for(after("cycle_opened", 1))
        second = tiny.run(*one_cycle)
        assert second.returncode == 1
        assert f"held by process {first.pid}" in second.stderr
        assert "--take-over" in second.stderr and "Traceback" not in second.stderr
        first.send_signal(signal.SIGSTOP)
        with tiny.start(*one_cycle, "--take-over") as third:
            tiny.wait_for(after("lease_taken", 2))
            first.send_signal(signal.SIGCONT)
            _, stderr = first.communicate(timeout=300)
            assert first.returncode == 1
            assert "another controller has taken over" in stderr and "Traceback" not in stderr
            _, stderr = third.communicate(timeout=500)
            assert third.returncode == 0, stderr
    (_, taken) = [entry.seq for entry in tiny.entries if entry.kind == "lease_taken"]
    assert {entry.lease for entry in tiny.entries[taken:]} == {taken}
    so_far = tiny.canonical_ledger()
    assert so_far == uninterrupted[: len(so_far)] and so_far[-1][0] == "cycle_closed"
    assert tiny.broken_invariants() == []
