"""One Delta table of the lake: creation, durable commits, the current files.

Files are written here and only committed through delta-rs, which costs a few milliseconds a commit
and leaves naming, encoding, retries and fsync to us. A handle does not advance by its own commit;
`update` does that, and also makes what it saw durable.
"""

import errno
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction

from schemas.tables import SCHEMA_VERSION, Table
from tasks.durable import explain_os_errors, fsync_dir, fsync_file, make_durable_dirs
from tasks.lake.files import new_write_id, partition_dir
from tasks.lake.writer import delta_statistics, file_rows, write_file

SCHEMA_VERSION_KEY = "rollhouse.schemaVersion"

CHECKPOINT_INTERVAL = 10
"""Commits between checkpoints of the log; without one, a commit grows tenfold in 400 commits."""

MAX_COMMIT_RETRIES = 1000
"""Lost races before an append gives up.

An append conflicts with no other, so each lost race means that another writer got on; delta-rs's
own 15 are used up by four writers on a busy machine. A transaction that was overtaken fails at its
first conflict whatever this number.
"""


def create_delta_table(root: Path, table: Table) -> None:
    """Makes the table with its CHECK constraints in one commit, unless it is there already.

    The constraints bind other Delta writers; our own commits bypass delta-rs's data path, so
    `Lake.append` evaluates the same expressions itself.
    """
    path = root / table.name
    if DeltaTable.is_deltatable(str(path)):
        return
    with explain_os_errors(f"create table {table.name} in {root}"):
        make_durable_dirs(path)
        # CommitFailedError: another process made the table in the meantime.
        with suppress(CommitFailedError):
            _create(path, table)
        log = path / "_delta_log"
        fsync_file(log / f"{0:020d}.json")
        fsync_dir(log)
        fsync_dir(path)


def _create(path: Path, table: Table) -> None:
    constraints = {f"delta.constraints.{name}": sql for name, sql in table.checks.items()}
    DeltaTable.create(
        str(path),
        table.schema,
        mode="ignore",
        partition_by=list(table.partition_by),
        name=table.name,
        description=table.description,
        configuration={
            "delta.checkpointInterval": str(CHECKPOINT_INTERVAL),
            "delta.minReaderVersion": "1",
            # Version 3 is the first whose writers must honour CHECK constraints.
            "delta.minWriterVersion": "3",
            SCHEMA_VERSION_KEY: str(SCHEMA_VERSION),
            **constraints,
        },
        raise_if_key_not_exists=False,
    )


class LakeTable:
    """A table of an existing lake, at the version of its last `update`; safe to use from threads.

    Raises:
        ValueError: the table is missing, or was written by a newer schema version.
    """

    def __init__(self, root: Path, table: Table):
        self.table = table
        self.path = root / table.name
        self._lock = threading.RLock()
        try:
            self._handle = DeltaTable(str(self.path))
        except TableNotFoundError as error:
            raise ValueError(
                f"The lake at {root} has no table {table.name}; `rollhouse run RUN.toml` makes it."
            ) from error
        self._refuse_newer_schema()
        self._durable_version = self._handle.version()

    def _refuse_newer_schema(self) -> None:
        version = int(self._handle.metadata().configuration.get(SCHEMA_VERSION_KEY, "0"))
        if version > SCHEMA_VERSION:
            raise ValueError(
                f"Table {self.table.name} at {self.path} has schema version {version}, this "
                f"Rollhouse reads up to {SCHEMA_VERSION}; upgrade Rollhouse to open this lake."
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other threads from moving the handle between a look at it and a commit on it."""
        with self._lock:
            yield

    def update(self) -> int:
        """Moves the handle to the table's newest version and returns that."""
        with self._lock:
            self._handle.update_incremental()
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
            return self._handle.file_uris(file_pruning_predicate=" AND ".join(terms) or None)

    def holds_write(self, write_id: str, run_id: str) -> bool:
        """Whether a committed file of the run is named by the write."""
        name = f"{write_id}.parquet"
        run_dir = (self.path / partition_dir(run_id, 0)).parent
        # Most tables do not have the file at all, and their logs need not be read to know.
        if not any((cycle / name).exists() for cycle in run_dir.glob("cycle=*")):
            return False
        return any(Path(file).name == name for file in self.files(run_id=run_id))

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
            CommitFailedError: the transaction's application has moved on.
            OSError: the file or the commit could not be written; as long as no ledger row names
                the write id, its rows stay invisible.
        """
        write_id = new_write_id(lease)
        path = self.path / partition_dir(run_id, cycle) / f"{write_id}.parquet"
        typed = file_rows(self.table, rows, write_id)
        size_bytes = write_file(self.table, typed, path)
        add = AddAction(
            path=str(path.relative_to(self.path)),
            size=size_bytes,
            partition_values={"run_id": run_id, "cycle": str(cycle)},
            modification_time=time.time_ns() // 1_000_000,
            data_change=True,
            stats=delta_statistics(typed),
        )
        with self._lock, explain_os_errors(f"commit to table {self.table.name} at {self.path}"):
            if transaction is None:
                self.update()
            self._commit(add, transaction)
            self.update()
            self._make_commits_durable()
        return write_id

    def _commit(self, add: AddAction, transaction: Transaction | None) -> None:
        try:
            self._handle.create_write_transaction(
                [add],
                mode="append",
                schema=self.table.schema,
                partition_by=list(self.table.partition_by),
                commit_properties=CommitProperties(
                    max_commit_retries=MAX_COMMIT_RETRIES,
                    app_transactions=None if transaction is None else [transaction],
                ),
                # Looking for expired log entries lists the whole log, which a commit need not do.
                post_commithook_properties=PostCommitHookProperties(
                    cleanup_expired_logs=(self._handle.version() + 1) % CHECKPOINT_INTERVAL == 0
                ),
            )
        except CommitFailedError:
            raise
        except (DeltaError, OSError) as error:
            # delta-rs reports a full or read-only disk as a general error with a tree of causes,
            # whose innermost ends in "(os error N)".
            number = re.search(r"os error (\d+)", str(error))
            raise OSError(int(number[1]) if number else errno.EIO, str(error)) from error

    def _make_commits_durable(self) -> None:
        log = self.path / "_delta_log"
        checkpointed = False
        for version in range(self._durable_version + 1, self._handle.version() + 1):
            for name in (f"{version:020d}.json", f"{version:020d}.checkpoint.parquet"):
                if os.path.exists(log / name):
                    fsync_file(log / name)
                    checkpointed |= name.endswith(".parquet")
        if checkpointed:
            fsync_file(log / "_last_checkpoint")
        fsync_dir(log)
        self._durable_version = self._handle.version()
