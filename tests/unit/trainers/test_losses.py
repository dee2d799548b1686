"""Surrogates against gradients worked out by hand, and what they are an estimate of."""

import math

import pytest
import torch

from trainers.losses import KL_ESTIMATORS, LOSSES, UNCLIPPED, ClipRange, cross_entropy, ppo_clip
from trainers.reductions import REDUCTIONS, reduce_loss

CLIP = ClipRange(low=0.2, high=0.3)
F64 = torch.float64


def _tokens(ratios, advantages):
    old = torch.full((len(ratios),), -1.5, dtype=F64)
    logprobs = (old + torch.tensor(ratios, dtype=F64).log()).requires_grad_()
    return logprobs, old, torch.tensor(advantages, dtype=F64)


def _apart(logprobs):
    """Every token a sequence of its own."""
    return torch.arange(len(logprobs))


def _gradient(logprobs):
    assert logprobs.grad is not None
    return logprobs.grad.tolist()


def test_reinforce_is_advantage_times_logprob():
    logprobs, old, advantages = _tokens([1.0, 3.0], [2.0, -0.5])
    value, clipped = LOSSES["reinforce"](logprobs, old, advantages, _apart(logprobs), UNCLIPPED)
    assert value.tolist() == pytest.approx([-3.0, -0.5 * (-1.5 + math.log(3))], abs=1e-12)
    value.sum().backward()
    assert _gradient(logprobs) == [2.0, -0.5]
    assert not clipped.any()


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
    result, clipped = ppo_clip(logprobs, old, advantages, _apart(logprobs), CLIP)
    assert result.item() == pytest.approx(value, abs=1e-12)
    result.sum().backward()
    assert _gradient(logprobs) == pytest.approx([gradient], abs=1e-12)
    assert clipped.item() == (gradient == 0.0)


def test_gspo_by_hand():
    # Ratios 2, 0.5 and 1.25 * 1.25, 1: geometric means 1 and 1.25; the third sequence has 1.5.
    logprobs, old, advantages = _tokens([2.0, 0.5, 1.25**2, 1.0, 1.5], [3.0, 3.0, -1.0, -1.0, 2.0])
    ids = torch.tensor([0, 0, 1, 1, 2])
    value, clipped = LOSSES["gspo"](logprobs, old, advantages, ids, CLIP)
    assert value.tolist() == pytest.approx([3.0, 3.0, -1.25, -1.25, 2.6], abs=1e-12)
    assert clipped.tolist() == [False, False, False, False, True]
    shares, denominator = REDUCTIONS["sequence"](ids, ids, 1.0)
    loss = reduce_loss(value, torch.ones(5, dtype=F64), shares, denominator)
    assert loss.item() == pytest.approx(-(3.0 - 1.25 + 2.6) / 3, abs=1e-12)
    loss.backward()
    # s A / |y| for each token, over three sequences.
    expected = [-3.0 / 6, -3.0 / 6, 1.25 / 6, 1.25 / 6, 0.0]
    assert _gradient(logprobs) == pytest.approx(expected, abs=1e-12)


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    logprobs, old, advantages = _tokens([1.1, 4.0, 0.1, 4.0], [1.0, 2.0, 2.0, -2.0])
    value, clipped = LOSSES["cispo"](logprobs, old, advantages, _apart(logprobs), CLIP)
    value.sum().backward()
    assert _gradient(logprobs) == pytest.approx([1.1, 2 * 1.3, 2 * 0.8, -2 * 1.3], abs=1e-12)
    assert value[1].item() == pytest.approx(2 * 1.3 * (-1.5 + math.log(4)), abs=1e-12)
    assert clipped.tolist() == [False, True, True, True]


@pytest.mark.parametrize("loss", LOSSES)
def test_before_the_first_step_every_loss_has_the_policy_gradient(loss):
    logprobs, old, advantages = _tokens([1.0, 1.0, 1.0], [1.0, 1.0, -2.0])
    ids = torch.tensor([0, 0, 1])
    value, clipped = LOSSES[loss](logprobs, old, advantages, ids, CLIP)
    value.sum().backward()
    assert _gradient(logprobs) == pytest.approx([1.0, 1.0, -2.0], abs=1e-12)
    assert not clipped.any()


