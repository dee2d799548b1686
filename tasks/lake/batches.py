"""Batches: what the controller freezes at admission and the trainer reads back, in one order.

The order of trajectories is part of the record, since microbatches and floating-point sums follow
it. The ledger row carries a count and a hash over the ordered ids, so a batch that is short,
doubled or reordered is refused before anything is computed from it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from blake3 import blake3

from tasks.lake.lake import Lake
from tasks.lake.ledger import Entry


@dataclass(frozen=True)
class Batch:
    """One admitted batch.

    `trajectories` is in batch order; `segments` and `routing` are ordered by trajectory, then
    sequence_index and segment_index. All have their table's schema; `routing` is None where it was
    not asked for.
    """

    batch: int
    admission: int
    trajectories: pa.Table
    segments: pa.Table
    routing: pa.Table | None = None


def trajectories_hash(trajectory_ids: Sequence[str]) -> str:
    """BLAKE3 over the ids in order, each ended by a newline; 64 hex digits."""
    return blake3("".join(f"{name}\n" for name in trajectory_ids).encode()).hexdigest()


def write_batch(
    lake: Lake,
    *,
    run_id: str,
    cycle: int,
    lease: int,
    admission: int,
    batch: int,
    trajectory_ids: Sequence[str],
) -> str:
    """Writes which trajectories an admission takes, in (group_id, sample_index) order.

    `admission` is the seq that the `batch_admitted` row will get, which must name the returned
    write id, `len(trajectory_ids)` and `trajectories_hash(trajectory_ids)`.
    """
    assert len(set(trajectory_ids)) == len(trajectory_ids), "a trajectory is admitted once"
    count = len(trajectory_ids)
    rows = pa.table(
        {
            "admission": pa.array([admission] * count, pa.int64()),
            "batch": pa.array([batch] * count, pa.int64()),
            "batch_position": pa.array(range(count), pa.int32()),
            "trajectory_id": pa.array(trajectory_ids, pa.string()),
        }
    )
    return lake.append("batches", rows, run_id=run_id, cycle=cycle, lease=lease)


def read_batch(lake: Lake, run_id: str, admission: int, *, with_routing: bool = False) -> Batch:
    """Reads an admitted batch and everything in it that was sampled, its routing only if asked for:
    that of a mixture of experts is far larger than its tokens.

    Raises:
        ValueError: the ledger has no such admission, the lake's rows do not agree with it, or
            one of them was imported.
    """
    entry = lake.ledger(run_id).last("batch_admitted", seq=admission)
    if entry is None or entry.batch is None:
        raise ValueError(
            f"The ledger of run {run_id} has no batch_admitted row {admission}; "
            "`rollhouse status` shows the admissions it has."
        )
    ids = _admitted_ids(lake, run_id, entry)
    span = f"trajectory_id >= '{min(ids)}' AND trajectory_id <= '{max(ids)}'"
    trajectories = _rows_of(lake, "trajectories", run_id, ids, span)
    found = trajectories.column("trajectory_id").to_pylist()
    if found != ids:
        missing = sorted(set(ids) - set(found))
        raise ValueError(
            f"Batch {entry.batch} (admission {admission}) of run {run_id} has "
            f"{len(ids)} trajectories, the lake shows {len(found)} rows for them (missing: "
            f"{missing or 'none'}); restore the lake from a backup."
        )
    if imported := pc.call_function("drop_null", [trajectories.column("origin")]).to_pylist():
        raise ValueError(
            f"Batch {entry.batch} (admission {admission}) of run {run_id} holds {len(imported)} "
            f"rollouts imported from {imported[0]}; only rollouts sampled here are trained. Start "
            "a run under another name."
        )
    return Batch(
        batch=entry.batch,
        admission=admission,
        trajectories=trajectories,
        segments=_rows_of(lake, "segments", run_id, ids, span),
        routing=_rows_of(lake, "routing", run_id, ids, span) if with_routing else None,
    )


def _admitted_ids(lake: Lake, run_id: str, entry: Entry) -> list[str]:
    rows = lake.read(
        "batches",
        run_id=run_id,
        columns=["trajectory_id"],
        where="admission = ?",
        params=[entry.seq],
        write_ids=entry.write_ids,
        order_by="batch_position",
    )
    ids = rows.column("trajectory_id").to_pylist()
    if len(ids) != entry.num_trajectories or trajectories_hash(ids) != entry.trajectories_hash:
        raise ValueError(
            f"Batch {entry.batch} (admission {entry.seq}) of run {run_id} has {len(ids)} rows in "
            f"the lake that do not match the ledger's {entry.num_trajectories} trajectories and "
            "their hash; restore the lake from a backup."
        )
    assert ids, "an admitted batch is never empty"
    return ids


def _rows_of(lake: Lake, table: str, run_id: str, ids: list[str], span: str) -> pa.Table:
    """Visible rows of the trajectories, by place in `ids`, then in the table's own order."""
    rows = lake.read(
        table,
        run_id=run_id,
        where="list_contains(?, trajectory_id)",
        params=[ids],
        predicate=span,
    )
    place = pc.call_function(
        "index_in",
        [rows.column("trajectory_id")],
        pc.SetLookupOptions(value_set=pa.array(ids, pa.string())),
    )
    # The table's order is kept within a trajectory: Arrow's sort is stable.
    return rows.take(pc.call_function("sort_indices", [place]))
