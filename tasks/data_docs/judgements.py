"""What the lake holds about each judgement of a run, gathered for people.

Everything is read from the ledger and the rows it names, so the same lake gives the same facts
whether the run was interrupted, refused or finished.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from schemas.expectations import RULES
from tasks.lake.lake import Lake
from tasks.lake.ledger import Entry

OUTCOMES = ("refused", "waived", "quarantined", "warned", "held")
"""What a result meant, the gravest first."""

_TEXTS = {
    (gate, rule.id): (rule.description, rule.protects_against)
    for gate, rules in RULES.items()
    for rule in rules
} | {
    (gate, "rows_present"): (
        "There is something to judge.",
        "A gate that passes because it saw nothing.",
    )
    for gate in RULES
}
_TEXTS[1, "row_fault_share"] = (
    "Few of the window's trajectories break a rule.",
    "An engine that is broken, hidden by dropping most of what it returns.",
)


@dataclass(frozen=True)
class Decision:
    """A reviewer's word on a refusal, as adopted; `adopted` is the seq of that ledger row."""

    refusal: int
    decision: str
    rules: tuple[str, ...]
    reviewer: str
    reason: str
    decided_at: datetime
    adopted: int


@dataclass(frozen=True)
class Finding:
    """One rule's result. `outcome` is one of `OUTCOMES`; `decision` waived it, None if none did."""

    rule: str
    severity: str
    observed: float | None
    expected: str
    num_failed: int
    outcome: str
    decision: Decision | None
    description: str
    protects_against: str


@dataclass(frozen=True)
class Judgement:
    """One gate's judgement, named by the ledger row `entry`; `name` is unique in the run."""

    name: str
    gate: int
    scope: str
    entry: Entry
    judged_at: datetime
    findings: tuple[Finding, ...]
    quarantined: tuple[dict[str, Any], ...]
    decision: Decision | None
    """The reviewer's answer, where this refused."""

    @property
    def refused_by(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.outcome == "refused"]

    @property
    def verdict(self) -> str:
        """accepted, waived (accepted since rules were), waiting (for a person) or refused."""
        if self.refused_by:
            undecided = self.entry.kind == "batch_refused" and self.decision is None
            return "waiting" if undecided and self.gate else "refused"
        return "waived" if self.counts["waived"] else "accepted"

    @property
    def counts(self) -> Counter[str]:
        """Rules by outcome."""
        return Counter(finding.outcome for finding in self.findings)

    @property
    def what(self) -> str:
        entry = self.entry
        if self.gate == 0:
            return self.scope
        if entry.batch is not None and self.gate == 2:
            return f"batch {entry.batch} ({self.scope}, {entry.num_trajectories} trajectories)"
        return f"{self.scope} ({entry.num_trajectories} trajectories)"


def read_decisions(lake: Lake, run_id: str) -> list[Decision]:
    """The adopted decisions, in the order of their adoption."""
    adopted = {
        write_id: entry
        for entry in lake.ledger(run_id).entries
        if entry.kind == "decision_adopted"
        for write_id in entry.write_ids
    }
    found: dict[int, Decision] = {}
    for row in lake.read("decisions", run_id=run_id).to_pylist():
        entry = adopted[row["write_id"]]
        found[entry.seq] = Decision(
            row["refusal"],
            row["decision"],
            tuple(entry.details["rules"]),
            row["reviewer"],
            row["reason"],
            row["decided_at"],
            entry.seq,
        )
    return [found[seq] for seq in sorted(found)]


def read_judgements(lake: Lake, run_id: str) -> list[Judgement]:
    """Every judgement that a ledger row names, in the ledger's order."""
    decisions = read_decisions(lake, run_id)
    named = {w: entry for entry in lake.ledger(run_id).entries for w in entry.write_ids}
    results: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in lake.read("validations", run_id=run_id).to_pylist():
        results[row["write_id"]].append(row)
    quarantined: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in lake.read("quarantine", run_id=run_id).to_pylist():
        quarantined[named[row["write_id"]].seq].append(row)
    judgements = []
    for write_id in sorted(results, key=lambda w: (named[w].seq, results[w][0]["gate"], w)):
        entry, gate = named[write_id], results[write_id][0]["gate"]
        same = sum(j.entry.seq == entry.seq and j.gate == gate for j in judgements)
        judgements.append(
            Judgement(
                f"{entry.seq:06d}-gate{gate}" + (f"-{same + 1}" if same else ""),
                gate,
                results[write_id][0]["scope"],
                entry,
                results[write_id][0]["judged_at"],
                _findings(results[write_id], decisions),
                tuple(quarantined[entry.seq]) if gate == 1 else (),
                next((d for d in decisions if gate and d.refusal == entry.seq), None),
            )
        )
    return judgements


def _findings(rows: Sequence[dict[str, Any]], decisions: Sequence[Decision]) -> tuple[Finding, ...]:
    by_adoption = {decision.adopted: decision for decision in decisions}
    order = {rule.id: i for i, rule in enumerate(RULES.get(rows[0]["gate"], ()))}
    findings = []
    for row in rows:
        description, protects_against = _TEXTS.get((row["gate"], row["rule"]), ("", ""))
        findings.append(
            Finding(
                row["rule"],
                row["severity"],
                row["observed"],
                row["expected"],
                row["num_failed"],
                _outcome(row),
                by_adoption.get(row["waived_by"]),
                description,
                protects_against,
            )
        )
    return tuple(
        sorted(findings, key=lambda f: (OUTCOMES.index(f.outcome), order.get(f.rule, len(order))))
    )


def _outcome(row: dict[str, Any]) -> str:
    if row["ok"]:
        return "held"
    if row["waived_by"] is not None:
        return "waived"
    return {"batch": "refused", "warning": "warned"}.get(row["severity"], "quarantined")
