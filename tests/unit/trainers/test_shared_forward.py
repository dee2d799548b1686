"""Packed rows with shared prefixes against plain transformers, one sequence at a time."""

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from tests.plain_transformers import action_logprobs, plain_copy
from trainers.packing import TrainingSequence, empty_microbatch, pack
from trainers.policy import Policy

TEMPERATURE = 0.7
SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.5,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
ARCHITECTURES = {
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**{k: v for k, v in SIZES.items() if k != "head_dim"}),
    "llama": LlamaConfig(**SIZES),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS),
}


def _sequence(*parts):
    """Observed and action tokens by turns."""
    mask = [torch.full((len(part),), bool(turn % 2)) for turn, part in enumerate(parts)]
    return TrainingSequence(torch.cat(parts), torch.cat(mask))


def _cases():
    generator = torch.Generator().manual_seed(5)
    sizes = (9, 5, 3, 1, 7, 4, 6)
    prompt, a, b, c, d, seen, other = (
        torch.randint(0, 32, (size,), generator=generator) for size in sizes
    )
    return {
        "group": [_sequence(prompt, response) for response in (a, b, c, d)],
        "turns and forks": [
            _sequence(prompt, a),
            _sequence(prompt, a, seen, b),  # trains the first turn again
            _sequence(torch.cat([prompt, a, seen]), d),
            _sequence(torch.cat([prompt, a, seen, d, other]), b),
            _sequence(torch.cat([prompt, a[:2], other]), c, seen, d),
            _sequence(prompt, torch.cat([a[:3], d])),
        ],
        "prefixes": [_sequence(prompt, r) for r in (a[:2], torch.cat([a, b]), a)],
        "identical": [_sequence(prompt, a, seen, b)] * 3,
        "nothing shared": [_sequence(prompt, a), _sequence(seen, d, a, b), _sequence(other, c)],
    }


CASES = _cases()


def _distinct_prefixes(sequences):
    read = [s.token_ids[: int(s.action_mask.nonzero()[-1])].tolist() for s in sequences]
    return len({tuple(ids[: end + 1]) for ids in read for end in range(len(ids))})


def _of_policy(policy, microbatches, values):
    """Log-probabilities, and gradients of their sum weighted by `values`."""
    logprobs = torch.zeros(len(values))
    for microbatch in microbatches:
        index = microbatch.action_index
        found = policy.logprobs(microbatch, torch.full((len(index),), TEMPERATURE))[0]
        (found * values[index]).sum().backward()
        logprobs[index] = found.detach()
    gradients = {}
    for name, parameter in policy.parameters.items():
        gradients[name] = parameter.grad.full_tensor().clone()
        parameter.grad = None
    return logprobs, gradients


@pytest.fixture(scope="module", params=ARCHITECTURES)
def policy(request, one_rank, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    ARCHITECTURES[request.param].save_pretrained(folder)
    torch.manual_seed(3)
    return Policy(folder, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("case", CASES)
def test_sharing_changes_no_logprob_and_no_gradient(policy, case):
    sequences = CASES[case]
    plain = plain_copy(policy)
    alone = torch.cat([action_logprobs(plain, sequence, TEMPERATURE) for sequence in sequences])
    values = torch.linspace(-1, 2, len(alone))
    (alone * values).sum().backward()
    (whole,) = pack(sequences, 1000)
    assert whole.num_tokens == _distinct_prefixes(sequences)
    for microbatches in ([whole], pack(sequences, 20), [*pack(sequences, 1), empty_microbatch()]):
        logprobs, gradients = _of_policy(policy, microbatches, values)
        torch.testing.assert_close(logprobs, alone.detach(), rtol=0, atol=1e-5)
        for name, parameter in plain.named_parameters():
            expected = parameter.grad
            assert expected.norm() > 0, name
            assert (gradients[name] - expected).norm() / expected.norm() <= 1e-5, name


def test_the_same_rows_give_the_same_bits(make_policy):
    """Two threads, and 25,600 action tokens that 100 positions predict."""
    policy = make_policy()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 32, (108,), generator=generator)
    microbatches = pack([TrainingSequence(ids, torch.arange(108) >= 8)] * 256, 1000)
    values = torch.randn(25_600, generator=generator)
    torch.set_num_threads(2)
    try:
        (_, first), *others = (_of_policy(policy, microbatches, values) for _ in range(5))
    finally:
        torch.set_num_threads(1)
    for _, gradients in others:
        for name, expected in first.items():
            assert torch.equal(gradients[name], expected), name
