"""From lake rows to training sequences and flat arrays, on two turns, two sequences and a stale
segment."""

import pyarrow as pa
import pytest
import torch

from schemas.tables import TABLES
from tasks.lake import Batch
from trainers.sequences import lag_steps, minibatches, training_batch

SEGMENTS = [
    # trajectory, sequence, segment, start, kind, version, kv_version, token_ids, logprobs
    ("a", 0, 0, 0, "prompt", None, None, [1, 2], None),
    ("a", 0, 1, 2, "action", 3, 3, [3], [-0.1]),
    ("a", 0, 2, 3, "action", 4, 3, [4, 5], [-0.2, -0.3]),
    ("a", 0, 3, 5, "observation", None, None, [6], None),
    ("a", 1, 0, 0, "summary", None, None, [7], None),
    ("a", 1, 1, 1, "action", 4, 4, [8], [-0.4]),
    ("b", 0, 0, 0, "prompt", None, None, [9], None),
    ("b", 0, 1, 1, "action", 4, 4, [10, 11], [-0.5, -0.6]),
]
SAMPLING = (
    {"temperature": 0.5, "top_p": 1.0, "top_k": 0, "min_p": 0.0},
    {"temperature": 2.0, "top_p": 0.75, "top_k": 7, "min_p": 0.25},
)
COLUMNS = (
    *("trajectory_id", "sequence_index", "segment_index", "start_position", "kind"),
    *("weight_version", "kv_version_min", "token_ids", "rollout_logprobs"),
)


def _batch(segments=SEGMENTS, rewards=(1.0, 0.25)):
    trajectories = [
        {
            "trajectory_id": name,
            "group_id": 7,
            "reward": reward,
            "sampling": sampling,
        }
        for name, reward, sampling in zip("ab", rewards, SAMPLING, strict=True)
    ]
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in segments]
    return Batch(
        batch=5,
        admission=40,
        trajectories=pa.Table.from_pylist(trajectories, TABLES["trajectories"].own_schema),
        segments=pa.Table.from_pylist(rows, TABLES["segments"].own_schema),
    )


def test_sequences_and_flat_arrays_by_hand():
    batch = training_batch(_batch())
    assert (batch.batch, batch.admission, batch.trajectory_ids) == (5, 40, ["a", "b"])
    assert [s.token_ids.tolist() for s in batch.sequences] == [
        [1, 2, 3, 4, 5, 6],
        [7, 8],
        [9, 10, 11],
    ]
    assert [s.action_mask.int().tolist() for s in batch.sequences] == [
        [0, 0, 1, 1, 1, 0],
        [0, 1],
        [0, 1, 1],
    ]
    assert batch.rewards.tolist() == [1.0, 0.25]
    assert batch.sequence_trajectory.tolist() == [0, 0, 1]
    assert batch.action_sequence.tolist() == [0, 0, 0, 1, 2, 2]
    assert batch.action_trajectory.tolist() == [0, 0, 0, 0, 1, 1]
    assert batch.rollout_logprobs.tolist() == pytest.approx([-0.1, -0.2, -0.3, -0.4, -0.5, -0.6])
    assert batch.temperatures.tolist() == [0.5, 0.5, 0.5, 0.5, 2.0, 2.0]
    assert batch.truncation.top_p.tolist() == [1.0, 1.0, 1.0, 1.0, 0.75, 0.75]
    assert batch.truncation.top_k.tolist() == [0, 0, 0, 0, 7, 7]
    assert batch.truncation.min_p.tolist() == [0.0, 0.0, 0.0, 0.0, 0.25, 0.25]


def test_action_segments_keep_their_versions():
    segments = training_batch(_batch()).segments
    assert segments.starts.tolist() == [0, 1, 3, 4, 6]
    assert segments.trajectory.tolist() == [0, 0, 0, 1]
    assert segments.sequence_index.tolist() == [0, 0, 1, 0]
    assert segments.segment_index.tolist() == [1, 2, 1, 1]
    assert segments.kv_version_min.tolist() == [3, 3, 4, 4]
    versions = segments.per_token(segments.weight_version)
    assert versions.tolist() == [3, 4, 4, 4, 4, 4]
    # M (b - 1 - v) + m - 1 with M = 2, b = 5, m = 2.
    assert lag_steps(versions, 5, 2, 2).tolist() == [3, 1, 1, 1, 1, 1]


def test_minibatches_are_contiguous_in_batch_order():
    batch = training_batch(_batch())
    first, second = minibatches(batch, 2)
    assert (first.number, second.number) == (1, 2)
    assert (first.trajectories, second.trajectories) == (slice(0, 1), slice(1, 2))
    assert (first.sequences, second.sequences) == (slice(0, 2), slice(2, 3))
    assert (first.actions, second.actions) == (slice(0, 4), slice(4, 6))
    (whole,) = minibatches(batch, 1)
    assert whole.actions == slice(0, 6)


@pytest.mark.parametrize(
    ("segments", "rewards", "message"),
    [
        (SEGMENTS, (None, 1.0), "a trajectory without a reward"),
        (SEGMENTS[:6], (1.0, 1.0), "a trajectory without tokens"),
        ([SEGMENTS[0], *SEGMENTS[2:]], (1.0, 1.0), "segments that do not join up"),
        (
            [*SEGMENTS[:7], (*SEGMENTS[7][:8], [-0.5])],
            (1.0, 1.0),
            "more or fewer log-probabilities than action tokens",
        ),
    ],
)
def test_damaged_rows_are_refused(segments, rewards, message):
    with pytest.raises(ValueError, match=rf"batch 5 \(admission 40\) holds {message}"):
        training_batch(_batch(segments, rewards))


def test_batch_arrays_index_the_right_tokens():
    batch = training_batch(_batch())
    ids = torch.cat([s.token_ids[s.action_mask] for s in batch.sequences])
    assert ids.tolist() == [3, 4, 5, 8, 10, 11]
