"""pass@k and its intervals, against counting by hand."""

import itertools
import math

import pytest

from tasks.evaluate import estimate_mean, estimate_pass_at_k, paired_gain, pass_at_k


@pytest.mark.parametrize(("n", "c", "k"), [(5, 2, 1), (5, 2, 3), (6, 0, 2), (4, 4, 2), (7, 3, 7)])
def test_pass_at_k_counts_the_subsets_that_hold_a_pass(n: int, c: int, k: int):
    passed = [i < c for i in range(n)]
    subsets = list(itertools.combinations(passed, k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_k_needs_k_rollouts():
    with pytest.raises(ValueError, match="pass@3 needs at least 3 rollouts"):
        pass_at_k(2, 1, 3)


def test_an_interval_by_hand():
    estimate = estimate_mean([0.0, 1.0, 1.0, 1.0])
    half = 1.959964 * math.sqrt(0.25 / 4)
    assert estimate.mean == 0.75
    assert estimate.ci_low == pytest.approx(0.75 - half, abs=1e-6)
    assert estimate.ci_high == pytest.approx(0.75 + half, abs=1e-6)


def test_the_gain_is_paired_by_problem():
    before = {"a": (1, 0), "b": (1, 1), "c": (1, 0), "only": (1, 1)}
    after = {"a": (1, 1), "b": (1, 1), "c": (1, 0)}
    gain = paired_gain(before, after)
    assert gain.num_tasks == 3 and gain.mean == pytest.approx(1 / 3)
    assert estimate_pass_at_k(before, 1).mean == 0.5
    with pytest.raises(ValueError, match="share no problem"):
        paired_gain(before, {"z": (1, 1)})
