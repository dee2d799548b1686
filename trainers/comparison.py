"""What came out otherwise when a batch was trained again: recorded against replayed values.

Values are compared as bits, so a changed sign of zero counts and a NaN equals itself. Everything
is a pure function over arrays, in the order in which the trainer computes: scores, steps, weights.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from trainers.sequences import Minibatch, TrainingBatch

SCORES = (
    "old_logprobs",
    "entropies",
    "own_version_logprobs",
    "reference_logprobs",
    "correction_weights",
    "included",
)
"""Columns of `scores` that can be derived again, first computed first."""

STEP_VALUES = (
    "num_trajectories",
    "num_sequences",
    "num_tokens",
    "num_action_tokens",
    "max_w",
    "mean_lag_steps",
    "reward_mean",
    "entropy_mean",
    "learning_rate",
    "loss",
    "gradient_norm",
)
"""Columns of `steps` that can be derived again, beside `metrics`."""


@dataclass(frozen=True)
class Difference:
    """`num_differing` of the `num_values` values of a quantity are not the recorded ones.

    `largest` is the largest distance, infinite where values are missing or no numbers; `where` says
    where the first one stands.
    """

    quantity: str
    num_differing: int
    num_values: int
    largest: float
    where: str


@dataclass(frozen=True)
class TensorDifference:
    """The same of a tensor. `relative_l2` is |replayed - recorded| / |recorded|, `square` the
    numerator's square; infinite where the shapes differ."""

    tensor: str
    num_differing: int
    num_values: int
    largest: float
    relative_l2: float
    square: float


def score_differences(
    batch: TrainingBatch, minibatch: Minibatch, recorded: pa.Table, replayed: pa.Table
) -> Iterator[Difference]:
    """Columns of `scores` that differ in the rows of a minibatch; both tables have one row for each
    action segment of the batch."""
    trajectories = batch.segments.trajectory
    bounds = [minibatch.trajectories.start, minibatch.trajectories.stop]
    first, end = np.searchsorted(trajectories, bounds).tolist()
    for name in SCORES:
        then, now = (
            table.column(name).combine_chunks().slice(first, end - first)
            for table in (recorded, replayed)
        )
        lengths, expected = (
            np.asarray(lists.value_lengths().fill_null(-1)) for lists in (then, now)
        )
        unequal = np.flatnonzero(lengths != expected)
        if len(unequal):
            segment = first + int(unequal[0])
            yield Difference(name, len(unequal), end - first, math.inf, _segment(batch, segment))
            continue
        values, again = (np.asarray(lists.flatten()) for lists in (then, now))
        differs = _bits(values) != _bits(again)
        if differs.any():
            index = int(np.flatnonzero(differs)[0])
            ends = np.cumsum(np.maximum(lengths, 0))
            segment = int(np.searchsorted(ends, index, side="right"))
            place = index - int(ends[segment] - lengths[segment])
            yield Difference(
                name,
                int(differs.sum()),
                len(values),
                _largest(values[differs], again[differs]),
                f"{_segment(batch, first + segment)}, token {place}: recorded {values[index]!s}, "
                f"replayed {again[index]!s}",
            )


def step_differences(
    recorded: Mapping[str, Any], replayed: Mapping[str, Any]
) -> Iterator[Difference]:
    """Values of a `steps` row that differ."""
    now = _step_values(replayed)
    for name, value in _step_values(recorded).items():
        # An older Rollhouse may not have recorded it.
        if value is None:
            continue
        then, again = np.array([value], float), np.array([now.get(name)], float)
        if _bits(then) != _bits(again):
            where = f"recorded {value}, replayed {now.get(name)}"
            yield Difference(name, 1, 1, _largest(then, again), where)


def _step_values(row: Mapping[str, Any]) -> dict[str, float | None]:
    return {name: row[name] for name in STEP_VALUES} | dict(row["metrics"] or ())


def tensor_difference(name: str, recorded: Tensor, replayed: Tensor) -> TensorDifference:
    """How far a bf16 tensor is from the recorded one."""
    count = replayed.numel()
    if recorded.shape != replayed.shape:
        return TensorDifference(name, count, count, math.inf, math.inf, math.inf)
    differs = recorded.view(torch.int16) != replayed.view(torch.int16)
    gap = replayed.double() - recorded.double()
    square = float(gap.square().sum())
    norm = float(recorded.double().square().sum())
    return TensorDifference(
        name,
        int(differs.sum()),
        count,
        float(gap.abs().max()),
        math.sqrt(square / norm) if norm else math.inf,
        square,
    )


def _segment(batch: TrainingBatch, segment: int) -> str:
    segments = batch.segments
    trajectory = batch.trajectory_ids[segments.trajectory[segment]]
    return f"trajectory {trajectory}, segment {segments.segment_index[segment]}"


def _bits(values: np.ndarray) -> np.ndarray:
    return values.view(np.dtype(f"u{values.dtype.itemsize}"))


def _largest(recorded: np.ndarray, replayed: np.ndarray) -> float:
    gap = np.abs(recorded.astype(float) - replayed.astype(float))
    return float(np.where(np.isnan(gap), math.inf, gap).max())
