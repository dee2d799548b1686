"""Importance corrections for tokens sampled from mu and trained under pi_old.

delta = log pi_old - log mu of each sampled token, w = exp(delta). A correction is a weight, which
multiplies the surrogate, and a mask, which leaves tokens or sequences out. Everything stays in log
space until the last exponential, and caps apply there, so a ratio that would overflow is still
capped. Sums over a sequence are taken in float64.

The token forms correct one token's conditional law and not its prefix, so they are biased over a
sequence; the sequence forms are unbiased (without cap or mask) and their variance grows with
length. A cap bounds the variance and costs bias towards what mu sampled too rarely; a mask drops
that part altogether. At one position the cap's bias has an exact form:
E_pi[f] - E_mu[min(w, w_cap) f] = sum over a with w(a) > w_cap of (pi(a) - w_cap mu(a)) f(a).

Shapes: T = action tokens; `sequence_ids` [T] i64, from 0, say which sequence a token is in.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from trainers.reductions import mean_by, sum_by


class MaskLimits(NamedTuple):
    """Of a ratio, both inclusive; `low` 0 is no lower limit."""

    low: float
    high: float


NO_LIMITS = MaskLimits(0.0, math.inf)


class Correction(NamedTuple):
    """`weights` [T], factors outside the surrogate, and `included` [T] bool: False where the mask
    left the token out, whose weight is then 0."""

    weights: Tensor
    included: Tensor


def none(delta: Tensor, sequence_ids: Tensor, w_cap: float) -> Tensor:
    """1: mu is taken for pi_old, and the estimator is biased by their difference."""
    return torch.ones_like(delta)


def token_is(delta: Tensor, sequence_ids: Tensor, w_cap: float) -> Tensor:
    """w_t, importance sampling of each token's conditional law; no cap."""
    return delta.exp()


def token_tis(delta: Tensor, sequence_ids: Tensor, w_cap: float) -> Tensor:
    """min(w_t, w_cap): IMPALA's truncation (Espeholt et al., 2018); Yao et al. (2025) for LLMs."""
    return delta.clamp(max=math.log(w_cap)).exp()


def sequence_is(delta: Tensor, sequence_ids: Tensor, w_cap: float) -> Tensor:
    """The product of w over the sequence, for each of its tokens; unbiased, no cap."""
    return sum_by(sequence_ids, delta.double()).exp().to(delta.dtype)


def sequence_tis(delta: Tensor, sequence_ids: Tensor, w_cap: float) -> Tensor:
    """min(product of w over the sequence, w_cap), for each of its tokens."""
    log_product = sum_by(sequence_ids, delta.double())
    return log_product.clamp(max=math.log(w_cap)).exp().to(delta.dtype)


WEIGHTS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "none": none,
    "token_is": token_is,
    "token_tis": token_tis,
    "sequence_is": sequence_is,
    "sequence_tis": sequence_tis,
}


def no_mask(delta: Tensor, sequence_ids: Tensor, limits: MaskLimits) -> Tensor:
    """Every token."""
    return torch.ones_like(delta, dtype=torch.bool)


def token_mask(delta: Tensor, sequence_ids: Tensor, limits: MaskLimits) -> Tensor:
    """Tokens with low <= w_t <= high: IcePop (Ling team, 2025), masked importance sampling."""
    return _within(delta, limits)


def sequence_mask(delta: Tensor, sequence_ids: Tensor, limits: MaskLimits) -> Tensor:
    """Sequences whose product of w lies in [low, high]; long ones leave it by chance alone."""
    return _within(sum_by(sequence_ids, delta.double()), limits)


def geometric_mask(delta: Tensor, sequence_ids: Tensor, limits: MaskLimits) -> Tensor:
    """Sequences whose geometric mean of w lies in [low, high], whatever their length.

    exp of the mean of delta, an estimate of exp(-KL(mu || pi_old)) a token; Li et al. (2025), "When
    speed kills stability". Limits lie close to 1.
    """
    return _within(mean_by(sequence_ids, delta.double()), limits)


def _within(log_ratio: Tensor, limits: MaskLimits) -> Tensor:
    low = math.log(limits.low) if limits.low > 0 else -math.inf
    return (log_ratio >= low) & (log_ratio <= math.log(limits.high))


MASKS: dict[str, Callable[[Tensor, Tensor, MaskLimits], Tensor]] = {
    "none": no_mask,
    "token": token_mask,
    "sequence": sequence_mask,
    "geometric": geometric_mask,
}


def corrected(
    delta: Tensor,
    sequence_ids: Tensor,
    *,
    weight: str,
    w_cap: float = math.inf,
    mask: str = "none",
    limits: MaskLimits = NO_LIMITS,
) -> Correction:
    """The weight and the mask of these names; [T] to [T] each."""
    included = MASKS[mask](delta, sequence_ids, limits)
    weights = WEIGHTS[weight](delta, sequence_ids, w_cap)
    return Correction(weights.masked_fill(~included, 0.0), included)
