"""Whole objectives against formulas written differently, and packed against unpacked gradients.

The other formulas take probabilities instead of logarithms, one sequence after another.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from schemas.objective import RECIPES
from tests.plain_transformers import action_logits, plain_copy
from trainers.corrections import MASKS, WEIGHTS, MaskLimits, corrected
from trainers.losses import KL_ESTIMATORS, LOSSES, ClipRange
from trainers.packing import TrainingSequence
from trainers.reductions import REDUCTIONS, reduce_loss
from trainers.scoring import forward
from trainers.truncation import Truncation
from trainers.update import Objective, TokenData, accumulate_gradients

F64 = torch.float64
CLIP = ClipRange(0.1, 0.3)
W_CAP = 1.5
CONSTANT = 40.0
LIMITS = {
    "none": MaskLimits(0.0, math.inf),
    "token": MaskLimits(0.6, 1.8),
    "sequence": MaskLimits(0.4, 2.5),
    "geometric": MaskLimits(0.85, 1.1),
}
LENGTHS = [1, 4, 2, 7, 3]
GROUPS = [0, 0, 1, 1, 1]


def _corrections():
    return list(itertools.product(WEIGHTS, MASKS))


def _losses():
    return [(loss, name) for loss in LOSSES for name in RECIPES[loss].reductions]


@pytest.fixture(scope="module")
def tokens():
    """log pi, log pi_old, log mu and advantages of the tokens of five sequences."""
    generator = torch.Generator().manual_seed(4)
    mu = -torch.rand(sum(LENGTHS), generator=generator, dtype=F64) * 3 - 0.5
    old = mu + 0.3 * torch.randn(len(mu), generator=generator, dtype=F64)
    new = old + 0.2 * torch.randn(len(mu), generator=generator, dtype=F64)
    # Single tokens and whole sequences move, or no sequence would be clipped.
    moved = torch.tensor([0.5, -0.3, 0.0, 0.0, 0.1], dtype=F64)
    new += moved.repeat_interleave(torch.tensor(LENGTHS))
    advantages = torch.tensor([1.5, -0.5, 2.0, -1.0, 0.7], dtype=F64)
    return new, old, mu, advantages.repeat_interleave(torch.tensor(LENGTHS))


def _value(loss, ratio, sequence_ratio, advantage, probability):
    low, high = 1 - CLIP.low, 1 + CLIP.high
    if loss == "reinforce":
        return advantage * probability.log()
    if loss == "cispo":
        weight = min(max(ratio.item(), low), high)
        return weight * advantage * probability.log()
    r = sequence_ratio if loss == "gspo" else ratio
    # min(r A, clip(r) A): only an increase of what is good, or a decrease of what is bad, is cut.
    if advantage > 0:
        return advantage * (r if r < high else high)
    return advantage * (r if r > low else low)


def _weight(name, w, w_sequence):
    base = {"none": 1.0, "token": float(w), "sequence": float(w_sequence)}[name.split("_")[0]]
    return min(base, W_CAP) if name.endswith("_tis") else base


def _kept(mask, w, w_sequence, length):
    ratio = {
        "none": 1.0,
        "token": w,
        "sequence": w_sequence,
        "geometric": w_sequence ** (1 / length),
    }
    return LIMITS[mask].low <= ratio[mask] <= LIMITS[mask].high


def _written_out(tokens, new, loss, reduction, weight, mask):
    """The loss, sequence by sequence."""
    _, old, mu, advantages = tokens
    sums, start = [], 0
    for length in LENGTHS:
        part = slice(start, start + length)
        start += length
        p, p_old, p_mu = new[part].exp(), old[part].exp(), mu[part].exp()
        ratios, ws = p / p_old, p_old / p_mu
        sequence_ratio, w_sequence = ratios.prod() ** (1 / length), float(ws.prod())
        total = torch.zeros((), dtype=F64)
        for r, w, q, advantage in zip(ratios, ws, p, advantages[part], strict=True):
            if _kept(mask, w.item(), w_sequence, length):
                value = _value(loss, r, sequence_ratio, advantage.item(), q)
                total = total + _weight(weight, w, w_sequence) * value
        sums.append(total)
    if reduction == "token":
        mean = sum(sums) / sum(LENGTHS)
    elif reduction == "sequence":
        mean = sum(s / n for s, n in zip(sums, LENGTHS, strict=True)) / len(LENGTHS)
    elif reduction == "group":
        groups = [[i for i, g in enumerate(GROUPS) if g == group] for group in (0, 1)]
        mean = sum(sum(sums[i] for i in g) / sum(LENGTHS[i] for i in g) for g in groups) / 2
    else:
        mean = sum(sums) / CONSTANT
    return -mean


def _production(tokens, new, loss, reduction, weight, mask):
    _, old, mu, advantages = tokens
    ids = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    weights, _ = corrected(
        old - mu, ids, weight=weight, w_cap=W_CAP, mask=mask, limits=LIMITS[mask]
    )
    values, _ = LOSSES[loss](new, old, advantages, ids, CLIP)
    shares, denominator = REDUCTIONS[reduction](ids, torch.tensor(GROUPS)[ids], CONSTANT)
    return reduce_loss(values, weights, shares, denominator)


@pytest.mark.parametrize(
    ("loss", "reduction", "weight", "mask"),
    [(*pair, "token_tis", "none") for pair in _losses()]
    + [("ppo_clip", "token", *pair) for pair in _corrections()]
    + [("gspo", "sequence", "sequence_tis", "geometric")],
)
def test_objective_and_gradient_are_those_of_the_formula(tokens, loss, reduction, weight, mask):
    results = []
    for objective in (_production, _written_out):
        new = tokens[0].clone().requires_grad_()
        value = objective(tokens, new, loss, reduction, weight, mask)
        (gradient,) = torch.autograd.grad(value, new)
        assert gradient.abs().max() > 0
        results.append((value.detach(), gradient))
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-9)


def test_every_clip_cap_and_mask_of_these_tests_binds(tokens):
    new, old, mu, advantages = tokens
    ids = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    for loss in set(LOSSES) - {"reinforce"}:
        clipped = LOSSES[loss](new, old, advantages, ids, CLIP).clipped
        assert clipped.any() and not clipped.all(), loss
    for name in ("token", "sequence"):
        plain = WEIGHTS[f"{name}_is"](old - mu, ids, W_CAP)
        capped = WEIGHTS[f"{name}_tis"](old - mu, ids, W_CAP)
        assert (plain != capped).any() and (plain == capped).any(), name
    for name in set(MASKS) - {"none"}:
        kept = MASKS[name](old - mu, ids, LIMITS[name])
        assert kept.any() and not kept.all(), name


def _sequences():
    """Two turns, one token, an observation between actions, and nothing to train; the second
    begins like the first, and the fifth like the fourth."""
    generator = torch.Generator().manual_seed(1)
    masks = ["0011", "001101", "01", "0111111", "011", "00"]
    ids = [torch.randint(0, 32, (len(mask),), generator=generator) for mask in masks]
    ids[1][:3], ids[4][:2] = ids[0][:3], ids[3][:2]
    return [
        TrainingSequence(tokens, torch.tensor([character == "1" for character in mask]))
        for tokens, mask in zip(ids, masks, strict=True)
    ]


def _data(policy, sequences, correction=("token_tis", "none"), reference=False) -> TokenData:
    """Old log-probabilities near those of the policy, and a correction of made-up mu."""
    generator = torch.Generator().manual_seed(3)
    counts = torch.tensor([int(sequence.action_mask.sum()) for sequence in sequences])
    ids = torch.repeat_interleave(counts)
    count = len(ids)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(count, generator=generator)

    truncation = Truncation(torch.zeros_like(ids), torch.ones(count), torch.zeros(count))
    temperatures = torch.full((count,), 0.8)
    current, _ = forward(policy, sequences, temperatures, truncation, 64)
    old = (current + noise(0.3)).clamp(max=0.0)
    weight, mask = correction
    weights, _ = corrected(
        noise(0.3), ids, weight=weight, w_cap=W_CAP, mask=mask, limits=LIMITS[mask]
    )
    return TokenData(
        old_logprobs=old,
        advantages=torch.randn(len(counts), generator=generator)[ids],
        weights=weights,
        sequence_ids=ids,
        group_ids=torch.tensor([0, 0, 1, 1, 1, 1])[ids],
        temperatures=temperatures,
        truncation=truncation,
        reference_logprobs=(current + noise(0.5)).clamp(max=0.0) if reference else None,
    )


def _gradients(policy, sequences, data, objective, token_budget):
    report = accumulate_gradients(policy, sequences, data, objective, token_budget)
    gradients = {}
    for name, parameter in policy.parameters.items():
        gradients[name] = parameter.grad.to_local().clone()
        parameter.grad = None
    return report, gradients


def _packed_equals_unpacked(policy, data, objective):
    sequences = _sequences()
    packed, of_packed = _gradients(policy, sequences, data, objective, 100)
    single, of_single = _gradients(policy, sequences, data, objective, 1)
    assert packed.loss == pytest.approx(single.loss, rel=1e-5, abs=1e-6)
    assert packed.clip_frac == single.clip_frac
    for name, expected in of_single.items():
        assert expected.norm() > 0, name
        assert (of_packed[name] - expected).norm() / expected.norm() <= 1e-5, name


@pytest.mark.parametrize(("loss", "reduction"), _losses())
def test_packing_changes_no_loss_and_no_reduction(make_policy, loss, reduction):
    policy = make_policy()
    objective = Objective(loss, CLIP, reduction, CONSTANT)
    _packed_equals_unpacked(policy, _data(policy, _sequences()), objective)


@pytest.mark.parametrize("correction", _corrections(), ids="-".join)
def test_packing_changes_no_correction(make_policy, correction):
    policy = make_policy()
    data = _data(policy, _sequences(), correction)
    _packed_equals_unpacked(policy, data, Objective("ppo_clip", CLIP))


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_packing_changes_no_penalty(make_policy, estimator):
    policy = make_policy()
    objective = Objective(
        "gspo",
        CLIP,
        "sequence",
        kl_coefficient=0.5,
        kl_estimator=estimator,
        entropy_coefficient=0.2,
    )
    _packed_equals_unpacked(policy, _data(policy, _sequences(), reference=True), objective)


def test_penalties_are_those_of_plain_transformers(make_policy):
    """Entropy and divergence from full distributions, by autograd through the bare model."""
    policy, sequences = make_policy(), _sequences()
    data = _data(policy, sequences, reference=True)
    data = replace(data, advantages=torch.zeros_like(data.advantages))
    objective = Objective("ppo_clip", CLIP, kl_coefficient=0.5, entropy_coefficient=0.2)
    report, found = _gradients(policy, sequences, data, objective, 100)
    plain = plain_copy(policy)
    total, kl, start = torch.zeros(()), 0.0, 0
    for sequence in sequences[:-1]:
        actions = sequence.action_mask.nonzero().flatten()
        policies = torch.distributions.Categorical(logits=action_logits(plain, sequence) / 0.8)
        chosen = policies.probs.gather(1, sequence.token_ids[actions][:, None])[:, 0]
        part = slice(start, start + len(actions))
        start += len(actions)
        reference, old = data.reference_logprobs[part].exp(), data.old_logprobs[part].exp()
        k3 = reference / chosen - 1 - (reference / chosen).log()
        kl += k3.sum().item()
        value = 0.2 * policies.entropy() - 0.5 * chosen / old * k3
        total = total - (data.weights[part] * value).sum() / len(data.weights)
    total.backward()
    assert report.loss == pytest.approx(total.item(), rel=1e-5)
    assert report.reference_kl == pytest.approx(kl / len(data.weights), rel=1e-4)
    for name, parameter in plain.named_parameters():
        expected = parameter.grad
        assert (found[name] - expected).norm() / expected.norm() <= 2e-5, name


def test_a_minibatch_that_a_mask_emptied_has_no_gradient(make_policy):
    policy, sequences = make_policy(), _sequences()
    data = _data(policy, sequences)
    data = replace(data, weights=torch.zeros_like(data.weights))
    for loss, reduction in _losses():
        objective = Objective(loss, CLIP, reduction, CONSTANT)
        report, gradients = _gradients(policy, sequences, data, objective, 100)
        assert report.loss == 0.0
        assert all(not gradient.any() for gradient in gradients.values())


def test_a_minibatch_without_action_tokens_is_refused(make_policy):
    policy, sequences = make_policy(), _sequences()
    empty = _data(policy, sequences)[0:0]
    with pytest.raises(ValueError, match="no action token"):
        accumulate_gradients(policy, sequences[-1:], empty, Objective("ppo_clip", CLIP), 100)
