"""Row 3: what a commit costs late in a run, against early in one.

A unit is ten commits, one period of the log's checkpoints, so that both sides hold one. The young
side is a lake made anew for each pair; the old one has 1,000 commits behind it: all in one cycle
that no maintenance has touched, or in cycles of 100, compacted as `rollhouse maintain` does.
delta-rs 1.6 goes through the list of a table's current files several times a commit.
"""

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pyarrow as pa

from schemas.config import MaintenanceSection
from tasks.lake.lake import Lake
from tasks.lake.lease import take_lease
from tasks.maintain import maintain_run
from tests.benchmarks.lake.measure import Pairs, by_turns, verdict

NUM_PAIRS = 9
YOUNG, OLD, PERIOD, CYCLE = 10, 1000, 10, 100

Append = Callable[..., list[str]]

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
    take_lease(ledger)
    return lake


def _append_ledger(lake: Lake, times: int, cycle: int = 0) -> list[str]:
    ledger = lake.ledger("run")
    for _ in range(times):
        ledger.append("lease_renewed", lease=1, cycle=cycle)
    return []


def _append_rows(lake: Lake, times: int, cycle: int = 0) -> list[str]:
    return [
        lake.append("quarantine", _QUARANTINED, run_id="run", cycle=cycle, lease=1)
        for _ in range(times)
    ]


def _live_through(lake: Lake, append: Append) -> None:
    """`OLD` commits in cycles, each of which is maintained once it is closed."""
    ledger = lake.ledger("run")
    for cycle in range(OLD // CYCLE):
        ledger.append("cycle_opened", lease=1, cycle=cycle)
        written = append(lake, CYCLE, cycle)
        ledger.append("cycle_closed", lease=1, cycle=cycle, write_ids=written)
        maintain_run(lake, "run", MaintenanceSection(), now=datetime.now(UTC))
    ledger.append("cycle_opened", lease=1, cycle=OLD // CYCLE)


def _late_and_early(append: Append, old: Lake, folder: Path) -> Pairs:
    pairs = []
    for number in range(NUM_PAIRS):
        young = _open_run(folder / f"young-{number}")
        append(young, YOUNG)
        pairs.append(
            by_turns(
                partial(append, old, PERIOD, OLD // CYCLE),
                partial(append, young, PERIOD),
                num_pairs=1,
                warm_up=False,
            )
        )
    return Pairs(tuple(p.subject[0] for p in pairs), tuple(p.baseline[0] for p in pairs))


def lines(folder: Path) -> Iterator[str]:
    for name, append in (("of rows", _append_rows), ("to the ledger", _append_ledger)):
        for kept in ("never maintained", "maintained"):
            work = folder / f"{append.__name__}-{kept}"
            old = _open_run(work / "old")
            if kept == "maintained":
                _live_through(old, append)
            else:
                append(old, OLD, OLD // CYCLE)
            pairs = _late_and_early(append, old, work)
            late, early = (ms / PERIOD for ms in pairs.medians_ms())
            yield verdict(
                f"commit {name}: after {OLD}, {kept} / after {YOUNG}",
                pairs.slowdown(),
                "<=",
                1.5,
                f"{late:.1f} against {early:.1f} ms",
            )
    started = time.perf_counter()
    old = folder / f"{_append_ledger.__name__}-never maintained" / "old"
    entries = Lake.open(old).ledger("run").entries
    yield (
        f"context: opening a lake cold and reading a ledger of {len(entries)} rows takes "
        f"{(time.perf_counter() - started) * 1e3:.0f} ms"
    )
