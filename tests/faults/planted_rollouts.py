"""Faults of single rollouts and groups, for gate 1 to quarantine."""

import copy
import math

import numpy as np

from tasks.rollout import Rollout
from tests.factories import MAX_TOKENS, RUN_SEED, VOCAB_SIZE
from tests.faults.planted import Faults
from tests.faults.spoilable import SIZE, Spoilable

FAULTS = Faults()


def last_action(r: Rollout) -> dict:
    return r.segments[-1]


def set_logprob(r: Rollout, value: float | None) -> None:
    last_action(r)["rollout_logprobs"][2] = value


@FAULTS.in_one(1, "lengths_agree", "row")
def last_logprob_missing(batch, r):
    last_action(r)["rollout_logprobs"].pop()


@FAULTS.in_one(1, "lengths_agree", "row")
def observation_tokens_with_logprobs(batch, r):
    r.segments[2]["rollout_logprobs"] = [-1.0] * len(r.segments[2]["token_ids"])


@FAULTS.in_one(1, "logprobs_present", "row")
def logprob_null(batch, r):
    set_logprob(r, None)


@FAULTS.in_one(1, "logprobs_present", "row")
def logprob_nan(batch, r):
    set_logprob(r, math.nan)


@FAULTS.in_one(1, "logprobs_present", "row")
def logprob_of_an_impossible_token(batch, r):
    set_logprob(r, -math.inf)


@FAULTS.in_one(1, "logprobs_not_positive", "row")
def logits_as_logprobs(batch, r):
    logits = batch.logits[r.trajectory["trajectory_id"], 1]
    r.segments[1]["rollout_logprobs"] = [float(row.max()) for row in logits]


@FAULTS.in_one(1, "logprobs_not_positive", "row")
def probabilities_as_logprobs(batch, r):
    r.segments[1]["rollout_logprobs"] = np.exp(r.segments[1]["rollout_logprobs"]).tolist()


@FAULTS.in_one(1, "logprobs_plausible", "row")
def sentinel_for_a_missing_logprob(batch, r):
    set_logprob(r, -9999.0)


@FAULTS.in_one(1, "logprobs_plausible", "row")
def float16_overflow(batch, r):
    set_logprob(r, float(np.finfo(np.float16).min))


@FAULTS.in_one(1, "logprobs_vary", "row")
def mean_logprob_written_to_every_token(batch, r):
    action = last_action(r)
    mean = float(np.mean(action["rollout_logprobs"]))
    action["rollout_logprobs"] = [mean] * len(action["token_ids"])


@FAULTS.in_one(1, "versions_present", "row")
def version_lost(batch, r):
    last_action(r)["weight_version"] = None


@FAULTS.in_one(1, "versions_published", "row")
def version_ahead_of_published(batch, r):
    last_action(r)["weight_version"] = 4


@FAULTS.in_one(1, "versions_current", "row")
def version_counter_reset(batch, r):
    batch.limits["oldest_version"] = 2
    for action in batch.actions(r):
        action["weight_version"] = action["kv_version_min"] = 0


@FAULTS.in_one(1, "versions_monotone", "row")
def version_falls_within_a_sequence(batch, r):
    last_action(r)["weight_version"] = last_action(r)["kv_version_min"] = 1


@FAULTS.in_one(1, "version_bounds_agree", "row")
def trajectory_fresher_than_its_tokens(batch, r):
    r.trajectory["weight_version_min"] = 4


@FAULTS.in_one(1, "ids_in_vocabulary", "row")
def token_of_another_vocabulary(batch, r):
    r.segments[0]["token_ids"][0] = VOCAB_SIZE + 50


@FAULTS.in_one(1, "prompts_extend", "row")
def context_reencoded_to_fewer_tokens(batch, r):
    r.requests[1]["num_prompt_tokens"] -= 1


@FAULTS.in_one(1, "sequences_agree", "row")
def reencoded_context_in_the_same_sequence(batch, r):
    r.requests[1]["drift"] = "realign"


@FAULTS.in_one(1, "no_retokenization", "warning")
def reencoded_context_in_a_sequence_of_its_own(batch, r):
    """As it should be recorded: the second turn opens a sequence with what the policy saw."""
    seen = [token for segment in r.segments[:3] for token in segment["token_ids"]]
    action = r.segments.pop()
    r.segments[2] |= {"sequence_index": 1, "segment_index": 0, "start_position": 0}
    r.segments[2] |= {"kind": "prompt", "token_ids": seen}
    r.segments.append(action | {"sequence_index": 1, "segment_index": 1})
    r.requests[1]["drift"] = "realign"
    r.trajectory["num_sequences"] = 2
    r.trajectory["num_tokens"] = sum(len(s["token_ids"]) for s in r.segments)
    batch.limits["num_experts"] = None
    for rollout in batch.rollouts:
        rollout.routing.clear()


