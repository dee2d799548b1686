"""What a Delta table of the lake is made with: columns, partitions, properties, constraints."""

from contextlib import suppress

from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError, DeltaError

from schemas.tables import SCHEMA_VERSION, Table
from tasks.storage import Storage, explain_errors

SCHEMA_VERSION_KEY = "rollhouse.schemaVersion"

CHECKPOINT_INTERVAL = 10
"""Commits between checkpoints of the log; without one, a commit grows tenfold in 400 commits."""


def schema_version(handle: DeltaTable) -> int:
    """The schema version that the table was made or migrated with; 0 without one."""
    return int(handle.metadata().configuration.get(SCHEMA_VERSION_KEY, "0"))


def is_delta_table(storage: Storage) -> bool:
    with explain_errors(f"look for a lake at {storage.uri}", storage.uri, DeltaError):
        return storage.patiently(lambda: DeltaTable.is_deltatable(storage.uri, storage.options()))


def create_delta_table(root: Storage, table: Table) -> None:
    """Makes the table with its CHECK constraints in one commit, unless it is there already.

    The constraints bind other Delta writers; our own commits bypass delta-rs's data path, so
    `Lake.append` evaluates the same expressions itself.
    """
    storage = root.child(table.name)
    with explain_errors(f"create table {table.name} in {root.uri}", root.uri, DeltaError):
        if is_delta_table(storage):
            return
        storage.prepare()
        # CommitFailedError: another process made the table in the meantime.
        with suppress(CommitFailedError):
            _create(storage, table)
        storage.flush([f"_delta_log/{0:020d}.json", "_delta_log"])


def _create(storage: Storage, table: Table) -> None:
    constraints = {f"delta.constraints.{name}": sql for name, sql in table.checks.items()}
    DeltaTable.create(
        storage.uri,
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
        storage_options=storage.options(),
        raise_if_key_not_exists=False,
    )
