"""A run of a few rollouts written straight into a lake, for tests of what happens to it later."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from schemas.tables import TABLES
from tasks.lake import Lake, Ledger, take_lease, trajectories_hash, write_batch
from tasks.record import Window
from tasks.rollout import Rollout
from tests.factories import window

RUN = "demo"
TABLES_OF_ROLLOUTS = ("trajectories", "segments", "requests", "routing")


def ids_of(rollouts: Sequence[Rollout]) -> list[str]:
    return [rollout.trajectory["trajectory_id"] for rollout in rollouts]


@dataclass
class SmallRun:
    """Each step writes rows and the ledger row that names them, as a controller does."""

    lake: Lake
    lease: int
    cycle: int = 0

    @classmethod
    def create(cls, lake: Lake) -> "SmallRun":
        ledger = lake.ledger(RUN)
        ledger.append("run_created", lease=0)
        run = cls(lake, take_lease(ledger))
        run.commit("version_published", version=0)
        run.commit("cycle_opened")
        return run

    @property
    def ledger(self) -> Ledger:
        return self.lake.ledger(RUN)

    def commit(self, kind: str, **columns: Any) -> int:
        return self.ledger.append(kind, lease=self.lease, cycle=self.cycle, **columns).seq

    def append(self, table: str, rows: pa.Table | list[dict[str, Any]]) -> str:
        if isinstance(rows, list):
            rows = pa.Table.from_pylist(rows, schema=TABLES[table].own_schema)
        return self.lake.append(table, rows, run_id=RUN, cycle=self.cycle, lease=self.lease)

    def write(self, rollouts: Sequence[Rollout]) -> list[str]:
        """Rows of the rollouts, unnamed so far; their write ids in `TABLES_OF_ROLLOUTS`' order."""
        columns = Window.of(rollouts)
        return [self.append(table, getattr(columns, table)) for table in TABLES_OF_ROLLOUTS]

    def record(self, group: int) -> list[Rollout]:
        """One group of two rollouts, each of a prompt and an action segment."""
        rollouts = window(group, groups=1, size=2, first_group=group, routed=True)
        self.commit("rollouts_recorded", write_ids=self.write(rollouts))
        return rollouts

    def admit(self, batch: int, rollouts: Sequence[Rollout]) -> int:
        names, admission = ids_of(rollouts), len(self.ledger.entries)
        write_id = write_batch(
            self.lake,
            run_id=RUN,
            cycle=self.cycle,
            lease=self.lease,
            admission=admission,
            batch=batch,
            trajectory_ids=names,
        )
        return self.commit(
            "batch_admitted",
            batch=batch,
            write_ids=[write_id],
            num_trajectories=len(names),
            trajectories_hash=trajectories_hash(names),
        )

    def train(
        self, batch: int, admission: int, rollouts: Sequence[Rollout], checkpoint: str | None = None
    ) -> None:
        scores = [
            {
                **{key: segment[key] for key in ("trajectory_id", "sequence_index")},
                "segment_index": segment["segment_index"],
                "admission": admission,
                "batch": batch,
                "old_logprobs": segment["rollout_logprobs"],
                "own_version_logprobs": None,
                "entropies": [1.0] * len(segment["token_ids"]),
                "correction_weights": [1.0] * len(segment["token_ids"]),
                "included": [True] * len(segment["token_ids"]),
            }
            for rollout in rollouts
            for segment in rollout.segments
            if segment["kind"] == "action"
        ]
        details = {"admission": admission}
        write_ids = [self.append("scores", scores)]
        self.commit("batch_accepted", batch=batch, write_ids=write_ids, details=details)
        self.commit("batch_trained", batch=batch, checkpoint=checkpoint, details=details)

    def publish(self, version: int) -> None:
        self.commit("version_published", version=version)

    def close(self) -> None:
        self.commit("cycle_closed")
        self.cycle += 1
        self.commit("cycle_opened")

    def whole_cycle(self, batches: int = 2) -> None:
        """Cycle c trains batches c * batches + 1 and on, each of the group of its own number."""
        for batch in range(self.cycle * batches + 1, (self.cycle + 1) * batches + 1):
            rollouts = self.record(batch)
            self.train(batch, self.admit(batch, rollouts), rollouts)
            self.publish(batch)
        self.close()


def rows_of(lake: Lake) -> dict[str, list[dict[str, Any]]]:
    """Every row of the run, visible or not, ordered whatever the files: table -> rows."""
    found = {}
    for name, table in TABLES.items():
        order = ", ".join((*table.sort_by, "write_id"))
        rows = lake.read(name, run_id=RUN, write_ids="all", order_by=order)
        found[name] = rows.to_pylist()
    return found