def test_default_objective_is_equation_9():
    # min(w, 2) grad min(r A, clip(r) A), over 4 loss tokens of which these are 3.
    logprobs, old, advantages = _tokens([1.1, 1.5, 0.9], [1.0, 1.0, -3.0])
    weights = torch.tensor([2.0, 2.0, 0.25], dtype=F64)
    surrogate, _ = ppo_clip(logprobs, old, advantages, _apart(logprobs), CLIP)
    loss = reduce_loss(surrogate, weights, torch.ones(3), 4)
    assert loss.item() == pytest.approx(-(2 * 1.1 + 2 * 1.3 - 0.25 * 2.7) / 4, abs=1e-12)
    loss.backward()
    expected = [-2 * 1.1 / 4, 0.0, 0.25 * 2.7 / 4]
    assert _gradient(logprobs) == pytest.approx(expected, abs=1e-12)


def test_the_clip_is_spent_on_the_update_and_not_on_staleness():
    # mu = 0.1, pi_old = 0.3, pi = 0.33: pi / mu = 3.3 is far outside the clip range, and the token
    # is trained all the same, with weight min(3, 2) and ratio 1.1.
    mu, old = math.log(0.1), torch.tensor([math.log(0.3)], dtype=F64)
    logprobs = torch.tensor([math.log(0.33)], dtype=F64, requires_grad=True)
    weight = (old - mu).clamp(max=math.log(2)).exp()
    advantages, ids = torch.ones(1, dtype=F64), torch.zeros(1, dtype=torch.int64)
    value, _ = ppo_clip(logprobs, old, advantages, ids, CLIP)
    (weight * value).sum().backward()
    assert _gradient(logprobs) == pytest.approx([2 * 1.1], abs=1e-12)
    coupled, clipped = ppo_clip(logprobs.detach(), torch.tensor([mu]), advantages, ids, CLIP)
    assert clipped.item() and coupled.item() == pytest.approx(1.3)


@pytest.fixture
def position():
    """Logits [6] of pi_theta, and probabilities of pi_old and of the reference."""
    generator = torch.Generator().manual_seed(2)
    theta, old, reference = torch.randn(3, 6, generator=generator, dtype=F64)
    return theta.requires_grad_(), old.softmax(0), reference.softmax(0)


def _expected_kl(name, theta, old, reference):
    """Mean of the estimator under pi_old, over the whole vocabulary."""
    terms = KL_ESTIMATORS[name](theta.log_softmax(0), old.log(), reference.log())
    return (old * terms).sum()


def _divergence(theta, reference):
    policy = torch.distributions.Categorical(logits=theta)
    return torch.distributions.kl_divergence(policy, torch.distributions.Categorical(reference))


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_kl_terms_are_unbiased_wherever_the_policy_has_moved_to(name, position):
    theta, old, reference = position
    estimate, truth = _expected_kl(name, theta, old, reference), _divergence(theta, reference)
    assert estimate.item() == pytest.approx(truth.item(), abs=1e-12) and truth.item() > 0.1
    found, wanted = (torch.autograd.grad(value, theta)[0] for value in (estimate, truth))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_k2_has_the_gradient_of_the_kl_where_the_batch_starts(position):
    theta, _, reference = position
    old = theta.detach().softmax(0)
    found = torch.autograd.grad(_expected_kl("k2", theta, old, reference), theta)[0]
    wanted = torch.autograd.grad(_divergence(theta, reference), theta)[0]
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_kl_terms_by_hand():
    # pi = 0.4, pi_old = 0.2, pi_ref = 0.1: r = 2, log(pi / pi_ref) = log 4.
    logprobs, old, reference = (torch.tensor([p], dtype=F64).log() for p in (0.4, 0.2, 0.1))
    log4 = math.log(4)
    expected = {"k1": 2 * log4, "k2": log4**2 / 2, "k3": 2 * (0.25 - 1 + log4)}
    for name, value in expected.items():
        assert KL_ESTIMATORS[name](logprobs, old, reference).item() == pytest.approx(value)


def test_cross_entropy_is_the_mean_negative_log_likelihood():
    logits = torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.5, 0.5]], dtype=F64)
    targets = torch.tensor([0, 2])
    logprobs = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    ones = torch.ones(2, dtype=F64)
    loss = reduce_loss(cross_entropy(logprobs), ones, ones, 2)
    expected = torch.nn.functional.cross_entropy(logits, targets)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