@FAULTS.in_one(1, "finished_has_actions", "row")
def padding_row(batch, r):
    """A made-up rollout that fills its group."""
    del r.segments[1:]
    r.requests.clear()
    r.routing.clear()
    r.trajectory |= {"num_action_tokens": 0, "num_tokens": len(r.segments[0]["token_ids"])}
    r.trajectory |= {"weight_version_min": None, "weight_version_max": None, "reward": 0.0}


@FAULTS.in_one(1, "nothing_after_stop", "row")
def padding_tokens_appended(batch, r):
    action = r.segments[-1]
    padding = MAX_TOKENS - len(action["token_ids"])
    action["token_ids"] += [0] * padding
    action["rollout_logprobs"] += [0.0] * padding
    r.requests[-1]["num_output_tokens"] += padding
    for name in ("num_tokens", "num_action_tokens"):
        r.trajectory[name] += padding


@FAULTS.in_one(1, "action_within_cap", "row")
def generation_cap_ignored(batch, r):
    action = last_action(r)
    extra = MAX_TOKENS + 5 - len(action["token_ids"])
    action["token_ids"] = [7] * extra + action["token_ids"]
    action["rollout_logprobs"] = [-1.5] * extra + action["rollout_logprobs"]
    r.requests[-1]["num_output_tokens"] += extra
    for name in ("num_tokens", "num_action_tokens"):
        r.trajectory[name] += extra


@FAULTS.of(1, "status_agrees", "row")
def truncated_marked_complete(batch):
    r = batch.of(1, 3)
    r.trajectory |= {"status": "completed", "finish_reason": "stop"}
    return {r.trajectory["trajectory_id"]}


@FAULTS.in_one(1, "status_agrees", "row")
def complete_marked_truncated(batch, r):
    r.trajectory |= {"status": "truncated", "finish_reason": "length"}


@FAULTS.of(1, "finishes_agree", "row")
def engine_calls_a_cut_answer_complete(batch):
    r = batch.of(1, 3)
    r.trajectory |= {"status": "completed", "finish_reason": "stop"}
    r.requests[-1]["finish_reason"] = "stop"
    return {r.trajectory["trajectory_id"]}


@FAULTS.in_one(1, "finishes_agree", "row")
def answer_cut_below_the_cap(batch, r):
    """The engine applied a cap of its own, lower than the configured one."""
    action = last_action(r)
    del action["token_ids"][5:], action["rollout_logprobs"][5:]
    r.requests[-1] |= {"num_output_tokens": 5, "finish_reason": "length"}
    r.trajectory |= {"status": "truncated", "finish_reason": "length"}


@FAULTS.in_one(1, "token_counts_agree", "row")
def segment_lost(batch, r):
    del r.segments[1], r.routing[1]


@FAULTS.in_one(1, "positions_contiguous", "row")
def segment_doubled(batch, r):
    r.segments.insert(2, copy.deepcopy(r.segments[1]))


@FAULTS.of(1, "prompts_extend", "row")
def segments_of_two_rollouts_swapped(batch):
    one, other = batch.of(1, 1), batch.of(4, 2)
    mine, theirs = one.segments[:3], other.segments[:3]
    assert sum(len(s["token_ids"]) for s in mine) != sum(len(s["token_ids"]) for s in theirs)
    for a, b in zip(mine, theirs, strict=True):
        for name in ("token_ids", "rollout_logprobs", "start_position"):
            a[name], b[name] = b[name], a[name]
    return {one.trajectory["trajectory_id"], other.trajectory["trajectory_id"]}


@FAULTS.in_one(1, "sequence_opens_with_prompt", "row")
def action_without_prompt(batch, r):
    del r.segments[0], r.routing[0]
    for rows in (r.segments, r.routing):
        for index, row in enumerate(rows):
            row["segment_index"] = index


@FAULTS.in_one(1, "kinds_present", "row")
def segment_of_no_kind(batch, r):
    r.segments[2]["kind"] = None


@FAULTS.in_one(1, "requests_agree", "row")
def tokens_that_no_request_returned(batch, r):
    r.requests[-1]["num_output_tokens"] -= 1


@FAULTS.in_one(1, "id_agrees", "row")
def sample_renumbered(batch, r):
    r.trajectory["sample_index"] = 9


@FAULTS.in_one(1, "reward_finite", "row")
def reward_nan(batch, r):
    r.trajectory["reward"] = math.nan


@FAULTS.in_one(1, "reward_finite", "row")
def reward_infinite(batch, r):
    r.trajectory["reward"] = math.inf


@FAULTS.in_one(1, "reward_in_range", "row")
def reward_in_percent(batch, r):
    r.trajectory["reward"] = 100.0


