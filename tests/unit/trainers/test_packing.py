"""Packing: every action token once, no attention across sequences, the same gradients."""

import pytest
import torch

from trainers.packing import (
    TrainingSequence,
    assign,
    empty_microbatch,
    first_fit_decreasing,
    num_forwarded,
    pack,
)


def _sequence(ids, actions):
    return TrainingSequence(
        torch.tensor(ids), torch.tensor([position in actions for position in range(len(ids))])
    )


SEQUENCES = [
    _sequence([1, 2, 3, 4, 5], {2, 3, 4}),
    _sequence([6, 7, 8, 9, 10, 11, 12, 13], {2, 3, 6}),  # two turns, an observation at the end
    _sequence([14, 15], {1}),
    _sequence([16, 17, 18], set()),
]


def test_first_fit_decreasing_by_hand():
    # 6 | 4 opens | 3 joins 4 | 3 opens: 6+1, 4+3, 3+2.
    assert first_fit_decreasing([3, 6, 1, 4, 3, 2], 7) == [[1, 2], [3, 0], [4, 5]]
    assert first_fit_decreasing([9, 2], 7) == [[0], [1]]
    assert first_fit_decreasing([], 7) == []


def test_only_tokens_before_the_last_action_are_forwarded():
    assert [num_forwarded(sequence) for sequence in SEQUENCES] == [4, 6, 1, 0]


def test_microbatch_by_hand():
    (microbatch,) = pack(SEQUENCES, 100)
    # Longest first: sequence 1, 0, 2; sequence 3 has nothing to predict.
    assert microbatch.input_ids.tolist() == [[6, 7, 8, 9, 10, 11, 1, 2, 3, 4, 14]]
    assert microbatch.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 0]]
    assert microbatch.block_ids.tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2]
    assert microbatch.logit_index.tolist() == [1, 2, 5, 7, 8, 9, 10]
    assert microbatch.target_ids.tolist() == [8, 9, 12, 3, 4, 5, 15]
    assert microbatch.action_index.tolist() == [3, 4, 5, 0, 1, 2, 6]


def test_attention_mask_is_block_diagonal_and_causal():
    (microbatch,) = pack([SEQUENCES[2], SEQUENCES[0]], 100)
    assert microbatch.attention_mask()[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [0, 0, 0, 0, 1],
    ]


def test_every_action_is_in_one_microbatch_within_the_budget():
    generator = torch.Generator().manual_seed(0)
    sequences = []
    for _ in range(60):
        length = int(torch.randint(2, 40, (), generator=generator))
        mask = torch.rand(length, generator=generator) < 0.5
        mask[0] = False
        sequences.append(TrainingSequence(torch.arange(length), mask))
    microbatches = pack(sequences, 50)
    seen = torch.cat([microbatch.action_index for microbatch in microbatches])
    total = sum(int(sequence.action_mask.sum()) for sequence in sequences)
    assert sorted(seen.tolist()) == list(range(total))
    assert max(microbatch.num_tokens for microbatch in microbatches) <= 50


def test_a_sequence_over_the_budget_has_a_row_of_its_own():
    microbatches = pack(SEQUENCES, 5)
    assert [microbatch.num_tokens for microbatch in microbatches] == [6, 5]


def test_every_rank_gets_as_many_microbatches():
    microbatches = pack(SEQUENCES, 4)
    assert len(microbatches) == 3
    first, second = assign(microbatches, 2)
    assert first == [microbatches[0], microbatches[2]]
    assert second == [microbatches[1], None]
    assert assign([], 2) == [[], []]


def test_an_action_without_a_predecessor_is_our_mistake():
    with pytest.raises(AssertionError, match="token before it"):
        _sequence([1, 2], {0})


def _gradients(policy, microbatches, num_actions):
    values = torch.linspace(-1, 1, num_actions)
    for microbatch in microbatches:
        logprobs = policy.logprobs(microbatch, torch.ones(len(microbatch.action_index)))
        (logprobs * values[microbatch.action_index]).sum().backward()
    gradients = {}
    for name, parameter in policy.parameters.items():
        gradients[name] = parameter.grad.to_local().clone()
        parameter.grad = None
    return gradients


def test_packed_and_unpacked_gradients_agree(make_policy):
    policy = make_policy()
    num_actions = 7
    packed = _gradients(policy, pack(SEQUENCES, 100), num_actions)
    one_by_one = _gradients(policy, pack(SEQUENCES, 1), num_actions)
    with_empty = _gradients(policy, [*pack(SEQUENCES, 8), empty_microbatch()], num_actions)
    for name, expected in one_by_one.items():
        assert expected.norm() > 0
        for other in (packed, with_empty):
            assert (other[name] - expected).norm() / expected.norm() <= 1e-5, name


def test_packed_logprobs_equal_plain_transformers(make_policy):
    policy = make_policy()
    packed = torch.zeros(7)
    for microbatch in pack(SEQUENCES, 100):
        temperatures = torch.full((len(microbatch.action_index),), 0.7)
        packed[microbatch.action_index] = policy.logprobs(microbatch, temperatures).detach()
    expected = []
    for sequence in SEQUENCES[:3]:
        with torch.no_grad():
            logits = policy.model(input_ids=sequence.token_ids[None], use_cache=False).logits[0]
        logprobs = (logits.double() / 0.7).log_softmax(-1)
        actions = sequence.action_mask.nonzero().flatten()
        expected.append(logprobs[actions - 1, sequence.token_ids[actions]])
    torch.testing.assert_close(packed.double(), torch.cat(expected), rtol=0, atol=2e-6)
