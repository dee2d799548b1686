"""Invariants of tables, files and writes: what the ledger names is there, and as it was written."""

from collections.abc import Iterator

import pyarrow as pa

from schemas.tables import SCHEMA_VERSION, TABLES, Table
from tasks.invariants.finding import Finding, Invariant
from tasks.invariants.snapshot import Snapshot
from tasks.lake.batches import trajectories_hash
from tasks.lake.creation import CHECKPOINT_INTERVAL
from tasks.lake.delta_log import TableLog
from tasks.lake.lake import Lake
from tasks.lake.migration import CONSTRAINT

WRITE_ID = "^[0-9]{6,}-[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$"

DATA_TABLES = [name for name in TABLES if name != "ledger"]


def check_tables(lake: Lake) -> Finding:
    """Each table is there with its columns, properties and constraints, and without deletion
    vectors. An older lake is not faulty: it is migrated when next written."""
    faults, older = [], []
    lake_version = TableLog(lake.storage.child("ledger")).schema_version
    for name, table in TABLES.items():
        if name not in lake.tables:
            if lake_version == SCHEMA_VERSION:
                faults.append(f"{name} is not there")
            continue
        log = TableLog(lake.storage.child(name))
        if log.schema_version < SCHEMA_VERSION:
            older.append(name)
        faults += [f"{name}: {fault}" for fault in table_faults(table, log)]
    found = f"{len(lake.tables)} tables of schema version {lake_version}"
    if older:
        found += (
            f"; `rollhouse run` brings {len(older)} of them to {SCHEMA_VERSION}, with new columns"
        )
    return Finding(
        run_id=None,
        invariant="tables",
        ok=not faults,
        found="; ".join(faults) or found,
        fix="restore the table from a backup, or its properties with deltalake" if faults else "",
        faults=tuple(faults),
    )


def table_faults(table: Table, log: TableLog) -> Iterator[str]:
    if log.has_deletion_vectors:
        yield "it has deletion vectors, which our readers ignore"
    interval = log.properties.get("delta.checkpointInterval")
    if interval != str(CHECKPOINT_INTERVAL):
        yield f"delta.checkpointInterval is {interval}, not {CHECKPOINT_INTERVAL}"
    is_current = log.schema_version == SCHEMA_VERSION
    schema = log.schema()
    for column in table.schema:
        if column.name not in schema.names:
            if is_current:
                yield f"column {column.name} is missing"
        elif not _same_type(schema.field(column.name).type, column.type):
            yield f"{column.name} is {schema.field(column.name).type}, not {column.type}"
    for name, expression in table.checks.items():
        present = log.properties.get(CONSTRAINT + name)
        if present != expression and is_current:
            yield f"constraint {name} is {present or 'missing'}"


def _same_type(one: pa.DataType, other: pa.DataType) -> bool:
    """Whether two types agree but for the names that Arrow gives to elements of lists and maps."""
    if one.id != other.id:
        return False
    if one.num_fields == 0:
        return one == other
    if one.num_fields != other.num_fields:
        return False
    inner = [(one.field(i), other.field(i)) for i in range(one.num_fields)]
    is_struct = pa.types.is_struct(one)
    return all(_same_type(a.type, b.type) and (a.name == b.name or not is_struct) for a, b in inner)


def write_id_faults(snapshot: Snapshot) -> Iterator[str]:
    """Every row says which write made it; a row without one could never count or be cleaned up."""
    for name in TABLES:
        yield from snapshot.texts(
            f"SELECT format('{name}: {{}} rows with write id {{}}', count(*), write_id)"
            f" FROM {name}_all WHERE write_id IS NULL"
            f" OR NOT regexp_matches(write_id, '{WRITE_ID}') GROUP BY write_id ORDER BY write_id"
        )


def write_faults(snapshot: Snapshot) -> Iterator[str]:
    """Each write that a row names has rows, made under that row's lease; so a table that was put
    back to an earlier version is found out."""
    found: set[str] = set()
    for name in DATA_TABLES:
        found.update(snapshot.texts(f"SELECT DISTINCT write_id FROM {name}"))
    for entry in snapshot.entries:
        place = f"row {entry['seq']} ({entry['kind']})"
        # After a reviewer's decision, writes of the refusal's lease count after all.
        decided = entry["kind"] == "decision_adopted" or "refusal" in entry["details"]
        for write_id in entry["write_ids"]:
            if write_id not in found and write_id not in snapshot.expired:
                yield f"{place} names write {write_id}, which has no rows in any table"
            lease = int(write_id.partition("-")[0])
            if lease > entry["lease"] or (lease < entry["lease"] and not decided):
                yield f"{place} of lease {entry['lease']} names write {write_id} of another lease"


def recorded_faults(snapshot: Snapshot) -> Iterator[str]:
    """As many trajectories, under the same ids, as the row that recorded them says."""
    rows = snapshot.connection.execute(
        "SELECT l.seq, list(t.trajectory_id ORDER BY t.trajectory_id)"
        " FROM ledger l JOIN trajectories t ON list_contains(l.write_ids, t.write_id)"
        " GROUP BY l.seq"
    ).fetchall()
    recorded: dict[int, list[str]] = dict(rows)
    for entry in snapshot.of_kind("rollouts_recorded", "evaluated"):
        ids = recorded.get(entry["seq"], [])
        expected, digest = entry["num_trajectories"], entry["trajectories_hash"]
        if expected is not None and len(ids) != expected:
            yield f"row {entry['seq']} recorded {expected} trajectories, {len(ids)} are there"
        elif digest is not None and trajectories_hash(ids) != digest:
            yield f"row {entry['seq']} recorded other trajectories than the {len(ids)} there"


def uncounted(snapshot: Snapshot) -> str:
    """How many rows no ledger row names: what crashes, repeats and refusals left behind."""
    counts = {
        name: snapshot.number(
            f"SELECT count(*) FROM {name}_all ANTI JOIN recorded_writes USING (write_id)"
        )
        for name in DATA_TABLES
    }
    listed = [f"{count} of {name}" for name, count in counts.items() if count]
    return "rows that do not count: " + (", ".join(listed) or "none")


INVARIANTS = (
    Invariant(
        "files",
        lambda s: s.unreadable,
        lambda s: f"{s.num_files} files, every row decoded",
    ),
    Invariant("write_ids", lambda s: list(write_id_faults(s)), uncounted),
    Invariant(
        "writes",
        lambda s: list(write_faults(s)),
        lambda s: f"{sum(len(entry['write_ids']) for entry in s.entries)} writes named",
    ),
    Invariant(
        "recorded",
        lambda s: list(recorded_faults(s)),
        lambda s: f"{s.number('SELECT count(*) FROM trajectories')} trajectories",
    ),
)
