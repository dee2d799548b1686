"""Kills a small real run at one point, runs the same command again, and says how it ended."""

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tasks.query import connect
from tasks.warm_start import starting_checkpoint
from tests.faults.kill_points import Call, Point, Request, SystemCall
from tests.faults.kill_proxy import KillingProxy
from tests.faults.kill_server import RunServer
from tests.tiny_run import RUN_ID, TinyRun

SMALL = (
    *("run.num_cycles=1", "batch.trajectories=8", "evaluation.num_tasks=4", "engine.num_slots=16"),
)
NUM_BATCHES = 2
BATCH_TRAJECTORIES = 8

AHEAD = ("asynchrony.k=1", "asynchrony.update=keep")
PATCHED = ("publication.anchor_every=5",)


def can_trace() -> bool:
    """Whether strace is here and may attach to a process."""
    if shutil.which("strace") is None:
        return False
    with subprocess.Popen(["sleep", "0.2"]) as sleeping:
        strace = ["strace", "-qq", "-e", "trace=none", "-p", str(sleeping.pid)]
        return subprocess.run(strace, check=False, capture_output=True).returncode == 0


@dataclass(frozen=True)
class Outcome:
    """What became of a point. `last_row` is the ledger's at death, `problems` is empty if the
    resumed run equals the uninterrupted one and every invariant holds."""

    point: Point
    occurrence: int
    last_row: str
    seconds: float
    problems: tuple[str, ...]

    def row(self) -> str:
        result = "; ".join(self.problems) or "equal"
        name = f"{self.point.name} ({self.occurrence})"
        return (
            f"{name:52} {self.point.process:10} {self.last_row:22} {self.seconds:6.1f} s  {result}"
        )


def chosen(point: Point, seed: int) -> int:
    """The occurrence that this seed dies at."""
    place = point.place
    candidates = place.versions if isinstance(place, SystemCall) else place.nth
    return candidates[seed % len(candidates)]


def faults_of(tiny: TinyRun) -> list[str]:
    """What must hold of a finished run whatever killed it, at any k: what the doctor checks, and
    that the run did all of its work within its lag. Raises what a table that does not open
    raises."""
    found = [f"{finding.invariant}: {finding.found}" for finding in tiny.broken_invariants()]
    connection = connect(tiny.lake)
    ends = dict(connection.sql("SELECT ended, count(*) FROM trajectory_ends GROUP BY 1").fetchall())
    expected = NUM_BATCHES * BATCH_TRAJECTORIES
    if ends.get("trained") != expected or not set(ends) <= {"trained", "dropped"}:
        found.append(f"trajectories ended as {ends}, of which {expected} should be trained")
    if twice := tiny.trained_twice():
        found.append(f"trained twice: {twice}")
    (lag,) = connection.sql("SELECT max(lag_versions) FROM token_scores").fetchall()[0]
    if lag is None or lag > tiny.config.asynchrony.k:
        found.append(f"lag {lag}")
    return found


