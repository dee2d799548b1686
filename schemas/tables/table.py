"""The description of one lake table: columns, order on disk, encodings and constraints.

Arrow holds the types; the text beside each column is what the documentation and
`rollhouse describe` print, so a column cannot exist without saying what it means.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa

SCHEMA_VERSION = 5
"""Bumped when a column or table is added; a reader refuses tables with a higher number."""

TIMESTAMP = pa.timestamp("us", tz="UTC")


@dataclass(frozen=True)
class Column:
    """One column. `nullable` is True where NULL means "does not apply or was not observed"."""

    name: str
    type: pa.DataType
    description: str
    nullable: bool = False

    @property
    def arrow_field(self) -> pa.Field:
        # Arrow and Delta keep every column nullable: old files lack columns added later, and the
        # expectations, not the file format, say where a NULL is a fault.
        return pa.field(self.name, self.type, metadata={"description": self.description})


def required(name: str, type: pa.DataType, description: str) -> Column:
    return Column(name, type, description)


def optional(name: str, type: pa.DataType, description: str) -> Column:
    return Column(name, type, description, nullable=True)


RUN_ID = required("run_id", pa.string(), "Run the row belongs to: one line of policy weights.")
CYCLE = required(
    "cycle", pa.int64(), "Cycle in which the row was written. A partition, never a join key."
)
WRITE_ID = required(
    "write_id",
    pa.string(),
    "The write that made the row, `{lease:06d}-{uuid7}`. A row counts only if the ledger names "
    "it, so a crashed or repeated write is invisible.",
)


@dataclass(frozen=True)
class Table:
    """One Delta table of the lake.

    `columns` are those of its own; `schema` adds the three that every table has.
    `byte_stream_split` and `dictionary` name Parquet leaf columns by their dotted path.
    `checks` are SQL expressions that hold for each row (`x IS NULL OR ...`, since NULL fails
    a Delta CHECK).
    """

    name: str
    description: str
    columns: tuple[Column, ...]
    sort_by: tuple[str, ...]
    byte_stream_split: tuple[str, ...] = ()
    dictionary: tuple[str, ...] = ()
    checks: Mapping[str, str] = field(default_factory=dict)

    partition_by = ("run_id", "cycle")

    @property
    def all_columns(self) -> tuple[Column, ...]:
        return (RUN_ID, CYCLE, *self.columns, WRITE_ID)

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([c.arrow_field for c in self.all_columns])

    @property
    def file_schema(self) -> pa.Schema:
        """What a Parquet file holds: partition values live in its path."""
        return pa.schema(
            [c.arrow_field for c in self.all_columns if c.name not in self.partition_by]
        )

    @property
    def own_schema(self) -> pa.Schema:
        """What a writer hands over: without the partition columns and the write id."""
        return pa.schema([c.arrow_field for c in self.columns])
