"""Admission: how far sampling may run ahead, and which finished groups make the next batch.

Two pure functions, used by the controller and by anything that simulates it. Admission bounds how
far sampling runs ahead, not how stale a straggler gets; `max_lag` bounds that, by dropping.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal


def may_start(
    *,
    num_started: int,
    num_dropped: int,
    batches_trained: int,
    k: int,
    batch_trajectories: int,
    last_batch: int,
) -> bool:
    """Whether another group may be dispatched.

    num_started - num_dropped < (batches_trained + k + 1) B, in trajectories, with held-out ones
    left out of both counts; k = 0 is synchronous RL. Nothing is started beyond what batches up
    to `last_batch` can train.
    """
    horizon = min(batches_trained + k + 1, last_batch)
    return num_started - num_dropped < horizon * batch_trajectories


@dataclass(frozen=True)
class FinishedGroup:
    """A whole usable group that waits for a batch. `position` counts up as groups are recorded."""

    group_id: int
    position: int
    weight_version_min: int


@dataclass(frozen=True)
class Selection:
    """`admitted` groups by id, or None while too few wait; `stale` ones are dropped for good."""

    admitted: tuple[int, ...] | None
    stale: tuple[int, ...]


def select_groups(
    finished: Iterable[FinishedGroup],
    in_flight: Collection[int],
    *,
    batch: int,
    num_groups: int,
    max_lag: int,
    order: Literal["finish", "start"],
) -> Selection:
    """The groups of batch `batch`.

    A group's lag is batch - 1 - its oldest version; above `max_lag` it is stale. With order
    "finish" the first recorded are taken; with "start" the first dispatched, so a group still in
    flight holds back all later ones and the batch is not biased towards short rollouts.
    """
    fresh, stale = [], []
    for group in finished:
        (stale if batch - 1 - group.weight_version_min > max_lag else fresh).append(group)
    if order == "start":
        first_in_flight = min(in_flight, default=None)
        fresh = [g for g in fresh if first_in_flight is None or g.group_id < first_in_flight]
        fresh.sort(key=lambda group: group.group_id)
    else:
        fresh.sort(key=lambda group: (group.position, group.group_id))
    taken = fresh[:num_groups]
    admitted = tuple(sorted(g.group_id for g in taken)) if len(taken) == num_groups else None
    return Selection(admitted, tuple(sorted(group.group_id for group in stale)))