@dataclass
class KillMatrix:
    """All points of one seed, in `folder`, on this disk or below the S3 address `bucket`."""

    folder: Path
    policies: Path
    seed: int
    points: Sequence[Point]
    bucket: str | None = None
    settings: tuple[str, ...] = ()
    outcomes: list[Outcome] = field(default_factory=list)

    def run(self, report: Callable[[str], None] = print) -> list[Outcome]:
        """Kills at every point; each outcome is reported as a line."""
        starting_checkpoint(self._tiny("unused").config)
        server = RunServer(self.folder / "server.log")
        try:
            uninterrupted = self._tiny("uninterrupted")
            assert self._execute(server, uninterrupted) == 0, _log(uninterrupted)
            expected = uninterrupted.canonical_ledger()
            assert faults_of(uninterrupted) == []
            for number, point in enumerate(self.points):
                tiny = self._tiny(f"p{number:02d}")
                outcome = self._kill_and_resume(point, tiny, server, expected)
                self.outcomes.append(outcome)
                report(outcome.row())
                if not outcome.problems:
                    shutil.rmtree(tiny.root)
        finally:
            server.stop()
        return self.outcomes

    def _tiny(self, name: str) -> TinyRun:
        root = self.folder / name
        root.mkdir(exist_ok=True)
        settings = (*SMALL, f"run.seed={self.seed + 5}", *self.settings)
        place = None if self.bucket is None else f"{self.bucket}/{self.folder.name}/{name}"
        return TinyRun(root, self.policies, settings, place)

    def _execute(
        self,
        server: RunServer,
        tiny: TinyRun,
        death: dict[str, object] | None = None,
        environment: dict[str, str] | None = None,
        traced: str | None = None,
    ) -> int:
        return server.run(
            arguments=tiny.command("--no-prefect")[3:],
            root=str(tiny.root),
            log=str(tiny.root / "log"),
            environment=environment or {},
            death=death,
            traced=traced,
        )

    def _kill(self, point: Point, tiny: TinyRun, server: RunServer) -> int:
        place, occurrence = point.place, chosen(point, self.seed)

        def victim() -> int:
            return json.loads((tiny.root / "pids.json").read_text())[point.process]

        if isinstance(place, SystemCall):
            file = str(tiny.root / "lake" / place.path.format(occurrence))
            with self._traced(tiny, point.process, file, place.calls):
                return self._execute(server, tiny, traced=point.process)
        if isinstance(place, Call):
            call = {"call": place.call, "path": place.path, "moment": place.moment}
            return self._execute(
                server, tiny, {"process": point.process, "nth": occurrence, **call}
            )
        assert isinstance(place, Request)
        address = os.environ["AWS_ENDPOINT_URL"]
        proxy = KillingProxy(address, place.request, place.moment, occurrence, victim)
        try:
            return self._execute(server, tiny, environment={"AWS_ENDPOINT_URL": proxy.endpoint})
        finally:
            proxy.close()

    @contextmanager
    def _traced(self, tiny: TinyRun, process: str, file: str, calls: str) -> Iterator[None]:
        """Has strace kill a process of the run that is about to start at its first of these
        calls on a file. The run waits for strace."""

        def attach() -> None:
            pids = tiny.root / "pids.json"
            while not pids.exists():
                time.sleep(0.005)
            subprocess.run(
                [
                    *("strace", "-f", "-qq", "-o", str(tiny.root / "strace.txt")),
                    *("-p", str(json.loads(pids.read_text())[process]), "-P", file),
                    *("-e", f"trace={calls}", "-e", f"inject={calls}:signal=SIGKILL"),
                ],
                check=False,
            )

        tracing = threading.Thread(target=attach, daemon=True)
        tracing.start()
        yield
        tracing.join()

    def _kill_and_resume(
        self,
        point: Point,
        tiny: TinyRun,
        server: RunServer,
        expected: list[tuple[object, ...]],
    ) -> Outcome:
        problems = []
        code = self._kill(point, tiny, server)
        if point.process == "trainer":
            ended = tiny.root / "trainer-ended"
            code = int(ended.read_text()) if ended.exists() else 0
        if code != -signal.SIGKILL:
            problems.append(f"never killed there (the {point.process} ended with {code})")
        last_row = _last_row(tiny)
        started = time.monotonic()
        again = self._execute(server, tiny)
        seconds = time.monotonic() - started
        if again != 0:
            problems.append(f"the second run ended with {again}: {_log(tiny)}")
        else:
            if tiny.config.asynchrony.k == 0 and tiny.canonical_ledger() != expected:
                problems.append("another ledger")
            problems += faults_of(tiny)
        return Outcome(point, chosen(point, self.seed), last_row, seconds, tuple(problems))


def _last_row(tiny: TinyRun) -> str:
    try:
        entries = tiny.lake.ledger(RUN_ID).entries
    except ValueError:
        return "no lake yet"
    return f"{entries[-1].seq} {entries[-1].kind}" if entries else "no row yet"


def _log(tiny: TinyRun) -> str:
    return (tiny.root / "log").read_text()[-1500:]
