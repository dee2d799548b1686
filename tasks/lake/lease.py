"""The lease on a run: which one controller may append to its ledger.

The lease is itself a ledger row, so taking it is as atomic as any append, and its id is that row's
seq. Every ledger row of the holder renews it. A dead holder is recognised at once on its own
machine; from another machine, a controller waits until the lease has expired.
"""

import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tasks.lake.ledger import Entry, LeaseLost, Ledger

LEASE_TTL_S = 60.0
"""Seconds without any ledger row after which another controller may take the lease."""


class LeaseHeld(Exception):
    """Another controller holds the run's lease and may be alive."""


@dataclass(frozen=True)
class Process:
    """Identifies one process for good: process ids are reused, start times with them are not.

    `boot_id` and `pid_namespace` say where `pid` means anything: a controller in another container
    or on another machine cannot look it up. `start_ticks` is the start time in clock ticks since
    boot (`/proc/<pid>/stat`, field 22).
    """

    host: str
    boot_id: str
    pid_namespace: str
    pid: int
    start_ticks: int

    @classmethod
    def current(cls) -> "Process":
        start_ticks = _start_ticks(os.getpid())
        assert start_ticks is not None
        return cls(
            host=socket.gethostname(),
            boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            pid_namespace=os.readlink("/proc/self/ns/pid"),
            pid=os.getpid(),
            start_ticks=start_ticks,
        )

    def shares_processes(self, observer: "Process") -> bool:
        """Whether the observer can look the process up."""
        return (self.boot_id, self.pid_namespace) == (observer.boot_id, observer.pid_namespace)

    def is_known_dead(self, observer: "Process") -> bool:
        """True only where the observer shares the process table and the process is not in it."""
        return self.shares_processes(observer) and _start_ticks(self.pid) != self.start_ticks


def _start_ticks(pid: int) -> int | None:
    """Start time of a running process in clock ticks; None if there is none or it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command's name, in brackets, may contain spaces and brackets itself.
    state, *rest = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(rest[18])


def take_lease(
    ledger: Ledger,
    *,
    take_over: bool = False,
    ttl_s: float = LEASE_TTL_S,
    details: Mapping[str, Any] | None = None,
) -> int:
    """Takes the run's lease and returns its id, the seq of its `lease_taken` row.

    `details` are kept in that row beside the holder's own.

    Allowed if nobody holds it, the holder is this process or known to be dead, or its last ledger
    row is older than its time to live; `take_over` takes it from a living holder as well, whose
    next ledger row will be refused.

    Raises:
        LeaseHeld: another controller holds the lease.
    """
    own = Process.current()
    while True:
        ledger.refresh()
        assert ledger.entries, "a lease is taken on a run that has been created"
        holder = ledger.last("lease_taken")
        if holder is not None and not take_over:
            _refuse_if_held(ledger, holder, own)
        try:
            taken = ledger.append(
                "lease_taken",
                lease=len(ledger.entries),
                details={**(details or {}), **asdict(own), "ttl_s": ttl_s},
            )
        except LeaseLost:
            # Another row came first: the holder is alive after all, or somebody else took it.
            continue
        return taken.seq


def renew_if_due(ledger: Ledger, lease: int) -> None:
    """Appends `lease_renewed` if the ledger has been silent for a third of the time to live.

    Raises:
        LeaseLost: another controller has taken the lease.
    """
    ledger.refresh()
    holder = ledger.last("lease_taken")
    assert holder is not None, "only a lease that was taken is renewed"
    if _silent_s(ledger) > holder.details["ttl_s"] / 3:
        ledger.append("lease_renewed", lease=lease)


def _silent_s(ledger: Ledger) -> float:
    return (datetime.now(UTC) - ledger.entries[-1].committed_at).total_seconds()


def holder_may_write(ledger: Ledger) -> bool:
    """Whether whoever holds the newest lease may still name what was written under it: it runs on
    this machine, however silent, or its lease has not expired."""
    holder = ledger.last("lease_taken")
    if holder is None:
        return False
    observer, process = Process.current(), _process(holder)
    if process.shares_processes(observer):
        return not process.is_known_dead(observer)
    return _silent_s(ledger) <= holder.details["ttl_s"]


def _process(holder: Entry) -> Process:
    return Process(**{field.name: holder.details[field.name] for field in fields(Process)})


def _refuse_if_held(ledger: Ledger, holder: Entry, own: Process) -> None:
    ttl_s = holder.details["ttl_s"]
    process = _process(holder)
    silent_s = _silent_s(ledger)
    if process == own or process.is_known_dead(own) or silent_s > ttl_s:
        return
    raise LeaseHeld(
        f"Run {ledger.run_id} is held by process {process.pid} on host {process.host} since "
        f"{holder.committed_at:%Y-%m-%d %H:%M:%S} UTC (last ledger row {max(silent_s, 0):.0f} s "
        f"ago, the lease expires after {ttl_s:.0f} s); stop that process, wait, or pass "
        "`--take-over` if it can no longer write."
    )
