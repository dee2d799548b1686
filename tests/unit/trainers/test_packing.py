"""Packing: every action token once, whatever sequences share stored once."""

import pytest
import torch

from trainers.packing import TrainingSequence, assign, num_forwarded, pack
from trainers.prefixes import Span, TreeAttention


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


def test_only_tokens_before_the_last_action_are_forwarded():
    assert [num_forwarded(sequence) for sequence in SEQUENCES] == [4, 6, 1, 0]


def test_microbatch_by_hand():
    (microbatch,) = pack(SEQUENCES, 100)
    # By their tokens; sequence 3 has nothing to predict.
    assert microbatch.input_ids.tolist() == [[1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 14]]
    assert microbatch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 0]]
    assert microbatch.tree == TreeAttention((Span(0, 4), Span(4, 10), Span(10, 11)), ())
    assert microbatch.logit_index.tolist() == [1, 2, 3, 5, 6, 9, 10]
    assert microbatch.logit_row.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert microbatch.target_ids.tolist() == [3, 4, 5, 8, 9, 12, 15]
    assert microbatch.action_index.tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_a_shared_prompt_is_stored_once_and_predicts_every_first_token():
    prompt = [1, 2, 3]
    group = [_sequence([*prompt, *response], {3, 4}) for response in ([7, 8], [5, 6], [7, 9])]
    (microbatch,) = pack(group, 100)
    # 1 2 3 5 | 7; the last tokens are predicted and not read.
    assert microbatch.input_ids.tolist() == [[1, 2, 3, 5, 7]]
    assert microbatch.position_ids.tolist() == [[0, 1, 2, 3, 3]]
    assert microbatch.tree == TreeAttention((Span(0, 4), Span(4, 5)), ((Span(4, 5), Span(0, 3)),))
    # The second response, then the first and the third, which read the same.
    assert microbatch.logit_index.tolist() == [2, 3, 4]
    assert microbatch.logit_row.tolist() == [0, 1, 0, 2, 0, 2]
    assert microbatch.target_ids.tolist() == [5, 6, 7, 8, 7, 9]
    assert microbatch.action_index.tolist() == [2, 3, 0, 1, 4, 5]


def test_an_action_that_two_sequences_train_counts_in_both():
    longer = _sequence([1, 2, 3, 4, 5], {2, 4})
    (microbatch,) = pack([_sequence([1, 2, 3], {2}), longer], 100)
    assert microbatch.input_ids.tolist() == [[1, 2, 3, 4]]
    assert microbatch.logit_index.tolist() == [1, 3]
    assert microbatch.logit_row.tolist() == [0, 1, 0]
    assert microbatch.target_ids.tolist() == [3, 5, 3]
    assert microbatch.action_index.tolist() == [1, 2, 0]


def _routed(ids, actions, *experts):
    return TrainingSequence(
        torch.tensor(ids),
        torch.tensor([position in actions for position in range(len(ids))]),
        torch.tensor(experts, dtype=torch.int16)[:, None],
    )


def test_a_token_is_shared_only_with_those_of_the_same_experts():
    a, b, none = [0, 1], [1, 2], [-1, -1]
    group = [
        _routed([1, 2, 3, 7], {3}, a, a, a, none),
        _routed([1, 2, 3, 8], {3}, a, b, a, none),  # another expert for the second token
        _routed([1, 2, 3, 9], {3}, a, a, a, none),
        _routed([1, 2, 3, 7], {3}, a, a, none, none),  # no row for the third
    ]
    (microbatch,) = pack(group, 100)
    assert microbatch.input_ids.tolist() == [[1, 2, 3, 3, 2, 3]]
    assert microbatch.position_ids.tolist() == [[0, 1, 2, 2, 1, 2]]
    assert microbatch.experts[:, 0].tolist() == [a, a, a, none, b, a]
    assert microbatch.readers.tolist() == [4, 3, 2, 1, 1, 1]
    tree = microbatch.tree
    assert tree.runs == (Span(0, 3), Span(3, 4), Span(4, 6))
    assert set(tree.crossings) == {(Span(3, 4), Span(0, 2)), (Span(4, 6), Span(0, 1))}
    assert microbatch.action_index.tolist() == [0, 2, 3, 1]


def test_every_action_is_in_one_microbatch_within_the_budget():
    generator = torch.Generator().manual_seed(0)
    sequences = []
    for _ in range(60):
        length = int(torch.randint(2, 40, (), generator=generator))
        mask = torch.rand(length, generator=generator) < 0.5
        mask[0] = False
        sequences.append(
            TrainingSequence(torch.randint(0, 3, (length,), generator=generator), mask)
        )
    microbatches = pack(sequences, 50)
    seen = torch.cat([microbatch.action_index for microbatch in microbatches])
    total = sum(int(sequence.action_mask.sum()) for sequence in sequences)
    assert sorted(seen.tolist()) == list(range(total))
    assert max(microbatch.num_tokens for microbatch in microbatches) <= 50
    forwarded = sum(num_forwarded(sequence) for sequence in sequences)
    assert sum(microbatch.num_tokens for microbatch in microbatches) < forwarded - 20


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
