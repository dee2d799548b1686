"""Both gates: honest data passes, and each planted fault is caught by the rule that names it."""

import copy
import math
from collections.abc import Callable

import numpy as np
import pytest

from tasks.record import Window, quarantine_of
from tasks.rollout import Rollout
from tests.factories import VOCAB_SIZE, scored, window
from tests.gate_judgements import failed_rules, gate1, gate2, recorded


def first_action(rollout: Rollout) -> dict:
    return next(segment for segment in rollout.segments if segment["kind"] == "action")


def test_gate_1_passes_honest_windows():
    for seed in range(12):
        judgement = gate1(window(seed, groups=2, turns=1 + seed % 3))
        assert judgement.ok and not failed_rules(judgement)


def test_gate_1_passes_a_rollout_whose_next_observation_had_no_room():
    rollouts = window(groups=2, turns=2)
    rollouts[3].trajectory.update(status="truncated", finish_reason="context")
    assert not failed_rules(gate1(rollouts))


def shorten_logprobs(r: Rollout) -> None:
    first_action(r)["rollout_logprobs"].pop()


def lose_logprob(r: Rollout) -> None:
    first_action(r)["rollout_logprobs"][0] = None


def nan_logprob(r: Rollout) -> None:
    first_action(r)["rollout_logprobs"][0] = math.nan


def infinite_logprob(r: Rollout) -> None:
    first_action(r)["rollout_logprobs"][-1] = -math.inf


def probability_as_logprob(r: Rollout) -> None:
    first_action(r)["rollout_logprobs"][0] = 0.3


def lose_version(r: Rollout) -> None:
    first_action(r)["weight_version"] = None


def version_ahead(r: Rollout) -> None:
    first_action(r)["weight_version"] = 4


def cache_newer_than_weights(r: Rollout) -> None:
    first_action(r)["kv_version_min"] = 99


def version_falls(r: Rollout) -> None:
    actions = [segment for segment in r.segments if segment["kind"] == "action"]
    actions[-1]["weight_version"] = actions[-1]["kv_version_min"] = 1


def foreign_token(r: Rollout) -> None:
    first_action(r)["token_ids"][0] = VOCAB_SIZE


def negative_token(r: Rollout) -> None:
    r.segments[0]["token_ids"][0] = -1


def lose_segment(r: Rollout) -> None:
    del r.segments[1]


def observation_with_logprobs(r: Rollout) -> None:
    r.segments[0]["rollout_logprobs"] = [-1.0] * len(r.segments[0]["token_ids"])


def opens_with_action(r: Rollout) -> None:
    r.segments[0]["kind"] = "observation"


def over_cap(r: Rollout) -> None:
    segment = r.segments[-1]
    extra = 17 - len(segment["token_ids"])
    segment["token_ids"] += [1] * extra
    segment["rollout_logprobs"] += [-1.0] * extra
    r.trajectory["num_tokens"] += extra
    r.trajectory["num_action_tokens"] += extra


def padding_counted(r: Rollout) -> None:
    r.trajectory["num_tokens"] += 5


def truncated_as_complete(r: Rollout) -> None:
    r.trajectory["finish_reason"] = "length"


def cap_passed_by_a_split_turn(r: Rollout) -> None:
    """One action of 20 tokens in two segments, as an update in flight leaves it."""
    last = r.segments[-1]
    for segment in (last, {**last, "segment_index": last["segment_index"] + 1}):
        segment["token_ids"], segment["rollout_logprobs"] = [1] * 10, [-1.0] * 10
        if segment is not last:
            segment["start_position"] += 10
            r.segments.append(segment)


def engine_says_length(r: Rollout) -> None:
    r.requests[-1]["finish_reason"] = "length"


def token_that_no_request_returned(r: Rollout) -> None:
    r.requests[-1]["num_output_tokens"] -= 1


def unknown_kind(r: Rollout) -> None:
    r.segments[0]["kind"] = None


def fresher_than_its_tokens(r: Rollout) -> None:
    r.trajectory["weight_version_min"] += 1


def nan_reward(r: Rollout) -> None:
    r.trajectory["reward"] = math.nan


def infinite_reward(r: Rollout) -> None:
    r.trajectory["reward"] = math.inf


