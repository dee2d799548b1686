"""Corrections against exact expectations over every sequence of a tabular softmax model.

Three tokens, three positions, so 27 sequences. pi has a table of logits for every prefix; mu has
other logits. The gradient of E_pi[R] is computed from its definition and compared with the exact
mean of each estimator under mu.
"""

import itertools
import math

import pytest
import torch

from trainers.corrections import CORRECTIONS
from trainers.losses import LOSSES, ClipRange

V, H = 3, 3
F64 = torch.float64
SEQUENCES = torch.tensor(list(itertools.product(range(V), repeat=H)))
IDS = torch.arange(len(SEQUENCES)).repeat_interleave(H)
FIRST_TABLE = [sum(V**d for d in range(t)) for t in range(H)]
"""Tables are numbered by prefix length, then by the prefix read as a number to base V."""
PREFIXES = torch.stack(
    [(SEQUENCES[:, :t] * V ** torch.arange(t)).sum(1) + FIRST_TABLE[t] for t in range(H)], 1
)
NUM_PREFIXES = sum(V**d for d in range(H))


def _logprobs(tables):
    """log p(a_t | prefix) of every sequence, [27, 3]."""
    return tables.log_softmax(-1)[PREFIXES, SEQUENCES]


@pytest.fixture
def tables():
    generator = torch.Generator().manual_seed(3)
    pi = torch.randn(NUM_PREFIXES, V, generator=generator, dtype=F64, requires_grad=True)
    mu = pi.detach() + 0.8 * torch.randn(NUM_PREFIXES, V, generator=generator, dtype=F64)
    rewards = torch.rand(len(SEQUENCES), generator=generator, dtype=F64)
    return pi, mu, rewards


def _true_gradient(pi, rewards):
    value = (_logprobs(pi).sum(1).exp() * rewards).sum()
    return torch.autograd.grad(value, pi)[0]


def _mean_gradient(pi, mu, rewards, correction, loss="reinforce", w_cap=2.0):
    """Exact mean under mu of the corrected estimator's gradient."""
    new, behaviour = _logprobs(pi), _logprobs(mu)
    delta = (new.detach() - behaviour).flatten()
    weights, included = CORRECTIONS[correction](delta, IDS, w_cap)
    advantages = rewards.repeat_interleave(H)
    old = new.detach().flatten()
    surrogate = LOSSES[loss](new.flatten(), old, advantages, ClipRange(0.2, 0.2))
    probability = behaviour.sum(1).exp().repeat_interleave(H)
    value = (probability * weights * surrogate * included).sum()
    return torch.autograd.grad(value, pi)[0]


def _relative_error(estimate, truth):
    return ((estimate - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("loss", ["reinforce", "ppo_clip"])
def test_sequence_importance_sampling_is_unbiased(tables, loss):
    pi, mu, rewards = tables
    estimate = _mean_gradient(pi, mu, rewards, "sequence_is", loss)
    torch.testing.assert_close(estimate, _true_gradient(pi, rewards), rtol=0, atol=1e-10)


def test_a_baseline_keeps_sequence_importance_sampling_unbiased(tables):
    pi, mu, rewards = tables
    estimate = _mean_gradient(pi, mu, rewards - 0.4, "sequence_is")
    torch.testing.assert_close(estimate, _true_gradient(pi, rewards), rtol=0, atol=1e-10)


def test_the_other_estimators_are_biased_and_corrections_help(tables):
    pi, mu, rewards = tables
    truth = _true_gradient(pi, rewards)
    errors = {
        name: _relative_error(_mean_gradient(pi, mu, rewards, name), truth) for name in CORRECTIONS
    }
    assert errors["none"] > 0.2
    for name in ("token_is", "token_tis", "sequence_tis"):
        assert 0.01 < errors[name] < errors["none"], errors


def test_without_mismatch_every_correction_is_exact(tables):
    pi, _, rewards = tables
    truth = _true_gradient(pi, rewards)
    for name in CORRECTIONS:
        estimate = _mean_gradient(pi, pi.detach(), rewards, name)
        torch.testing.assert_close(estimate, truth, rtol=0, atol=1e-12)


def test_weights_by_hand():
    # Two sequences: ratios (2, 3) and (0.5).
    delta = torch.tensor([2.0, 3.0, 0.5], dtype=F64).log()
    ids = torch.tensor([0, 0, 1])
    expected = {
        "none": [1, 1, 1],
        "token_is": [2, 3, 0.5],
        "token_tis": [2, 2.5, 0.5],
        "sequence_is": [6, 6, 0.5],
        "sequence_tis": [2.5, 2.5, 0.5],
    }
    for name, weights in expected.items():
        result = CORRECTIONS[name](delta, ids, 2.5)
        assert result.weights.tolist() == pytest.approx(weights, abs=1e-12)
        assert result.included.tolist() == [True, True, True]


def test_the_cap_bounds_ratios_that_overflow():
    delta = torch.tensor([800.0, -800.0])
    ids = torch.tensor([0, 1])
    for name in ("token_tis", "sequence_tis"):
        weights = CORRECTIONS[name](delta, ids, 2.0).weights
        assert weights.tolist() == pytest.approx([2.0, 0.0], abs=1e-6)


def test_bias_of_the_cap_at_one_position():
    # E_pi[f] - E_mu[min(w, cap) f] = sum over w > cap of (pi - cap mu) f.
    generator = torch.Generator().manual_seed(5)
    pi = torch.randn(50, generator=generator, dtype=F64).softmax(0)
    mu = torch.randn(50, generator=generator, dtype=F64).softmax(0)
    f = torch.randn(50, generator=generator, dtype=F64)
    for w_cap in (0.5, 1.0, 2.0, 5.0):
        weights = CORRECTIONS["token_tis"](pi.log() - mu.log(), torch.arange(50), w_cap).weights
        bias = (pi * f).sum() - (mu * weights * f).sum()
        above = pi / mu > w_cap
        assert above.any()
        formula = ((pi - w_cap * mu) * f)[above].sum()
        assert bias.item() == pytest.approx(formula.item(), abs=1e-12)


def test_the_worked_example():
    # mu = 0.01, pi = 0.20, w = 20, cap 2: the bias is 0.18 f of that token alone.
    pi, mu = torch.tensor([0.2, 0.8], dtype=F64), torch.tensor([0.01, 0.99], dtype=F64)
    weights = CORRECTIONS["token_tis"]((pi / mu).log(), torch.arange(2), 2.0).weights
    assert weights.tolist() == pytest.approx([2.0, 0.8 / 0.99], abs=1e-12)
    for f in (1.0, -3.0):
        values = torch.tensor([f, math.pi], dtype=F64)
        bias = (pi * values).sum() - (mu * weights * values).sum()
        assert bias.item() == pytest.approx(0.18 * f, abs=1e-12)
