"""Put finished rollouts through gate 1 and into the lake, in one ledger row.

Rows are written first and count only when the ledger names them, together with the validations and
the quarantine that judge them. A fault of the whole window leaves its rows unnamed: the refusal's
details list them, so that a reviewer's waiver can have them counted without sampling again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from schemas.tables import TABLES
from tasks.lake.lake import Lake
from tasks.profile import Limits, profile_rollouts
from tasks.rollout import Rollout
from tasks.validate import NO_WAIVERS, Fault, Judgement, Waivers, judge


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

    @classmethod
    def written(cls, lake: Lake, run_id: str, write_ids: Sequence[str]) -> "Window":
        """The window as its writes hold it, whether or not the ledger names them."""

        def rows(name: str) -> pa.Table:
            found = lake.read(name, run_id=run_id, write_ids=write_ids)
            return found.select(TABLES[name].own_schema.names)

        return cls(rows("trajectories"), rows("segments"), rows("requests"), rows("routing"))

    def write(self, lake: Lake, *, run_id: str, cycle: int, lease: int) -> tuple[str, ...]:
        """Writes the rows under write ids that nothing names yet; what is empty gets none."""
        tables = {
            "trajectories": self.trajectories,
            "segments": self.segments,
            "requests": self.requests,
            "routing": self.routing,
        }
        return tuple(
            lake.append(name, rows, run_id=run_id, cycle=cycle, lease=lease)
            for name, rows in tables.items()
            if rows.num_rows
        )


def _table(name: str, rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=TABLES[name].own_schema)


@dataclass(frozen=True)
class Recorded:
    """A judged window: `rows` are the writes that hold it, `findings` those that hold the
    judgement and the quarantine."""

    judgement: Judgement
    rows: tuple[str, ...]
    findings: tuple[str, ...]
    trajectory_ids: tuple[str, ...]
    quarantined: frozenset[str]

    @property
    def write_ids(self) -> tuple[str, ...]:
        """What the ledger may name: the rows of a refused window it may not."""
        return (*self.findings, *self.rows) if self.judgement.ok else self.findings

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


def fault_rows(faults: Sequence[Fault]) -> list[dict[str, Any]]:
    """Rows of the quarantine table for single faults."""
    return [
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


def quarantine_of(trajectories: pa.Table, faults: Sequence[Fault]) -> list[dict[str, Any]]:
    """Quarantine rows for single faults, and for those whose group they leave unusable.

    A failed rollout is not a fault, but its group cannot be compared any more either.
    """
    by_fault = fault_rows(faults)
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


def _first_conditions(lake: Lake, run_id: str, recorded: pa.Table) -> Limits:
    """Engine, tokenizer and template of the run's first recorded trajectory, None without one."""
    names = ("engine", "tokenizer_sha256", "chat_template_sha256")
    first = min(recorded.column("trajectory_id").to_pylist(), default=None)
    rows = []
    if first is not None:
        rows = lake.read(
            "trajectories",
            run_id=run_id,
            columns=names,
            where="trajectory_id = ?",
            params=[first],
            predicate=f"trajectory_id = '{first}'",
        ).to_pylist()
    return {f"first_{name}": rows[0][name] if rows else None for name in names}


def record_rollouts(
    lake: Lake, window: Window, limits: Limits, *, run_id: str, cycle: int, lease: int, scope: str
) -> Recorded:
    """Writes a window and judges it at gate 1. Nothing is visible until the caller commits the
    returned write ids."""
    rows = window.write(lake, run_id=run_id, cycle=cycle, lease=lease)
    return judge_window(
        lake, window, rows, limits, run_id=run_id, cycle=cycle, lease=lease, scope=scope
    )


def judge_window(
    lake: Lake,
    window: Window,
    rows: tuple[str, ...],
    limits: Limits,
    *,
    run_id: str,
    cycle: int,
    lease: int,
    scope: str,
    waivers: Waivers = NO_WAIVERS,
) -> Recorded:
    """Judges a window at gate 1 whose rows lie in the writes `rows`, and writes what was found."""
    known = lake.read("trajectories", run_id=run_id, columns=["trajectory_id"])
    limits = {**limits, **_first_conditions(lake, run_id, known)}
    profile = profile_rollouts(
        window.trajectories, window.segments, window.requests, window.routing, known, limits
    )
    judgement = judge(1, scope, profile, limits, waivers=waivers)

    def append(table: str, found: pa.Table) -> str:
        return lake.append(table, found, run_id=run_id, cycle=cycle, lease=lease)

    findings = [append("validations", judgement.validations())]
    quarantined = quarantine_of(window.trajectories, judgement.faults)
    if judgement.ok and quarantined:
        findings.append(append("quarantine", _table("quarantine", quarantined)))
    return Recorded(
        judgement,
        rows,
        tuple(findings),
        tuple(window.trajectories.column("trajectory_id").to_pylist()),
        frozenset(row["trajectory_id"] for row in quarantined),
    )
