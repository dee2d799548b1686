"""Corrections against exact expectations over every sequence of a tabular softmax model.

Three tokens, three positions, so 27 sequences. pi has a table of logits for every prefix; mu has
other logits. The gradient of E_pi[R] is computed from its definition and compared with the exact
mean of each estimator under mu.
"""

import itertools
import math

import pytest
import torch

from trainers.corrections import WEIGHTS, MaskLimits, corrected
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
    weights = WEIGHTS[correction](delta, IDS, w_cap)
    advantages = rewards.repeat_interleave(H)
    old = new.detach().flatten()
    surrogate, _ = LOSSES[loss](new.flatten(), old, advantages, IDS, ClipRange(0.2, 0.2))
    probability = behaviour.sum(1).exp().repeat_interleave(H)
    value = (probability * weights * surrogate).sum()
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
        name: _relative_error(_mean_gradient(pi, mu, rewards, name), truth) for name in WEIGHTS
    }
    assert errors["none"] > 0.2
    for name in ("token_is", "token_tis", "sequence_tis"):
        assert 0.01 < errors[name] < errors["none"], errors


def test_without_mismatch_every_correction_is_exact(tables):
    pi, _, rewards = tables
    truth = _true_gradient(pi, rewards)
    for name in WEIGHTS:
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
        result = corrected(delta, ids, weight=name, w_cap=2.5)
        assert result.weights.tolist() == pytest.approx(weights, abs=1e-12)
        assert result.included.tolist() == [True, True, True]


@pytest.mark.parametrize(
    ("mask", "limits", "included"),
    [
        ("token", (0.5, 2.0), [True, False, True, True]),  # 3 is above; 0.5 and 2 are inside
        ("token", (0.0, 1.0), [False, False, True, True]),  # no lower limit
        ("sequence", (0.4, 5.0), [False, False, True, True]),  # 6, 0.5, 1
        ("sequence", (0.6, 6.5), [True, True, False, True]),
        ("geometric", (0.6, 2.4), [False, False, False, True]),  # 6 ** 0.5 = 2.449
        ("geometric", (0.6, 2.5), [True, True, False, True]),
        ("geometric", (1.1, 1.2), [False, False, False, False]),
    ],
)
def test_masks_by_hand(mask, limits, included):
    # Sequences of ratios (2, 3), (0.5) and (1): one of two tokens and two of one.
    delta = torch.tensor([2.0, 3.0, 0.5, 1.0], dtype=F64).log()
    ids = torch.tensor([0, 0, 1, 2])
    result = corrected(delta, ids, weight="token_is", mask=mask, limits=MaskLimits(*limits))
    assert result.included.tolist() == included
    expected = [w if kept else 0.0 for w, kept in zip([2, 3, 0.5, 1], included, strict=True)]
    assert result.weights.tolist() == pytest.approx(expected, abs=1e-12)


def test_a_mask_leaves_out_ratios_that_overflow():
    delta, ids = torch.tensor([800.0, 0.0]), torch.tensor([0, 1])
    for mask in ("token", "sequence", "geometric"):
        result = corrected(delta, ids, weight="sequence_is", mask=mask, limits=MaskLimits(0.5, 2.0))
        assert result.weights.tolist() == [0.0, 1.0]


def test_the_geometric_mean_does_not_grow_with_length():
    # 2,000 tokens of w = 1.0005: the product is e, the geometric mean is 1.0005.
    delta = torch.full((2000,), math.log(1.0005))
    ids = torch.zeros(2000, dtype=torch.int64)
    for mask, kept in (("geometric", True), ("sequence", False)):
        limits = MaskLimits(0.999, 1.001) if mask == "geometric" else MaskLimits(0.5, 2.0)
        result = corrected(delta, ids, weight="none", mask=mask, limits=limits)
        assert result.included.all() == kept


def test_no_tokens_have_no_corrections():
    empty, ids = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    for weight in WEIGHTS:
        for mask in ("none", "token", "sequence", "geometric"):
            result = corrected(empty, ids, weight=weight, w_cap=2.0, mask=mask)
            assert result.weights.shape == result.included.shape == (0,)


def test_the_cap_bounds_ratios_that_overflow():
    delta = torch.tensor([800.0, -800.0])
    ids = torch.tensor([0, 1])
    for name in ("token_tis", "sequence_tis"):
        weights = WEIGHTS[name](delta, ids, 2.0)
        assert weights.tolist() == pytest.approx([2.0, 0.0], abs=1e-6)


def test_bias_of_the_cap_at_one_position():
    # E_pi[f] - E_mu[min(w, cap) f] = sum over w > cap of (pi - cap mu) f.
    generator = torch.Generator().manual_seed(5)
    pi = torch.randn(50, generator=generator, dtype=F64).softmax(0)
    mu = torch.randn(50, generator=generator, dtype=F64).softmax(0)
    f = torch.randn(50, generator=generator, dtype=F64)
    for w_cap in (0.5, 1.0, 2.0, 5.0):
        weights = WEIGHTS["token_tis"](pi.log() - mu.log(), torch.arange(50), w_cap)
        bias = (pi * f).sum() - (mu * weights * f).sum()
        above = pi / mu > w_cap
        assert above.any()
        formula = ((pi - w_cap * mu) * f)[above].sum()
        assert bias.item() == pytest.approx(formula.item(), abs=1e-12)


def test_the_worked_example():
    # mu = 0.01, pi = 0.20, w = 20, cap 2: the bias is 0.18 f of that token alone.
    pi, mu = torch.tensor([0.2, 0.8], dtype=F64), torch.tensor([0.01, 0.99], dtype=F64)
    weights = WEIGHTS["token_tis"]((pi / mu).log(), torch.arange(2), 2.0)
    assert weights.tolist() == pytest.approx([2.0, 0.8 / 0.99], abs=1e-12)
    for f in (1.0, -3.0):
        values = torch.tensor([f, math.pi], dtype=F64)
        bias = (pi * values).sum() - (mu * weights * values).sum()
        assert bias.item() == pytest.approx(0.18 * f, abs=1e-12)
