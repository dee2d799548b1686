"""Tables, commit protocol, ledger, lease and batches of the lake."""

from tasks.lake.batches import Batch, read_batch, trajectories_hash, write_batch
from tasks.lake.lake import Lake
from tasks.lake.lease import LEASE_TTL_S, LeaseHeld, renew_if_due, take_lease
from tasks.lake.ledger import Entry, LeaseLost, Ledger

__all__ = [
    "LEASE_TTL_S",
    "Batch",
    "Entry",
    "Lake",
    "LeaseHeld",
    "LeaseLost",
    "Ledger",
    "read_batch",
    "renew_if_due",
    "take_lease",
    "trajectories_hash",
    "write_batch",
]
