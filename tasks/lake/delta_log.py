"""What the Delta log of a table says of it, read on its own and at one version.

For who looks after a lake: this neither trusts the open `Lake` nor needs the table to be sound.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from tasks.lake.creation import schema_version
from tasks.storage import Storage, explain_errors


@dataclass(frozen=True)
class CommittedFile:
    """A current file; `path` is relative to the table, `num_rows` what its statistics say."""

    path: str
    run_id: str
    size_bytes: int
    num_rows: int


class TableLog:
    """The log of the table at `storage`, as it is now.

    Raises:
        StorageError: there is no readable Delta table.
    """

    def __init__(self, storage: Storage):
        self.storage = storage
        with explain_errors(f"read the log of {storage.uri}", storage.uri, DeltaError):
            self._handle = storage.patiently(
                lambda: DeltaTable(storage.uri, storage_options=storage.options())
            )

    @property
    def schema_version(self) -> int:
        return schema_version(self._handle)

    @property
    def properties(self) -> dict[str, str]:
        return self._handle.metadata().configuration

    @property
    def has_deletion_vectors(self) -> bool:
        return "deletionVectors" in (self._handle.protocol().reader_features or ())

    def schema(self) -> pa.Schema:
        return pa.schema(self._handle.schema().to_arrow())

    def transaction_version(self, application: str) -> int | None:
        return self._handle.transaction_version(application)

    def files(self) -> list[CommittedFile]:
        rows = pa.table(self._handle.get_add_actions(flatten=True))
        names = ["path", "partition.run_id", "size_bytes", "num_records"]
        if rows.num_rows == 0:
            return []
        return [
            # The log gives a path as a URL, whose escapes are not those of the partition's name.
            CommittedFile(unquote(path), run_id, size, num_rows)
            for path, run_id, size, num_rows in zip(
                *(rows.column(name).to_pylist() for name in names), strict=True
            )
        ]

    def history(self) -> list[dict[str, Any]]:
        """Versions that the log still holds, newest first: version, committed_at, operation,
        writer."""
        return [
            {
                "version": commit["version"],
                "committed_at": datetime.fromtimestamp(commit["timestamp"] / 1000, UTC),
                "operation": commit["operation"],
                "writer": commit.get("engineInfo"),
            }
            for commit in self._handle.history()
        ]
