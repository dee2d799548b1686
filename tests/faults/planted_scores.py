"""Faults that show only when the trainer's log-probabilities stand beside the engine's: gate 2."""

import math

import numpy as np

from tests.faults.planted import Faults
from tests.faults.spoilable import TEMPERATURE, Spoilable

FAULTS = Faults()


def shift(batch: Spoilable, by: int) -> None:
    for action in batch.actions():
        action["rollout_logprobs"] = np.roll(action["rollout_logprobs"], by).tolist()


def truncated(logits: np.ndarray, top_p: float) -> np.ndarray:
    """Logits of the smallest set that holds `top_p` of the probability, the rest cut away."""
    order = np.argsort(-logits, axis=-1)
    ranked = np.take_along_axis(logits, order, axis=-1)
    probs = np.exp(ranked - ranked.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    cut = np.where(np.cumsum(probs, -1) - probs < top_p, ranked, -60.0)
    result = np.empty_like(logits)
    np.put_along_axis(result, order, cut, axis=-1)
    return result


@FAULTS.of(2, "logprobs_aligned", "batch")
def logprobs_shifted_right(batch):
    shift(batch, 1)


@FAULTS.of(2, "logprobs_aligned", "batch")
def logprobs_shifted_left(batch):
    shift(batch, -1)


@FAULTS.of(2, "temperature_applied", "batch")
def raw_logprobs_instead_of_processed(batch):
    batch.relog(lambda logits: logits)


@FAULTS.of(2, "temperature_applied", "batch")
def sampled_at_another_temperature(batch):
    batch.relog(lambda logits: logits / (TEMPERATURE * 0.75))


@FAULTS.of(2, "temperature_applied", "batch")
def sampled_at_a_slightly_other_temperature(batch):
    batch.relog(lambda logits: logits / (TEMPERATURE * 1.02))


@FAULTS.of(2, "mismatch_two_signed", "batch")
def top_p_not_accounted_for(batch):
    """Each logged probability is divided by the mass that top_p = 0.9 kept."""
    for action in batch.actions():
        logits = batch.logits[action["trajectory_id"], action["segment_index"]] / TEMPERATURE
        kept = np.exp(truncated(logits, 0.9))
        mass = kept.sum(-1) / np.exp(logits).sum(-1)
        logged = np.asarray(action["rollout_logprobs"]) - np.log(mass)
        action["rollout_logprobs"] = np.minimum(logged, 0).tolist()


@FAULTS.of(2, "own_version_mismatch", "batch")
def stale_engine_that_lies_about_its_version(batch):
    """One update of 0.03 a logit behind what it claims."""
    rng = np.random.default_rng(5)
    batch.relog(lambda logits: (logits + rng.normal(0, 0.03, logits.shape)) / TEMPERATURE)


@FAULTS.of(2, "certain_logprobs_confirmed", "batch")
def one_missing_logprob_written_as_zero(batch):
    r = batch.of(1, 1)
    logprobs = r.segments[1]["rollout_logprobs"]
    logprobs[int(np.argmin(logprobs))] = 0.0
    return {r.trajectory["trajectory_id"]}


@FAULTS.of(2, "certain_logprobs_confirmed", "batch")
def one_rollouts_logprobs_written_as_zero(batch):
    r = batch.of(1, 1)
    for action in batch.actions(r):
        action["rollout_logprobs"] = [0.0] * len(action["token_ids"])
    return {r.trajectory["trajectory_id"]}


@FAULTS.of(2, "edges_match", "batch")
def first_logprob_of_each_answer_guessed(batch):
    for action in batch.actions():
        action["rollout_logprobs"][0] -= 0.5


@FAULTS.of(2, "trajectory_mismatch", "batch")
def actions_of_two_rollouts_swapped(batch):
    """Of one length, so that every count agrees."""
    one, other = batch.of(1, 1), batch.of(4, 2)
    mine, theirs = one.segments[1], other.segments[1]
    length = min(len(mine["token_ids"]), len(theirs["token_ids"]))
    for name in ("token_ids", "rollout_logprobs"):
        head = mine[name][:length]
        mine[name][:length] = theirs[name][:length]
        theirs[name][:length] = head
    for segment in (one.segments[3], other.segments[3]):
        segment["rollout_logprobs"] = [x - 0.1 for x in segment["rollout_logprobs"]]
    return {one.trajectory["trajectory_id"], other.trajectory["trajectory_id"]}


@FAULTS.of(2, "trajectory_mismatch", "batch")
def answer_scored_in_another_context(batch):
    """The trainer saw another prompt than the engine did."""
    rng = np.random.default_rng(6)
    r = batch.of(1, 1)
    for action in batch.actions(r):
        score = batch.score(action)
        own = np.asarray(score["old_logprobs"]) + rng.normal(0, 0.8, len(score["old_logprobs"]))
        score["old_logprobs"] = np.minimum(own, 0).tolist()
    return {r.trajectory["trajectory_id"]}


@FAULTS.of(2, "rollout_far_off", "warning")
def stale_rollout_spoilt_outside_the_audit(batch):
    r = batch.of(7, 1)
    for action in batch.actions(r):
        batch.score(action)["own_version_logprobs"] = None
        action["rollout_logprobs"] = [x - 1.5 for x in action["rollout_logprobs"]]
    batch.reweigh()


@FAULTS.of(2, "own_version_outliers", "warning")
def one_logprob_far_off(batch):
    batch.of(1, 1).segments[1]["rollout_logprobs"][3] -= 2.0
    batch.reweigh()


@FAULTS.of(2, "scores_complete", "batch")
def scores_missing_for_one_segment(batch):
    del batch.scores[4]


@FAULTS.of(2, "scores_complete", "batch")
def scores_written_twice(batch):
    batch.scores.append(dict(batch.scores[4]))


@FAULTS.of(2, "scores_complete", "batch")
def scores_one_token_short(batch):
    batch.scores[4]["old_logprobs"].pop()


@FAULTS.of(2, "scores_of_admission", "batch")
def scores_of_a_refused_admission(batch):
    for score in batch.scores:
        score["admission"] = 5


@FAULTS.of(2, "scores_of_admission", "batch")
def scores_of_another_batch(batch):
    batch.scores[4]["batch"] = 3


@FAULTS.of(2, "scores_finite", "batch")
def old_logprob_nan(batch):
    batch.scores[4]["old_logprobs"][1] = math.nan


@FAULTS.of(2, "scores_finite", "batch")
def entropy_overflowed(batch):
    batch.scores[4]["entropies"][1] = math.inf


@FAULTS.of(2, "own_version_mismatch", "batch")
def old_logprobs_of_an_older_version(batch):
    rng = np.random.default_rng(7)
    for action, score in zip(batch.actions(), batch.scores, strict=True):
        drift = rng.normal(0, 0.05, len(action["token_ids"]))
        score["old_logprobs"] = np.minimum(action["rollout_logprobs"] + drift, 0).tolist()


@FAULTS.of(2, "old_moved_from_own", "warning")
def old_logprobs_of_the_sampling_version(batch):
    """Every stale token looks as if no update had happened."""
    for score in batch.scores:
        if score["own_version_logprobs"] is not None:
            score["old_logprobs"] = list(score["own_version_logprobs"])
    batch.reweigh()


@FAULTS.of(2, "weights_as_configured", "batch")
def weights_with_another_cap(batch):
    batch.limits["w_cap"] = 1.01


@FAULTS.of(2, "weights_as_configured", "batch")
def weights_of_another_correction(batch):
    batch.limits["correction"] = "none"


@FAULTS.of(2, "weights_as_configured", "batch")
def mask_that_nobody_asked_for(batch):
    batch.scores[4]["included"][0] = False


@FAULTS.of(2, "weights_as_configured", "batch")
def token_mask_not_applied(batch):
    # Fresh tokens are within 1e-3 of 1, drifted ones are not.
    batch.limits |= {"mask": "token", "mask_low": 0.99, "mask_high": 1.01}


@FAULTS.of(2, "weights_as_configured", "batch")
def geometric_mask_not_applied(batch):
    batch.limits |= {"mask": "geometric", "mask_low": 0.999, "mask_high": 1.001}


@FAULTS.of(2, "weights_as_configured", "batch")
def weight_of_a_token_that_a_mask_left_out(batch):
    # The mask was applied, but for the weight of one token.
    batch.limits |= {"mask": "token", "mask_low": 0.99, "mask_high": 1.01}
    apply_token_mask(batch, 0.99, 1.01)
    score = next(s for s in batch.scores if not all(s["included"]))
    score["correction_weights"][score["included"].index(False)] = 1.0


@FAULTS.of(2, "reference_as_configured", "batch")
def reference_never_scored(batch):
    batch.limits["reference_version"] = 0


@FAULTS.of(2, "reference_as_configured", "batch")
def reference_that_nobody_asked_for(batch):
    for score in batch.scores:
        score["reference_logprobs"] = score["old_logprobs"]


@FAULTS.of(2, "reference_as_configured", "batch")
def reference_of_impossible_probability(batch):
    batch.limits["reference_version"] = 0
    for score in batch.scores:
        score["reference_logprobs"] = [*score["old_logprobs"][:-1], 0.5]


@FAULTS.of(2, "reference_as_configured", "batch")
def reference_is_another_version_than_the_newest(batch):
    batch.limits["reference_version"] = 9
    for score in batch.scores:
        score["reference_logprobs"] = [x - 0.01 for x in score["old_logprobs"]]


def apply_token_mask(batch, low, high):
    for segment in batch.actions():
        score = batch.score(segment)
        w = np.exp(np.float64(score["old_logprobs"]) - np.float64(segment["rollout_logprobs"]))
        score["included"] = ((w >= low) & (w <= high)).tolist()
        weights = np.where(score["included"], score["correction_weights"], 0.0)
        score["correction_weights"] = weights.tolist()


@FAULTS.of(2, "lag_within_bound", "batch")
def batch_staler_than_max_lag(batch):
    batch.limits["max_lag"] = 0


@FAULTS.of(2, "lag_not_negative", "batch")
def batch_trained_from_an_older_version(batch):
    batch.limits["old_version"] = 2


@FAULTS.of(2, "audit_present", "batch")
def audit_sample_lost(batch):
    for action, score in zip(batch.actions(), batch.scores, strict=True):
        score["own_version_logprobs"] = None
        action["weight_version"] = action["kv_version_min"] = 2


@FAULTS.of(2, "audit_share", "warning")
def audit_of_almost_nothing(batch):
    audit_sample_lost(batch)
    score = batch.scores[4]
    score["own_version_logprobs"] = [
        x if i == 0 else None for i, x in enumerate(score["old_logprobs"])
    ]


@FAULTS.of(2, "share_off_by_factor", "batch")
def policy_too_far_from_its_samples(batch):
    rng = np.random.default_rng(8)
    batch.limits["max_lag"] = 3
    for action, score in zip(batch.actions(), batch.scores, strict=True):
        action["weight_version"] = action["kv_version_min"] = 2
        score["own_version_logprobs"] = list(score["old_logprobs"])
        old = np.asarray(score["old_logprobs"]) + rng.normal(0, 1.5, len(action["token_ids"]))
        score["old_logprobs"] = np.minimum(old, 0).tolist()