def reward_on_other_scale(r: Rollout) -> None:
    r.trajectory["reward"] = 100.0


def failure_as_zero(r: Rollout) -> None:
    r.trajectory.update(status="failed", finish_reason="scorer: boom", reward=0.0)


@pytest.mark.parametrize(
    ("plant", "rule"),
    [
        (shorten_logprobs, "lengths_agree"),
        (observation_with_logprobs, "lengths_agree"),
        (lose_logprob, "logprobs_present"),
        (nan_logprob, "logprobs_present"),
        (infinite_logprob, "logprobs_present"),
        (probability_as_logprob, "logprobs_not_positive"),
        (lose_version, "versions_present"),
        (version_ahead, "versions_published"),
        (version_falls, "versions_monotone"),
        (cache_newer_than_weights, "versions_monotone"),
        (foreign_token, "ids_in_vocabulary"),
        (negative_token, "ids_in_vocabulary"),
        (lose_segment, "token_counts_agree"),
        (lose_segment, "positions_contiguous"),
        (opens_with_action, "sequence_opens_with_prompt"),
        (over_cap, "action_within_cap"),
        (cap_passed_by_a_split_turn, "action_within_cap"),
        (engine_says_length, "status_agrees"),
        (token_that_no_request_returned, "requests_agree"),
        (unknown_kind, "kinds_present"),
        (fresher_than_its_tokens, "version_bounds_agree"),
        (padding_counted, "token_counts_agree"),
        (truncated_as_complete, "status_agrees"),
        (nan_reward, "reward_finite"),
        (infinite_reward, "reward_finite"),
        (reward_on_other_scale, "reward_in_range"),
        (failure_as_zero, "reward_where_due"),
    ],
)
def test_gate_1_quarantines_a_row_fault_with_its_group(plant: Callable[[Rollout], None], rule: str):
    rollouts = window(groups=4, turns=2)
    plant(rollouts[5])
    judgement = gate1(rollouts)
    assert judgement.ok, judgement.refusals
    assert rule in failed_rules(judgement)
    assert {fault.trajectory_id for fault in judgement.faults} == {"00000001-001-0"}
    rows = quarantine_of(Window.of(rollouts).trajectories, judgement.faults)
    assert {row["group_id"] for row in rows} == {1}
    assert {row["trajectory_id"] for row in rows} == {f"00000001-{i:03d}-0" for i in range(4)}
    assert [row["action"] for row in rows].count("drop") == 3


def test_gate_1_quarantines_a_short_group_and_no_other():
    rollouts = window(groups=4)
    del rollouts[2]
    judgement = gate1(rollouts)
    assert judgement.ok
    assert failed_rules(judgement) == {"group_whole"}
    assert {fault.group_id for fault in judgement.faults} == {0}


def test_gate_1_quarantines_a_group_of_two_tasks():
    rollouts = window(groups=4)
    rollouts[0].trajectory["task_id"] = "another"
    judgement = gate1(rollouts)
    assert failed_rules(judgement) == {"group_one_task"}


def test_a_failed_rollout_is_no_fault_but_its_group_is_dropped():
    rollouts = window(groups=2)
    rollouts[0].trajectory.update(status="failed", finish_reason="scorer: boom", reward=None)
    judgement = gate1(rollouts)
    assert judgement.ok and not judgement.faults
    rows = quarantine_of(Window.of(rollouts).trajectories, judgement.faults)
    assert [(row["rule"], row["action"]) for row in rows] == [
        ("failed", "drop"),
        *[("group", "drop")] * 3,
    ]
    assert rows[0]["reason"] == "scorer: boom"


def test_gate_1_refuses_a_window_where_failures_are_the_rule():
    rollouts = window()
    for rollout in rollouts[:5]:
        rollout.trajectory.update(status="failed", finish_reason="scorer: boom", reward=None)
    assert failed_rules(gate1(rollouts)) == {"failed_share"}


def test_gate_1_refuses_heldout_rollouts_at_another_temperature():
    rollouts = window(size=1)
    for rollout in rollouts:
        rollout.trajectory["split"] = "heldout"
    assert gate1(rollouts).ok
    assert failed_rules(gate1(rollouts, heldout_temperature=0.7)) == {"sampling_as_configured"}


