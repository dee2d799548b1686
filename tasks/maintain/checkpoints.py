"""Which checkpoints a run needs no more, and how they leave the store.

Versions are never deleted: every recorded token names one, and patches need what they were made on.
A checkpoint is only ever needed to go on from the newest one and to publish its version; all others
save a replay the way from an older one.
"""

import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

import pyarrow as pa

from schemas.config import MaintenanceSection, RunConfig, parse_recorded_config
from schemas.tables import TABLES
from tasks.lake.lake import Lake
from tasks.lake.ledger import Entry, Ledger
from tasks.maintain.work import NO_LEASE
from tasks.storage import StoredFile
from tasks.weights.store import RunStore, elsewhere, open_store

FOLDER = "checkpoints"
"""Of a run's part of the store, and what `maintenance.table_name` says of folders in it."""

_NAME = re.compile(r"\.?b\d+-(\d+)(\.tmp)?")


@dataclass(frozen=True)
class Group:
    """Folders that go for one reason: the checkpoints of batches, or those of no batch."""

    action: Literal["expire", "drop"]
    folders: tuple[str, ...]
    files: tuple[StoredFile, ...]
    policy: str
    cutoff: datetime

    @property
    def num_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


@dataclass(frozen=True)
class CheckpointPlan:
    """`num_files` counts what lies in the checkpoints' folder before anything is done."""

    run_id: str
    cycle: int
    store: RunStore
    num_files: int
    groups: tuple[Group, ...]


def expired_checkpoints(lake: Lake, run_id: str) -> frozenset[str]:
    """Paths of checkpoints that a policy has deleted, or was about to."""
    return _recorded(lake, run_id, "expire")


def _recorded(lake: Lake, run_id: str, action: str) -> frozenset[str]:
    rows = lake.read(
        "maintenance",
        run_id=run_id,
        columns=["checkpoints"],
        where="table_name = ? AND action = ?",
        params=[FOLDER, action],
    )
    return frozenset(path for paths in rows.column("checkpoints").to_pylist() for path in paths)


def plan_checkpoints(
    lake: Lake,
    run_id: str,
    policy: MaintenanceSection,
    now: datetime,
    store_uri: str | None = None,
) -> CheckpointPlan | None:
    """What `maintenance.keep_checkpoints` asks for; None where it keeps all, and of a run without a
    store, whose rollouts were imported.

    Raises:
        ValueError: the store does not hold the newest checkpoint, so it is not the run's or was
            damaged.
    """
    ledger = lake.ledger(run_id)
    if policy.keep_checkpoints is None or "config" not in ledger.entries[0].details:
        return None
    config = parse_recorded_config(ledger.entries[0].details["config"], f"run {run_id}'s ledger")
    if store_uri is not None:
        config = elsewhere(config, store=store_uri, cache=config.run.cache)
    store = open_store(config)
    trained = [entry for entry in ledger.entries if entry.kind == "batch_trained"]
    if trained:
        _refuse_without(trained[-1], store, config)
    found: dict[str, list[StoredFile]] = {}
    for file in store.walk(FOLDER):
        found.setdefault(file.path.rpartition("/")[0], []).append(file)
    gone = expired_checkpoints(lake, run_id)
    groups = (
        _expired(ledger, trained, policy, gone, found),
        _dropped(ledger, trained, policy, now, found),
    )
    return CheckpointPlan(
        run_id=run_id,
        cycle=ledger.entries[-1].cycle,
        store=store,
        num_files=sum(map(len, found.values())),
        groups=tuple(group for group in groups if group.folders),
    )


def _refuse_without(newest: Entry, store: RunStore, config: RunConfig) -> None:
    # Here, since it loads torch.
    from tasks.weights.checkpoints import MANIFEST

    assert newest.checkpoint is not None
    if not store.holds(newest.checkpoint, MANIFEST):
        raise ValueError(
            f"{config.run.store} does not hold the checkpoint of batch {newest.batch}, which run "
            f"{config.run.run_id} goes on from, so no other one is deleted; pass --store with "
            "where the run's store is now, or restore it from a backup."
        )


def _expired(
    ledger: Ledger,
    trained: list[Entry],
    policy: MaintenanceSection,
    gone: frozenset[str],
    found: dict[str, list[StoredFile]],
) -> Group:
    """Checkpoints beyond the newest ones, oldest first, each with its version published; and what
    an interrupted maintenance left of earlier ones, whatever the policy is now."""
    assert policy.keep_checkpoints is not None
    kept = trained[-policy.keep_checkpoints :]
    published = {entry.version for entry in ledger.entries if entry.kind == "version_published"}
    folders = [
        entry.checkpoint
        for entry in trained[:-1]
        if entry.checkpoint in found
        and entry.batch in published
        and (entry not in kept or entry.checkpoint in gone)
    ]
    return _group(
        "expire",
        folders,
        found,
        f"maintenance.keep_checkpoints = {policy.keep_checkpoints}",
        kept[0].committed_at if kept else ledger.entries[-1].committed_at,
    )


def _dropped(
    ledger: Ledger,
    trained: list[Entry],
    policy: MaintenanceSection,
    now: datetime,
    found: dict[str, list[StoredFile]],
) -> Group:
    """What trainers left that were killed before the ledger named it, under leases that are over:
    nothing can name it any more."""
    cutoff = now - timedelta(hours=policy.grace_hours)
    named = {entry.checkpoint for entry in trained}
    folders = [
        folder
        for folder, files in sorted(found.items())
        if folder not in named
        and (name := _NAME.fullmatch(folder.removeprefix(f"{FOLDER}/")))
        and int(name[1]) < ledger.lease
        and all(file.modified < cutoff for file in files)
    ]
    text = f"maintenance.grace_hours = {policy.grace_hours:g}"
    return _group("drop", folders, found, text, cutoff)


def _group(
    action: Literal["expire", "drop"],
    folders: list[str],
    found: dict[str, list[StoredFile]],
    policy: str,
    cutoff: datetime,
) -> Group:
    files = tuple(file for folder in folders for file in found[folder])
    return Group(action, tuple(folders), files, policy, cutoff)


def remove_checkpoints(lake: Lake, plan: CheckpointPlan | None, now: datetime) -> None:
    """Records what goes, then deletes it, folder by folder and each manifest first: whatever is
    killed on the way leaves folders that are whole or have no manifest."""
    # Here, since it loads torch.
    from tasks.weights.checkpoints import MANIFEST

    for group in () if plan is None else plan.groups:
        assert plan is not None
        _record(lake, plan, group, now)
        for folder in group.folders:
            plan.store.remove(folder, MANIFEST)


def _record(lake: Lake, plan: CheckpointPlan, group: Group, now: datetime) -> None:
    """Says what goes and why, once: a maintenance that was killed may have said so already."""
    if _recorded(lake, plan.run_id, group.action).issuperset(group.folders):
        return
    row = {
        "action": group.action,
        "table_name": FOLDER,
        "policy": group.policy,
        "cutoff": group.cutoff,
        "num_files": len(group.files),
        "num_rows": 0,
        "num_bytes": group.num_bytes,
        "expired_write_ids": [],
        "checkpoints": list(group.folders),
        "recorded_at": now,
    }
    rows = pa.Table.from_pylist([row], schema=TABLES["maintenance"].own_schema)
    lake.append("maintenance", rows, run_id=plan.run_id, cycle=plan.cycle, lease=NO_LEASE)
