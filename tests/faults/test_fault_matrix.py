"""Every fault that has been seen in the field is caught by the rule that names it: at the gate it
belongs to, with the severity it deserves, and naming the rollouts that were spoilt and no other."""

import pytest

from schemas.expectations import RULES
from tasks.record import Window, quarantine_of
from tests.faults import planted_drift, planted_rollouts, planted_scores, planted_windows
from tests.faults.planted import Fault
from tests.faults.spoilable import clean
from tests.gate_judgements import failed_rules

FAULTS: list[Fault] = [
    *planted_rollouts.FAULTS,
    *planted_windows.FAULTS,
    *planted_scores.FAULTS,
    *planted_drift.FAULTS,
]


@pytest.mark.parametrize("gate", [1, 2])
def test_the_batch_is_clean_before_a_fault_is_planted(gate: int):
    judgement = clean().judge(gate)
    assert not failed_rules(judgement), judgement.reason


@pytest.mark.parametrize("fault", FAULTS, ids=[f"gate{f.gate}-{f.rule}-{f.name}" for f in FAULTS])
def test_a_planted_fault_is_caught_by_its_rule(fault: Fault):
    batch = clean()
    spoilt = fault.plant(batch)
    judgement = batch.judge(fault.gate)
    result = next(r for r in judgement.results if r.rule == fault.rule)
    assert not result.ok, f"failed instead: {failed_rules(judgement)}"
    assert result.severity == fault.severity
    named = {f.trajectory_id for f in judgement.faults if f.rule == fault.rule}
    match fault.severity:
        case "batch":
            assert any(f"rule {fault.rule}" in refusal for refusal in judgement.refusals)
            assert named == (spoilt or set())
        case "warning":
            assert any(f"rule {fault.rule}" in warning for warning in judgement.warnings)
            assert judgement.ok and not judgement.faults, judgement.reason
        case _:
            assert named == spoilt
            assert {f.trajectory_id for f in judgement.faults} == spoilt, "and nobody else"
            assert judgement.ok, "its group leaves, the window stays"
            gone = quarantine_of(Window.of(batch.rollouts).trajectories, judgement.faults)
            assert {row["group_id"] for row in gone} == {f.group_id for f in judgement.faults}


def test_every_rule_has_a_fault_that_it_catches():
    rules = {rule.id for rules in RULES.values() for rule in rules}
    assert rules | {"rows_present", "row_fault_share"} == {fault.rule for fault in FAULTS}
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 100
