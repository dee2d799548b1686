"""Surrogates against gradients worked out by hand, and their reduction."""

import math

import pytest
import torch

from trainers.losses import LOSSES, ClipRange, clip_binds, cross_entropy, ppo_clip, reduce_loss

CLIP = ClipRange(low=0.2, high=0.3)
F64 = torch.float64


def _tokens(ratios, advantages):
    old = torch.full((len(ratios),), -1.5, dtype=F64)
    logprobs = (old + torch.tensor(ratios, dtype=F64).log()).requires_grad_()
    return logprobs, old, torch.tensor(advantages, dtype=F64)


def test_reinforce_is_advantage_times_logprob():
    logprobs, old, advantages = _tokens([1.0, 3.0], [2.0, -0.5])
    value = LOSSES["reinforce"](logprobs, old, advantages, CLIP)
    assert value.tolist() == pytest.approx([-3.0, -0.5 * (-1.5 + math.log(3))], abs=1e-12)
    value.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [2.0, -0.5]


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "gradient"),
    [
        (1.0, 2.0, 2.0, 2.0),
        (1.2, 2.0, 2.4, 2.4),
        (1.5, 2.0, 2.6, 0.0),  # clipped at 1 + 0.3
        (0.5, 2.0, 1.0, 1.0),  # a good action that became rare is not clipped
        (0.5, -2.0, -1.6, 0.0),  # clipped at 1 - 0.2
        (9.0, -2.0, -18.0, -18.0),  # a bad action that became likely has no bound
    ],
)
def test_ppo_clip_by_hand(ratio, advantage, value, gradient):
    # d/dlogp of r A is r A, and 0 where the clip is taken.
    logprobs, old, advantages = _tokens([ratio], [advantage])
    result = ppo_clip(logprobs, old, advantages, CLIP)
    assert result.item() == pytest.approx(value, abs=1e-12)
    result.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(gradient, abs=1e-12)
    binds = clip_binds(logprobs.detach(), old, advantages, CLIP)
    assert binds.item() == (gradient == 0.0)


def test_default_objective_is_equation_9():
    # min(w, 2) grad min(r A, clip(r) A), over 4 loss tokens of which these are 3.
    logprobs, old, advantages = _tokens([1.1, 1.5, 0.9], [1.0, 1.0, -3.0])
    weights = torch.tensor([2.0, 2.0, 0.25], dtype=F64)
    included = torch.tensor([True, True, True])
    surrogate = ppo_clip(logprobs, old, advantages, CLIP)
    loss = reduce_loss(surrogate, weights, included, num_loss_tokens=4)
    assert loss.item() == pytest.approx(-(2 * 1.1 + 2 * 1.3 - 0.25 * 2.7) / 4, abs=1e-12)
    loss.backward()
    assert logprobs.grad is not None
    expected = [-2 * 1.1 / 4, 0.0, 0.25 * 2.7 / 4]
    assert logprobs.grad.tolist() == pytest.approx(expected, abs=1e-12)


def test_excluded_tokens_count_in_the_denominator_only():
    objective = torch.tensor([1.0, 5.0], dtype=F64)
    included = torch.tensor([True, False])
    loss = reduce_loss(objective, torch.ones(2, dtype=F64), included, num_loss_tokens=2)
    assert loss.item() == -0.5


def test_microbatch_losses_add_up_to_the_minibatch_loss():
    objective = torch.arange(6, dtype=F64)
    weights = torch.linspace(0.5, 2, 6, dtype=F64)
    included = torch.ones(6, dtype=torch.bool)
    whole = reduce_loss(objective, weights, included, 6)
    parts = [
        reduce_loss(objective[part], weights[part], included[part], 6)
        for part in (slice(0, 1), slice(1, 4), slice(4, 6))
    ]
    assert sum(part.item() for part in parts) == pytest.approx(whole.item(), abs=1e-12)


def test_cross_entropy_is_the_mean_negative_log_likelihood():
    logits = torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.5, 0.5]], dtype=F64)
    targets = torch.tensor([0, 2])
    logprobs = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    ones = torch.ones(2, dtype=F64)
    loss = reduce_loss(cross_entropy(logprobs), ones, ones.bool(), 2)
    expected = torch.nn.functional.cross_entropy(logits, targets)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
