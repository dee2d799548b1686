"""Prefix trees by hand, and random ones against the definition of a path."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainers.prefixes import (
    Span,
    TreeAttention,
    first_fit_decreasing,
    lay_out,
    prefix_order,
    split_tree,
)

BY_HAND = [[1, 2, 3, 4], [1, 2, 5], [1, 2], [9], [1, 2, 3, 6]]


def _tree(lists, budget=10**9):
    """Token lists in the order of the tree, their lengths and what they share, and the bins."""
    order, shared = prefix_order([torch.tensor(ids) for ids in lists])
    ordered = [lists[index] for index in order]
    lengths = [len(ids) for ids in ordered]
    return ordered, lengths, shared, split_tree(lengths, shared, budget)


def _stored(lists):
    """Tokens of a tree: the distinct prefixes of its sequences."""
    return len({tuple(ids[: end + 1]) for ids in lists for end in range(len(ids))})


def test_order_by_hand():
    # A prefix comes after what continues it; of equal sequences the first comes first.
    assert prefix_order([torch.tensor(ids) for ids in BY_HAND]) == (
        [0, 4, 1, 2, 3],
        [0, 3, 2, 2, 0],
    )
    twice = [torch.tensor([7, 300]), torch.tensor([7, 256]), torch.tensor([7, 300])]
    assert prefix_order(twice) == ([1, 0, 2], [0, 1, 2])
    assert prefix_order([]) == ([], [])


def test_layout_by_hand():
    _, lengths, shared, _ = _tree(BY_HAND)
    places, tree = lay_out(lengths, shared)
    # 1 2 3 4 | 6 after 1 2 3 | 5 after 1 2 | nothing for 1 2 | 9
    assert [place.tolist() for place in places] == [
        [0, 1, 2, 3],
        [0, 1, 2, 4],
        [0, 1, 5],
        [0, 1],
        [6],
    ]
    assert tree == TreeAttention(
        runs=(Span(0, 4), Span(4, 5), Span(5, 6), Span(6, 7)),
        crossings=((Span(4, 5), Span(0, 3)), (Span(5, 6), Span(0, 2))),
    )


def test_responses_to_one_prompt_read_it_in_one_call():
    lists = [[1, 2, 3, first, 9] for first in (4, 5, 6)]
    _, lengths, shared, _ = _tree(lists)
    _, tree = lay_out(lengths, shared)
    assert tree.runs == (Span(0, 5), Span(5, 7), Span(7, 9))
    assert tree.crossings == ((Span(5, 9), Span(0, 3)),)


def test_first_fit_decreasing_by_hand():
    # 6 | 4 opens | 3 joins 4 | 3 opens: 6+1, 4+3, 3+2.
    assert first_fit_decreasing([3, 6, 1, 4, 3, 2], 7) == [[1, 2], [3, 0], [4, 5]]
    assert first_fit_decreasing([9, 2], 7) == [[0], [1]]
    assert first_fit_decreasing([0, 9], 7) == [[1, 0]]
    assert first_fit_decreasing([], 7) == []


@pytest.mark.parametrize(
    ("budget", "bins"),
    [
        (7, [[0, 1, 2, 3, 4]]),
        # Beyond 1 2 there is room for three: 3 4 6 with the prefix itself, then 5 with 9.
        (5, [[0, 1, 3], [2, 4]]),
        (4, [[0, 3], [1], [2, 4]]),
        # Shorter than every sequence: what needs no token of its own goes along.
        (1, [[0, 3], [1], [2], [4]]),
    ],
)
def test_bins_by_hand(budget, bins):
    _, _, _, found = _tree(BY_HAND, budget)
    assert found == bins


def test_a_group_over_the_budget_repeats_its_prompt_once_a_bin():
    prompt = list(range(10))
    group = [[*prompt, 20 + n, 0, 0, 0, 0] for n in range(8)]
    others = [[90 + n] * 15 for n in range(2)]
    ordered, _, _, bins = _tree([*group, *others], 30)
    # 10 + 4 * 5 twice, and 15 + 15.
    assert sorted(_stored([ordered[place] for place in chosen]) for chosen in bins) == [30, 30, 30]


def test_whole_groups_stay_together_though_all_sequences_share_their_start():
    system = [1, 2, 3]
    groups = [[[*system, 10 + g, 0, 0, 0, n] for n in range(3)] for g in range(4)]
    ordered, _, _, bins = _tree([ids for group in groups for ids in group], 20)
    # A group stores 3 + 4 + 3; two are 3 + 14 = 17.
    assert len(bins) == 2
    for chosen in bins:
        assert len({ordered[place][3] for place in chosen}) == 2


SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=9)


@given(SEQUENCES)
def test_every_token_reads_its_own_path_once(lists):
    ordered, lengths, shared, _ = _tree(lists)
    places, tree = lay_out(lengths, shared)
    row = {}
    for ids, place in zip(ordered, places, strict=True):
        for end, where in enumerate(place.tolist()):
            assert row.setdefault(where, tuple(ids[: end + 1])) == tuple(ids[: end + 1])
    assert len(row) == len(set(row.values())) == tree.runs[-1].stop
    named = [
        (q, k) for r in tree.runs for q in range(r.start, r.stop) for k in range(r.start, q + 1)
    ]
    for queries, keys in tree.crossings:
        named += [
            (q, k) for q in range(queries.start, queries.stop) for k in range(keys.start, keys.stop)
        ]
    paths = {
        (q, k) for q, query in row.items() for k, key in row.items() if query[: len(key)] == key
    }
    assert len(named) == len(set(named))
    assert set(named) == paths


@given(SEQUENCES, st.integers(1, 30))
def test_bins_keep_to_the_budget_and_every_sequence(lists, budget):
    ordered, _, _, bins = _tree(lists, budget)
    assert sorted(place for chosen in bins for place in chosen) == list(range(len(lists)))
    for chosen in bins:
        assert chosen == sorted(chosen)
        members = [ordered[place] for place in chosen]
        # Over the budget only a sequence by itself, with the prefixes of it that cost nothing.
        assert _stored(members) <= max(budget, max(len(ids) for ids in members))
    if _stored(lists) <= budget:
        assert len(bins) == 1
