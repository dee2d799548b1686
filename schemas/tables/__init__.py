"""Every table of the lake, by name."""

from schemas.tables.governance import DECISIONS, LEDGER, LEDGER_KINDS, QUARANTINE, VALIDATIONS
from schemas.tables.rollouts import (
    KINDS,
    ORIGINS,
    REQUESTS,
    ROUTING,
    SEGMENTS,
    STATUSES,
    TRAJECTORIES,
)
from schemas.tables.table import SCHEMA_VERSION, Column, Table
from schemas.tables.training import ATTESTATIONS, BATCHES, EVALS, PUBLICATIONS, SCORES, STEPS

TABLES: dict[str, Table] = {
    table.name: table
    for table in (
        TRAJECTORIES,
        SEGMENTS,
        ROUTING,
        REQUESTS,
        BATCHES,
        SCORES,
        STEPS,
        PUBLICATIONS,
        ATTESTATIONS,
        EVALS,
        VALIDATIONS,
        QUARANTINE,
        DECISIONS,
        LEDGER,
    )
}

__all__ = [
    "KINDS",
    "LEDGER_KINDS",
    "ORIGINS",
    "SCHEMA_VERSION",
    "STATUSES",
    "TABLES",
    "Column",
    "Table",
]
