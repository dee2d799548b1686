"""One optimizer step: the objective over a minibatch, its gradient, and what is reported of it.

The loss is a sum over tokens divided by the loss tokens of the whole minibatch, and gradients are
summed over microbatches and ranks, so neither packing nor the number of ranks changes it beyond
rounding.

Shapes: N = action tokens of the minibatch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from trainers.losses import LOSSES, ClipRange, clip_binds, reduce_loss
from trainers.packing import TrainingSequence, assign, empty_microbatch, num_forwarded, pack
from trainers.policy import Policy
from trainers.truncation import Truncation


@dataclass(frozen=True)
class Objective:
    """Which surrogate is maximised."""

    loss: str
    clip: ClipRange


@dataclass(frozen=True)
class TokenData:
    """What the surrogate reads of each action token, all [N] in sequence order."""

    old_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    included: Tensor
    temperatures: Tensor
    truncation: Truncation


@dataclass(frozen=True)
class GradientReport:
    """Over all ranks. `loss` is what was minimised; `clip_frac` the share of action tokens whose
    gradient the clip removed; `update_kl` the mean of r - 1 - log r, r = pi_theta / pi_old."""

    loss: float
    clip_frac: float
    update_kl: float
    num_tokens: int


def accumulate_gradients(
    policy: Policy,
    sequences: Sequence[TrainingSequence],
    data: TokenData,
    objective: Objective,
    token_budget: int,
) -> GradientReport:
    """Leaves the gradient of the minibatch's loss in the policy's parameters. Every rank calls it.

    Raises:
        ValueError: no action token in the minibatch.
    """
    num_actions = len(data.old_logprobs)
    if num_actions == 0:
        raise ValueError("a minibatch has no action token; gate 1 refuses such trajectories.")
    surrogate = LOSSES[objective.loss]
    totals = torch.zeros(3, dtype=torch.float64, device=policy.device)
    share = assign(pack(sequences, token_budget), dist.get_world_size())[dist.get_rank()]
    for microbatch in share:
        microbatch = microbatch or empty_microbatch()
        index = microbatch.action_index
        logprobs = policy.logprobs(microbatch, data.temperatures[index], data.truncation[index])
        old, advantages, weights, included = (
            values[index].to(policy.device)
            for values in (data.old_logprobs, data.advantages, data.weights, data.included)
        )
        values = surrogate(logprobs, old, advantages, objective.clip)
        loss = reduce_loss(values, weights, included, num_actions)
        loss.backward()
        with torch.no_grad():
            log_ratio = logprobs - old
            totals[0] += loss
            totals[1] += clip_binds(logprobs, old, advantages, objective.clip).sum()
            totals[2] += (log_ratio.expm1() - log_ratio).sum()
    dist.all_reduce(totals)
    clips = objective.loss == "ppo_clip"
    return GradientReport(
        loss=float(totals[0]),
        clip_frac=float(totals[1]) / num_actions if clips else 0.0,
        update_kl=float(totals[2]) / num_actions,
        num_tokens=sum(num_forwarded(sequence) for sequence in sequences),
    )
