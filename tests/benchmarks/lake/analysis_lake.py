"""A lake of a long run for questions to be asked of, and the same tokens one row each.

101 batches of 8 groups of 8 rollouts, each with a shared prompt of 256 tokens and 4 turns of 1,950
sampled and 62 observed: 50.4 M sampled and trained tokens (53.7 M in all), two optimizer steps a
batch. Every row goes through `Lake.append` and counts because a real ledger row names it. Versions
lag by 0 to 2, old log-probabilities differ from the rollouts' by N(0, 0.02) nats, and one rollout
in eight is audited. The flat files, one a batch, hold what `token_scores` shows, step included.
"""

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from schemas.tables import TABLES
from tasks.lake.batches import trajectories_hash, write_batch
from tasks.lake.lake import Lake
from tests.benchmarks.lake.reference_batch import STARTED, RolloutTables, Shape, make_batch

SHAPE = Shape(prompt=256, num_turns=4, sampled=1950, observed=62)
NUM_MINIBATCHES = 2
W_CAP = 2.0


@dataclass(frozen=True)
class AnalysisLake:
    lake: Lake
    flat_files: list[str]
    num_tokens: int
    """Sampled and trained ones: rows of `token_scores` and of the flat files."""


def make_analysis_lake(folder: Path, num_batches: int) -> AnalysisLake:
    lake = Lake.create(folder / "lake")
    ledger = lake.ledger("run")
    ledger.append("run_created", lease=0, details={"config": {"trainer": {"w_cap": W_CAP}}})
    ledger.append("lease_taken", lease=1)
    (folder / "flat").mkdir()
    files, num_tokens = [], 0
    for batch in range(1, num_batches + 1):
        rows = make_batch(batch, SHAPE, first_group=(batch - 1) * SHAPE.num_groups)
        rng = np.random.default_rng((1, batch))
        rows = _versioned(rows, rng.integers(max(0, batch - 3), batch, SHAPE.num_rollouts))
        actions = rows.segments.filter(pc.field("kind") == "action")
        admission = len(ledger.entries) + 1
        scores = _scores(rng, actions, batch, admission)
        _record(lake, rows, scores, batch, admission)
        path = folder / "flat" / f"{batch:06d}.parquet"
        flat = _flat(actions, scores, batch)
        pq.write_table(flat, path, compression="zstd", compression_level=1)
        files.append(str(path))
        num_tokens += flat.num_rows
    return AnalysisLake(lake, files, num_tokens)


def _versioned(rows: RolloutTables, versions: np.ndarray) -> RolloutTables:
    """The rows with rollout i sampled by version `versions[i]`."""
    per_rollout = rows.segments.num_rows // len(versions)
    sampled = pc.equal(rows.segments["kind"], "action")
    of_segment = pc.if_else(sampled, pa.array(np.repeat(versions, per_rollout)), None)
    segments, trajectories = rows.segments, rows.trajectories
    for name in ("weight_version", "kv_version_min"):
        segments = _with(segments, name, of_segment)
    for name in ("weight_version_min", "weight_version_max"):
        trajectories = _with(trajectories, name, pa.array(versions))
    return RolloutTables(trajectories, segments, rows.requests, rows.num_tokens)


def _with(table: pa.Table, name: str, column: pa.Array | pa.ChunkedArray) -> pa.Table:
    return table.set_column(table.column_names.index(name), table.schema.field(name), column)


def _lists(values: np.ndarray, length: int, mask: np.ndarray | None = None) -> pa.Array:
    offsets = pa.array(np.arange(0, len(values) + 1, length), pa.int32())
    return pa.ListArray.from_arrays(
        offsets, pa.array(values), mask=None if mask is None else pa.array(mask)
    )


