"""What maintenance would do to a run: pure looking, so that a dry run prints the same plan.

A file of one write that the ledger does not name is left alone until it is dropped; only named
writes are merged. So a write that is yet to be named keeps the file of its name, and dropping never
rewrites anything.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import groupby
from typing import Literal

from schemas.config import MaintenanceSection
from schemas.tables import ALWAYS_COUNTED, TABLES
from tasks.lake.delta import TableFile
from tasks.lake.lake import Lake
from tasks.maintain.facts import RunFacts, read_facts, settled_trajectories

MERGED_BYTES = 64 * 2**20
"""Size up to which files are merged: large enough to be few, small enough to be sorted in memory,
where rows take several times the room."""

EXPIRING = {
    "routing": "routing_days",
    "segments": "tokens_days",
    "scores": "tokens_days",
    "requests": "requests_days",
}
"""Tables whose rows may expire, and the key of the policy that says when."""


NEVER_DROPPED = ("decisions",)
"""A reviewer's word counts once the controller adopts it, however late the run goes on."""


@dataclass(frozen=True)
class Removal:
    """Files that leave a table: rows that expire by policy, or writes that never counted."""

    action: Literal["expire", "drop"]
    table: str
    run_id: str
    cycle: int
    files: tuple[TableFile, ...]
    write_ids: tuple[str, ...]
    policy: str
    cutoff: datetime

    @property
    def num_rows(self) -> int:
        return sum(file.num_rows for file in self.files)


@dataclass(frozen=True)
class Merge:
    """Files of one closed cycle that become one each of `groups`, in one commit."""

    table: str
    run_id: str
    cycle: int
    groups: tuple[tuple[TableFile, ...], ...]

    @property
    def files(self) -> tuple[TableFile, ...]:
        return tuple(file for group in self.groups for file in group)


@dataclass(frozen=True)
class Plan:
    """`num_files` counts the files of each table before anything is done."""

    run_id: str
    num_files: dict[str, int]
    expirations: tuple[Removal, ...]
    drops: tuple[Removal, ...]
    merges: tuple[Merge, ...]


def plan_run(lake: Lake, run_id: str, policy: MaintenanceSection, now: datetime) -> Plan:
    grace = now - timedelta(hours=policy.grace_hours)
    if missing := sorted(TABLES.keys() - lake.tables.keys()):
        raise ValueError(
            f"The lake at {lake.uri} has no table {missing[0]} yet; `rollhouse run RUN.toml` "
            "migrates it."
        )
    listed = {name: table.current_files(run_id) for name, table in lake.tables.items()}
    # Read after the files, so that each write of a closed cycle is as named as it will be.
    facts = read_facts(lake.ledger(run_id))
    expirations = tuple(_expirations(lake, facts, listed, policy, now))
    gone = {file.path for removal in expirations for file in removal.files}
    drops: list[Removal] = []
    merges: list[Merge] = []
    for name, files in listed.items():
        for cycle, group in groupby(files, key=lambda file: file.cycle):
            unnamed, named = _split(facts, name, group)
            droppable = () if name in NEVER_DROPPED else unnamed
            if old := [f for f in droppable if f.write_id and facts.may_drop(f.write_id, grace)]:
                ids = tuple(f.write_id for f in old if f.write_id)
                text = f"maintenance.grace_hours = {policy.grace_hours:g}"
                drops.append(Removal("drop", name, run_id, cycle, tuple(old), ids, text, grace))
            if cycle in facts.closed:
                bins = tuple(_bins(file for file in named if file.path not in gone))
                if bins:
                    merges.append(Merge(name, run_id, cycle, bins))
    num_files = {name: len(files) for name, files in listed.items()}
    return Plan(run_id, num_files, expirations, tuple(drops), tuple(merges))


def _split(
    facts: RunFacts, table: str, files: Iterable[TableFile]
) -> tuple[list[TableFile], list[TableFile]]:
    """Files of a write that no ledger row names, and the others."""
    unnamed: list[TableFile] = []
    named: list[TableFile] = []
    for file in files:
        is_unnamed = table not in ALWAYS_COUNTED and facts.is_unnamed(file.write_id)
        (unnamed if is_unnamed else named).append(file)
    return unnamed, named


def _bins(files: Iterable[TableFile]) -> Iterator[tuple[TableFile, ...]]:
    """Neighbours by first key, together as large as a merged file may be; no file alone."""
    bin: list[TableFile] = []
    for file in files:
        if sum(f.size_bytes for f in bin) + file.size_bytes > MERGED_BYTES:
            if len(bin) > 1:
                yield tuple(bin)
            bin = []
        bin.append(file)
    if len(bin) > 1:
        yield tuple(bin)


def _expirations(
    lake: Lake,
    facts: RunFacts,
    listed: dict[str, list[TableFile]],
    policy: MaintenanceSection,
    now: datetime,
) -> Iterator[Removal]:
    settled: set[str] | None = None
    for table, key in EXPIRING.items():
        days = getattr(policy, key)
        if days is None:
            continue
        cutoff = now - timedelta(days=days)
        for cycle, group in groupby(listed[table], key=lambda file: file.cycle):
            _, files = _split(facts, table, group)
            if not files or facts.closed.get(cycle, now) >= cutoff:
                continue
            settled = settled_trajectories(lake, facts.run_id) if settled is None else settled
            trajectory_ids, write_ids = _contents(lake, table, facts.run_id, cycle)
            # A write may be named later than in its own cycle.
            youngest = max((facts.named[write_id] for write_id in write_ids), default=now)
            if trajectory_ids <= settled and youngest < cutoff:
                text = f"maintenance.{key} = {days:g}"
                ids = tuple(sorted(write_ids))
                yield Removal("expire", table, facts.run_id, cycle, tuple(files), ids, text, cutoff)


def _contents(lake: Lake, table: str, run_id: str, cycle: int) -> tuple[set[str], set[str]]:
    """Trajectories and writes whose rows count in a partition."""
    rows = lake.read(
        table,
        run_id=run_id,
        columns=["trajectory_id", "write_id"],
        where="cycle = ?",
        params=[cycle],
        predicate=f"cycle = {cycle}",
    )
    return set(rows.column("trajectory_id").to_pylist()), set(rows.column("write_id").to_pylist())
