"""The phases of maintenance: expire, drop, compact, vacuum.

Each may be killed anywhere and run again. What leaves a table is recorded before it goes; files are
replaced in one commit; and a file is deleted only when no version of the grace period holds it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta

import pyarrow as pa
from deltalake.transaction import AddAction

from schemas.config import MaintenanceSection
from schemas.tables import TABLES
from tasks.lake.delta import FilesChanged, LakeTable, TableFile
from tasks.lake.files import new_merged_name, run_dir
from tasks.lake.lake import Lake
from tasks.lake.writer import merged_rows
from tasks.maintain.plan import Merge, Plan, Removal
from tasks.storage import StoredFile

NO_LEASE = 0
"""No controller ever holds it; maintenance needs none."""

NUM_READERS = 8
"""Files read at a time: those of an object store each cost a round trip."""


def expire_rows(lake: Lake, plan: Plan, now: datetime) -> Counter[str]:
    """Takes out rows that the policy no longer keeps. How many files of each table were left to
    the next maintenance, since another one changed them meanwhile."""
    return _add_up(_remove(lake, removal, now) for removal in plan.expirations)


def drop_writes(lake: Lake, plan: Plan, now: datetime) -> Counter[str]:
    """Takes out writes that no ledger row names; returns as `expire_rows`."""
    return _add_up(_remove(lake, removal, now) for removal in plan.drops)


def compact_files(lake: Lake, plan: Plan) -> Counter[str]:
    """Merges the small files of closed cycles; returns as `expire_rows`."""
    return _add_up(_merge(lake, merge) for merge in plan.merges)


def _add_up(skipped: Iterable[Counter[str]]) -> Counter[str]:
    return sum(skipped, Counter())


def _remove(lake: Lake, removal: Removal, now: datetime) -> Counter[str]:
    _record(lake, removal, now)
    return _replace(lake.tables[removal.table], removal.files, data_change=True)


def _record(lake: Lake, removal: Removal, now: datetime) -> None:
    """Says what goes and why, once: a maintenance that was killed may have said so already."""
    earlier = lake.read(
        "maintenance",
        run_id=removal.run_id,
        columns=["expired_write_ids"],
        where="table_name = ? AND action = ?",
        params=[removal.table, removal.action],
    )
    known = {i for ids in earlier.column("expired_write_ids").to_pylist() for i in ids}
    if known.issuperset(removal.write_ids):
        return
    row = {
        "action": removal.action,
        "table_name": removal.table,
        "policy": removal.policy,
        "cutoff": removal.cutoff,
        "num_files": len(removal.files),
        "num_rows": removal.num_rows,
        "num_bytes": sum(file.size_bytes for file in removal.files),
        "expired_write_ids": list(removal.write_ids),
        "recorded_at": now,
    }
    rows = pa.Table.from_pylist([row], schema=TABLES["maintenance"].own_schema)
    lake.append("maintenance", rows, run_id=removal.run_id, cycle=removal.cycle, lease=NO_LEASE)


def _merge(lake: Lake, merge: Merge) -> Counter[str]:
    table = lake.tables[merge.table]
    added = [_write_merged(table, group) for group in merge.groups]
    return _replace(table, merge.files, added, data_change=False)


def _write_merged(table: LakeTable, files: tuple[TableFile, ...]) -> AddAction:
    with ThreadPoolExecutor(NUM_READERS) as readers:
        contents = readers.map(table.storage.read, [file.path for file in files])
        rows = merged_rows(table.table, contents)
    assert rows.num_rows == sum(file.num_rows for file in files), "a merge keeps every row"
    first = files[0]
    return table.write_file(
        rows,
        new_merged_name(),
        run_id=first.run_id,
        cycle=first.cycle,
        data_change=False,
    )


def _replace(
    table: LakeTable,
    files: Sequence[TableFile],
    added: Sequence[AddAction] = (),
    *,
    data_change: bool,
) -> Counter[str]:
    try:
        table.replace_files(files, added, data_change=data_change)
    except FilesChanged:
        return Counter({table.table.name: len(files)})
    return Counter()


def vacuum_plan(
    lake: Lake, run_id: str, policy: MaintenanceSection, now: datetime
) -> dict[str, list[StoredFile]]:
    """Files of a run that no version of its tables has held since the grace period began: those
    that maintenance took out, and orphans of a writer killed between its file and its commit."""
    cutoff = now - timedelta(hours=policy.grace_hours)
    found = {}
    for name in TABLES:
        table = lake.tables[name]
        storage = table.storage
        old = [
            file
            for file in storage.walk(run_dir(run_id))
            if file.path.endswith(".parquet") and file.modified < cutoff
        ]
        # Listed after the walk: what was committed meanwhile is seen.
        held = set(table.files(run_id=run_id))
        unheld = [file for file in old if storage.location(file.path) not in held]
        if unheld:
            held = table.files_at(cutoff)
        found[name] = [file for file in unheld if storage.location(file.path) not in held]
    return found


def delete_files(lake: Lake, found: dict[str, list[StoredFile]]) -> None:
    for name, files in found.items():
        lake.tables[name].storage.delete(file.path for file in files)
