"""The ledger of one run: an append-only list of facts, written by the holder of the lease alone.

A row of any other table counts if and only if a ledger row names its write id, so a crash leaves
nothing to undo. Two writers are kept apart twice: each row names the lease it was written under,
and Delta's application transaction `ledger/{run_id}` with version = seq refuses a commit made on a
view of the ledger that is no longer the newest.
"""

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from deltalake import Transaction
from deltalake.exceptions import CommitFailedError

from schemas.tables import LEDGER_KINDS
from tasks.lake.delta import LakeTable


class LeaseLost(Exception):
    """Another controller has taken the run's lease; this one must stop, and nothing was written."""


@dataclass(frozen=True)
class Entry:
    """One row of the ledger; the columns of the same names say what each field means."""

    seq: int
    kind: str
    cycle: int
    batch: int | None
    version: int | None
    lease: int
    committed_at: datetime
    write_ids: tuple[str, ...]
    num_trajectories: int | None
    trajectories_hash: str | None
    checkpoint: str | None
    root_hash: str | None
    details: dict[str, Any] = field(hash=False)


FIELDS = tuple(entry_field.name for entry_field in fields(Entry))


class Ledger:
    """A run's ledger as of the last `refresh`.

    `read_rows` turns file paths of the ledger table into rows; `holds_write` says whether some
    table of the lake has committed the file of a write id of this run.
    """

    def __init__(
        self,
        run_id: str,
        table: LakeTable,
        read_rows: Callable[[Sequence[str]], pa.Table],
        holds_write: Callable[[str], bool],
    ):
        self.run_id = run_id
        self.entries: list[Entry] = []
        self.visible_write_ids: set[str] = set()
        self.lease = 0
        self._table = table
        self._read_rows = read_rows
        self._holds_write = holds_write
        self._version = -1
        self._files: set[str] = set()
        self._lock = threading.RLock()

    @property
    def _application(self) -> str:
        return f"ledger/{self.run_id}"

    def refresh(self) -> None:
        """Reads what was committed since the last call; only new files are opened."""
        with self._lock:
            version = self._table.update()
            if version == self._version:
                return
            files = self._table.files(run_id=self.run_id)
            new = [file for file in files if file not in self._files]
            if new:
                for row in self._read_rows(new).to_pylist():
                    self._add(row)
            self._files = set(files)
            self._version = version

    def _add(self, row: dict[str, Any]) -> None:
        # A compacted file repeats rows that are known already.
        if row["seq"] < len(self.entries):
            return
        assert row["seq"] == len(self.entries), f"ledger of {self.run_id} has a gap at {row['seq']}"
        entry = Entry(
            **{name: row[name] for name in FIELDS if name not in ("write_ids", "details")},
            write_ids=tuple(row["write_ids"]),
            details=json.loads(row["details"]),
        )
        self.entries.append(entry)
        self.visible_write_ids.update(entry.write_ids)
        if entry.kind == "lease_taken":
            self.lease = entry.seq

    def last(self, kind: str, **filters: object) -> Entry | None:
        """The newest entry of a kind whose fields equal `filters`, or None."""
        for entry in reversed(self.entries):
            if entry.kind == kind and all(
                getattr(entry, name) == value for name, value in filters.items()
            ):
                return entry
        return None

    def append(
        self,
        kind: str,
        *,
        lease: int,
        cycle: int | None = None,
        batch: int | None = None,
        version: int | None = None,
        write_ids: Sequence[str] = (),
        num_trajectories: int | None = None,
        trajectories_hash: str | None = None,
        checkpoint: str | None = None,
        root_hash: str | None = None,
        details: dict[str, Any] | None = None,
    ) -> Entry:
        """Commits the next row under a lease; durable on return.

        `cycle` defaults to the last row's. The first row is `run_created` under lease 0; a
        `lease_taken` row's lease is the seq it expects to get.

        Raises:
            LeaseLost: the lease is not the newest, or another writer committed first.
            OSError: the row could not be written.
        """
        assert kind in LEDGER_KINDS, kind
        # The table's lock keeps other threads from moving the handle past the view that is checked.
        with self._lock, self._table.locked():
            self.refresh()
            seq = len(self.entries)
            self._check_turn(kind, lease, seq)
            for write_id in write_ids:
                # Only writes that are named are ever merged, and lose the file of their name.
                held = write_id in self.visible_write_ids or self._holds_write(write_id)
                assert held, f"{kind} names {write_id}, which is not written"
            entry = Entry(
                seq=seq,
                kind=kind,
                cycle=cycle if cycle is not None else self.entries[-1].cycle if seq else 0,
                batch=batch,
                version=version,
                lease=lease,
                committed_at=datetime.now(UTC),
                write_ids=tuple(write_ids),
                num_trajectories=num_trajectories,
                trajectories_hash=trajectories_hash,
                checkpoint=checkpoint,
                root_hash=root_hash,
                details=details or {},
            )
            self._commit(entry)
            return self.entries[seq]

    def _check_turn(self, kind: str, lease: int, seq: int) -> None:
        if kind == "run_created" and seq > 0:
            raise LeaseLost(
                f"Run {self.run_id} was created by another controller meanwhile. Stop this one."
            )
        assert (kind == "run_created") == (seq == 0), f"{kind} cannot be the first row of a ledger"
        expected = seq if kind == "lease_taken" else self.lease
        if lease != expected:
            raise LeaseLost(
                f"Lease {lease} of run {self.run_id} is no longer the newest ({self.lease} is): "
                f"another controller has taken over, so {kind} was not recorded. Stop this one."
            )
        # Dropped data keeps its transaction ids (a restored table does that), so both must agree.
        known = self._table.transaction_version(self._application)
        if known != (seq - 1 if seq else None):
            raise ValueError(
                f"The ledger of run {self.run_id} has {seq} rows, but its transaction log counts "
                f"{'none' if known is None else known + 1}: the table was restored or edited. "
                "Restore the whole lake from one backup, or start a run under another name."
            )

    def _commit(self, entry: Entry) -> None:
        row = {name: getattr(entry, name) for name in FIELDS}
        row["details"] = json.dumps(entry.details, sort_keys=True)
        own = {name: value for name, value in row.items() if name != "cycle"}
        try:
            write_id = self._table.append(
                pa.Table.from_pylist([own], schema=self._table.table.own_schema),
                run_id=self.run_id,
                cycle=entry.cycle,
                lease=entry.lease,
                transaction=Transaction(self._application, entry.seq),
            )
        except CommitFailedError as error:
            raise LeaseLost(
                f"Another controller wrote row {entry.seq} of run {self.run_id}'s ledger first, so "
                f"{entry.kind} was not recorded. Stop this one."
            ) from error
        if self._table.version == self._version + 1:
            # Nobody else wrote meanwhile, so there is nothing to read but this row.
            self._add(row)
            self._files.add(self._table.file_of(write_id, self.run_id, entry.cycle))
            self._version = self._table.version
        else:
            self.refresh()
