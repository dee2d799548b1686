"""The lake: every table under one root, appended durably and read through DuckDB.

The lake is the only queue between controller and trainer and the only record of a run. Any Delta
reader can open its tables; only this module and the ledger write them.
"""

import threading
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import pyarrow as pa

from schemas.tables import ALWAYS_COUNTED, TABLES
from tasks.lake.creation import create_delta_table, is_delta_table
from tasks.lake.delta import LakeTable
from tasks.lake.ledger import Ledger
from tasks.lake.migration import migrate
from tasks.lake.reader import Database, check_rows
from tasks.storage import Storage, open_storage


class Lake:
    """An open lake; safe to use from threads, and from several processes that each open it.

    `tables` holds those that are there: a lake that an older Rollhouse made, and only this one's
    `create` migrates, may lack some, which are then read as empty.
    """

    def __init__(self, storage: Storage, *, allow_missing: bool = False):
        self.uri = storage.uri
        self.storage = storage
        self.tables = _open_tables(storage, allow_missing)
        self._database = Database(storage)
        self._ledgers: dict[str, Ledger] = {}
        self._lock = threading.Lock()

    @classmethod
    def create(cls, uri: str | Path) -> "Lake":
        """Makes what tables and columns are missing and opens the lake; several processes may race
        to.

        Raises:
            ValueError: the URI is neither a directory nor in S3, or a table is newer than this
                Rollhouse.
            StorageError: the directory or bucket cannot be written.
        """
        storage = open_storage(uri)
        storage.prepare()
        for table in TABLES.values():
            create_delta_table(storage, table)
        lake = cls(storage)
        older = [table for table in TABLES.values() if lake.tables[table.name].is_older]
        # The ledger is TABLES' last, so its version is the lake's.
        for table in older:
            migrate(storage, table)
        return cls(storage) if older else lake

    @classmethod
    def open(cls, uri: str | Path, *, allow_missing: bool = False) -> "Lake":
        """Opens an existing lake, a directory or `s3://bucket/prefix`, without writing anything.

        `allow_missing` is for who looks after damage: tables that are gone are read as empty.

        Raises:
            ValueError: there is none, or it is newer than this Rollhouse.
            StorageError: the object store does not answer.
        """
        storage = open_storage(uri)
        if not is_delta_table(storage.child("ledger")):
            raise ValueError(f"No lake at {storage.uri}; `rollhouse run RUN.toml` makes one.")
        return cls(storage, allow_missing=allow_missing)

    def append(self, table: str, rows: pa.Table, *, run_id: str, cycle: int, lease: int) -> str:
        """Writes rows under a new write id and returns it; durable on return.

        The rows stay invisible until a ledger row names the write id. `rows` has the table's own
        columns (without run_id, cycle and write_id).

        Raises:
            ValueError: columns, types or a table check do not hold; nothing was written.
            StorageError: a disk or object store refused; nothing became visible.
        """
        assert table != "ledger", "the ledger is written through `Ledger.append`"
        _known(table)
        if table not in self.tables:
            raise ValueError(
                f"The lake at {self.uri} has no table {table} yet; `rollhouse run RUN.toml` "
                "migrates it."
            )
        target = self.tables[table]
        check_rows(self._database.connection, target.table, rows)
        return target.append(rows, run_id=run_id, cycle=cycle, lease=lease)

    def files(
        self,
        table: str,
        *,
        run_id: str | None = None,
        cycle: int | None = None,
        predicate: str | None = None,
    ) -> list[str]:
        """Absolute paths or addresses of a table's current Parquet files, visible rows or not.

        `predicate` is a Delta SQL expression over scalar columns that prunes files by statistics.
        """
        _known(table)
        if table not in self.tables:
            return []
        return self.tables[table].files(run_id=run_id, cycle=cycle, predicate=predicate)

    def read(
        self,
        table: str,
        *,
        run_id: str,
        columns: Sequence[str] | None = None,
        where: str | None = None,
        params: Sequence[object] = (),
        write_ids: Collection[str] | Literal["all"] | None = None,
        order_by: str | None = None,
        predicate: str | None = None,
    ) -> pa.Table:
        """Rows of a run, in `order_by` or else the table's own order.

        By default only visible rows: those of writes that the run's ledger names. `write_ids`
        picks writes by name instead, or `"all"` of them, crashed and repeated ones included.
        `where` is DuckDB SQL with `?` for `params`; `predicate` prunes files as in `files`.

        Raises:
            ValueError: table or column unknown.
        """
        _known(table)
        wanted: Collection[str] | None
        if write_ids == "all" or (write_ids is None and table in ALWAYS_COUNTED):
            wanted = None
        elif write_ids is None:
            wanted = self.ledger(run_id).visible_write_ids
        else:
            wanted = write_ids
            if wanted:
                span = f"write_id >= '{min(wanted)}' AND write_id <= '{max(wanted)}'"
                predicate = span if predicate is None else f"({predicate}) AND {span}"
        return self._database.read_files(
            TABLES[table],
            self.files(table, run_id=run_id, predicate=predicate),
            columns=columns,
            where=where,
            params=params,
            write_ids=wanted,
            order_by=order_by,
        )

    def ledger(self, run_id: str) -> Ledger:
        """The run's ledger, refreshed; the same object each time, so that only news is read."""
        with self._lock:
            if run_id not in self._ledgers:
                table = self.tables["ledger"]
                self._ledgers[run_id] = Ledger(
                    run_id,
                    table,
                    read_rows=partial(self._database.read_files, table.table),
                    holds_write=partial(self._holds_write, run_id),
                )
            ledger = self._ledgers[run_id]
        ledger.refresh()
        return ledger

    def run_ids(self) -> list[str]:
        """Runs that have a ledger, sorted."""
        return self.tables["ledger"].run_ids()

    def _holds_write(self, run_id: str, write_id: str) -> bool:
        return any(table.holds_write(write_id, run_id) for table in self.tables.values())


def _known(name: str) -> None:
    if name not in TABLES:
        raise ValueError(f"The lake has no table {name}; it has {', '.join(TABLES)}.")


def _open_tables(storage: Storage, allow_missing: bool) -> dict[str, LakeTable]:
    ledger = LakeTable(storage, TABLES["ledger"])
    tables = {}
    for name, table in TABLES.items():
        may_lack = (allow_missing or ledger.is_older) and name != "ledger"
        if may_lack and not is_delta_table(storage.child(name)):
            continue
        tables[name] = ledger if name == "ledger" else LakeTable(storage, table)
    return tables
