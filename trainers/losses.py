"""Surrogate objectives, one value a token, to be maximised.

Every function is pure and takes the same arguments, so that a run names its loss by a word. The
importance correction is a factor outside the surrogate and lives in `trainers.corrections`; the
reduction over tokens is one for all of them (`reduce_loss`), because a mean per microbatch would
make the gradient depend on how sequences happened to be packed.

Shapes: T = action tokens that carry the loss.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class ClipRange(NamedTuple):
    """The ratio is clipped to [1 - low, 1 + high]."""

    low: float
    high: float


def reinforce(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip: ClipRange):
    """A_t log pi(a_t): the score-function objective of Williams (1992).

    All tensors [T]. `old_logprobs` and `clip` do not enter.
    """
    return advantages * logprobs


def ppo_clip(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip: ClipRange):
    """min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t) with r_t = exp(logprobs - old_logprobs).

    All tensors [T]. Schulman et al. (2017), Eq. (7); low and high apart as in DAPO (2025). The
    minimum leaves a token with A < 0 and a large ratio unclipped, so its term has no bound.
    """
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = ratio.clamp(1.0 - clip.low, 1.0 + clip.high)
    return torch.minimum(ratio * advantages, clipped * advantages)


def clip_binds(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip: ClipRange
) -> Tensor:
    """Where `ppo_clip` passes no gradient, [T] bool."""
    ratio = torch.exp(logprobs - old_logprobs)
    above = (ratio > 1.0 + clip.high) & (advantages > 0)
    below = (ratio < 1.0 - clip.low) & (advantages < 0)
    return above | below


def cross_entropy(logprobs: Tensor) -> Tensor:
    """log pi(a_t), whose negated mean is the cross-entropy of supervised training; [T] to [T]."""
    return logprobs


def reduce_loss(
    objective: Tensor, weights: Tensor, included: Tensor, num_loss_tokens: int
) -> Tensor:
    """-sum(weights * objective over included tokens) / num_loss_tokens; [T] to a scalar.

    `num_loss_tokens` counts the loss-eligible tokens of the whole minibatch over all ranks and
    microbatches, those that a correction left out too: the sum over microbatches and ranks is
    then the same number however they were cut. With truncated weights and `ppo_clip` its gradient
    is Eq. (9) of the FP16 study of the training-inference mismatch (2025):
    min(w, w_max) grad min(r A, clip(r, 1 - eps, 1 + eps) A).
    """
    return -(weights * objective * included).sum() / num_loss_tokens


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor, ClipRange], Tensor]] = {
    "reinforce": reinforce,
    "ppo_clip": ppo_clip,
}