def test_gate_1_quarantines_a_group_with_a_retry_beside_the_rollout_it_repeats():
    rollouts = window()
    retry = copy.deepcopy(rollouts[0])
    for row in (retry.trajectory, *retry.segments, *retry.requests):
        row["trajectory_id"] = "00000000-000-1"
    assert "group_whole" in failed_rules(gate1([*rollouts, retry]))


def test_gate_1_refuses_the_same_trajectory_twice_in_a_window():
    rollouts = window()
    judgement = gate1([*rollouts, copy.deepcopy(rollouts[3])])
    assert not judgement.ok
    assert "trajectory_once" in judgement.reason


def test_gate_1_refuses_a_trajectory_that_is_recorded_already():
    judgement = gate1(window(), recorded("00000002-001-0"))
    assert not judgement.ok
    assert failed_rules(judgement) == {"trajectory_once"}


def test_gate_1_refuses_a_request_recorded_twice():
    rollouts = window()
    rollouts[0].requests.append(dict(rollouts[0].requests[0]))
    assert failed_rules(gate1(rollouts)) == {"request_once", "requests_agree"}


def test_gate_1_refuses_constant_logprobs():
    rollouts = window()
    for rollout in rollouts:
        for segment in rollout.segments:
            if segment["kind"] == "action":
                segment["rollout_logprobs"] = [0.0] * len(segment["token_ids"])
    judgement = gate1(rollouts)
    assert "logprobs_not_constant" in judgement.reason


@pytest.mark.parametrize(
    ("column", "value", "rule"),
    [
        ("tokenizer_sha256", "x" * 64, "tokenizer_unchanged"),
        ("chat_template_sha256", "x" * 64, "tokenizer_unchanged"),
        ("engine", "engine-2", "engine_unchanged"),
        ("logprobs_mode", "raw_logprobs", "logprobs_processed"),
    ],
)
def test_gate_1_refuses_a_window_made_under_other_conditions(column: str, value: str, rule: str):
    rollouts = window()
    rollouts[7].trajectory[column] = value
    judgement = gate1(rollouts)
    assert not judgement.ok and failed_rules(judgement) == {rule}


@pytest.mark.parametrize(
    ("parameter", "value"),
    [("temperature", 0.9), ("top_p", 0.9), ("top_k", 5), ("min_p", 0.05), ("min_p", None)],
)
def test_gate_1_refuses_parameters_that_were_not_configured(parameter: str, value: float | None):
    rollouts = window()
    rollouts[0].trajectory["sampling"][parameter] = value
    assert failed_rules(gate1(rollouts)) == {"sampling_as_configured"}


def test_gate_1_passes_truncation_where_all_was_truncated_as_configured():
    rollouts, configured = window(), {"top_p": 0.9, "top_k": 5, "min_p": 0.05}
    for rollout in rollouts:
        rollout.trajectory["sampling"] |= configured
    assert gate1(rollouts, **configured).ok
    rollouts[0].trajectory["sampling"]["top_p"] = 1.0
    assert failed_rules(gate1(rollouts, **configured)) == {"sampling_as_configured"}


def test_gate_1_refuses_a_window_where_faults_are_the_rule():
    rollouts = window()
    for rollout in rollouts[:5]:
        nan_reward(rollout)
    judgement = gate1(rollouts)
    assert not judgement.ok
    assert "reward_finite" in judgement.reason and "00000000-000-0" in judgement.reason


def test_gate_1_refuses_an_empty_window():
    judgement = gate1([])
    assert "rows_present" in judgement.reason


def actions(rollouts: list[Rollout]) -> list[dict]:
    return [s for r in rollouts for s in r.segments if s["kind"] == "action"]


def test_gate_2_passes_honest_batches_on_policy_and_stale():
    for seed in range(20):
        rollouts = window(seed, groups=8, version=3 - seed % 2, turns=2)
        judgement = gate2(rollouts, scored(rollouts, drift=0.05 * (seed % 2)))
        assert not failed_rules(judgement), judgement.reason


