"""What a reviewer may decide, and what is refused with one sentence and no row."""

from pathlib import Path

import pytest

from tasks.decisions import (
    answers,
    decide,
    decision_rows,
    refusing_rules,
    undecided,
    unfinished_waivers,
)
from tests.refused_lake import RUN_ID, RefusedLake

ADA = {"reviewer": "Ada", "reason": "known, harmless"}


def test_a_decision_is_invisible_until_it_is_adopted(tmp_path: Path):
    run = RefusedLake(tmp_path)
    refusal = run.refuse("logprobs_aligned", "own_version_mismatch")
    assert undecided(run.ledger.entries) == [refusal]
    rules = refusing_rules(run.lake, RUN_ID, refusal)
    assert rules == ["logprobs_aligned", "own_version_mismatch"]
    decided = decide(run.lake, RUN_ID, refusal.seq, rules=rules, **ADA)
    assert decided["write_id"].startswith("000000-") and decided["decision"] == "waive"
    assert run.lake.read("decisions", run_id=RUN_ID).num_rows == 0
    assert len(run.ledger.entries) == refusal.seq + 1, "the reviewer writes no ledger row"
    adopted = run.adopt(decided)
    rows = run.lake.read("decisions", run_id=RUN_ID).to_pylist()
    assert [(row["rule"], row["reviewer"]) for row in rows] == [(rule, "Ada") for rule in rules]
    assert {(row["refusal"], row["admission"]) for row in rows} == {
        (refusal.seq, refusal.details["admission"])
    }
    assert undecided(run.ledger.entries) == []
    assert unfinished_waivers(run.ledger.entries) == [adopted]
    run.ledger.append(
        "batch_accepted",
        lease=run.lease,
        batch=1,
        details={"admission": refusal.details["admission"], "refusal": refusal.seq},
    )
    assert unfinished_waivers(run.ledger.entries) == []


def test_an_approval_leaves_nothing_to_judge_again(tmp_path: Path):
    run = RefusedLake(tmp_path)
    refusal = run.refuse("scores_finite")
    decided = decide(run.lake, RUN_ID, refusal.seq, **ADA)
    assert (decided["decision"], decided["rules"]) == ("approve", [])
    run.adopt(decided)
    assert undecided(run.ledger.entries) == unfinished_waivers(run.ledger.entries) == []


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"reason": " \n"}, "--reason is empty"),
        ({"reviewer": " "}, "--reviewer is empty"),
        ({"refusal": 99}, "has no refusal 99; its refusals are 4"),
        ({"refusal": 3}, "has no refusal 3; its refusals are 4"),
        ({"refusal": -1}, "has no refusal -1"),
        ({"rules": ["audit_present"]}, "Rule audit_present did not refuse 4; .* logprobs_aligned"),
        ({"rules": ["logprobs_aligned", "nothing"]}, "Rule nothing did not refuse 4"),
        ({"rules": ["scores_finite"]}, "can never be waived: the gradient would not be finite"),
    ],
)
def test_bad_decisions_are_refused_and_leave_no_row(tmp_path: Path, changed: dict, sentence: str):
    run = RefusedLake(tmp_path)
    assert run.refuse("logprobs_aligned", "scores_finite").seq == 4
    asked = {"refusal": 4, "rules": ["logprobs_aligned"], **ADA, **changed}
    with pytest.raises(ValueError, match=sentence):
        decide(run.lake, RUN_ID, asked.pop("refusal"), **asked)
    assert run.lake.read("decisions", run_id=RUN_ID, write_ids="all").num_rows == 0


def test_a_run_without_a_refusal_says_so(tmp_path: Path):
    with pytest.raises(ValueError, match="Run r has no refusal 0; it has none"):
        decide(RefusedLake(tmp_path).lake, RUN_ID, 0, **ADA)


def test_a_second_decision_is_refused_whether_the_first_is_adopted_or_not(tmp_path: Path):
    run = RefusedLake(tmp_path)
    refusal = run.refuse("logprobs_aligned")
    first = decide(run.lake, RUN_ID, refusal.seq, **ADA)
    sentence = "was decided already: approve by Ada on .* UTC \\(known, harmless\\)"
    for _ in range(2):
        with pytest.raises(ValueError, match=sentence):
            decide(run.lake, RUN_ID, refusal.seq, rules=["logprobs_aligned"], **ADA)
        if undecided(run.ledger.entries):
            run.adopt(first)
    rows = run.lake.read("decisions", run_id=RUN_ID, write_ids="all")
    assert rows.num_rows == 1


def test_of_two_decisions_at_the_same_moment_the_first_write_counts(tmp_path: Path):
    run = RefusedLake(tmp_path)
    refusal = run.refuse("logprobs_aligned").seq
    first = decide(run.lake, RUN_ID, refusal, **ADA)
    row = decision_rows(run.lake, RUN_ID, refusal)[0]
    late = {name: row[name] for name in row if name not in ("run_id", "cycle", "write_id")}
    run.write("decisions", [late | {"decision": "waive", "rule": "logprobs_aligned"}])
    (kept,) = decision_rows(run.lake, RUN_ID, refusal)
    assert (kept["write_id"], kept["decision"]) == (first["write_id"], "approve")


def test_the_commands_that_answer_can_be_pasted():
    assert answers("/a b/lake", "r", 4, ["x", "y"]) == (
        "rollhouse approve --lake '/a b/lake' --run r --refusal 4 --reason TEXT",
        "rollhouse waive --lake '/a b/lake' --run r --refusal 4 --rule x --rule y --reason TEXT",
    )
    assert len(answers("lake", "r", 4, ["x", "scores_finite"])) == 1
