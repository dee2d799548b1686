"""Faults of a whole window, for gate 1 to refuse or to warn of."""

import copy

from tests.faults.planted import Faults

FAULTS = Faults()


@FAULTS.of(1, "trajectory_once", "batch")
def rollout_recorded_twice(batch):
    batch.rollouts.append(copy.deepcopy(batch.of(2, 2)))


@FAULTS.of(1, "trajectory_once", "batch")
def rollout_recorded_before(batch):
    batch.known = ("00000002-001-0",)


@FAULTS.of(1, "request_once", "batch")
def request_recorded_twice(batch):
    requests = batch.of(2, 2).requests
    requests.append(dict(requests[0]))


@FAULTS.of(1, "segments_have_trajectory", "batch")
def rollout_lost_but_for_its_segments(batch):
    batch.of(2, 2).segments[1]["trajectory_id"] = "00000099-000-0"


@FAULTS.of(1, "routing_has_segment", "batch")
def routing_of_a_segment_that_is_not_there(batch):
    r = batch.of(2, 2)
    r.routing.append(r.routing[0] | {"segment_index": 9})


@FAULTS.of(1, "logprobs_not_constant", "batch")
def every_missing_logprob_written_as_zero(batch):
    for action in batch.actions():
        action["rollout_logprobs"] = [0.0] * len(action["token_ids"])


@FAULTS.of(1, "failed_share", "batch")
def scorer_fails_again_and_again(batch):
    for r in batch.rollouts[::3]:
        r.trajectory |= {"status": "failed", "finish_reason": "scorer: boom", "reward": None}


@FAULTS.of(1, "sampling_as_configured", "batch")
def top_p_defaulted_by_the_engine(batch):
    batch.of(2, 2).trajectory["sampling"]["top_p"] = 0.95


@FAULTS.of(1, "sampling_as_configured", "batch")
def wrong_temperature_sent(batch):
    for r in batch.rollouts:
        r.trajectory["sampling"]["temperature"] = 0.6


@FAULTS.of(1, "sampling_as_configured", "batch")
def token_cap_lost_on_the_way(batch):
    batch.of(2, 2).trajectory["sampling"]["max_tokens"] = None


@FAULTS.of(1, "logprobs_processed", "batch")
def engine_in_raw_logprobs_mode(batch):
    for r in batch.rollouts:
        r.trajectory["logprobs_mode"] = "raw_logprobs"


@FAULTS.of(1, "tokenizer_unchanged", "batch")
def template_changed_while_sampling(batch):
    batch.of(2, 2).trajectory["chat_template_sha256"] = "x" * 64


@FAULTS.of(1, "tokenizer_unchanged", "batch")
def template_changed_in_mid_run(batch):
    """Consistent within the window and with what is loaded, but not with the run's beginning."""
    batch.limits["first_chat_template_sha256"] = "b" * 64


@FAULTS.of(1, "tokenizer_unchanged", "batch")
def tokenizer_changed_in_mid_run(batch):
    batch.limits["first_tokenizer_sha256"] = "b" * 64


@FAULTS.of(1, "engine_unchanged", "batch")
def engine_exchanged_while_sampling(batch):
    batch.of(2, 2).trajectory["engine"] = "engine-2"


@FAULTS.of(1, "engine_as_before", "warning")
def engine_upgraded_in_mid_run(batch):
    batch.limits["first_engine"] = "engine-0"


@FAULTS.of(1, "reward_varies", "warning")
def reward_constant(batch):
    for r in batch.rollouts:
        r.trajectory["reward"] = 0.0


@FAULTS.of(1, "window_trainable", "warning")
def window_too_old_to_train(batch):
    batch.limits |= {"published_version": 9, "max_lag": 2}


@FAULTS.of(1, "row_fault_share", "batch")
def fault_in_every_third_rollout(batch):
    for r in batch.rollouts[::3]:
        r.trajectory["reward"] = -7.0


@FAULTS.of(1, "rows_present", "batch")
def window_empty(batch):
    batch.rollouts.clear()
