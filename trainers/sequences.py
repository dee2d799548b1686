"""An admitted batch as training sequences and flat arrays over its action tokens.

Everything a loss reads per token lies in flat tensors over the N action tokens of the batch, in
(batch position, sequence, position) order; sequences only say how to compute log-probabilities. A
minibatch is then a contiguous range of trajectories, of sequences and of action tokens at once.

Minibatches are contiguous slices in batch order, hence whole groups wherever the sizes allow.
Groups are numbered in dispatch order, so the oldest data is trained first, when pi_theta is nearest
to pi_old, and the freshest takes the extra lag of the later steps. Advantages come from the whole
batch, so a group cut by a slice keeps its baseline.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from tasks.lake import Batch, Lake, read_batch
from trainers.packing import TrainingSequence
from trainers.recorded_experts import RoutedLayers, recorded_experts
from trainers.truncation import Truncation


@dataclass(frozen=True)
class ActionSegments:
    """The action segments of a batch in flat order: one row each, all columns [A].

    `starts` [A + 1]: segment a holds action tokens starts[a] to starts[a + 1]. `trajectory` is the
    batch position.
    """

    trajectory: np.ndarray
    sequence_index: np.ndarray
    segment_index: np.ndarray
    weight_version: np.ndarray
    kv_version_min: np.ndarray
    starts: np.ndarray

    def per_token(self, values: np.ndarray) -> Tensor:
        """One value a segment, repeated for each of its tokens: [A] to [N]."""
        return torch.from_numpy(np.repeat(values, np.diff(self.starts)))


@dataclass(frozen=True)
class TrainingBatch:
    """B trajectories, their sequences, and N action tokens.

    `rewards` [B] f64, `group_ids` [B]; `sequence_trajectory` [number of sequences] and
    `action_sequence` [N] index trajectories and sequences; `rollout_logprobs` and `temperatures`
    [N] f32, `truncation` [N]; `rows` [B] are those of the `trajectories` table.
    """

    batch: int
    admission: int
    trajectory_ids: list[str]
    rewards: Tensor
    group_ids: Tensor
    sequences: list[TrainingSequence]
    sequence_trajectory: Tensor
    action_sequence: Tensor
    rollout_logprobs: Tensor
    temperatures: Tensor
    truncation: Truncation
    segments: ActionSegments
    rows: pa.Table

    @property
    def num_actions(self) -> int:
        return len(self.rollout_logprobs)

    @property
    def action_trajectory(self) -> Tensor:
        """Batch position of each action token, [N]."""
        return self.sequence_trajectory[self.action_sequence]


@dataclass(frozen=True)
class Minibatch:
    """Half-open ranges of one optimizer step in a batch; `number` counts from 1."""

    number: int
    trajectories: slice
    sequences: slice
    actions: slice


def minibatches(batch: TrainingBatch, count: int) -> list[Minibatch]:
    """`count` contiguous slices of equally many trajectories."""
    num_trajectories = len(batch.trajectory_ids)
    assert num_trajectories % count == 0, f"{num_trajectories} trajectories in {count} minibatches"
    size = num_trajectories // count
    bounds = torch.arange(count + 1) * size
    sequence_bounds = torch.searchsorted(batch.sequence_trajectory, bounds).tolist()
    action_bounds = torch.searchsorted(batch.action_trajectory, bounds).tolist()
    return [
        Minibatch(
            number=m + 1,
            trajectories=slice(m * size, (m + 1) * size),
            sequences=slice(sequence_bounds[m], sequence_bounds[m + 1]),
            actions=slice(action_bounds[m], action_bounds[m + 1]),
        )
        for m in range(count)
    ]


def lag_steps(versions: Tensor, batch: int, minibatch: int, num_minibatches: int) -> Tensor:
    """Optimizer steps between sampling and training, M (b - 1 - v) + m - 1; same shape as
    `versions`."""
    return num_minibatches * (batch - 1 - versions) + minibatch - 1


def read_training_batch(
    lake: Lake, run_id: str, admission: int, layers: RoutedLayers | None
) -> TrainingBatch:
    """An admitted batch; with `layers`, their recorded experts beside its tokens.

    Raises `ValueError` as `read_batch` and `training_batch`.
    """
    batch = read_batch(lake, run_id, admission, with_routing=layers is not None)
    return training_batch(batch, layers)


def training_batch(batch: Batch, layers: RoutedLayers | None = None) -> TrainingBatch:
    """Sequences and flat arrays of an admitted batch.

    Raises:
        ValueError: a trajectory has no reward or no tokens, segments do not join up, there are
            not as many log-probabilities as action tokens, or routing does not fit tokens and
            `layers`; gate 1 refuses such rows.
    """
    trajectory_ids = batch.trajectories.column("trajectory_id").to_pylist()
    rewards = batch.trajectories.column("reward")
    if rewards.null_count:
        raise _damaged(batch, "a trajectory without a reward")
    rows = _segment_columns(batch, trajectory_ids)
    lengths, is_action = rows["length"], rows["is_action"]
    opens = np.ones(len(lengths), dtype=bool)
    opens[1:] = (np.diff(rows["trajectory"]) != 0) | (np.diff(rows["sequence_index"]) != 0)
    sequence_of_row = np.cumsum(opens) - 1
    ends = np.cumsum(lengths)
    first_token = (ends - lengths)[opens]
    if not np.array_equal(rows["start_position"], ends - lengths - first_token[sequence_of_row]):
        raise _damaged(batch, "segments that do not join up")
    sequence_trajectory = torch.from_numpy(rows["trajectory"][opens])
    if len(torch.unique(sequence_trajectory)) != len(trajectory_ids):
        raise _damaged(batch, "a trajectory without tokens")

    token_ids = torch.from_numpy(_flat(batch.segments, "token_ids", np.int64))
    action_mask = torch.from_numpy(np.repeat(is_action, lengths))
    sizes = np.diff(np.append(first_token, ends[-1])).tolist()
    action_sequence = torch.from_numpy(np.repeat(sequence_of_row, lengths))[action_mask]
    rollout_logprobs = torch.from_numpy(_flat(batch.segments, "rollout_logprobs", np.float32))
    if len(rollout_logprobs) != len(action_sequence):
        raise _damaged(batch, "more or fewer log-probabilities than action tokens")
    sampling = batch.trajectories.column("sampling").to_pylist()

    def as_sampled(parameter: str) -> Tensor:
        """A sampling parameter of each action token, [N]; a double is rounded to f32."""
        values = torch.tensor([row[parameter] for row in sampling])
        return values[sequence_trajectory[action_sequence]]

    return TrainingBatch(
        batch=batch.batch,
        admission=batch.admission,
        trajectory_ids=trajectory_ids,
        rewards=torch.tensor(rewards.to_pylist(), dtype=torch.float64),
        group_ids=torch.tensor(batch.trajectories.column("group_id").to_pylist()),
        sequences=[
            TrainingSequence(*parts)
            for parts in zip(
                token_ids.split(sizes),
                action_mask.split(sizes),
                _experts(batch, layers, sizes),
                strict=True,
            )
        ],
        sequence_trajectory=sequence_trajectory,
        action_sequence=action_sequence,
        rollout_logprobs=rollout_logprobs,
        temperatures=as_sampled("temperature"),
        truncation=Truncation(as_sampled("top_k"), as_sampled("top_p"), as_sampled("min_p")),
        segments=ActionSegments(
            trajectory=rows["trajectory"][is_action],
            sequence_index=rows["sequence_index"][is_action],
            segment_index=rows["segment_index"][is_action],
            weight_version=_integers(batch.segments, "weight_version")[is_action],
            kv_version_min=_integers(batch.segments, "kv_version_min")[is_action],
            starts=np.concatenate([[0], np.cumsum(lengths[is_action])]),
        ),
        rows=batch.trajectories,
    )


def _experts(
    batch: Batch, layers: RoutedLayers | None, sizes: list[int]
) -> Sequence[Tensor | None]:
    """Recorded experts of each sequence, None where the batch has none at all."""
    if layers is None or batch.routing is None or batch.routing.num_rows == 0:
        return [None] * len(sizes)
    try:
        return recorded_experts(batch.routing, batch.segments, layers).split(sizes)
    except ValueError as error:
        raise _damaged(batch, str(error)) from error


def _segment_columns(batch: Batch, trajectory_ids: list[str]) -> dict[str, np.ndarray]:
    segments = batch.segments
    position = {name: index for index, name in enumerate(trajectory_ids)}
    return {
        "trajectory": np.array([position[t] for t in segments.column("trajectory_id").to_pylist()]),
        "length": _lists(segments, "token_ids").value_lengths().to_numpy().astype(np.int64),
        "is_action": np.array(segments.column("kind").to_pylist()) == "action",
        **{
            name: _integers(segments, name)
            for name in ("sequence_index", "segment_index", "start_position")
        },
    }


def _integers(table: pa.Table, column: str) -> np.ndarray:
    """A column as int64, -1 where it is NULL."""
    return table.column(column).cast(pa.int64()).fill_null(-1).to_numpy()


def _lists(table: pa.Table, column: str) -> pa.ListArray:
    return table.column(column).combine_chunks()


def _flat(table: pa.Table, column: str, dtype: type) -> np.ndarray:
    """All values of a list column in row order; NULL lists add none."""
    return _lists(table, column).flatten().to_numpy(zero_copy_only=False).astype(dtype)


def _damaged(batch: Batch, what: str) -> ValueError:
    return ValueError(
        f"batch {batch.batch} (admission {batch.admission}) holds {what}; gate 1 refuses such "
        "rows, so restore the lake from a backup or roll the run back to before this admission."
    )
