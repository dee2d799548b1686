"""Names of writes and partitions."""

import os
import re
import time
from datetime import UTC, datetime
from urllib.parse import quote
from uuid import UUID

WRITE_FILE = re.compile(r"(?:^|/)(\d{6,}-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\.parquet$")


def uuid7() -> UUID:
    """A time-ordered UUID: 48 bits of Unix milliseconds, then random bits (RFC 9562, 5.7)."""
    milliseconds = time.time_ns() // 1_000_000
    value = (milliseconds & (1 << 48) - 1) << 80 | int.from_bytes(os.urandom(10), "big")
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return UUID(int=value)


def new_write_id(lease: int) -> str:
    """`{lease:06d}-{uuid7}`: names one write and the lease it was made under."""
    return f"{lease:06d}-{uuid7()}"


def lease_of(write_id: str) -> int:
    """The lease that a write was made under."""
    return int(write_id.partition("-")[0])


def write_of_file(path: str) -> str | None:
    """The write that a file is named by; None for a merged file, or one of another tool."""
    found = WRITE_FILE.search(path)
    return found[1] if found else None


def new_merged_name() -> str:
    """Names a file that holds the rows of several writes."""
    return f"merged-{uuid7()}"


def written_at(write_id: str) -> datetime:
    """When a write began, by its writer's clock."""
    milliseconds = UUID(write_id.partition("-")[2]).int >> 80
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


def partition_dir(run_id: str, cycle: int) -> str:
    """Path of a partition under its table, percent-encoded as Delta and Hive readers expect."""
    return f"{run_dir(run_id)}/cycle={cycle}"


def run_dir(run_id: str) -> str:
    """Path of all partitions of a run under a table."""
    return f"run_id={quote(run_id, safe='')}"
