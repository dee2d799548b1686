"""Write the rollouts of an import: numbered, counted and judged, and invisible until committed."""

import json
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from schemas.expectations import imported as expectations
from schemas.tables import TABLES
from tasks.interchange.source import SourceRollout, field_names
from tasks.lake.lake import Lake
from tasks.lake.lease import renew_if_due
from tasks.lake.ledger import Ledger
from tasks.profile import profile_rollouts
from tasks.record import fault_rows
from tasks.validate import Judgement, judge

ROWS_PER_TABLE = 512

UNKNOWN_LIMITS = dict.fromkeys(("run_seed", "stop_token_ids", "max_tokens", "max_model_tokens"))
"""What gate 1's profile compares with and no source says."""


@dataclass
class Import:
    """One import in progress, and what its summary counts."""

    lake: Lake
    ledger: Ledger
    origin: str
    lease: int
    groups: dict[Hashable, int] = field(default_factory=dict)
    samples: Counter[int] = field(default_factory=Counter)
    first_group: int = 0
    write_ids: list[str] = field(default_factory=list)
    trajectory_ids: list[str] = field(default_factory=list)
    kept: set[str] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    broken: Counter[str] = field(default_factory=Counter)

    def write(self, file: Path, rollouts: Iterable[SourceRollout]) -> int:
        """Writes and judges one file's rollouts; invisible until the ledger names them."""
        trajectories, segments = self._tables(rollouts)
        if trajectories.num_rows == 0:
            return 0
        judgement = self._judge(file, trajectories, segments)
        faults = judgement.faults
        self._append("validations", judgement.validations())
        self._append("trajectories", trajectories)
        if segments.num_rows:
            self._append("segments", segments)
        if faults:
            schema = TABLES["quarantine"].own_schema
            self._append("quarantine", pa.Table.from_pylist(fault_rows(faults), schema=schema))
        for result in judgement.results:
            if not result.ok:
                self.broken[result.rule] += result.num_failed
        self.counts["quarantined"] += len({fault.trajectory_id for fault in faults})
        self.trajectory_ids += trajectories.column("trajectory_id").to_pylist()
        return trajectories.num_rows

    def _append(self, table: str, rows: pa.Table) -> None:
        run_id = self.ledger.run_id
        self.write_ids.append(
            self.lake.append(table, rows, run_id=run_id, cycle=0, lease=self.lease)
        )
        renew_if_due(self.ledger, self.lease)

    def _judge(self, file: Path, trajectories: pa.Table, segments: pa.Table) -> Judgement:
        known = self.lake.read("trajectories", run_id=self.ledger.run_id, columns=["trajectory_id"])
        limits = {"origin": self.origin, **UNKNOWN_LIMITS}
        requests, routing = (
            TABLES[name].own_schema.empty_table() for name in ("requests", "routing")
        )
        profile = profile_rollouts(
            trajectories, segments, requests, routing, known, limits, expectations.RULES
        )
        return judge(1, f"import of {file.name}", profile, limits, rules=expectations.RULES)

    def _tables(self, rollouts: Iterable[SourceRollout]) -> tuple[pa.Table, pa.Table]:
        schemas = [TABLES[name].own_schema for name in ("trajectories", "segments")]
        found: list[list[pa.Table]] = [[schema.empty_table()] for schema in schemas]
        remaining = iter(rollouts)
        while chunk := list(islice(remaining, ROWS_PER_TABLE)):
            rows: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
            for rollout in chunk:
                trajectory = self._trajectory(rollout)
                rows[0].append(trajectory)
                name = {"trajectory_id": trajectory["trajectory_id"]}
                rows[1].extend({**segment, **name} for segment in rollout.segments or ())
            for tables, new, schema in zip(found, rows, schemas, strict=True):
                tables.append(pa.Table.from_pylist(new, schema=schema))
        trajectories, segments = (pa.concat_tables(tables) for tables in found)
        return trajectories, segments

    def _trajectory(self, rollout: SourceRollout) -> dict[str, Any]:
        group = self.groups.setdefault(rollout.group, self.first_group + len(self.groups))
        sample = self.samples[group]
        self.samples[group] += 1
        self.kept.update(field_names(rollout.details))
        counted: dict[str, int] = {}
        if rollout.segments is not None:
            lengths = [(s["kind"], len(s["token_ids"])) for s in rollout.segments]
            counted = {
                "num_sequences": len({s["sequence_index"] for s in rollout.segments}),
                "num_tokens": sum(n for _, n in lengths),
                "num_action_tokens": sum(n for kind, n in lengths if kind == "action"),
            }
            self.counts.update(
                tokens=counted["num_tokens"], action_tokens=counted["num_action_tokens"]
            )
        return {
            **rollout.columns,
            **counted,
            "trajectory_id": f"{group:08d}-{sample:03d}-0",
            "group_id": group,
            "sample_index": sample,
            "attempt": 0,
            "origin": self.origin,
            "origin_details": json.dumps(rollout.details, ensure_ascii=False, default=str),
        }
