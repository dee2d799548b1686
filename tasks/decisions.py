"""A reviewer's word on a refusal: what may be decided, and the rows that say it.

A fault of a whole window or batch stops the run until a person approves the refusal or waives the
rules behind it. The reviewer holds no lease, so the rows are written under lease 0 and count only
once the controller adopts them with a `decision_adopted` row.
"""

import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from schemas.tables import TABLES
from tasks.lake.lake import Lake
from tasks.lake.ledger import Entry

REVIEWERS_LEASE = 0
"""No controller ever holds it, so it marks the writes of those who hold none."""

NEVER_WAIVED = {
    "rows_present": "there is nothing to use",
    "scores_complete": "tokens without an old log-probability cannot be trained",
    "scores_finite": "the gradient would not be finite",
    "lag_not_negative": "the trainer would start from older weights than those that sampled",
    "segments_have_trajectory": "segments of nobody cannot be admitted",
    "trajectory_once": "a trajectory would be trained twice",
}
"""Rules without which the data cannot be used at all, and why."""


def undecided(entries: Sequence[Entry]) -> list[Entry]:
    """The refusals that no adopted decision answers, oldest first."""
    decided = {e.details["refusal"] for e in entries if e.kind == "decision_adopted"}
    return [e for e in entries if e.kind == "batch_refused" and e.seq not in decided]


def unfinished_waivers(entries: Sequence[Entry]) -> list[Entry]:
    """Adopted waivers whose refused data has not been judged again, oldest first."""
    judged = {e.details.get("refusal") for e in entries if e.kind != "decision_adopted"}
    return [
        e
        for e in entries
        if e.kind == "decision_adopted"
        and e.details["decision"] == "waive"
        and e.details["refusal"] not in judged
    ]


def refusing_rules(lake: Lake, run_id: str, refusal: Entry) -> list[str]:
    """The rules that a `batch_refused` row stands on, by its own validations."""
    rows = lake.read(
        "validations",
        run_id=run_id,
        columns=["rule"],
        where="NOT ok AND severity = 'batch' AND waived_by IS NULL",
        write_ids=refusal.write_ids,
    )
    return rows.column("rule").to_pylist()


def answers(lake_uri: str, run_id: str, refusal: int, rules: Sequence[str]) -> tuple[str, ...]:
    """The commands that answer a refusal by `rules`: to approve it, and to waive it if that can be
    done."""
    on = f"--lake {shlex.quote(lake_uri)} --run {run_id} --refusal {refusal}"
    approve = f"rollhouse approve {on} --reason TEXT"
    if NEVER_WAIVED.keys() & set(rules):
        return (approve,)
    waived = " ".join(f"--rule {rule}" for rule in rules)
    return approve, f"rollhouse waive {on} {waived} --reason TEXT"


def decision_rows(lake: Lake, run_id: str, refusal: int) -> list[dict[str, Any]]:
    """The rows of the first decision that was written on a refusal, adopted or not; [] if none.

    Of two reviewers who decide at the same moment, the first write counts and the other never.
    """
    rows = lake.read(
        "decisions", run_id=run_id, where="refusal = ?", params=[refusal], write_ids="all"
    ).to_pylist()
    first = min((row["write_id"] for row in rows), default=None)
    return [row for row in rows if row["write_id"] == first]


def decide(
    lake: Lake,
    run_id: str,
    refusal: int,
    *,
    rules: Sequence[str] = (),
    reviewer: str,
    reason: str,
) -> dict[str, Any]:
    """Writes a decision on a refusal and returns it: a waiver of `rules`, or without any an
    approval.

    Raises `ValueError` if there is no such refusal, it is decided already, the reviewer or the
    reason is blank, or a rule is not one that refused or can never be waived; nothing is written.
    """
    reviewer, reason = reviewer.strip(), reason.strip()
    if not reason:
        raise ValueError("--reason is empty; say in one sentence why, for those who audit the run.")
    if not reviewer:
        raise ValueError("--reviewer is empty; give the name of the person who decides.")
    entry = _refusal(lake, run_id, refusal)
    _check_open(lake, run_id, refusal)
    _check_rules(refusal, refusing_rules(lake, run_id, entry), rules)
    now = datetime.now(UTC)
    rows = [
        {
            "decision": "waive" if rules else "approve",
            "refusal": refusal,
            "admission": entry.details["admission"],
            "rule": rule,
            "reviewer": reviewer,
            "reason": reason,
            "decided_at": now,
        }
        for rule in dict.fromkeys(rules or [None])
    ]
    table = pa.Table.from_pylist(rows, schema=TABLES["decisions"].own_schema)
    write_id = lake.append(
        "decisions", table, run_id=run_id, cycle=entry.cycle, lease=REVIEWERS_LEASE
    )
    return {
        "run_id": run_id,
        "refusal": refusal,
        "decision": rows[0]["decision"],
        "rules": [row["rule"] for row in rows if row["rule"] is not None],
        "reviewer": reviewer,
        "reason": reason,
        "decided_at": now,
        "write_id": write_id,
    }


def _refusal(lake: Lake, run_id: str, refusal: int) -> Entry:
    entries = lake.ledger(run_id).entries
    refusals = [e.seq for e in entries if e.kind == "batch_refused"]
    if refusal not in refusals:
        known = f"its refusals are {', '.join(map(str, refusals))}" if refusals else "it has none"
        raise ValueError(f"Run {run_id} has no refusal {refusal}; {known}.")
    return entries[refusal]


def _check_open(lake: Lake, run_id: str, refusal: int) -> None:
    if earlier := decision_rows(lake, run_id, refusal):
        row = earlier[0]
        raise ValueError(
            f"Refusal {refusal} of run {run_id} was decided already: {row['decision']} by "
            f"{row['reviewer']} on {row['decided_at']:%Y-%m-%d %H:%M:%S} UTC ({row['reason']}). A "
            "decision is final; run the run again to go on."
        )


def _check_rules(refusal: int, refused_by: Sequence[str], rules: Sequence[str]) -> None:
    for rule in rules:
        if rule not in refused_by:
            raise ValueError(
                f"Rule {rule} did not refuse {refusal}; the rules that did are "
                f"{', '.join(refused_by)}."
            )
        if rule in NEVER_WAIVED:
            raise ValueError(
                f"Rule {rule} can never be waived: {NEVER_WAIVED[rule]}. Confirm the refusal with "
                "`rollhouse approve`."
            )
