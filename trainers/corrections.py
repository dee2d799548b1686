"""Importance corrections for tokens sampled from mu and trained under pi_old.

delta = log pi_old - log mu of each sampled token, w = exp(delta). Everything stays in log space
until the last exponential, and caps apply there, so a ratio that would overflow is still capped.
The token forms correct one token's conditional law and not its prefix, so they are biased over a
sequence; the sequence forms are unbiased (without a cap) and their variance grows with length.

At one position the cap's bias has an exact form:
E_pi[f] - E_mu[min(w, w_cap) f] = sum over a with w(a) > w_cap of (pi(a) - w_cap mu(a)) f(a).

Shapes: T = action tokens; `sequence_ids` [T] i64, from 0, say which sequence a token is in.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Correction(NamedTuple):
    """`weights` [T], factors outside the surrogate; `included` [T] bool, False if masked out."""

    weights: Tensor
    included: Tensor


def _all_included(weights: Tensor) -> Correction:
    return Correction(weights, torch.ones_like(weights, dtype=torch.bool))


def _sequence_delta(delta: Tensor, sequence_ids: Tensor) -> Tensor:
    """Sum of delta over each token's sequence, [T]: log of the product of its ratios."""
    num_sequences = int(sequence_ids.max()) + 1 if len(sequence_ids) else 0
    sums = torch.zeros(num_sequences, dtype=delta.dtype, device=delta.device)
    return sums.index_add_(0, sequence_ids, delta)[sequence_ids]


def none(delta: Tensor, sequence_ids: Tensor, w_cap: float) -> Correction:
    """1: mu is taken for pi_old, and the estimator is biased by their difference."""
    return _all_included(torch.ones_like(delta))


def token_is(delta: Tensor, sequence_ids: Tensor, w_cap: float) -> Correction:
    """w_t, importance sampling of each token's conditional law; no cap."""
    return _all_included(delta.exp())


def token_tis(delta: Tensor, sequence_ids: Tensor, w_cap: float) -> Correction:
    """min(w_t, w_cap): IMPALA's truncation (Espeholt et al., 2018); Yao et al. (2025) for LLMs."""
    return _all_included(delta.clamp(max=math.log(w_cap)).exp())


def sequence_is(delta: Tensor, sequence_ids: Tensor, w_cap: float) -> Correction:
    """The product of w over the sequence, for each of its tokens; unbiased, no cap."""
    return _all_included(_sequence_delta(delta, sequence_ids).exp())


def sequence_tis(delta: Tensor, sequence_ids: Tensor, w_cap: float) -> Correction:
    """min(product of w over the sequence, w_cap), for each of its tokens."""
    return _all_included(_sequence_delta(delta, sequence_ids).clamp(max=math.log(w_cap)).exp())


CORRECTIONS: dict[str, Callable[[Tensor, Tensor, float], Correction]] = {
    "none": none,
    "token_is": token_is,
    "token_tis": token_tis,
    "sequence_is": sequence_is,
    "sequence_tis": sequence_tis,
}