@FAULTS.in_one(1, "reward_where_due", "row")
def failed_counted_as_zero_reward(batch, r):
    r.trajectory |= {"status": "failed", "finish_reason": "scorer: boom", "reward": 0.0}


@FAULTS.in_one(1, "reward_where_due", "row")
def reward_lost(batch, r):
    r.trajectory["reward"] = None


def copy_into(batch: Spoilable, source: Rollout, target: Rollout) -> None:
    """Everything sampled in `source` under the id, and in the place, of `target`."""
    name = target.trajectory["trajectory_id"]
    seed = dict(target.trajectory["sampling"])
    for rows in ("segments", "requests", "routing"):
        copied = copy.deepcopy(getattr(source, rows))
        for row in copied:
            row["trajectory_id"] = name
        setattr(target, rows, copied)
    place = ("trajectory_id", "group_id", "sample_index", "task_id")
    kept = {key: target.trajectory[key] for key in place}
    target.trajectory = copy.deepcopy(source.trajectory) | kept | {"sampling": seed}


@FAULTS.of(1, "content_once", "row")
def rollout_duplicated_under_another_id(batch):
    one, other = batch.of(2, 0), batch.of(2, 2)
    copy_into(batch, one, other)
    return {one.trajectory["trajectory_id"], other.trajectory["trajectory_id"]}


@FAULTS.in_one(1, "seed_as_derived", "row")
def rollout_sampled_twice_from_one_seed(batch, r):
    """The same draws on another server, equal but for rounding."""
    source = batch.of(1, 2)
    copy_into(batch, source, r)
    for action in batch.actions(r):
        action["rollout_logprobs"] = [x - 1e-5 for x in action["rollout_logprobs"]]
    r.trajectory["sampling"] = dict(source.trajectory["sampling"])


@FAULTS.in_one(1, "seed_as_derived", "row")
def seed_chosen_by_the_engine(batch, r):
    r.trajectory["sampling"]["seed"] = RUN_SEED


@FAULTS.in_one(1, "group_one_prompt", "row")
def prompt_of_another_group(batch, r):
    """Context swap: the answer stays, the problem before it is another's."""
    other = batch.of(5, 0).segments[0]["token_ids"]
    ids = r.segments[0]["token_ids"]
    ids[:] = (other * 3)[: len(ids)]


@FAULTS.of(1, "group_whole", "group")
def group_short_by_one(batch):
    batch.rollouts.remove(batch.of(3, 1))
    return {f"00000003-{sample:03d}-0" for sample in (0, 2, 3)}


@FAULTS.of(1, "group_whole", "group")
def retry_beside_its_original(batch):
    retry = copy.deepcopy(batch.of(3, 1))
    for row in (retry.trajectory, *retry.segments, *retry.requests, *retry.routing):
        row["trajectory_id"] = "00000003-001-1"
    retry.trajectory["attempt"] = 1
    for action in batch.actions(retry):
        action["rollout_logprobs"] = [x - 0.01 for x in action["rollout_logprobs"]]
    batch.rollouts.append(retry)
    return {f"00000003-{sample:03d}-0" for sample in range(SIZE)} | {"00000003-001-1"}


@FAULTS.of(1, "group_one_task", "group")
def group_with_two_tasks(batch):
    batch.of(3, 1).trajectory["task_id"] = "another"
    return {f"00000003-{sample:03d}-0" for sample in range(SIZE)}


@FAULTS.in_one(1, "routing_not_blank", "row")
def experts_all_zero(batch, r):
    r.routing[1]["experts"] = bytes(len(r.routing[1]["experts"]))


@FAULTS.in_one(1, "routing_in_range", "row")
def expert_out_of_range(batch, r):
    r.routing[1]["experts"] = bytes([8]) + r.routing[1]["experts"][1:]


@FAULTS.in_one(1, "routing_shape", "row")
def routing_of_another_layer_count(batch, r):
    for row in r.routing:
        row |= {"num_layers": 2, "top_k": 3}


@FAULTS.in_one(1, "routing_shape", "row")
def routing_of_one_row_too_many(batch, r):
    r.routing[0]["num_rows"] += 1
    r.routing[0]["experts"] += r.routing[0]["experts"][:6]


@FAULTS.in_one(1, "routing_complete", "row")
def routing_short_in_the_middle(batch, r):
    r.routing[1]["num_rows"] -= 1
    r.routing[1]["experts"] = r.routing[1]["experts"][:-6]


@FAULTS.in_one(1, "routing_like_group", "row")
def routing_off_by_one_row(batch, r):
    """Each token beside the experts of the one after it, as from an engine that skips a row."""
    r.routing[0]["experts"] = r.routing[0]["experts"][6:] + r.routing[1]["experts"][:6]
