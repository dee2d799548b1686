"""Replay: train a run's batches again from what is recorded, and compare what comes out.

The training is a `torchrun` of `trainers.replay_job`, which computes with the trainer's own
functions. Nothing is written but to a temporary folder, so a replay needs no lease.

Where run and replay both compute on CPUs, equal means equal bits. On a GPU kernels are not
deterministic: the replay then says how far it came out from what is recorded.
"""

import json
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemas.config import RunConfig, parse_recorded_config
from tasks.lake.lake import Lake
from tasks.lake.ledger import Entry
from tasks.maintain.checkpoints import expired_checkpoints
from tasks.query import connect
from tasks.replay_verdicts import NOTHING_FOUND, judged_rows
from tasks.train import TrainerFailed, log_end, torchrun
from tasks.weights import checkpoints, folders
from tasks.weights.store import RunStore, elsewhere, open_store

POLL_S = 0.1

EXPIRED = """
SELECT DISTINCT b.admission
FROM batches b LEFT JOIN trajectories t USING (run_id, trajectory_id)
JOIN maintenance m ON m.run_id = b.run_id AND m.action = 'expire'
WHERE b.run_id = ? AND ((m.table_name = 'segments' AND m.cycle = t.cycle)
    OR (m.table_name = 'scores' AND m.cycle = b.cycle)
    OR (m.table_name = 'routing' AND m.cycle = t.cycle AND ?))
"""


@dataclass(frozen=True)
class Item:
    """One batch to replay. `start` is the batch whose checkpoint it begins at, 0 for version 0;
    `missing` says what keeps it from being replayed."""

    batch: int
    start: int = 0
    missing: str | None = None


def replay(
    lake: Lake,
    run_id: str,
    *,
    step: int | None = None,
    store_uri: str | None = None,
    tolerance: float,
) -> Iterator[dict[str, Any]]:
    """A row for each optimizer step of the batch that holds `step`, or of all, as they are done.

    `verdict` is equal, differs, near or far (where bits are not comparable: whether the weights are
    within `tolerance` of the recorded ones, as a share of the batch's update), or not replayed.
    `store_uri` is where the run's store is now.

    Raises:
        ValueError: there is no such step, nothing is trained, or what a replay needs is gone.
        TrainerFailed: the trainer ended otherwise than by itself.
    """
    steps = _recorded_steps(lake, run_id)
    batches = _batches(run_id, steps, step)
    began_with = lake.ledger(run_id).entries[0].details
    config = parse_recorded_config(began_with["config"], f"the ledger of run {run_id}")
    with tempfile.TemporaryDirectory(prefix="rollhouse-replay-") as folder:
        # Weights and checkpoints are read afresh, and a store on a disk stays as it is.
        config = elsewhere(
            config, store=store_uri or config.run.store, cache=str(Path(folder) / "cache")
        )
        plan = plan_replay(lake, config, batches)
        if not any(item.missing is None for item in plan):
            raise ValueError(plan[0].missing)
        outcomes = _outcomes(lake, config, [i for i in plan if i.missing is None], Path(folder))
        for item in plan:
            rows = [row for row in steps if row["batch"] == item.batch]
            if item.missing is None:
                yield from judged_rows(rows, next(outcomes), config, tolerance)
                continue
            for row in rows:
                yield NOTHING_FOUND | row | {"verdict": "not replayed", "found": item.missing}
        for _ in outcomes:
            raise AssertionError("one outcome an item")


def _recorded_steps(lake: Lake, run_id: str) -> list[dict[str, Any]]:
    return lake.read(
        "steps", run_id=run_id, columns=["step", "batch", "minibatch"], order_by="step"
    ).to_pylist()


def _batches(run_id: str, steps: list[dict[str, Any]], step: int | None) -> list[int]:
    if not steps:
        raise ValueError(f"Run {run_id} has trained no batch yet, so there is nothing to replay.")
    batches = sorted({row["batch"] for row in steps if step in (None, row["step"])})
    if not batches:
        raise ValueError(
            f"Run {run_id} has no optimizer step {step}; it has {steps[0]['step']} to "
            f"{steps[-1]['step']}."
        )
    return batches


