"""One Delta table of the lake: commits and the current files.

Files are written here and only committed through delta-rs, which costs a few milliseconds a commit
and leaves naming, encoding, retries and fsync to us. A handle does not advance by its own commit;
`update` does that, and also makes what it saw durable.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from schemas.tables import SCHEMA_VERSION, Table
from tasks.lake.creation import CHECKPOINT_INTERVAL, schema_version
from tasks.lake.files import new_write_id, partition_dir, write_of_file
from tasks.lake.writer import delta_statistics, file_rows, parquet_bytes
from tasks.storage import Storage, explain_errors

MAX_COMMIT_RETRIES = 1000
"""Lost races before an append gives up.

An append conflicts with no other, so each lost race means that another writer got on; delta-rs's
own 15 are used up by four writers on a busy machine. A transaction that was overtaken fails at its
first conflict whatever this number.
"""


@dataclass(frozen=True)
class TableFile:
    """A current file, from its add action. `path` is relative to the table's folder.

    `first_key` is the least value of the table's first sort column, None if it is not known.
    `write_id` is the one write that the file is; None for a merged file.
    """

    path: str
    run_id: str
    cycle: int
    size_bytes: int
    num_rows: int
    first_key: Any
    write_id: str | None


class FilesChanged(Exception):
    """Another writer has taken out files that were to be replaced; nothing was committed."""


def _file_path(name: str, run_id: str, cycle: int) -> str:
    return f"{partition_dir(run_id, cycle)}/{name}.parquet"


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class LakeTable:
    """A table of an existing lake, at the version of its last `update`; safe to use from threads.

    Raises:
        ValueError: the table is missing, or was written by a newer schema version.
    """

    def __init__(self, root: Storage, table: Table):
        self.table = table
        self.storage = root.child(table.name)
        self._lock = threading.RLock()
        self._options: dict[str, str] = {}
        self._own_writes: set[str] = set()
        try:
            self._open()
        except TableNotFoundError as error:
            raise ValueError(
                f"The lake at {root.uri} has no table {table.name}; `rollhouse run RUN.toml` makes "
                "it."
            ) from error
        self.is_older = self._refuse_newer_schema() < SCHEMA_VERSION
        self._durable_version = self._handle.version()

    def _open(self) -> None:
        self._options = self.storage.options()
        with self._explained("read"):
            self._handle = self.storage.patiently(
                lambda: DeltaTable(self.storage.uri, storage_options=self._options)
            )

    def _explained(self, verb: str):
        """Disk, object store and delta-rs report in one way; a lost race stays what it is."""
        action = f"{verb} table {self.table.name} at {self.storage.uri}"
        return explain_errors(action, self.storage.uri, DeltaError)

    def _refuse_newer_schema(self) -> int:
        version = schema_version(self._handle)
        if version > SCHEMA_VERSION:
            raise ValueError(
                f"Table {self.table.name} at {self.storage.uri} has schema version {version}, this "
                f"Rollhouse reads up to {SCHEMA_VERSION}; upgrade Rollhouse to open this lake."
            )
        return version

    def _refuse_older_schema(self) -> None:
        """A lake that was only opened may be migrated by another process meanwhile."""
        if not self.is_older:
            return
        with self._lock:
            self.update()
            self.is_older = self._refuse_newer_schema() < SCHEMA_VERSION
        if self.is_older:
            raise ValueError(
                f"Table {self.table.name} at {self.storage.uri} was made by an older Rollhouse and "
                "is read-only until it is migrated; `rollhouse run RUN.toml` does that."
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other threads from moving the handle between a look at it and a commit on it."""
        with self._lock:
            yield

    def update(self) -> int:
        """Moves the handle to the table's newest version and returns that."""
        with self._lock:
            if not self._renewed():
                with self._explained("read"):
                    self.storage.patiently(self._handle.update_incremental)
            return self._handle.version()

    def _renewed(self) -> bool:
        """Opens the table again if temporary credentials were renewed."""
        is_renewed = self.storage.options() != self._options
        if is_renewed:
            self._open()
        return is_renewed

    @property
    def version(self) -> int:
        """The table's version as of the last `update` or `append`."""
        return self._handle.version()

    def transaction_version(self, application: str) -> int | None:
        """The last transaction of an application that the handle knows of; None before any."""
        with self._lock:
            return self._handle.transaction_version(application)

    def run_ids(self) -> list[str]:
        """Runs that have files in the table, sorted."""
        with self._lock:
            self.update()
            return sorted({str(partition["run_id"]) for partition in self._handle.partitions()})

    def files(
        self, *, run_id: str | None = None, cycle: int | None = None, predicate: str | None = None
    ) -> list[str]:
        """Absolute paths of the current files that may hold rows of the run and cycle.

        `predicate` is a Delta SQL expression over scalar columns; it prunes by statistics, so a
        file that stays may still hold rows that do not match.

        Raises:
            ValueError: another writer put deletion vectors into the table.
        """
        terms = [] if run_id is None else [f"run_id = '{run_id.replace(chr(39), chr(39) * 2)}'"]
        if cycle is not None:
            terms.append(f"cycle = {int(cycle)}")
        if predicate is not None:
            terms.append(f"({predicate})")
        with self._lock:
            self.update()
            if "deletionVectors" in (self._handle.protocol().reader_features or ()):
                raise ValueError(
                    f"Table {self.table.name} has deletion vectors, which a Parquet reader would "
                    "ignore; rewrite it without them (`REORG TABLE … APPLY (PURGE)`)."
                )
            return self._paths(self._handle, " AND ".join(terms) or None)

    def _paths(self, handle: DeltaTable, predicate: str | None = None) -> list[str]:
        """delta-rs percent-encodes the table's own address in a file's, which no reader decodes."""
        root = handle.table_uri.removeprefix("file://")
        files = handle.file_uris(file_pruning_predicate=predicate)
        return [self.storage.location(file.removeprefix(root)) for file in files]

    def file_of(self, write_id: str, run_id: str, cycle: int) -> str:
        """Absolute path of the file that a write is, as `files` has it."""
        return self.storage.location(_file_path(write_id, run_id, cycle))

    def holds_write(self, write_id: str, run_id: str) -> bool:
        """Whether a committed file of the run is named by the write."""
        if write_id in self._own_writes:
            return True
        name = f"/{write_id}.parquet"
        return any(file.endswith(name) for file in self.files(run_id=run_id))

    def append(
        self,
        rows: pa.Table,
        *,
        run_id: str,
        cycle: int,
        lease: int,
        transaction: Transaction | None = None,
    ) -> str:
        """Writes the rows as one file and commits it; durable on return. The write id.

        With a `transaction` the commit is made on the handle as it stands and refused if the
        application has moved on since the last `update`; without one it joins whatever others
        have committed.

        Raises:
            ValueError: the table has an older schema.
            CommitFailedError: the transaction's application has moved on.
            OSError: the file or the commit could not be written; as long as no ledger row names
                the write id, its rows stay invisible.
        """
        self._refuse_older_schema()
        write_id = new_write_id(lease)
        typed = file_rows(self.table, rows, write_id)
        add = self.write_file(typed, write_id, run_id=run_id, cycle=cycle, data_change=True)
        with self._lock:
            # A guarded commit is made on the view that was checked: its handle must not move.
            if transaction is None:
                self._renewed()
            try:
                self._commit(add, transaction)
            except CommitFailedError:
                if transaction is not None:
                    raise
                # Rows alone conflict with nothing; a newer schema or protocol has to be read.
                self.update()
                self._commit(add, None)
            self.update()
            self._make_commits_durable()
            self._own_writes.add(write_id)
        return write_id

    def write_file(
        self, typed: pa.Table, name: str, *, run_id: str, cycle: int, data_change: bool
    ) -> AddAction:
        """Writes rows in a file's form, durable on return; the add action that would commit it."""
        path = _file_path(name, run_id, cycle)
        data = parquet_bytes(self.table, typed)
        self.storage.write(path, data)
        return AddAction(
            path=path,
            size=len(data),
            partition_values={"run_id": run_id, "cycle": str(cycle)},
            modification_time=_now_ms(),
            data_change=data_change,
            stats=delta_statistics(typed),
        )

    def current_files(self, run_id: str) -> list[TableFile]:
        """Every current file of a run, by cycle and then by its first key and path."""
        with self._lock:
            self.update()
            listed = pa.table(self._handle.get_add_actions(flatten=True)).to_pylist()
        files = [self._table_file(row) for row in listed if row["partition.run_id"] == run_id]
        return sorted(files, key=lambda f: (f.cycle, f.first_key is not None, f.first_key, f.path))

    def _table_file(self, action: dict[str, Any]) -> TableFile:
        # The log holds the path once more percent-encoded than the file's own name.
        path = unquote(action["path"])
        return TableFile(
            path=path,
            run_id=action["partition.run_id"],
            cycle=int(action["partition.cycle"]),
            size_bytes=action["size_bytes"],
            num_rows=action["num_records"],
            first_key=action.get(f"min.{self.table.sort_by[0]}"),
            write_id=write_of_file(path),
        )

    def replace_files(
        self, removed: Sequence[TableFile], added: Sequence[AddAction] = (), *, data_change: bool
    ) -> None:
        """Takes files out of the table and puts others in, in one commit; durable on return.

        delta-rs lets two commits remove the same file, whose rows would then count twice. So each
        try commits at the very version that the files were looked up in, or not at all.

        Raises:
            FilesChanged: another writer has taken out some of the files.
        """
        self._refuse_older_schema()
        now = _now_ms()
        removals = [
            RemoveAction(
                path=file.path,
                data_change=data_change,
                deletion_timestamp=now,
                size=file.size_bytes,
                partition_values={"run_id": file.run_id, "cycle": str(file.cycle)},
            )
            for file in removed
        ]
        old = {self.storage.location(file.path) for file in removed}
        new = {self.storage.location(add.path) for add in added}

        def commit() -> bool:
            self._handle.update_incremental()
            current = set(self._paths(self._handle))
            if new <= current and not old & current:
                # An answer to a try before was lost, or another writer took out the same.
                return True
            if not old <= current:
                raise FilesChanged(f"files of table {self.table.name} were replaced meanwhile")
            try:
                self._write_transaction([*added, *removals], CommitProperties(max_commit_retries=0))
            except CommitFailedError:
                return False
            return True

        with self._lock:
            self.update()
            with self._explained("commit to"):
                while not self.storage.patiently(commit):
                    pass
            self.update()
            self._make_commits_durable()

    def files_at(self, moment: datetime) -> set[str]:
        """Absolute paths of the files that the table had at a moment; of its first version if it
        is younger."""
        with self._explained("read"):
            past = self.storage.patiently(
                lambda: DeltaTable(self.storage.uri, storage_options=self.storage.options())
            )
            self.storage.patiently(lambda: past.load_as_version(moment))
            return set(self._paths(past))

    def _write_transaction(
        self, actions: list[AddAction | RemoveAction], properties: CommitProperties
    ) -> None:
        self._handle.create_write_transaction(
            actions,
            mode="append",
            schema=self.table.schema,
            partition_by=list(self.table.partition_by),
            commit_properties=properties,
            # Looking for expired log entries lists the whole log, which a commit need not do.
            post_commithook_properties=PostCommitHookProperties(
                cleanup_expired_logs=(self._handle.version() + 1) % CHECKPOINT_INTERVAL == 0
            ),
        )

    def _commit(self, add: AddAction, transaction: Transaction | None) -> None:
        known = None if transaction is None else self.transaction_version(transaction.app_id)
        is_repeated = False

        def commit() -> None:
            nonlocal is_repeated
            if is_repeated:
                # The answer to the try before, and no more, may have been lost.
                self._handle.update_incremental()
                if self.storage.location(add.path) in self._paths(self._handle):
                    return
                if transaction and self.transaction_version(transaction.app_id) != known:
                    raise CommitFailedError(f"{transaction.app_id} has moved on")
            is_repeated = True
            self._write_transaction(
                [add],
                CommitProperties(
                    max_commit_retries=MAX_COMMIT_RETRIES,
                    app_transactions=None if transaction is None else [transaction],
                ),
            )

        with self._explained_commit():
            self.storage.patiently(commit)

    @contextmanager
    def _explained_commit(self) -> Iterator[None]:
        lost_race: CommitFailedError | None = None
        with self._explained("commit to"):
            try:
                yield
            except CommitFailedError as error:
                lost_race = error
        if lost_race is not None:
            raise lost_race

    def _make_commits_durable(self) -> None:
        """delta-rs wrote these itself, without fsync."""
        log = []
        for version in range(self._durable_version + 1, self._handle.version() + 1):
            log += [f"_delta_log/{version:020d}.{kind}" for kind in ("json", "checkpoint.parquet")]
        self.storage.flush([*log, "_delta_log/_last_checkpoint"])
        self._durable_version = self._handle.version()
