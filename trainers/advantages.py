"""Advantages from the rewards of groups of rollouts of one task.

Rewards stay in float64 until the last operation, so that a group whose rewards are all equal gives
zeros and not amplified rounding.

Shapes: B = trajectories of a batch.
"""

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor

STD_EPSILON = 1e-6
"""Added to the standard deviation, which bounds the advantages of a nearly constant group."""


def _moments(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, size and sample standard deviation of each trajectory's own group, all [B]."""
    _, group, counts = torch.unique(group_ids, return_inverse=True, return_counts=True)
    if int(counts.min()) < 2:
        raise ValueError(
            "a group of one rollout has no baseline; admit whole groups of at least two"
        )
    sums = torch.zeros(len(counts), dtype=rewards.dtype).index_add_(0, group, rewards)
    centred = rewards - (sums / counts)[group]
    squares = torch.zeros_like(sums).index_add_(0, group, centred.square())
    return (sums / counts)[group], counts[group], (squares / (counts - 1)).sqrt()[group]


def group_mean(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """r - mean of its group; [B] to [B]. GRPO's baseline without its scale (Dr. GRPO, 2025)."""
    mean, _, _ = _moments(rewards, group_ids)
    return rewards - mean


def group_mean_std(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """(r - mean) / (std + 1e-6) over its group, std with n - 1; [B] to [B].

    GRPO (Shao et al., 2024). The scale raises the weight of groups that nearly always pass or
    nearly always fail.
    """
    mean, _, std = _moments(rewards, group_ids)
    return (rewards - mean) / (std + STD_EPSILON)


def leave_one_out(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """r - mean of the others of its group; [B] to [B]. RLOO (Ahmadian et al., 2024).

    (r - mean) n / (n - 1): with a baseline that its own reward does not enter, the policy gradient
    is unbiased, where `group_mean` shrinks it by (n - 1) / n.
    """
    mean, count, _ = _moments(rewards, group_ids)
    return (rewards - mean) * count / (count - 1)


def permuted_rewards(rewards: Tensor, seed: int, batch: int) -> Tensor:
    """The rewards in a random order fixed by (seed, batch); [B] to [B].

    The null control: same rewards, same batch, no relation between a rollout and its reward.
    """
    digest = hashlib.sha256(f"permuted rewards/{seed}/{batch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return rewards[torch.randperm(len(rewards), generator=generator)]


ADVANTAGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "group_mean": group_mean,
    "group_mean_std": group_mean_std,
    "leave_one_out": leave_one_out,
}