def plan_replay(lake: Lake, config: RunConfig, batches: Sequence[int]) -> list[Item]:
    """Where the replay of each batch begins. Raises `ValueError` without store or version 0."""
    run_id, store = config.run.run_id, open_store(config)
    ledger = lake.ledger(run_id)
    first = ledger.last("version_published", version=0)
    if first is None or not store.holds(first.details["uri"], folders.MANIFEST):
        raise ValueError(
            f"{config.run.store} does not hold version 0 of run {run_id}, which a replay needs; "
            "pass --store with where the run's store is now, or call from where the run was "
            "started."
        )
    trained = {entry.batch: entry for entry in ledger.entries if entry.kind == "batch_trained"}
    rows = connect(lake).execute(EXPIRED, [run_id, config.trainer.routing_replay]).fetchall()
    gone = {admission for (admission,) in rows}
    expired = {b for b, entry in trained.items() if entry.details["admission"] in gone}
    deleted = expired_checkpoints(lake, run_id)
    return [_item(batch, trained, expired, deleted, store) for batch in batches]


def _item(
    batch: int,
    trained: dict[int | None, Entry],
    expired: set[int | None],
    deleted: frozenset[str],
    store: RunStore,
) -> Item:
    policy = 'expired by policy; `rollhouse sql "FROM maintenance"` says when'
    if batch in expired:
        return Item(batch, missing=f"The tokens, scores or routing of batch {batch} {policy}.")
    start = batch - 1
    while start > 0:
        checkpoint = trained[start].checkpoint
        assert checkpoint is not None
        if store.holds(checkpoint, checkpoints.MANIFEST):
            break
        if start in expired:
            way = f"Batch {batch} has no way back: the checkpoint of batch {start}"
            if checkpoint in deleted:
                return Item(batch, missing=f"{way} and its tokens, scores or routing {policy}.")
            return Item(
                batch,
                missing=f"{way} is gone, and its tokens, scores or routing {policy}. Restore the "
                "checkpoint from a backup.",
            )
        start -= 1
    return Item(batch, start)


def _outcomes(
    lake: Lake, config: RunConfig, plan: list[Item], folder: Path
) -> Iterator[dict[str, Any]]:
    """What the job says of each batch, as it says it."""
    trainer, report = config.trainer, folder / "report.jsonl"
    (folder / "plan.json").write_text(
        json.dumps([{"batch": item.batch, "start": item.start} for item in plan])
    )
    arguments = {
        "--lake": lake.uri,
        "--run-id": config.run.run_id,
        "--store": config.run.store,
        "--cache": config.run.cache,
        "--plan": folder / "plan.json",
        "--report": report,
        "--threads": trainer.threads,
    }
    report.touch()
    with torchrun(
        "trainers.replay_job",
        arguments,
        ranks=trainer.ranks,
        threads=trainer.threads,
        log=folder / "trainer.log",
    ) as process:
        try:
            yield from _lines(process, report)
        finally:
            # torchrun passes the signal on to its ranks, which a kill would leave running.
            process.terminate()
    if process.returncode != 0:
        raise TrainerFailed(
            f"The replay ended with code {process.returncode} before it was done; nothing was "
            f"changed. Its log ends:\n{log_end(folder / 'trainer.log')}"
        )


def _lines(process: subprocess.Popen[bytes], report: Path) -> Iterator[dict[str, Any]]:
    with report.open() as file:
        begun = ""
        while True:
            # Asked before the file is read: a job may write its last line and end.
            ended = process.poll() is not None
            *whole, begun = (begun + file.read()).split("\n")
            for line in whole:
                yield json.loads(line)
            if ended:
                return
            time.sleep(POLL_S)
