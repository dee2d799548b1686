"""What must be true of a lake whatever happened to it, and the proof that it is.

Each invariant is a function from a snapshot of one run to the faults it finds. Nothing is written.
"""

from collections.abc import Iterator
from pathlib import Path

from tasks.invariants import batches, ledger, store, tables
from tasks.invariants.finding import Finding
from tasks.invariants.snapshot import expired_writes, read_snapshot
from tasks.lake.lake import Lake
from tasks.storage import open_storage

__all__ = ["Finding", "check_lake", "expired_writes", "run_ids"]

INVARIANTS = (
    *tables.INVARIANTS,
    *ledger.INVARIANTS,
    *batches.INVARIANTS,
    store.PUBLICATIONS,
)


def run_ids(lake: Lake) -> list[str]:
    """Runs that have files in any table, sorted: a lost ledger hides nothing."""
    return sorted({run for table in lake.tables.values() for run in table.run_ids()})


def check_lake(
    lake: Lake, *, run_id: str | None = None, store_uri: str | Path | None = None
) -> Iterator[Finding]:
    """Every invariant of the lake, then of each run or of `run_id`, one finding each.

    `store_uri` holds the runs' checkpoints and weights; by default each run's own `run.store`.
    """
    yield tables.check_tables(lake)
    for name in run_ids(lake) if run_id is None else [run_id]:
        snapshot = read_snapshot(lake, name)
        for invariant in INVARIANTS:
            yield invariant.check(snapshot)
        configured = snapshot.config.get("run", {}).get("store", "")
        for invariant in store.store_invariants(open_storage(store_uri or configured)):
            yield invariant.check(snapshot)
