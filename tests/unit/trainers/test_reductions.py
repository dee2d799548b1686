"""Reductions by hand, and their sums over microbatches."""

import pytest
import torch

from trainers.reductions import REDUCTIONS, mean_by, reduce_loss, sum_by

F64 = torch.float64
SEQUENCES = torch.tensor([3, 3, 3, 4, 6, 6])
"""Three sequences of 3, 1 and 2 tokens, numbered as a later minibatch's are."""

GROUPS = torch.tensor([1, 1, 1, 1, 2, 2])
VALUES = torch.tensor([1.0, 2.0, 6.0, 5.0, -4.0, 10.0], dtype=F64)


@pytest.mark.parametrize(
    ("name", "mean"),
    [
        ("token", 20 / 6),
        ("sequence", (3.0 + 5.0 + 3.0) / 3),
        ("group", (14 / 4 + 6 / 2) / 2),
        ("constant", 20 / 50),
    ],
)
def test_by_hand(name, mean):
    shares, denominator = REDUCTIONS[name](SEQUENCES, GROUPS, 50.0)
    loss = reduce_loss(VALUES, torch.ones(6, dtype=F64), shares.double(), denominator)
    assert loss.item() == pytest.approx(-mean, abs=1e-6)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_microbatches_add_up_to_the_minibatch(name):
    shares, denominator = REDUCTIONS[name](SEQUENCES, GROUPS, 50.0)
    weights = torch.linspace(0.5, 2, 6, dtype=F64)
    whole = reduce_loss(VALUES, weights, shares, denominator)
    parts = [
        reduce_loss(VALUES[part], weights[part], shares[part], denominator)
        for part in (slice(0, 3), slice(3, 4), slice(4, 6), slice(6, 6))
    ]
    assert sum(part.item() for part in parts) == pytest.approx(whole.item(), abs=1e-12)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_one_token_is_its_own_mean(name):
    only = torch.tensor([7])
    shares, denominator = REDUCTIONS[name](only, only, 1.0)
    assert (shares.tolist(), denominator) == ([1.0], 1)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_tokens_left_out_count_in_the_denominator_only(name):
    shares, denominator = REDUCTIONS[name](SEQUENCES, GROUPS, 50.0)
    weights = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, 1.0], dtype=F64)
    loss = reduce_loss(VALUES, weights, shares, denominator)
    all_but_one = torch.where(weights > 0, VALUES, 0.0)
    expected = reduce_loss(all_but_one, torch.ones(6, dtype=F64), shares, denominator)
    assert loss.item() == expected.item()


def test_sums_and_means_of_no_tokens_are_empty():
    empty = torch.zeros(0)
    ids = torch.zeros(0, dtype=torch.int64)
    assert sum_by(ids, empty).shape == mean_by(ids, empty).shape == (0,)


def test_sums_and_means_by_id():
    assert sum_by(SEQUENCES, VALUES).tolist() == [9.0, 9.0, 9.0, 5.0, 6.0, 6.0]
    assert mean_by(SEQUENCES, VALUES).tolist() == [3.0, 3.0, 3.0, 5.0, 3.0, 3.0]
