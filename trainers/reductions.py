"""From one value a token to the number that is minimised.

A reduction is a mean over units (tokens, sequences, groups) of the mean within each. It is written
as a share for every token and one denominator of the whole minibatch, so that summing over
microbatches and ranks gives the same number however the minibatch was cut. Tokens that a mask left
out count in shares and denominators: a mask changes what is summed and not how much the rest
weighs, and each step has the scale of its data.

Shapes: T = action tokens, in sequence order; `sequence_ids`, `group_ids` [T] i64 from 0 on, not
necessarily without gaps.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


def sum_by(ids: Tensor, values: Tensor) -> Tensor:
    """The sum of `values` [T] over all tokens with a token's id, for each token: [T]."""
    size = int(ids.max()) + 1 if len(ids) else 0
    return values.new_zeros(size).index_add(0, ids, values)[ids]


def mean_by(ids: Tensor, values: Tensor) -> Tensor:
    """The mean of `values` [T] over all tokens with a token's id, for each token: [T]."""
    return sum_by(ids, values) / sum_by(ids, torch.ones_like(values))


class Reduction(NamedTuple):
    """loss = -sum(shares * weights * objective) / denominator, `shares` [T] f32."""

    shares: Tensor
    denominator: float


def token(sequence_ids: Tensor, group_ids: Tensor, constant: float) -> Reduction:
    """1/N sum over the N tokens of the minibatch: long sequences count in proportion."""
    return Reduction(torch.ones(len(sequence_ids)), len(sequence_ids))


def sequence(sequence_ids: Tensor, group_ids: Tensor, constant: float) -> Reduction:
    """1/S sum_i 1/|y_i| sum_t, over the S sequences that have tokens: GRPO (Shao et al., 2024).

    Each sequence counts alike, so a token of a long one counts less.
    """
    return _means_within(sequence_ids)


def group(sequence_ids: Tensor, group_ids: Tensor, constant: float) -> Reduction:
    """1/G sum_g 1/N_g sum_t, over the G groups and their N_g tokens: DAPO's Eq. (8) (Yu et al.,
    2025), the expectation over prompts outside. Each task counts alike."""
    return _means_within(group_ids)


def constant(sequence_ids: Tensor, group_ids: Tensor, constant: float) -> Reduction:
    """1/constant sum over tokens: Dr. GRPO (Liu et al., 2025), which divides by a number that no
    length enters, rollouts times the length they may have."""
    return Reduction(torch.ones(len(sequence_ids)), constant)


def _means_within(ids: Tensor) -> Reduction:
    counts = sum_by(ids, torch.ones(len(ids)))
    return Reduction(1 / counts, len(torch.unique(ids)))


REDUCTIONS: dict[str, Callable[[Tensor, Tensor, float], Reduction]] = {
    "token": token,
    "sequence": sequence,
    "group": group,
    "constant": constant,
}


def reduce_loss(objective: Tensor, weights: Tensor, shares: Tensor, denominator: float) -> Tensor:
    """-sum(weights * objective * shares) / denominator; all [T], to a scalar.

    `weights` are the correction's, 0 where its mask left a token out. With `token_tis` weights,
    `ppo_clip` and the token reduction its gradient is Eq. (9) of the FP16 study of the
    training-inference mismatch (2025): min(w, w_cap) grad min(r A, clip(r, 1 - eps, 1 + eps) A).
    """
    return -(weights * objective * shares).sum() / denominator
