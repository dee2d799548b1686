"""Admission, against schedules worked out by hand and a simulation with the same function."""

import heapq

import pytest

from tasks.admit import FinishedGroup, may_start, select_groups


def starts(started: int, dropped: int, trained: int, k: int, last: int = 99) -> bool:
    return may_start(
        num_started=started,
        num_dropped=dropped,
        batches_trained=trained,
        k=k,
        batch_trajectories=8,
        last_batch=last,
    )


def test_k_0_is_synchronous():
    assert starts(0, 0, 0, 0) and starts(4, 0, 0, 0)
    assert not starts(8, 0, 0, 0)
    assert starts(8, 0, 1, 0)


def test_k_batches_run_ahead_and_no_more():
    assert starts(23, 0, 0, 2) and not starts(24, 0, 0, 2)


def test_what_was_dropped_makes_room():
    assert starts(8, 4, 0, 0) and not starts(12, 4, 0, 0)


def test_nothing_is_started_that_no_batch_could_train():
    assert not starts(8, 0, 0, 2, last=1)
    assert starts(8, 4, 0, 2, last=1)


def simulate(lengths: list[float], lanes: int, batch: int, k: int, train: float) -> float:
    """Time to train all of `lengths`, sampled on `lanes` in order: batches of the first finished.

    A lane that admission holds back waits until the trainer is done with its batch.
    """
    now, started, trained, ready, waiting = 0.0, 0, 0, 0, list(lengths)
    running: list[float] = []
    trainer_until: float | None = None
    num_batches = len(lengths) // batch
    while trained < num_batches:
        while (
            waiting
            and len(running) < lanes
            and may_start(
                num_started=started,
                num_dropped=0,
                batches_trained=trained,
                k=k,
                batch_trajectories=batch,
                last_batch=num_batches,
            )
        ):
            heapq.heappush(running, now + waiting.pop(0))
            started += 1
        if trainer_until is None and ready >= batch:
            ready -= batch
            trainer_until = now + train
        events = [*running[:1], *([trainer_until] if trainer_until is not None else [])]
        now = min(events)
        while running and running[0] <= now:
            heapq.heappop(running)
            ready += 1
        if trainer_until is not None and trainer_until <= now:
            trained, trainer_until = trained + 1, None
    return now


def test_two_lanes_by_hand():
    # Lengths 1 and 3, then 1 and 1, training 1: synchronous 3 + 1 + 1 + 1; with k = 1 the second
    # pair is sampled on the free lane and trained at 3, right after the first at 2.
    assert simulate([1, 3, 1, 1], lanes=2, batch=2, k=0, train=1) == 6
    assert simulate([1, 3, 1, 1], lanes=2, batch=2, k=1, train=1) == 4


def group(number: int, position: int, version: int) -> FinishedGroup:
    return FinishedGroup(number, position, version)


def select(groups, in_flight=(), *, batch=4, num=2, lag=1, order="finish"):
    return select_groups(groups, in_flight, batch=batch, num_groups=num, max_lag=lag, order=order)


def test_the_first_finished_are_taken_and_frozen_in_group_order():
    groups = [group(9, 1, 3), group(2, 2, 3), group(5, 1, 3)]
    assert select(groups).admitted == (5, 9)


def test_too_few_groups_admit_nothing():
    assert select([group(1, 1, 3)]).admitted is None


def test_what_is_older_than_max_lag_is_dropped():
    groups = [group(1, 1, 1), group(2, 1, 2), group(3, 1, 3)]
    selection = select(groups)
    assert selection.stale == (1,) and selection.admitted == (2, 3)


def test_dispatch_order_waits_for_a_straggler():
    groups = [group(2, 1, 3), group(3, 1, 3), group(1, 2, 3)]
    assert select(groups, in_flight={0}, order="start").admitted is None
    assert select(groups, in_flight={3}, order="start").admitted == (1, 2)
    assert select(groups, order="start").admitted == (1, 2)


@pytest.mark.parametrize("k", [0, 1, 2])
def test_oldest_admissible_version_is_batch_minus_1_minus_max_lag(k: int):
    groups = [group(i, i, version) for i, version in enumerate(range(5))]
    selection = select(groups, batch=5, num=1, lag=k)
    assert selection.admitted == (4 - k,)