@pytest.mark.parametrize("direction", [-1, 1])
def test_gate_2_names_a_shift_by_one_position(direction: int):
    rollouts = window(groups=8)
    scores = scored(rollouts)
    for segment in actions(rollouts):
        segment["rollout_logprobs"] = np.roll(segment["rollout_logprobs"], direction).tolist()
    judgement = gate2(rollouts, scores)
    assert {"logprobs_aligned", "own_version_mismatch"} <= failed_rules(judgement)


def softmax_logprobs(logits: np.ndarray, temperature: float) -> np.ndarray:
    scaled = logits / temperature
    return scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))


def test_gate_2_names_raw_logprobs_at_temperature_0_7():
    rollouts = window(groups=8)
    scores = scored(rollouts)
    rng = np.random.default_rng(3)
    for segment, row in zip(actions(rollouts), scores, strict=True):
        logits = rng.normal(0, 2, (len(row["old_logprobs"]), VOCAB_SIZE))
        sampled = softmax_logprobs(logits, 0.7)
        token = [rng.choice(VOCAB_SIZE, p=np.exp(line)) for line in sampled]
        row["old_logprobs"] = sampled[range(len(token)), token].tolist()
        raw = softmax_logprobs(logits, 1.0)[range(len(token)), token]
        segment["rollout_logprobs"] = raw.tolist()
    judgement = gate2(rollouts, scores)
    assert {"temperature_applied", "own_version_mismatch"} <= failed_rules(judgement)


def test_gate_2_refuses_logprobs_of_other_weights():
    rollouts = window(groups=8)
    judgement = gate2(rollouts, scored(rollouts, noise=0.02))
    assert "own_version_mismatch" in failed_rules(judgement)
    assert "served other weights" in judgement.reason


def test_gate_2_refuses_a_stale_batch_and_one_from_the_future():
    rollouts = window(groups=8, version=1)
    assert failed_rules(gate2(rollouts, scored(rollouts, drift=0.01))) == {"lag_within_bound"}
    rollouts = window(groups=8, version=3)
    judgement = gate2(rollouts, scored(rollouts), old_version=2)
    assert "lag_not_negative" in failed_rules(judgement)


def test_gate_2_refuses_scores_that_are_missing_short_or_doubled():
    rollouts = window(groups=8)
    scores = scored(rollouts)
    assert "scores_complete" in failed_rules(gate2(rollouts, scores[1:]))
    assert "scores_complete" in failed_rules(gate2(rollouts, [*scores, scores[0]]))
    scores[0]["old_logprobs"].pop()
    assert "scores_complete" in failed_rules(gate2(rollouts, scores))


def test_gate_2_refuses_scores_that_overflowed():
    rollouts = window(groups=8)
    scores = scored(rollouts)
    scores[0]["old_logprobs"][0] = math.nan
    assert "scores_finite" in failed_rules(gate2(rollouts, scores))


def test_gate_2_refuses_certain_and_infinite_logprobs_without_failing_itself():
    rollouts = window(groups=8)
    scores = scored(rollouts)
    certain = copy.deepcopy(rollouts)
    for segment in actions(certain):
        segment["rollout_logprobs"] = [0.0] * len(segment["token_ids"])
    assert "temperature_applied" in failed_rules(gate2(certain, scores))
    scores[0]["own_version_logprobs"] = [-math.inf] * len(scores[0]["old_logprobs"])
    scores[1]["entropies"][0] = math.nan
    assert "scores_finite" in failed_rules(gate2(rollouts, scores))


def test_gate_2_refuses_a_batch_that_it_could_not_compare():
    rollouts = window(groups=8, version=2)
    scores = scored(rollouts, drift=0.01)
    for row in scores:
        row["own_version_logprobs"] = None
    judgement = gate2(rollouts, scores)
    assert failed_rules(judgement) == {"audit_present", "audit_share"}
    assert "audit_present" in judgement.reason and "audit_share" in judgement.warnings[0]


def test_gate_2_refuses_a_policy_that_moved_too_far():
    rollouts = window(groups=8, version=2)
    judgement = gate2(rollouts, scored(rollouts, drift=2.0))
    assert failed_rules(judgement) == {"share_off_by_factor", "rollout_far_off"}
    assert not judgement.ok and "rollout_far_off" not in judgement.reason


def test_gate_2_refuses_an_empty_batch():
    assert "rows_present" in gate2([], []).reason
