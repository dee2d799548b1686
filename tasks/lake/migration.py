"""Bring a table that an older Rollhouse made up to today's schema, for every Delta reader.

Files are never rewritten: a column added to the Delta schema is NULL in older files. Each step is a
commit that may be repeated, and the schema version comes last; so a process that is killed, or that
another overtakes, leaves a table that the next `Lake.create` finishes.
"""

from deltalake import DeltaTable, Schema
from deltalake.exceptions import CommitFailedError, DeltaError

from schemas.tables import SCHEMA_VERSION, Table
from tasks.lake.creation import SCHEMA_VERSION_KEY, schema_version
from tasks.storage import Storage, explain_errors

CONSTRAINT = "delta.constraints."


def migrate(root: Storage, table: Table) -> None:
    """Adds the columns and constraints that an existing table lacks; a newer one is left alone.

    Raises:
        StorageError: a commit was refused, or rows violate a new constraint.
    """
    storage = root.child(table.name)
    with explain_errors(f"migrate table {table.name} at {storage.uri}", storage.uri, DeltaError):
        handle = storage.patiently(
            lambda: DeltaTable(storage.uri, storage_options=storage.options())
        )
        first = handle.version()
        while schema_version(handle) < SCHEMA_VERSION:
            try:
                storage.patiently(lambda: _migrate(handle, table))
            except CommitFailedError:
                # Another process is at the same work: what it has not done is done next time.
                handle.update_incremental()
        versions = range(first + 1, handle.version() + 1)
        storage.flush([f"_delta_log/{version:020d}.json" for version in versions])


def _migrate(handle: DeltaTable, table: Table) -> None:
    handle.update_incremental()
    known = {field.name for field in handle.schema().fields}
    missing = [field for field in Schema.from_arrow(table.schema).fields if field.name not in known]
    if missing:
        handle.alter.add_columns(missing)
    properties = handle.metadata().configuration
    for name, expression in table.checks.items():
        present = properties.get(CONSTRAINT + name)
        if present == expression:
            continue
        if present is not None:
            handle.alter.drop_constraint(name)
        handle.alter.add_constraint({name: expression})
    # Its check for properties that exist knows Delta's own and no others.
    version = {SCHEMA_VERSION_KEY: str(SCHEMA_VERSION)}
    handle.alter.set_table_properties(version, raise_if_not_exists=False)
