"""Row 3: what a commit costs late in a run, against early in one.

A unit is ten commits, one period of the log's checkpoints, so that both sides hold one. The young
side is a lake made anew for each pair; the old one has 1,000 commits behind it.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa

from tasks.lake.lake import Lake
from tests.benchmarks.lake.measure import Pairs, by_turns, verdict

NUM_PAIRS = 9
YOUNG, OLD, PERIOD = 10, 1000, 10

_QUARANTINED = pa.table(
    {
        "trajectory_id": ["00000000-000-0"],
        "group_id": pa.array([0], pa.int64()),
        "rule": ["failed"],
        "observed": pa.array([None], pa.float64()),
        "action": ["drop"],
        "reason": ["engine lost"],
    }
)


def _open_run(root: Path) -> Lake:
    lake = Lake.create(root)
    ledger = lake.ledger("run")
    ledger.append("run_created", lease=0)
    ledger.append("lease_taken", lease=1)
    return lake


def _append_ledger(lake: Lake, times: int) -> None:
    ledger = lake.ledger("run")
    for _ in range(times):
        ledger.append("lease_renewed", lease=1)


def _append_rows(lake: Lake, times: int) -> None:
    for _ in range(times):
        lake.append("quarantine", _QUARANTINED, run_id="run", cycle=0, lease=1)


def _late_and_early(append: Callable[[Lake, int], None], old: Lake, folder: Path) -> Pairs:
    pairs = []
    for number in range(NUM_PAIRS):
        young = _open_run(folder / f"young-{number}")
        append(young, YOUNG)
        pairs.append(
            by_turns(
                partial(append, old, PERIOD),
                partial(append, young, PERIOD),
                num_pairs=1,
                warm_up=False,
            )
        )
    return Pairs(tuple(p.subject[0] for p in pairs), tuple(p.baseline[0] for p in pairs))


def lines(folder: Path) -> Iterator[str]:
    for name, append in (("of rows", _append_rows), ("to the ledger", _append_ledger)):
        work = folder / append.__name__
        old = _open_run(work / "old")
        append(old, OLD)
        pairs = _late_and_early(append, old, work)
        late, early = (ms / PERIOD for ms in pairs.medians_ms())
        yield verdict(
            f"commit {name}: after {OLD} / after {YOUNG}",
            pairs.slowdown(),
            "<=",
            1.5,
            f"{late:.1f} against {early:.1f} ms",
        )
    started = time.perf_counter()
    entries = Lake.open(folder / _append_ledger.__name__ / "old").ledger("run").entries
    yield (
        f"context: opening a lake cold and reading a ledger of {len(entries)} rows takes "
        f"{(time.perf_counter() - started) * 1e3:.0f} ms"
    )
