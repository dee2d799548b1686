"""What the table of bias and variance says, over all 4,096 sequences, and that it is as printed."""

from pathlib import Path

import pytest
import torch

from tests.benchmarks.correction_bias import (
    ESTIMATORS,
    MISMATCHES,
    NUM_SEQUENCES,
    Row,
    Toy,
    gradients,
    markdown,
    measure,
    table,
    true_gradient,
)
from trainers.corrections import WEIGHTS

TRUNCATED = ("token_tis", "sequence_tis")


@pytest.fixture(scope="module", params=[20, 21, 22])
def measured(request) -> tuple[Toy, dict[tuple[str, float], Row]]:
    toy = Toy.make(request.param)
    return toy, {(row.estimator, row.mismatch): row for row in table(toy)}


def test_all_sequences_have_all_the_probability(measured):
    toy, _ = measured
    assert len({tuple(tokens) for tokens in toy.tokens.tolist()}) == NUM_SEQUENCES == 4096
    for mismatch in MISMATCHES:
        probabilities, _ = gradients(toy, mismatch, "none", "reinforce")
        assert probabilities.sum().item() == pytest.approx(1.0, abs=1e-12)


def test_the_true_gradient_is_that_of_finite_differences(measured):
    toy, _ = measured

    def value(logits):
        return float((toy.logprobs(logits).sum(1).exp() * toy.rewards).sum())

    truth = true_gradient(toy)
    for state, token in ((0, 1), (7, 3), (29, 0)):
        step = torch.zeros_like(toy.logits)
        step[state, token] = 1e-5
        slope = (value(toy.logits + step) - value(toy.logits - step)) / 2e-5
        assert truth[state, token].item() == pytest.approx(slope, abs=1e-9)


@pytest.mark.parametrize("mismatch", MISMATCHES)
@pytest.mark.parametrize("loss", ["reinforce", "ppo_clip", "cispo"])
def test_sequence_importance_sampling_has_no_bias(measured, mismatch, loss):
    assert measure(measured[0], mismatch, "sequence_is", loss).bias <= 1e-10


def test_without_mismatch_nothing_is_biased(measured):
    for name in ESTIMATORS:
        assert measured[1][name, 0.0].bias <= 1e-10


def test_no_correction_is_biased_in_proportion_to_the_mismatch(measured):
    _, rows = measured
    biases = [rows["none", mismatch].bias for mismatch in MISMATCHES[1:]]
    assert biases == sorted(biases) and biases[0] > 0.1
    # Linear at first: three times the mismatch has about three times the bias.
    assert 2 < biases[1] / biases[0] < 4.5


def test_unbiased_is_not_good_once_the_variance_explodes(measured):
    _, rows = measured
    unbiased = rows["sequence_is", 1.0]
    assert unbiased.deviation > 5 * rows["none", 1.0].deviation
    assert unbiased.error > rows["none", 1.0].error


@pytest.mark.parametrize("mismatch", [0.6, 1.0])
def test_truncation_has_the_least_error_at_large_mismatch(measured, mismatch):
    _, rows = measured
    best = min(WEIGHTS, key=lambda name: rows[name, mismatch].error)
    assert best in TRUNCATED
    for name in TRUNCATED:
        assert rows[name, mismatch].error < rows["none", mismatch].error
        assert rows[name, mismatch].error < rows["sequence_is", mismatch].error


def test_the_documentation_has_the_table():
    assert markdown(table(Toy.make())) in Path("docs/losses.md").read_text()
