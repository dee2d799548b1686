"""Surrogate objectives, one value a token, to be maximised.

Three policies enter. The behaviour policy mu drew the tokens; the proximal policy pi_old is the one
at the batch's start, scored by the trainer; the current policy pi_theta moves with every minibatch.
Surrogates see the last two, r = pi_theta / pi_old, and their clip bounds how far the current policy
moves from the proximal one. What lies between the first two, w = pi_old / mu, is a factor outside
(`trainers.corrections`), without gradient and with a cap of its own: decoupled PPO (Hilton et al.,
2022). A clip of pi_theta / mu would spend its range on staleness that no update can undo.

Every surrogate is pure and takes the same arguments, so that a run names its loss by a word. All
gradients at pi_theta = pi_old are A grad log pi: losses differ once the policy has moved.

Shapes: T = action tokens; `sequence_ids` [T] i64 say which sequence a token is in.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from trainers.reductions import mean_by


class ClipRange(NamedTuple):
    """The ratio is clipped to [1 - low, 1 + high]."""

    low: float
    high: float


UNCLIPPED = ClipRange(1.0, math.inf)


class Surrogate(NamedTuple):
    """`values` [T], and `clipped` [T] bool: where the clip decided the gradient."""

    values: Tensor
    clipped: Tensor


def reinforce(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence_ids: Tensor,
    clip: ClipRange,
) -> Surrogate:
    """A_t log pi(a_t): the score-function objective of Williams (1992).

    All tensors [T]; only `logprobs` and `advantages` enter. Over several minibatches it takes
    pi_theta for pi_old.
    """
    return Surrogate(advantages * logprobs, torch.zeros_like(logprobs, dtype=torch.bool))


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence_ids: Tensor,
    clip: ClipRange,
) -> Surrogate:
    """min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t) with r_t = exp(logprobs - old_logprobs).

    All tensors [T]. Schulman et al. (2017), Eq. (7); low and high apart as in DAPO (Yu et al.,
    2025). The minimum leaves a token with A < 0 and a large ratio unclipped, so its term has no
    bound.
    """
    return _clipped(torch.exp(logprobs - old_logprobs), advantages, clip)


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence_ids: Tensor,
    clip: ClipRange,
) -> Surrogate:
    """min(s A, clip(s, 1 - low, 1 + high) A), s the geometric mean of r_t over the sequence.

    s = exp(1/|y| sum_t (logprobs - old_logprobs)). Zheng et al. (2025), Eq. (5) and (7), at each of
    the sequence's tokens: the sequence reduction then gives their sum, and its gradient, s A times
    the mean of grad log pi over the sequence. All tensors [T]; a sequence must be there whole.
    """
    ratio = torch.exp(mean_by(sequence_ids, logprobs - old_logprobs))
    return _clipped(ratio, advantages, clip)


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence_ids: Tensor,
    clip: ClipRange,
) -> Surrogate:
    """sg(clip(r_t, 1 - low, 1 + high)) A_t log pi(a_t), sg without gradient.

    All tensors [T]. MiniMax-M1 (2025), Eq. (4): the clip bounds how much a token weighs and takes
    the gradient of none. low = 1 is no lower bound.
    """
    ratio = torch.exp((logprobs - old_logprobs).detach())
    weights = ratio.clamp(1.0 - clip.low, 1.0 + clip.high)
    return Surrogate(weights * advantages * logprobs, weights != ratio)


def _clipped(ratio: Tensor, advantages: Tensor, clip: ClipRange) -> Surrogate:
    clipped = ratio.clamp(1.0 - clip.low, 1.0 + clip.high)
    above = (ratio > 1.0 + clip.high) & (advantages > 0)
    below = (ratio < 1.0 - clip.low) & (advantages < 0)
    return Surrogate(torch.minimum(ratio * advantages, clipped * advantages), above | below)


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, ClipRange], Surrogate]] = {
    "reinforce": reinforce,
    "ppo_clip": ppo_clip,
    # Recipes: `schemas.objective` holds their clip ranges, reductions and advantages.
    "dapo": ppo_clip,
    "dr_grpo": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
}


def kl_k1(logprobs: Tensor, old_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """r_t (log pi - log pi_ref), r = pi_theta / pi_old; all [T].

    Summed over the vocabulary under pi_old it is KL(pi_theta || pi_ref) of the position for every
    theta, and so is its gradient. Without r the gradient of k1 has mean zero and holds nothing.
    """
    return torch.exp(logprobs - old_logprobs) * (logprobs - reference_logprobs)


def kl_k2(logprobs: Tensor, old_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """(log pi - log pi_ref)^2 / 2; all [T], `old_logprobs` does not enter.

    Its gradient is (log pi - log pi_ref) grad log pi: at pi_theta = pi_old that of
    KL(pi_theta || pi_ref), later without the factor r. Its value is the KL to second order only.
    """
    return (logprobs - reference_logprobs).square() / 2


def kl_k3(logprobs: Tensor, old_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """r_t (pi_ref / pi - 1 - log(pi_ref / pi)), r = pi_theta / pi_old; all [T].

    Schulman's (2020) estimator, not negative, with the ratio of DeepSeek-V3.2 (2025): value and
    gradient are those of KL(pi_theta || pi_ref), as with k1, at less variance. Without r, as in
    GRPO, its gradient is that of KL(pi_ref || pi_theta).
    """
    log_ratio = reference_logprobs - logprobs
    return torch.exp(logprobs - old_logprobs) * (log_ratio.expm1() - log_ratio)


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "k1": kl_k1,
    "k2": kl_k2,
    "k3": kl_k3,
}


def cross_entropy(logprobs: Tensor) -> Tensor:
    """log pi(a_t), whose negated mean is the cross-entropy of supervised training; [T] to [T]."""
    return logprobs
