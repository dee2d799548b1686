"""Advantages by hand, on groups that are not contiguous."""

import itertools
import math

import pytest
import torch

from trainers.advantages import ADVANTAGES, permuted_rewards

REWARDS = torch.tensor([1.0, 5.0, 0.0, 5.0, 0.0, 0.0], dtype=torch.float64)
GROUPS = torch.tensor([7, 3, 7, 3, 7, 7])


def test_group_mean():
    result = ADVANTAGES["group_mean"](REWARDS, GROUPS)
    assert result.tolist() == [0.75, 0.0, -0.25, 0.0, -0.25, -0.25]


def test_group_mean_std():
    # Rewards 1, 0, 0, 0: sum of squares 0.75, over n - 1 = 3, so std = 0.5.
    result = ADVANTAGES["group_mean_std"](REWARDS, GROUPS)
    scale = 0.5 + 1e-6
    expected = [0.75 / scale, 0.0, *[-0.25 / scale, 0.0, -0.25 / scale, -0.25 / scale]]
    assert result.tolist() == pytest.approx(expected, abs=1e-12)


def test_leave_one_out():
    # 1 - mean(0, 0, 0), and 0 - mean(1, 0, 0).
    result = ADVANTAGES["leave_one_out"](REWARDS, GROUPS)
    assert result.tolist() == pytest.approx([1.0, 0.0, -1 / 3, 0.0, -1 / 3, -1 / 3], abs=1e-15)


@pytest.mark.parametrize(("name", "scale"), [("leave_one_out", 1.0), ("group_mean", 2 / 3)])
def test_a_baseline_without_the_own_reward_is_unbiased(name, scale):
    # All 3^3 groups of three draws from three actions with rewards 0, 1 and 5.
    probability = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    rewards = torch.tensor([0.0, 1.0, 5.0], dtype=torch.float64)
    estimate = torch.zeros(3, dtype=torch.float64)
    for draws in itertools.product(range(3), repeat=3):
        actions = torch.tensor(draws)
        advantages = ADVANTAGES[name](rewards[actions], torch.zeros(3, dtype=torch.int64))
        scores = torch.eye(3, dtype=torch.float64)[actions] - probability
        estimate += probability[actions].prod() * (advantages[:, None] * scores).mean(0)
    # d/dz of sum_a softmax(z)_a R_a.
    truth = probability * (rewards - (probability * rewards).sum())
    torch.testing.assert_close(estimate, scale * truth, rtol=0, atol=1e-12)


def test_a_constant_group_of_awkward_rewards_stays_near_zero():
    rewards = torch.full((8,), 0.1, dtype=torch.float64) * 3
    result = ADVANTAGES["group_mean_std"](rewards, torch.zeros(8, dtype=torch.int64))
    assert result.abs().max().item() < 1e-9


def test_a_group_of_one_is_refused():
    with pytest.raises(ValueError, match="whole groups of at least two"):
        ADVANTAGES["group_mean"](REWARDS[:3], torch.tensor([1, 1, 2]))


def test_permuted_rewards_keep_the_values_and_depend_on_seed_and_batch():
    rewards = torch.arange(64, dtype=torch.float64)
    one = permuted_rewards(rewards, seed=1, batch=1)
    assert sorted(one.tolist()) == rewards.tolist()
    assert torch.equal(one, permuted_rewards(rewards, seed=1, batch=1))
    for other in (permuted_rewards(rewards, 2, 1), permuted_rewards(rewards, 1, 2)):
        assert not torch.equal(one, other)
    correlation = torch.corrcoef(torch.stack([rewards, one]))[0, 1].item()
    assert abs(correlation) < 3 / math.sqrt(64)