def _scores(rng: np.random.Generator, actions: pa.Table, batch: int, admission: int) -> pa.Table:
    count, length = actions.num_rows, SHAPE.sampled
    rollout = actions["rollout_logprobs"].combine_chunks().flatten().to_numpy()
    old = np.minimum(rollout + rng.normal(0, 0.02, len(rollout)), 0).astype(np.float32)
    own = np.minimum(rollout + rng.normal(0, 0.002, len(rollout)), 0).astype(np.float32)
    weights = np.minimum(np.exp(old - rollout), W_CAP).astype(np.float32)
    audited = np.repeat(np.arange(count // SHAPE.num_turns) % 8 == 0, SHAPE.num_turns)
    return pa.table(
        {
            "admission": pa.array([admission] * count, pa.int64()),
            "batch": pa.array([batch] * count, pa.int64()),
            "trajectory_id": actions["trajectory_id"],
            "sequence_index": actions["sequence_index"],
            "segment_index": actions["segment_index"],
            "old_logprobs": _lists(old, length),
            "own_version_logprobs": _lists(own, length, ~audited),
            "reference_logprobs": pa.nulls(count),
            "entropies": _lists(rng.gamma(2, 0.3, len(rollout)).astype(np.float32), length),
            "correction_weights": _lists(weights, length),
            "included": _lists(np.ones(len(rollout), bool), length),
        }
    )


def _record(lake: Lake, rows: RolloutTables, scores: pa.Table, batch: int, admission: int) -> None:
    where = {"run_id": "run", "cycle": batch // 10, "lease": 1}
    ledger = lake.ledger("run")

    def commit(kind: str, write_ids: list[str], **columns) -> None:
        ledger.append(
            kind, lease=1, cycle=where["cycle"], batch=batch, write_ids=write_ids, **columns
        )

    ids = rows.trajectories["trajectory_id"].to_pylist()
    named = {"num_trajectories": len(ids), "trajectories_hash": trajectories_hash(ids)}
    recorded = [
        lake.append(name, getattr(rows, name), **where) for name in ("trajectories", "segments")
    ]
    commit("rollouts_recorded", recorded, **named)
    admitted = write_batch(lake, admission=admission, batch=batch, trajectory_ids=ids, **where)
    commit("batch_admitted", [admitted], **named)
    assert ledger.entries[-1].seq == admission
    details = {"admission": admission}
    commit("batch_accepted", [lake.append("scores", scores, **where)], details=details)
    commit("batch_trained", [lake.append("steps", _steps(batch, admission), **where)], **named)


def _steps(batch: int, admission: int) -> pa.Table:
    rows = [
        {
            "step": (batch - 1) * NUM_MINIBATCHES + minibatch,
            "batch": batch,
            "admission": admission,
            "minibatch": minibatch,
            "metrics": [],
            "num_trajectories": SHAPE.num_rollouts // NUM_MINIBATCHES,
            "loss_name": "ppo",
            "correction": "token_tis",
            "finished_at": STARTED + timedelta(minutes=batch),
        }
        for minibatch in range(1, NUM_MINIBATCHES + 1)
    ]
    return pa.Table.from_pylist(rows, schema=TABLES["steps"].own_schema)


def _flat(actions: pa.Table, scores: pa.Table, batch: int) -> pa.Table:
    """One row a token, in the segments' order, all that a segment has repeated."""
    length, count = SHAPE.sampled, actions.num_rows

    def repeated(column: pa.ChunkedArray) -> pa.ChunkedArray:
        return column.take(pa.array(np.repeat(np.arange(count), length)))

    def constant(value: int | str | float, type: pa.DataType) -> pa.Array:
        return pa.repeat(pa.scalar(value, type), count * length)

    per_minibatch = SHAPE.num_rollouts // NUM_MINIBATCHES * SHAPE.num_turns * length
    minibatch = 1 + np.arange(count * length) // per_minibatch
    within = np.tile(np.arange(length), count)
    start = np.repeat(actions["start_position"].to_numpy(), length)
    own = scores["own_version_logprobs"].combine_chunks()
    audited = np.repeat(~np.asarray(own.is_null()), length)
    return pa.table(
        {
            "run_id": constant("run", pa.string()),
            "step": pa.array((batch - 1) * NUM_MINIBATCHES + minibatch),
            "batch": constant(batch, pa.int64()),
            "minibatch": pa.array(minibatch.astype(np.int32)),
            "num_minibatches": constant(NUM_MINIBATCHES, pa.int32()),
            "trajectory_id": repeated(actions["trajectory_id"]),
            "sequence_index": repeated(actions["sequence_index"]),
            "turn_index": repeated(actions["turn_index"]),
            "position": pa.array((start + within).astype(np.int32)),
            "token_id": actions["token_ids"].combine_chunks().flatten(),
            "weight_version": repeated(actions["weight_version"]),
            "rollout_logprob": actions["rollout_logprobs"].combine_chunks().flatten(),
            "old_logprob": scores["old_logprobs"].combine_chunks().flatten(),
            "own_version_logprob": pa.array(
                np.asarray(own.values), mask=~audited, type=pa.float32()
            ),
            "correction_weight": scores["correction_weights"].combine_chunks().flatten(),
            "included": scores["included"].combine_chunks().flatten(),
            "entropy": scores["entropies"].combine_chunks().flatten(),
            "w_cap": constant(W_CAP, pa.float64()),
        }
    )
