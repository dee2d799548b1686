"""One optimizer step: the objective over a minibatch, its gradient, and what is reported of it.

The loss is a sum over tokens with shares and a denominator of the whole minibatch
(`trainers.reductions`), and gradients are summed over microbatches and ranks, so neither packing
nor the number of ranks changes it beyond rounding. A sequence is never cut between microbatches,
so what a loss computes over a sequence is whole.

Shapes: N = action tokens of the minibatch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from trainers.losses import KL_ESTIMATORS, LOSSES, ClipRange
from trainers.optimizer import MasterAdamW
from trainers.packing import (
    Forwarded,
    TrainingSequence,
    assign,
    empty_microbatch,
    forwarded,
    num_forwarded,
    pack,
)
from trainers.policy import Policy
from trainers.reductions import REDUCTIONS, reduce_loss
from trainers.truncation import Truncation


@dataclass(frozen=True)
class Objective:
    """What is maximised: the surrogate, less `kl_coefficient` times the divergence from the
    reference policy, plus `entropy_coefficient` times the entropy. The correction's weight is a
    factor outside all three. `constant` is the denominator of the constant reduction."""

    loss: str
    clip: ClipRange
    reduction: str = "token"
    constant: float = 1.0
    kl_coefficient: float = 0.0
    kl_estimator: str = "k3"
    entropy_coefficient: float = 0.0


@dataclass(frozen=True)
class TokenData:
    """What the objective reads of each action token, all [N] in sequence order.

    `weights` are 0 where a mask left the token out; `sequence_ids`, `group_ids` count from 0 on;
    `reference_logprobs` is None without a reference.
    """

    old_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    sequence_ids: Tensor
    group_ids: Tensor
    temperatures: Tensor
    truncation: Truncation
    reference_logprobs: Tensor | None = None

    def __getitem__(self, index: slice) -> "TokenData":
        """The same of some of the tokens."""
        reference = self.reference_logprobs
        return TokenData(
            self.old_logprobs[index],
            self.advantages[index],
            self.weights[index],
            self.sequence_ids[index],
            self.group_ids[index],
            self.temperatures[index],
            self.truncation[index],
            None if reference is None else reference[index],
        )


@dataclass(frozen=True)
class GradientReport:
    """Over all ranks. `loss` is what was minimised; `clip_frac` the share of action tokens at which
    the clip decided the gradient; `update_kl` the mean of r - 1 - log r, r = pi_theta / pi_old;
    `reference_kl` the same of pi_ref / pi_theta, None without a reference. `num_tokens` counts a
    token for each sequence that reads it, `forwarded` what was computed; `routing` are metrics of
    the replay, empty without one. `loss_scale` is in none of them."""

    loss: float
    clip_frac: float
    update_kl: float
    reference_kl: float | None
    num_tokens: int
    forwarded: Forwarded
    routing: dict[str, float]
    loss_scale: float


def take_step(
    policy: Policy,
    optimizer: MasterAdamW,
    sequences: Sequence[TrainingSequence],
    data: TokenData,
    objective: Objective,
    token_budget: int,
    learning_rate: float,
) -> tuple[GradientReport, float]:
    """One optimizer step on a minibatch, and the norm of its gradient. Every rank calls it.

    Raises:
        ValueError: no action token in the minibatch, or its loss or gradient is not finite.
    """
    while True:
        scale = optimizer.loss_scale.value
        report = accumulate_gradients(policy, sequences, data, objective, token_budget, scale)
        # No scale mends the forward pass.
        if not math.isfinite(report.loss):
            raise optimizer.not_finite(f"the loss is {report.loss}")
        norm = optimizer.step(learning_rate)
        if norm is not None:
            return report, norm


def accumulate_gradients(
    policy: Policy,
    sequences: Sequence[TrainingSequence],
    data: TokenData,
    objective: Objective,
    token_budget: int,
    loss_scale: float = 1.0,
) -> GradientReport:
    """Leaves the gradient of the minibatch's loss, times `loss_scale`, in the policy's parameters.
    Every rank calls it.

    Raises:
        ValueError: no action token in the minibatch.
    """
    num_actions = len(data.old_logprobs)
    if num_actions == 0:
        raise ValueError("a minibatch has no action token; gate 1 refuses such trajectories.")
    reduction = REDUCTIONS[objective.reduction]
    shares, denominator = reduction(data.sequence_ids, data.group_ids, objective.constant)
    totals = torch.zeros(4, dtype=torch.float64, device=policy.device)
    routing = policy.routing
    agreeing = torch.zeros((), dtype=torch.int64) if routing is None else routing.no_agreement()
    microbatches = pack(sequences, token_budget)
    share = assign(microbatches, dist.get_world_size())[dist.get_rank()]
    for microbatch in share:
        microbatch = microbatch or empty_microbatch()
        index = microbatch.action_index
        logprobs, entropies = policy.logprobs(
            microbatch, data.temperatures[index], data.truncation[index]
        )
        if routing is not None:
            agreeing += routing.agreeing()

        def of_microbatch(values: Tensor, index: Tensor = index) -> Tensor:
            return values[index].to(policy.device)

        old = of_microbatch(data.old_logprobs)
        values, clipped = LOSSES[objective.loss](
            logprobs,
            old,
            of_microbatch(data.advantages),
            of_microbatch(data.sequence_ids),
            objective.clip,
        )
        if objective.entropy_coefficient:
            values = values + objective.entropy_coefficient * entropies
        if data.reference_logprobs is not None:
            reference = of_microbatch(data.reference_logprobs)
            kl = KL_ESTIMATORS[objective.kl_estimator](logprobs, old, reference)
            values = values - objective.kl_coefficient * kl
            totals[3] += _k3(reference - logprobs.detach())
        loss = reduce_loss(values, of_microbatch(data.weights), of_microbatch(shares), denominator)
        loss.backward(torch.full_like(loss, loss_scale))
        totals[0] += loss.detach()
        totals[1] += clipped.sum()
        totals[2] += _k3(logprobs.detach() - old)
    dist.all_reduce(totals)
    dist.all_reduce(agreeing)
    _, clip_frac, update_kl, reference_kl = (totals / num_actions).tolist()
    return GradientReport(
        loss=float(totals[0]),
        clip_frac=clip_frac,
        update_kl=update_kl,
        reference_kl=None if data.reference_logprobs is None else reference_kl,
        num_tokens=sum(num_forwarded(sequence) for sequence in sequences),
        forwarded=forwarded(microbatches),
        routing={} if routing is None else routing.metrics(agreeing, sequences),
        loss_scale=loss_scale,
    )


def _k3(log_ratio: Tensor) -> Tensor:
    """Sum of r - 1 - log r over tokens, [K] to a scalar."""
    return (log_ratio.expm1() - log_ratio).sum()
