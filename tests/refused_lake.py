"""A lake whose run was refused, without an engine or a trainer: what a reviewer meets."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from schemas.tables import TABLES
from tasks.lake.lake import Lake
from tasks.lake.lease import take_lease
from tasks.lake.ledger import Entry

RUN_ID = "r"


class RefusedLake:
    """`admit`, `refuse` and `adopt` append what a controller would."""

    def __init__(self, root: Path):
        self.lake = Lake.create(root / "lake")
        self.ledger = self.lake.ledger(RUN_ID)
        self.ledger.append("run_created", lease=0, cycle=0, details={"config": {}})
        self.lease = take_lease(self.ledger)
        self.ledger.append("cycle_opened", lease=self.lease)

    def write(self, table: str, rows: list[dict[str, Any]]) -> str:
        arrow = pa.Table.from_pylist(rows, schema=TABLES[table].own_schema)
        return self.lake.append(table, arrow, run_id=RUN_ID, cycle=0, lease=self.lease)

    def results(self, gate: int, scope: str, **rules: tuple[str, float, bool]) -> str:
        """Writes validations; each rule is (severity, observed, ok), and 0.25 is allowed."""
        return self.write(
            "validations",
            [
                {
                    "gate": gate,
                    "rule": rule,
                    "severity": severity,
                    "scope": scope,
                    "observed": observed,
                    "expected": "<= 0.25",
                    "ok": ok,
                    "num_failed": int(not ok),
                    "judged_at": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
                }
                for rule, (severity, observed, ok) in rules.items()
            ],
        )

    def refuse(self, *rules: str, held: tuple[str, ...] = ("audit_present",)) -> Entry:
        """Gate 2 refuses a batch by `rules`."""
        admission = self.ledger.append("batch_admitted", lease=self.lease, batch=1).seq
        results = dict.fromkeys(rules, ("batch", 0.5, False))
        results |= dict.fromkeys(held, ("batch", 0.0, True))
        return self.ledger.append(
            "batch_refused",
            lease=self.lease,
            batch=1,
            num_trajectories=4,
            write_ids=[self.results(2, f"admission {admission}", **results)],
            details={"admission": admission, "gate": 2, "reason": "it is bad"},
        )

    def adopt(self, decided: dict[str, Any]) -> Entry:
        return self.ledger.append(
            "decision_adopted",
            lease=self.lease,
            batch=1,
            write_ids=[decided["write_id"]],
            details={name: decided[name] for name in ("refusal", "decision", "rules", "reviewer")},
        )
