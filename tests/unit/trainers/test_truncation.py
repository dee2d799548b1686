"""The trainer's truncation against hand calculation, numpy in float64 and the engine's own."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tasks.engines.protocol import Sampling
from tasks.engines.sampling import processed_logprobs
from tests.engine_models import processed
from tests.plain_transformers import plain_copy
from trainers.optimizer import AdamWSettings, MasterAdamW
from trainers.packing import TrainingSequence, pack
from trainers.scoring import forward
from trainers.truncation import Truncation, truncate

PROBS = [0.05, 0.4, 0.15, 0.3, 0.1]
LOGITS = torch.tensor([PROBS]).log() + 3.0


def truncation(top_k=0, top_p=1.0, min_p=0.0, rows=1) -> Truncation:
    return Truncation(
        torch.full((rows,), top_k), torch.full((rows,), top_p), torch.full((rows,), min_p)
    )


def probabilities(target: int, **parameters) -> list[float]:
    logits = truncate(LOGITS, torch.tensor([target]), truncation(**parameters))
    return logits.softmax(1)[0].tolist()


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7, 0]),
        # 0.4 + 0.3 = 0.7 reaches 0.65 and not 0.75.
        ({"top_p": 0.65}, [0, 4 / 7, 0, 3 / 7, 0]),
        ({"top_p": 0.75}, [0, 8 / 17, 3 / 17, 6 / 17, 0]),
        ({"top_p": 1e-6}, [0, 1, 0, 0, 0]),
        # A floor of 0.3 * 0.4 = 0.12.
        ({"min_p": 0.3}, [0, 8 / 17, 3 / 17, 6 / 17, 0]),
        # After top_k the masses are 8/17, 14/17, 1: 0.8 needs two of them and not three.
        ({"top_k": 3, "top_p": 0.8}, [0, 4 / 7, 0, 3 / 7, 0]),
        # After min_p the masses are 4/7 and 1: 0.5 needs one, where 0.5 of all would need two.
        ({"min_p": 0.5, "top_p": 0.5}, [0, 1, 0, 0, 0]),
        ({"top_k": 4, "min_p": 0.3}, [0, 8 / 17, 3 / 17, 6 / 17, 0]),
    ],
)
def test_truncation_matches_hand_calculation(parameters, expected):
    found = probabilities(target=1, **parameters)
    assert found == pytest.approx(expected, abs=1e-6)
    assert [p == 0 for p in found] == [p == 0 for p in expected]


def test_the_sampled_token_is_never_cut():
    # Without it 0.7 would be left; with it 0.75.
    assert probabilities(target=0, top_k=2) == pytest.approx([1 / 15, 8 / 15, 0, 6 / 15, 0])


def test_what_is_not_truncated_is_not_touched():
    assert truncate(LOGITS, torch.tensor([0]), truncation()) is LOGITS
    mixed = Truncation(torch.tensor([0, 1]), torch.ones(2), torch.zeros(2))
    whole, greedy = truncate(LOGITS.expand(2, -1), torch.tensor([0, 1]), mixed)
    assert torch.equal(whole, LOGITS[0])
    assert greedy.softmax(0).tolist() == [0, 1, 0, 0, 0]


def test_a_cut_token_gets_no_gradient_and_the_others_that_of_their_softmax():
    logits = LOGITS.clone().requires_grad_()
    cut = truncate(logits, torch.tensor([3]), truncation(top_p=0.75))
    cut.log_softmax(1)[0, 3].backward()
    assert logits.grad is not None
    gradient = logits.grad[0].tolist()
    # 1[a = 3] - pi over a support of mass 0.85.
    assert gradient == pytest.approx([0, -8 / 17, -3 / 17, 11 / 17, 0], abs=1e-6)
    assert gradient[0] == 0 and gradient[4] == 0


@st.composite
def rows(draw):
    """[K, V] logits with many ties, temperatures, and parameters of which any may be off."""
    count, vocabulary = draw(st.integers(1, 6)), draw(st.integers(1, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = np.round(rng.normal(0, draw(st.sampled_from([0.1, 1, 4])), (count, vocabulary)), 1)
    off = rng.random((3, count)) < 0.4
    return (
        torch.tensor(logits, dtype=torch.float32),
        torch.tensor(rng.uniform(0.3, 2.0, count), dtype=torch.float32),
        Truncation(
            top_k=torch.tensor(np.where(off[0], 0, rng.integers(1, 45, count))),
            top_p=torch.tensor(np.where(off[1], 1, rng.uniform(0.01, 1, count))).float(),
            min_p=torch.tensor(np.where(off[2], 0, rng.uniform(0.001, 0.9, count))).float(),
        ),
        torch.tensor(rng.integers(0, vocabulary, count)),
    )


def engine_logprobs(logits, temperatures, cut: Truncation):
    return processed_logprobs(logits, temperatures, cut.top_k, cut.top_p, cut.min_p)


@settings(deadline=None)
@given(rows())
def test_trainer_and_engine_truncate_alike(given_rows):
    logits, temperatures, cut, anywhere = given_rows
    expected = engine_logprobs(logits, temperatures, cut)
    scaled = logits / temperatures[:, None]
    found = truncate(scaled, expected.argmax(1), cut).log_softmax(1)
    assert torch.equal(found.exp() == 0, expected == -torch.inf)
    torch.testing.assert_close(found.exp(), expected.exp(), rtol=1e-5, atol=0)
    kept = truncate(scaled, anywhere, cut).log_softmax(1).exp() > 0
    asked = torch.zeros_like(kept).scatter_(1, anywhere[:, None], True)
    assert torch.equal(kept, (expected > -torch.inf) | asked)


def test_many_rows_keep_their_own_parameters():
    rng = np.random.default_rng(4)
    logits = torch.tensor(rng.normal(0, 2, (700, 30)), dtype=torch.float32)
    cut = Truncation(
        torch.tensor(rng.integers(0, 9, 700)),
        torch.tensor(rng.uniform(0.5, 1, 700)).float(),
        torch.tensor(rng.uniform(0, 0.1, 700)).float(),
    )
    expected = engine_logprobs(logits, torch.ones(700), cut)
    found = truncate(logits, expected.argmax(1), cut).log_softmax(1)
    torch.testing.assert_close(found.exp(), expected.exp(), rtol=1e-5, atol=0)


def test_scoring_and_training_see_the_truncated_distribution(make_policy, policy_folder):
    policy = make_policy()
    MasterAdamW(policy, AdamWSettings(0.9, 0.95, 1e-8, 0.0, 1.0)).load(
        load_file(policy_folder / "model.safetensors").items(), "policy"
    )
    prompt = torch.tensor([3, 1, 4, 1, 5, 9])
    with torch.no_grad():
        logits = plain_copy(policy)(input_ids=prompt[None], use_cache=False).logits[0, -1].numpy()
    sampling = Sampling(1.5, top_p=0.8, top_k=20, min_p=0.02, max_tokens=8, seed=0)
    expected = processed(logits, sampling)
    support = np.flatnonzero(np.isfinite(expected))
    assert 2 < len(support) < 20
    entropy = -np.sum(np.exp(expected[support]) * expected[support])
    probs = np.exp(logits.astype(np.float64) / 1.5)
    mass = probs[support].sum() / probs.sum()
    cut, temperature = truncation(20, 0.8, 0.02), torch.tensor([1.5])
    for token in support:
        sequence = TrainingSequence(
            torch.cat([prompt, torch.tensor([token])]), torch.arange(7) == 6
        )
        scored = forward(policy, [sequence], temperature, cut, token_budget=64)
        assert torch.cat(scored).tolist() == pytest.approx([expected[token], entropy], abs=2e-6)
        (microbatch,) = pack([sequence], 64)
        trained = policy.logprobs(microbatch, temperature, cut)[0].detach()
        assert trained.tolist() == pytest.approx([expected[token]], abs=2e-6)
        # The whole distribution would be seen to be wrong: off by the log of the mass that is left.
        whole = policy.logprobs(microbatch, temperature)[0].detach()
        assert (whole - trained).tolist() == pytest.approx([math.log(mass)], abs=2e-6)
