"""The lake: every table under one directory, appended durably and read through DuckDB.

The lake is the only queue between controller and trainer and the only record of a run. Any Delta
reader can open its tables; only this module and the ledger write them.
"""

import threading
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import pyarrow as pa

from schemas.tables import TABLES
from tasks.durable import explain_os_errors, make_durable_dirs
from tasks.lake.delta import LakeTable, create_delta_table
from tasks.lake.ledger import Ledger
from tasks.lake.reader import check_rows, open_database, read_files


class Lake:
    """An open lake; safe to use from threads, and from several processes that each open it."""

    def __init__(self, root: Path):
        self.uri = str(root)
        self._tables = {name: LakeTable(root, table) for name, table in TABLES.items()}
        self._database = open_database()
        self._ledgers: dict[str, Ledger] = {}
        self._lock = threading.Lock()

    @classmethod
    def create(cls, uri: str | Path) -> "Lake":
        """Makes what tables are missing and opens the lake; several processes may race to.

        Raises:
            ValueError: the URI is not a local directory, or a table is newer than this Rollhouse.
            OSError: the directory cannot be written.
        """
        root = _local_root(uri)
        if root.exists() and not root.is_dir():
            raise ValueError(f"{root} is a file, not a lake; give the path of a directory.")
        with explain_os_errors(f"make a lake at {root}"):
            make_durable_dirs(root)
        for table in TABLES.values():
            create_delta_table(root, table)
        return cls(root)

    @classmethod
    def open(cls, uri: str | Path) -> "Lake":
        """Opens an existing lake.

        Raises:
            ValueError: there is none, it is not a local directory, or it is newer than this
                Rollhouse.
        """
        root = _local_root(uri)
        if not (root / "ledger" / "_delta_log").is_dir():
            raise ValueError(f"No lake at {root}; `rollhouse run RUN.toml` makes one.")
        return cls(root)

    def append(self, table: str, rows: pa.Table, *, run_id: str, cycle: int, lease: int) -> str:
        """Writes rows under a new write id and returns it; durable on return.

        The rows stay invisible until a ledger row names the write id. `rows` has the table's own
        columns (without run_id, cycle and write_id).

        Raises:
            ValueError: columns, types or a table check do not hold; nothing was written.
            OSError: the disk is full or read-only; nothing became visible.
        """
        assert table != "ledger", "the ledger is written through `Ledger.append`"
        target = self._table(table)
        check_rows(self._database, target.table, rows)
        return target.append(rows, run_id=run_id, cycle=cycle, lease=lease)

    def files(
        self,
        table: str,
        *,
        run_id: str | None = None,
        cycle: int | None = None,
        predicate: str | None = None,
    ) -> list[str]:
        """Absolute paths of a table's current Parquet files, visible rows or not.

        `predicate` is a Delta SQL expression over scalar columns that prunes files by statistics.
        """
        return self._table(table).files(run_id=run_id, cycle=cycle, predicate=predicate)

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
        target = self._table(table)
        wanted: Collection[str] | None
        if write_ids == "all" or table == "ledger":
            wanted = None
        elif write_ids is None:
            wanted = self.ledger(run_id).visible_write_ids
        else:
            wanted = write_ids
            if wanted:
                span = f"write_id >= '{min(wanted)}' AND write_id <= '{max(wanted)}'"
                predicate = span if predicate is None else f"({predicate}) AND {span}"
        return read_files(
            self._database,
            target.table,
            target.files(run_id=run_id, predicate=predicate),
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
                table = self._tables["ledger"]
                self._ledgers[run_id] = Ledger(
                    run_id,
                    table,
                    read_rows=partial(read_files, self._database, table.table),
                    holds_write=partial(self._holds_write, run_id),
                )
            ledger = self._ledgers[run_id]
        ledger.refresh()
        return ledger

    def run_ids(self) -> list[str]:
        """Runs that have a ledger, sorted."""
        return self._tables["ledger"].run_ids()

    def _holds_write(self, run_id: str, write_id: str) -> bool:
        return any(table.holds_write(write_id, run_id) for table in self._tables.values())

    def _table(self, name: str) -> LakeTable:
        if name not in self._tables:
            raise ValueError(f"The lake has no table {name}; it has {', '.join(self._tables)}.")
        return self._tables[name]


def _local_root(uri: str | Path) -> Path:
    if "://" in str(uri):
        raise ValueError(
            f"This release opens lakes in local directories, not {uri}; pass a path, or copy the "
            "lake to a local directory first."
        )
    return Path(uri).expanduser().absolute()
