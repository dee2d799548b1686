"""One run of a lake as it lies there, read so that damage is found and not stumbled over.

The ledger is read as rows, since a `Ledger` refuses to open over a gap; files that are gone or
unreadable are set aside and named, and everything else is looked at without them.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import duckdb
import pyarrow as pa

from schemas.tables import TABLES
from tasks.lake.delta_log import TableLog
from tasks.lake.lake import Lake
from tasks.lake.reader import Database
from tasks.maintain.checkpoints import expired_checkpoints
from tasks.query import create_table, open_connection

ADMISSIONS = """
CREATE VIEW admissions AS
SELECT a.seq AS admission, a.batch, a.num_trajectories, a.write_ids, w.word, w.word_seq,
    t.seq AS trained_seq, t.write_ids AS trained_write_ids, t.checkpoint, t.root_hash
FROM ledger a
LEFT JOIN (
    -- Gate 2's newest word: a waiver has a refused batch accepted after all.
    SELECT (details->>'admission')::BIGINT AS admission, arg_max(kind, seq) AS word,
        max(seq) AS word_seq
    FROM ledger WHERE kind IN ('batch_accepted', 'batch_refused') GROUP BY 1
) w ON w.admission = a.seq
LEFT JOIN ledger t
    ON t.kind = 'batch_trained' AND (t.details->>'admission')::BIGINT = a.seq
WHERE a.kind = 'batch_admitted'
"""

EXPIRED_TRAJECTORIES = """
CREATE VIEW expired_trajectories AS
SELECT DISTINCT t.trajectory_id
FROM trajectories t JOIN ledger l ON list_contains(l.write_ids, t.write_id)
WHERE EXISTS (FROM expired_writes e WHERE list_contains(l.write_ids, e.write_id))
"""


def expired_writes(lake: Lake, run_id: str) -> frozenset[str]:
    """Writes that a retention policy took out of the lake on purpose."""
    rows = lake.read(
        "maintenance", run_id=run_id, columns=["expired_write_ids"], where="action = 'expire'"
    )
    lists = rows.column("expired_write_ids").to_pylist()
    return frozenset(write_id for ids in lists for write_id in ids or ())


@dataclass
class Snapshot:
    """A run's rows behind `connection`: every table and view of `rollhouse sql`, over its readable
    files alone; and `admissions`, `expired_writes` and
    `expired_trajectories`, recorded with a write that expired.

    `unreadable` names each file that is not as the Delta log says, and why;
    `expired_checkpoints` are what a policy took out of the store.
    """

    lake: Lake
    run_id: str
    entries: list[dict[str, Any]]
    transaction_version: int | None
    unreadable: list[str]
    num_files: int
    expired: frozenset[str]
    expired_checkpoints: frozenset[str]
    connection: duckdb.DuckDBPyConnection

    def texts(self, sql: str) -> list[str]:
        """The first column of a query's rows."""
        return [str(row[0]) for row in self.connection.execute(sql).fetchall()]

    def number(self, sql: str) -> int:
        row = self.connection.execute(sql).fetchone()
        assert row is not None
        return int(row[0] or 0)

    @cached_property
    def config(self) -> dict[str, Any]:
        """What the run began with; empty where its first row is lost."""
        if self.entries and self.entries[0]["kind"] == "run_created":
            return self.entries[0]["details"].get("config", {})
        return {}

    def of_kind(self, *kinds: str) -> list[dict[str, Any]]:
        return [entry for entry in self.entries if entry["kind"] in kinds]


def read_snapshot(lake: Lake, run_id: str) -> Snapshot:
    """Reads the ledger first, so that what its rows name must be found in the other tables."""
    logs = {"ledger": TableLog(lake.storage.child("ledger"))}
    logs |= {name: TableLog(lake.storage.child(name)) for name in lake.tables if name != "ledger"}
    files: dict[str, list[str]] = {}
    unreadable: list[str] = []
    num_files = 0
    reader = Database(lake.storage)
    for name, log in logs.items():
        committed = [file for file in log.files() if file.run_id == run_id]
        sizes = {file.path: file.size_bytes for file in log.storage.walk()} if committed else {}
        locations = {}
        for file in committed:
            size = sizes.get(file.path)
            if size != file.size_bytes:
                found = "is missing" if size is None else f"has {size} bytes"
                unreadable.append(f"{name}: {file.path} of {file.size_bytes} bytes {found}")
            else:
                locations[log.storage.location(file.path)] = file.num_rows
        found = _rows_by_file(reader, list(locations))
        for location, num_rows in locations.items():
            if isinstance(found[location], str):
                unreadable.append(f"{name}: {location} cannot be read ({found[location]})")
            elif found[location] != num_rows:
                unreadable.append(f"{name}: {location} has {found[location]} of {num_rows} rows")
        files[name] = [location for location in locations if isinstance(found[location], int)]
        num_files += len(committed)
    expired = expired_writes(lake, run_id)
    entries = _entries(reader, files["ledger"])
    visible = {write_id for entry in entries for write_id in entry["write_ids"]}
    connection = open_connection(lake, visible, files)
    expired_rows = pa.table({"write_id": pa.array(sorted(expired), pa.string())})
    create_table(connection, "expired_writes", expired_rows)
    connection.execute(ADMISSIONS)
    connection.execute(EXPIRED_TRAJECTORIES)
    return Snapshot(
        lake=lake,
        run_id=run_id,
        entries=entries,
        transaction_version=logs["ledger"].transaction_version(f"ledger/{run_id}"),
        unreadable=unreadable,
        num_files=num_files,
        expired=expired,
        expired_checkpoints=expired_checkpoints(lake, run_id),
        connection=connection,
    )


def _rows_by_file(reader: Database, locations: list[str]) -> dict[str, int | str]:
    """Rows of each file, every value of which was decoded; or why that failed."""
    if not locations:
        return {}
    # The hash is what makes the reader decode the columns.
    sql = (
        "SELECT filename, count(*), bit_xor(hash(rows)) FROM read_parquet(?, filename = true,"
        " union_by_name = true, hive_partitioning = false) AS rows GROUP BY filename"
    )
    try:
        with reader.connection.cursor() as cursor:
            rows = cursor.execute(sql, [locations]).fetchall()
    except duckdb.Error as error:
        if len(locations) == 1:
            return {locations[0]: str(error).splitlines()[0]}
        halves = locations[: len(locations) // 2], locations[len(locations) // 2 :]
        return _rows_by_file(reader, halves[0]) | _rows_by_file(reader, halves[1])
    return dict.fromkeys(locations, 0) | {name: count for name, count, _ in rows}


def _entries(reader: Database, files: list[str]) -> list[dict[str, Any]]:
    """The ledger's rows by seq, as dictionaries with `details` parsed."""
    rows = reader.read_files(TABLES["ledger"], files).to_pylist()
    return [row | {"details": json.loads(row["details"])} for row in rows]
