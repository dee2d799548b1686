"""The learning rate of a step, against numbers worked out by hand."""

from itertools import pairwise
from typing import Any

import pytest

from schemas.trainer_section import TrainerSection
from trainers.schedules import learning_rate


def rates(num_steps: int, **options: Any) -> list[float]:
    trainer = TrainerSection(learning_rate=8.0, **options)
    return [learning_rate(step, trainer) for step in range(1, num_steps + 1)]


def test_without_options_every_step_has_the_very_rate_given():
    trainer = TrainerSection(learning_rate=3e-4)
    assert {learning_rate(step, trainer) for step in (1, 2, 1000)} == {3e-4}


def test_warmup_rises_to_the_peak():
    assert rates(6, warmup_steps=4) == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]
    assert rates(2, warmup_steps=1) == [8.0, 8.0]


def test_linear_falls_by_the_same_amount_each_step():
    decay = {"learning_rate_schedule": "linear", "decay_steps": 4}
    assert rates(7, **decay) == [8.0, 6.0, 4.0, 2.0, 0.0, 0.0, 0.0]
    floor = {**decay, "min_learning_rate": 4.0, "warmup_steps": 2}
    assert rates(8, **floor) == [4.0, 8.0, 8.0, 7.0, 6.0, 5.0, 4.0, 4.0]


def test_cosine_is_half_a_period():
    decay = {"learning_rate_schedule": "cosine", "decay_steps": 6, "min_learning_rate": 2.0}
    # cos of 0, 30, 60, 90, 120, 150 and 180 degrees, around 5 with amplitude 3.
    half_root = 0.8660254037844386
    cosines = [1.0, half_root, 0.5, 0.0, -0.5, -half_root, -1.0, -1.0]
    assert rates(8, **decay) == pytest.approx([5 + 3 * c for c in cosines], rel=1e-14)
    warm = rates(11, **decay, warmup_steps=3)
    assert warm[:3] == pytest.approx([8 / 3, 16 / 3, 8.0], rel=1e-15)
    assert warm[3:] == rates(8, **decay)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_rate_never_leaves_its_bounds(schedule: str):
    found = rates(
        500, learning_rate_schedule=schedule, decay_steps=313, min_learning_rate=0.1, warmup_steps=7
    )
    assert all(0.1 <= rate <= 8.0 for rate in found)
    assert found[6] == found[7] == 8.0 and found[320] == found[-1] == 0.1
    assert all(one >= other for one, other in pairwise(found[7:]))
