"""The cycle's ledger rows: what each is made of.

Each function writes the rows it will name, then commits one ledger row; so whatever kills the
controller, the ledger says where it stood.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from flows.opening import OpenRun
from flows.refusals import refuse_batch
from tasks.history import read_history
from tasks.lake.batches import read_batch, trajectories_hash, write_batch
from tasks.lake.ledger import Entry
from tasks.publish import publication_row, publish_version, relative_uri
from tasks.record import Recorded, quarantine_rows, record_rollouts
from tasks.train import judge_scores, write_ids_of
from tasks.validate import Judgement
from tasks.weights.folders import Publication


@dataclass(frozen=True)
class Phases:
    """The cycle's heavy steps, as plain functions; Prefect hands in the same ones as tasks."""

    record: Callable[..., Recorded] = record_rollouts
    admit: Callable[..., str] = write_batch
    judge: Callable[..., Judgement] = judge_scores
    publish: Callable[..., Publication] = publish_version


def group_members(run: OpenRun, groups: Sequence[int]) -> list[dict[str, Any]]:
    """Trajectory and group ids of whole groups, in (group_id, sample_index) order."""
    return run.lake.read(
        "trajectories",
        run_id=run.run_id,
        columns=["trajectory_id", "group_id"],
        where="list_contains(?, group_id)",
        params=[list(groups)],
        order_by="group_id, sample_index",
    ).to_pylist()


def drop_groups(run: OpenRun, groups: Sequence[int], rule: str, reason: str) -> int:
    """Commits that whole groups will not be trained though nothing is wrong with them."""
    rows = quarantine_rows(group_members(run, groups), rule=rule, action="drop", reason=reason)
    run.commit(
        "rollouts_recorded",
        write_ids=(run.append("quarantine", rows),),
        num_trajectories=0,
        details={"dropped": len(rows), "rule": rule},
    )
    return len(rows)


def admit_batch(run: OpenRun, phases: Phases, batch: int, groups: Sequence[int]) -> None:
    """Freezes whole groups as a batch and commits `batch_admitted`."""
    ids = [row["trajectory_id"] for row in group_members(run, groups)]
    admission = len(run.ledger.entries)
    write_id = phases.admit(
        run.lake,
        run_id=run.run_id,
        cycle=run.cycle,
        lease=run.lease,
        admission=admission,
        batch=batch,
        trajectory_ids=ids,
    )
    entry = run.commit(
        "batch_admitted",
        batch=batch,
        write_ids=(write_id,),
        num_trajectories=len(ids),
        trajectories_hash=trajectories_hash(ids),
    )
    assert entry.seq == admission, "only the lease holder appends"


def judge_batch(run: OpenRun, phases: Phases, admitted: Entry, scores: pa.Table) -> Judgement:
    """Puts scores through gate 2, commits its word and returns it. Raises `BatchRefused`."""
    batch = read_batch(run.lake, run.run_id, admitted.seq)
    history = read_history(run.lake, run.run_id, run.config.gates.drift_batches)
    judgement = phases.judge(batch, scores, run.config, history)
    write_ids = (*write_ids_of(scores), run.append("validations", judgement.validations()))
    if not judgement.ok:
        raise refuse_batch(run, batch, admitted, judgement, write_ids)
    accept_batch(run, admitted, write_ids)
    return judgement


def accept_batch(
    run: OpenRun,
    admitted: Entry,
    write_ids: tuple[str, ...],
    details: dict[str, Any] | None = None,
) -> None:
    """Commits `batch_accepted`: the trainer may start its backward passes."""
    run.commit(
        "batch_accepted",
        batch=admitted.batch,
        write_ids=write_ids,
        num_trajectories=admitted.num_trajectories,
        trajectories_hash=admitted.trajectories_hash,
        details={"admission": admitted.seq, **(details or {})},
    )


def commit_trained(run: OpenRun, admitted: Entry, steps: pa.Table) -> Entry:
    """Commits `batch_trained` from the steps rows, whose last names a durable checkpoint."""
    last = steps.filter(pc.field("checkpoint").is_valid()).to_pylist()[0]
    return run.commit(
        "batch_trained",
        batch=admitted.batch,
        write_ids=tuple(write_ids_of(steps)),
        num_trajectories=admitted.num_trajectories,
        trajectories_hash=admitted.trajectories_hash,
        checkpoint=last["checkpoint"],
        root_hash=last["root_hash"],
        details={"admission": admitted.seq},
    )


def publish_trained(run: OpenRun, phases: Phases, trained: Entry) -> int:
    """Publishes a trained batch's version, commits `version_published`, and returns the version."""
    publication = phases.publish(run.config, run.ledger, trained, run.lease)
    run.commit(
        "version_published",
        batch=trained.batch,
        version=publication.version,
        root_hash=publication.root_hash,
        write_ids=(run.append("publications", [publication_row(run.config, publication)]),),
        details={"uri": relative_uri(run.config, publication)},
    )
    return publication.version
