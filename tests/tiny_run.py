"""A tiny real run in its own folder: the run file, engine, trainer job and lake of any other."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flows.run import execute_run_sync
from flows.run_file import load_run_file
from schemas.config import RunConfig
from tasks.invariants import Finding, check_lake
from tasks.lake.lake import Lake
from tasks.lake.ledger import Entry
from tasks.query import connect

REPOSITORY = Path(__file__).parent.parent
RUN_FILE = REPOSITORY / "tests" / "runs" / "tiny.toml"
RUN_ID = "tiny"
ROLLHOUSE = [sys.executable, "-c", "from flows.cli import main; main()"]


@dataclass(frozen=True)
class TinyRun:
    """`settings` are `--set` overrides; `policies` is a cache shared by all tests. Lake and store
    lie in `root`, or at the address `place`."""

    root: Path
    policies: Path
    settings: tuple[str, ...] = ()
    place: str | None = None

    @property
    def overrides(self) -> list[str]:
        return [
            f"run.lake={self.place or self.root}/lake",
            f"run.store={self.place or self.root}/store",
            f"run.cache={self.root / 'cache'}",
            f"policy.warm_start.cache={self.policies}",
            *self.settings,
        ]

    @property
    def config(self) -> RunConfig:
        return load_run_file(RUN_FILE, self.overrides)

    @property
    def lake(self) -> Lake:
        return Lake.open(self.config.run.lake)

    @property
    def entries(self) -> list[Entry]:
        return self.lake.ledger(RUN_ID).entries

    def command(self, *options: str) -> list[str]:
        sets = [part for override in self.overrides for part in ("--set", override)]
        return [*ROLLHOUSE, "run", str(RUN_FILE), *sets, *options]

    def start(self, *options: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*options),
            cwd=self.root,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *options: str) -> subprocess.CompletedProcess[str]:
        with self.start(*options) as process:
            stdout, stderr = process.communicate(timeout=500)
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def execute(self) -> None:
        """The run in this process, whose imports are done; raises what ends it."""
        execute_run_sync(self.config, str(RUN_FILE))

    def wait_for(self, condition: Callable[[list[Entry]], bool], timeout_s: float = 240) -> None:
        """Returns once the ledger satisfies `condition`."""
        until = time.monotonic() + timeout_s
        lake = None
        while time.monotonic() < until:
            # There is no lake before the run has made one.
            with suppress(ValueError):
                lake = lake or self.lake
                if condition(lake.ledger(RUN_ID).entries):
                    return
            time.sleep(0.02)
        raise TimeoutError("the ledger never got there")

    def trained_twice(self) -> list[tuple[str]]:
        """Trajectories that more than one optimizer step claims."""
        return (
            connect(self.lake)
            .sql("SELECT trajectory_id FROM step_trajectories GROUP BY 1 HAVING count(*) > 1")
            .fetchall()
        )

    def broken_invariants(self) -> list[Finding]:
        """What `rollhouse doctor` would complain of."""
        findings = list(check_lake(self.lake))
        assert {finding.run_id for finding in findings} == {None, RUN_ID}
        return [finding for finding in findings if not finding.ok]

    def canonical_ledger(self) -> list[tuple[object, ...]]:
        """What a run must come to whatever killed it on the way: kind, batch, version, the ordered
        (group, sample) pairs and the root hash. Leases and their renewals are left out."""
        lake = self.lake
        names = {
            row["trajectory_id"]: (row["group_id"], row["sample_index"])
            for row in lake.read("trajectories", run_id=RUN_ID).to_pylist()
        }
        rows = []
        for entry in lake.ledger(RUN_ID).entries:
            if entry.kind in ("run_created", "lease_taken", "lease_renewed"):
                continue
            ordered: tuple[object, ...] = ()
            if entry.kind == "batch_admitted":
                ids = lake.read(
                    "batches", run_id=RUN_ID, write_ids=entry.write_ids, order_by="batch_position"
                )
                ordered = tuple(names[i] for i in ids.column("trajectory_id").to_pylist())
            rows.append((entry.kind, entry.batch, entry.version, ordered, entry.root_hash))
        return rows


def count(entries: list[Entry], kind: str) -> int:
    return sum(entry.kind == kind for entry in entries)
