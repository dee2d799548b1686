"""Maintenance of a lake and its store: compact, expire by policy, drop what never counted, vacuum.

It needs no lease and may run beside a controller: closed cycles alone are rewritten, no ledger row
is ever taken away, and whatever the ledger may still name stays.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from schemas.config import MaintenanceSection
from tasks.lake.lake import Lake
from tasks.maintain.checkpoints import (
    FOLDER,
    CheckpointPlan,
    plan_checkpoints,
    remove_checkpoints,
)
from tasks.maintain.facts import run_policy
from tasks.maintain.plan import Plan, plan_run
from tasks.maintain.work import compact_files, delete_files, drop_writes, expire_rows, vacuum_plan
from tasks.storage import StoredFile

__all__ = ["Phases", "TableReport", "maintain_run", "run_policy"]


@dataclass(frozen=True)
class TableReport:
    """What was done to a run's part of a table, or to its `checkpoints` in the store, or would be.

    `bytes_released` left the table and are freed by a vacuum once the grace period is over;
    `bytes_freed` were deleted now. `files_skipped` were changed by another maintenance meanwhile;
    it, or the next one, does what was planned for them.
    """

    run_id: str
    table: str
    files_before: int
    files_after: int
    rows_expired: int
    rows_dropped: int
    bytes_released: int
    files_deleted: int
    bytes_freed: int
    files_skipped: int


@dataclass
class Phases:
    """The heavy steps of a maintenance, replaceable by the same functions as Prefect tasks."""

    plan: Callable[[Lake, str, MaintenanceSection, datetime], Plan] = plan_run
    expire: Callable[[Lake, Plan, datetime], Counter[str]] = expire_rows
    drop: Callable[[Lake, Plan, datetime], Counter[str]] = drop_writes
    compact: Callable[[Lake, Plan], Counter[str]] = compact_files
    look_for_garbage: Callable[
        [Lake, str, MaintenanceSection, datetime], dict[str, list[StoredFile]]
    ] = vacuum_plan
    look_at_checkpoints: Callable[
        [Lake, str, MaintenanceSection, datetime, str | None], CheckpointPlan | None
    ] = plan_checkpoints
    remove_checkpoints: Callable[[Lake, CheckpointPlan | None, datetime], None] = remove_checkpoints
    vacuum: Callable[[Lake, dict[str, list[StoredFile]]], None] = delete_files


def maintain_run(
    lake: Lake,
    run_id: str,
    policy: MaintenanceSection,
    *,
    now: datetime,
    dry_run: bool = False,
    phases: Phases | None = None,
    store_uri: str | None = None,
) -> list[TableReport]:
    """Maintains a run's part of the lake; a dry run only looks. One report a table with files.

    Another maintenance may be at work: what it changed meanwhile is left to the next one.
    `store_uri` is where the run's store is now.

    Raises:
        ValueError: the lake was made before there was a table `maintenance`, or checkpoints are
            to expire and the store does not hold the newest. Nothing was changed.
    """
    phases = phases or Phases()
    plan = phases.plan(lake, run_id, policy, now)
    checkpoints = phases.look_at_checkpoints(lake, run_id, policy, now, store_uri)
    garbage = phases.look_for_garbage(lake, run_id, policy, now)
    skipped: Counter[str] = Counter()
    if not dry_run:
        skipped += phases.expire(lake, plan, now)
        skipped += phases.drop(lake, plan, now)
        skipped += phases.compact(lake, plan)
        phases.remove_checkpoints(lake, checkpoints, now)
        phases.vacuum(lake, garbage)
    reports = _reports(plan, garbage, skipped)
    if checkpoints is not None and checkpoints.num_files:
        reports.append(_report_of(checkpoints))
    return reports


def _report_of(plan: CheckpointPlan) -> TableReport:
    files = [file for group in plan.groups for file in group.files]
    return TableReport(
        run_id=plan.run_id,
        table=FOLDER,
        files_before=plan.num_files,
        files_after=plan.num_files - len(files),
        rows_expired=0,
        rows_dropped=0,
        bytes_released=0,
        files_deleted=len(files),
        bytes_freed=sum(file.size_bytes for file in files),
        files_skipped=0,
    )


def _reports(
    plan: Plan, garbage: dict[str, list[StoredFile]], skipped: Counter[str]
) -> list[TableReport]:
    reports = []
    for name, num_files in plan.num_files.items():
        merges = [merge for merge in plan.merges if merge.table == name]
        expired = [removal for removal in plan.expirations if removal.table == name]
        dropped = [removal for removal in plan.drops if removal.table == name]
        gone = [file for step in (*expired, *dropped, *merges) for file in step.files]
        num_merged = sum(len(merge.groups) for merge in merges)
        files = garbage[name]
        reports.append(
            TableReport(
                run_id=plan.run_id,
                table=name,
                files_before=num_files,
                files_after=num_files - len(gone) + num_merged,
                rows_expired=sum(removal.num_rows for removal in expired),
                rows_dropped=sum(removal.num_rows for removal in dropped),
                bytes_released=sum(file.size_bytes for file in gone),
                files_deleted=len(files),
                bytes_freed=sum(file.size_bytes for file in files),
                files_skipped=skipped[name],
            )
        )
    return [report for report in reports if report.files_before or report.files_deleted]
