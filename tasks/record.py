"""Put finished rollouts through gate 1 and into the lake, in one ledger row.

Rows are written first and count only when the ledger names them, together with the validations and
the quarantine that judge them. A fault of the whole window leaves its rows unnamed: the ledger then
holds the refusal, and the same groups are sampled again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from schemas.tables import TABLES
from tasks.lake.lake import Lake
from tasks.profile import Limits, profile_rollouts
from tasks.rollout import Rollout
from tasks.validate import Fault, Judgement, judge


@dataclass(frozen=True)
class Window:
    """Rollouts as Arrow tables in their own schemas, in (group_id, sample_index) order."""

    trajectories: pa.Table
    segments: pa.Table
    requests: pa.Table
    routing: pa.Table

    @classmethod
    def of(cls, rollouts: Sequence[Rollout]) -> "Window":
        ordered = sorted(rollouts, key=lambda rollout: rollout.trajectory["trajectory_id"])
        return cls(
            _table("trajectories", [rollout.trajectory for rollout in ordered]),
            _table("segments", [row for rollout in ordered for row in rollout.segments]),
            _table("requests", [row for rollout in ordered for row in rollout.requests]),
            _table("routing", [row for rollout in ordered for row in rollout.routing]),
        )


def _table(name: str, rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=TABLES[name].own_schema)


@dataclass(frozen=True)
class Recorded:
    judgement: Judgement
    write_ids: tuple[str, ...]
    trajectory_ids: tuple[str, ...]
    quarantined: frozenset[str]

    @property
    def num_quarantined(self) -> int:
        return len(self.quarantined)


def quarantine_rows(
    rows: Sequence[Mapping[str, Any]], *, rule: str, action: str, reason: str
) -> list[dict[str, Any]]:
    """Rows of the quarantine table for trajectories that leave together, for one reason."""
    return [
        {
            "trajectory_id": row["trajectory_id"],
            "group_id": row["group_id"],
            "rule": rule,
            "observed": None,
            "action": action,
            "reason": reason,
        }
        for row in rows
    ]


def quarantine_of(trajectories: pa.Table, faults: Sequence[Fault]) -> list[dict[str, Any]]:
    """Quarantine rows for single faults, and for those whose group they leave unusable.

    A failed rollout is not a fault, but its group cannot be compared any more either.
    """
    by_fault = [
        {
            "trajectory_id": fault.trajectory_id,
            "group_id": fault.group_id,
            "rule": fault.rule,
            "observed": fault.observed,
            "action": "quarantine",
            "reason": f"rule {fault.rule} counted {fault.observed:g}",
        }
        for fault in faults
    ]
    rows = trajectories.select(["trajectory_id", "group_id", "status", "finish_reason"]).to_pylist()
    faulted = {fault.trajectory_id for fault in faults}
    failed = [
        row for row in rows if row["status"] == "failed" and row["trajectory_id"] not in faulted
    ]
    lost = [
        quarantine_rows([row], rule="failed", action="drop", reason=row["finish_reason"])[0]
        for row in failed
    ]
    gone = {row["trajectory_id"] for row in (*by_fault, *lost)}
    broken = {row["group_id"] for row in (*by_fault, *lost)}
    siblings = [
        row for row in rows if row["group_id"] in broken and row["trajectory_id"] not in gone
    ]
    return [
        *by_fault,
        *lost,
        *quarantine_rows(
            siblings, rule="group", action="drop", reason="another rollout of its group is unusable"
        ),
    ]


def record_rollouts(
    lake: Lake, window: Window, limits: Limits, *, run_id: str, cycle: int, lease: int, scope: str
) -> Recorded:
    """Writes a window and judges it at gate 1. Nothing is visible until the caller commits the
    returned write ids; on a refusal these hold only the validations."""
    known = lake.read("trajectories", run_id=run_id, columns=["trajectory_id"])
    profile = profile_rollouts(
        window.trajectories, window.segments, window.requests, window.routing, known, limits
    )
    judgement = judge(1, scope, profile, limits)

    def append(table: str, rows: pa.Table) -> str:
        return lake.append(table, rows, run_id=run_id, cycle=cycle, lease=lease)

    write_ids = [append("validations", judgement.validations())]
    quarantined = quarantine_of(window.trajectories, judgement.faults)
    if judgement.ok:
        write_ids.append(append("trajectories", window.trajectories))
        # Where every rollout failed there is no token. A write that counts has rows.
        for name in ("segments", "requests", "routing"):
            rows = getattr(window, name)
            if rows.num_rows:
                write_ids.append(append(name, rows))
        if quarantined:
            write_ids.append(append("quarantine", _table("quarantine", quarantined)))
    ids = tuple(window.trajectories.column("trajectory_id").to_pylist())
    return Recorded(
        judgement, tuple(write_ids), ids, frozenset(row["trajectory_id"] for row in quarantined)
    )
