"""Refusals: the ledger row that stops a run, and the sentence that asks a person about it."""

from typing import Any

from flows.opening import OpenRun
from tasks.decisions import answers, refusing_rules
from tasks.lake.batches import Batch, trajectories_hash
from tasks.lake.lake import Lake
from tasks.lake.ledger import Entry
from tasks.profile import Limits
from tasks.record import Recorded
from tasks.validate import NO_WAIVERS, Judgement, Waivers


class BatchRefused(RuntimeError):
    """A gate refused data and no person has decided on that. Nothing was trained on it."""


def refuse_window(
    run: OpenRun,
    recorded: Recorded,
    limits: Limits,
    scope: str,
    *,
    batch: int | None = None,
    version: int | None = None,
    again: dict[str, Any] | None = None,
) -> BatchRefused:
    """Commits gate 1's refusal and returns what to raise.

    A window is meant for a `batch` or evaluates a `version`. Its rows stay unnamed, but the details
    list their writes and the limits, with which a waiver has the same rows judged again.
    """
    ids = recorded.trajectory_ids
    refusal = run.commit(
        "batch_refused",
        batch=batch,
        version=version,
        write_ids=recorded.write_ids,
        num_trajectories=len(ids),
        trajectories_hash=trajectories_hash(ids),
        details={
            "admission": None,
            "gate": 1,
            "reason": recorded.judgement.reason,
            "scope": scope,
            "held": recorded.rows,
            "limits": dict(limits),
            **(again or {}),
        },
    )
    return refusal_error(run.lake, run.run_id, refusal)


def refuse_batch(
    run: OpenRun,
    batch: Batch,
    admitted: Entry,
    judgement: Judgement,
    write_ids: tuple[str, ...],
    again: dict[str, Any] | None = None,
) -> BatchRefused:
    """Commits gate 2's refusal and returns what to raise."""
    ids = batch.trajectories.column("trajectory_id").to_pylist()
    refusal = run.commit(
        "batch_refused",
        batch=admitted.batch,
        write_ids=write_ids,
        num_trajectories=admitted.num_trajectories,
        trajectories_hash=admitted.trajectories_hash,
        details={
            "admission": admitted.seq,
            "gate": 2,
            "reason": judgement.reason,
            "first": ids[0],
            "last": ids[-1],
            **(again or {}),
        },
    )
    return refusal_error(run.lake, run.run_id, refusal)


def waivers_after(refusal: Entry, adopted: Entry) -> Waivers:
    """The waivers that stand once `adopted` is added to those the refusal was judged with."""
    earlier: Waivers = refusal.details.get("waivers", NO_WAIVERS)
    return {**earlier, **dict.fromkeys(adopted.details["rules"], adopted.seq)}


def refusal_error(lake: Lake, run_id: str, refusal: Entry) -> BatchRefused:
    """A refusal as one sentence, with the commands that answer it."""
    details, number = refusal.details, refusal.num_trajectories
    resampled = "the groups are"
    if refusal.batch is None:
        what = f"the evaluation of version {refusal.version}"
    elif details["admission"] is None:
        what = f"{number} trajectories meant for batch {refusal.batch}"
    else:
        ids = f"{details['first']} to {details['last']}"
        what = f"batch {refusal.batch} ({number} trajectories, {ids})"
        resampled = "other groups are"
    rules = refusing_rules(lake, run_id, refusal)
    approve, *waive = answers(lake.uri, run_id, refusal.seq, rules)
    ways = f"`{approve}` keeps it refused and {resampled} sampled anew"
    if waive:
        ways += f"; `{waive[0]}` has it used all the same"
    return BatchRefused(
        f"Gate {details['gate']} refused {what}: {details['reason']}. Nothing was trained on it, "
        f"and run {run_id} waits for a person to decide on refusal {refusal.seq}: {ways}. Then run "
        "again."
    )
