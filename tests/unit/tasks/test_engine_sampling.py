"""Truncation against hand calculation, draws against their probabilities."""

import math

import numpy as np
import pytest
import torch

from tasks.engines.protocol import Sampling
from tasks.engines.sampling import draw, processed_logprobs, uniforms

PROBS = [0.05, 0.4, 0.15, 0.3, 0.1]


def probabilities(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, probs=PROBS) -> list[float]:
    logprobs = processed_logprobs(
        torch.tensor([probs]).log() + 3.0,
        temperature=torch.tensor([temperature]),
        top_k=torch.tensor([top_k]),
        top_p=torch.tensor([top_p]),
        min_p=torch.tensor([min_p]),
    )
    return logprobs.exp()[0].tolist()


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, PROBS),
        # Squares 0.0025, 0.16, 0.0225, 0.09, 0.01 over their sum 0.285.
        ({"temperature": 0.5}, [x * x / 0.285 for x in PROBS]),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7, 0]),
        ({"top_k": 99}, PROBS),
        # 0.4 + 0.3 = 0.7 reaches 0.65 and not 0.75.
        ({"top_p": 0.65}, [0, 4 / 7, 0, 3 / 7, 0]),
        ({"top_p": 0.75}, [0, 8 / 17, 3 / 17, 6 / 17, 0]),
        ({"top_p": 1e-6}, [0, 1, 0, 0, 0]),
        # A floor of 0.3 · 0.4 = 0.12.
        ({"min_p": 0.3}, [0, 8 / 17, 3 / 17, 6 / 17, 0]),
        # After top_k the masses are 8/17, 14/17, 1: 0.8 needs two of them.
        ({"top_k": 3, "top_p": 0.8}, [0, 4 / 7, 0, 3 / 7, 0]),
        # The floor applies after the temperature: squares below 0.3 · 0.16 = 0.048 go.
        ({"temperature": 0.5, "min_p": 0.3}, [0, 16 / 25, 0, 9 / 25, 0]),
    ],
)
def test_truncation_matches_hand_calculation(parameters, expected):
    assert probabilities(**parameters) == pytest.approx(expected, abs=1e-6)


def test_top_k_keeps_the_lower_ids_of_equal_logits():
    assert probabilities(top_k=3, probs=[0.2] * 5) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0, 0])


def test_rows_do_not_share_their_parameters():
    logits = torch.tensor(PROBS).log().expand(3, -1)
    rows = processed_logprobs(
        logits,
        temperature=torch.tensor([1.0, 0.5, 1.0]),
        top_k=torch.tensor([0, 0, 1]),
        top_p=torch.tensor([1.0, 1.0, 1.0]),
        min_p=torch.tensor([0.0, 0.3, 0.0]),
    ).exp()
    assert rows[0].tolist() == pytest.approx(PROBS)
    assert rows[1].tolist() == pytest.approx([0, 0.64, 0, 0.36, 0])
    assert rows[2].tolist() == pytest.approx([0, 1, 0, 0, 0])


def test_draw_frequencies_match_the_probabilities():
    count = 20_000
    logprobs = torch.tensor([PROBS]).log().expand(count, -1)
    uniform = torch.tensor([uniforms(seed, 7, 1)[0] for seed in range(count)])
    counts = np.bincount(draw(logprobs, uniform.double()).numpy(), minlength=len(PROBS))
    expected = count * np.array(PROBS)
    # The 99.9 % quantile of chi-square with 4 degrees of freedom.
    assert ((counts - expected) ** 2 / expected).sum() < 18.47


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-53, math.nextafter(1.0, 0.0)])
def test_no_token_of_probability_zero_is_drawn(uniform):
    rng = np.random.default_rng(0)
    logits = torch.tensor(rng.normal(size=(200, 50)), dtype=torch.float32)
    logits[:, :5] = -torch.inf
    logits[:, -5:] = -torch.inf
    tokens = draw(logits.log_softmax(1), torch.full((200,), uniform, dtype=torch.float64))
    assert set(tokens.tolist()) == ({5} if uniform == 0.0 else {44})


def test_uniforms_depend_on_seed_and_position_alone():
    whole = uniforms(11, 0, 40)
    assert uniforms(11, 13, 27) == whole[13:]
    assert uniforms(12, 0, 40) != whole
    assert all(0 <= u < 1 for u in whole)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"temperature": 0.0}, "temperature must be a finite number above 0"),
        ({"temperature": math.nan}, "temperature must be a finite number above 0"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\]"),
        ({"top_k": -1}, "top_k must be 0 or more"),
        ({"min_p": 1.5}, r"min_p must lie in \[0, 1\]"),
        ({"max_tokens": 0}, "max_tokens must be 1 or more"),
        ({"seed": -1}, r"seed must lie in \[0, 2\*\*63\)"),
    ],
)
def test_parameters_out_of_range_are_refused(change, sentence):
    valid = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "max_tokens": 1,
        "seed": 0,
    }
    with pytest.raises(ValueError, match=sentence):
        Sampling(**{**valid, **change})
