"""Recorded against replayed values, with differences placed by hand."""

import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch

from schemas.tables import TABLES
from tasks.lake import Batch
from trainers.comparison import (
    STEP_VALUES,
    Difference,
    score_differences,
    step_differences,
    tensor_difference,
)
from trainers.sequences import TrainingBatch, minibatches, training_batch

SEGMENTS = {"a": (2, 1), "b": (3,)}
"""Action segments of each trajectory, by their tokens; each follows a prompt of one token."""


@pytest.fixture
def batch() -> TrainingBatch:
    trajectories, segments = [], []
    for group, (name, lengths) in enumerate(SEGMENTS.items()):
        sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
        row = {"trajectory_id": name, "group_id": group, "reward": 1.0, "sampling": sampling}
        trajectories.append(row)
        start = 0
        for number, length in enumerate(n for action in lengths for n in (1, action)):
            is_action = number % 2 == 1
            segments.append(
                {
                    "trajectory_id": name,
                    "sequence_index": 0,
                    "segment_index": number,
                    "start_position": start,
                    "kind": "action" if is_action else "prompt",
                    "token_ids": [1] * length,
                    "rollout_logprobs": [-1.0] * length if is_action else None,
                }
            )
            start += length
    return training_batch(
        Batch(
            1,
            4,
            pa.Table.from_pylist(trajectories, TABLES["trajectories"].own_schema),
            pa.Table.from_pylist(segments, TABLES["segments"].own_schema),
        )
    )


def scores(own: list[list[float] | None] | None = None, **changed: list[list[float]]) -> pa.Table:
    values = [[-1.0, -2.0], [-3.0], [-4.0, -5.0, 0.0]]
    columns = {
        "old_logprobs": values,
        "entropies": values,
        "own_version_logprobs": own or [None, [-3.0], None],
        "reference_logprobs": [None] * 3,
        "correction_weights": [[1.0] * len(row) for row in values],
        "included": [[True] * len(row) for row in values],
    }
    schema = pa.schema([TABLES["scores"].own_schema.field(name) for name in columns])
    return pa.table(columns | changed, schema)


def differences(batch: TrainingBatch, recorded: pa.Table) -> list[list[Difference]]:
    """Of each of the two minibatches."""
    return [
        list(score_differences(batch, minibatch, recorded, scores()))
        for minibatch in minibatches(batch, 2)
    ]


def test_equal_scores_have_no_difference(batch: TrainingBatch):
    assert differences(batch, scores()) == [[], []]


def test_a_changed_score_is_found_in_its_minibatch(batch: TrainingBatch):
    recorded = scores(old_logprobs=[[-1.0, -2.0], [-3.5], [-4.0, -5.25, 0.0]])
    where = "trajectory {}, segment {}, token {}: recorded {}, replayed {}"
    assert differences(batch, recorded) == [
        [Difference("old_logprobs", 1, 3, 0.5, where.format("a", 3, 0, -3.5, -3.0))],
        [Difference("old_logprobs", 1, 3, 0.25, where.format("b", 1, 1, -5.25, -5.0))],
    ]


def test_one_bit_counts_and_so_does_the_sign_of_zero(batch: TrainingBatch):
    nearest = float(np.nextafter(np.float32(-4.0), np.float32(0.0)))
    recorded = scores(entropies=[[-1.0, -2.0], [-3.0], [nearest, -5.0, -0.0]])
    ((), (found,)) = differences(batch, recorded)
    assert (found.quantity, found.num_differing, found.largest) == ("entropies", 2, 2.0**-22)


def test_the_first_computed_comes_first(batch: TrainingBatch):
    recorded = scores(
        old_logprobs=[[math.nan, -2.0], [-3.0], [-4.0, -5.0, 0.0]],
        included=[[False, True], [True], [True] * 3],
    )
    (found, ()) = differences(batch, recorded)
    assert [(f.quantity, f.largest) for f in found] == [
        ("old_logprobs", math.inf),
        ("included", 1.0),
    ]


def test_lists_of_another_length_differ_as_a_whole(batch: TrainingBatch):
    recorded = scores(own=[None, None, [-4.0, -5.0, 0.0]])
    where = "trajectory {}, segment {}"
    assert differences(batch, recorded) == [
        [Difference("own_version_logprobs", 1, 2, math.inf, where.format("a", 3))],
        [Difference("own_version_logprobs", 1, 1, math.inf, where.format("b", 1))],
    ]


def test_steps_compare_what_was_recorded():
    row = dict.fromkeys(STEP_VALUES, 2.0) | {"metrics": [("x", 1.0)], "train_s": 1.0}
    assert list(step_differences(row, row | {"train_s": 9.0})) == []
    again = row | {"loss": 2.5, "metrics": [("x", 4.0), ("new", 1.0)]}
    assert list(step_differences(row, again)) == [
        Difference("loss", 1, 1, 0.5, "recorded 2.0, replayed 2.5"),
        Difference("x", 1, 1, 3.0, "recorded 1.0, replayed 4.0"),
    ]
    assert list(step_differences(row | {"loss": None, "metrics": None}, again)) == []


def test_a_tensor_differs_by_values_and_by_distance():
    recorded = torch.tensor([3.0, 4.0, 0.0, 0.0], dtype=torch.bfloat16)
    replayed = torch.tensor([3.0, 3.0, -0.0, 2.0], dtype=torch.bfloat16)
    found = tensor_difference("w", recorded, replayed)
    # Distances 0, 1, 0 (but for its sign) and 2; |recorded| is 5.
    assert (found.num_differing, found.num_values, found.largest) == (3, 4, 2.0)
    assert found.square == 5.0 and found.relative_l2 == pytest.approx(math.sqrt(5) / 5)
    other_shape = tensor_difference("w", recorded[:2], replayed)
    assert other_shape == replace(found, num_differing=4, largest=math.inf, relative_l2=math.inf,
                                  square=math.inf)  # fmt: skip
