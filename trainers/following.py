"""What the ledger asks of the trainer: pure functions over its entries, and the wait for them.

The trainer never writes the ledger. It reads which admission of its batch counts, whether gate 2
has judged it, and when to stop. Rank 0 alone reads and decides; the others learn its answer.
"""

import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tasks.lake import Entry, Ledger
from trainers import ranks

log = logging.getLogger(__name__)

POLL_S = 0.05
HEARTBEAT_S = 5.0
"""How often ranks meet while there is nothing to do, far below any collective's timeout."""
SUPERSEDED = 4
"""Exit code when another controller has taken the run's lease."""

_WAIT, _FOUND, _REFUSED, _CLOSED, _SUPERSEDED = range(5)


@dataclass(frozen=True)
class Standing:
    """The admission of a batch that counts now, and its `batch_accepted` row if gate 2 passed."""

    admission: int
    accepted: Entry | None


def standing(entries: Sequence[Entry], batch: int) -> Standing | None:
    """The newest admission of `batch`, unless it is refused, or None while there is none.

    Gate 2's newest word on it counts: a waiver has a refused batch accepted after all.
    """
    admitted = None
    word: dict[int, Entry] = {}
    for entry in entries:
        if entry.batch != batch:
            continue
        if entry.kind == "batch_admitted":
            admitted = entry.seq
        elif entry.kind in ("batch_accepted", "batch_refused"):
            word[entry.details["admission"]] = entry
    newest = None if admitted is None else word.get(admitted)
    if admitted is None or (newest is not None and newest.kind == "batch_refused"):
        return None
    return Standing(admitted, newest)


def cycle_is_closed(entries: Sequence[Entry], cycle: int) -> bool:
    return any(entry.kind == "cycle_closed" and entry.cycle == cycle for entry in entries)


def is_superseded(entries: Sequence[Entry], lease: int) -> bool:
    """Whether another controller has taken a lease after `lease`."""
    return any(entry.kind == "lease_taken" and entry.seq > lease for entry in entries)


class Follower:
    """Waits on the ledger, on every rank at once, for what one cycle asks.

    Every method returns None once the cycle is closed, and ends the process with `SUPERSEDED` when
    a newer lease appears.
    """

    def __init__(self, ledger: Ledger, cycle: int, lease: int):
        self.ledger = ledger
        self.cycle = cycle
        self.lease = lease

    def next_admission(self, batch: int) -> tuple[int, Entry | None] | None:
        """The admission to train as `batch`, and its `batch_accepted` row if it has one already."""

        def look() -> tuple[int, int, int]:
            now = standing(self.ledger.entries, batch)
            if now is None:
                return _WAIT, 0, 0
            return _FOUND, now.admission, now.accepted.seq if now.accepted else 0

        code, admission, accepted = self._follow(look)
        if code != _FOUND:
            return None
        # Row 0 is `run_created`, so 0 stands for no row.
        return admission, self.ledger.entries[accepted] if accepted else None

    def is_accepted(self, batch: int, admission: int) -> bool | None:
        """Gate 2's word on an admission."""

        def look() -> tuple[int, int, int]:
            now = standing(self.ledger.entries, batch)
            if now is None or now.admission != admission:
                return _REFUSED, 0, 0
            return (_FOUND if now.accepted else _WAIT), 0, 0

        code, _, _ = self._follow(look)
        return None if code == _CLOSED else code == _FOUND

    def _follow(self, look: Callable[[], tuple[int, int, int]]) -> tuple[int, int, int]:
        def poll() -> tuple[int, int, int]:
            until = time.monotonic() + HEARTBEAT_S
            while time.monotonic() < until:
                self.ledger.refresh()
                if is_superseded(self.ledger.entries, self.lease):
                    return _SUPERSEDED, 0, 0
                answer = look()
                if answer[0] != _WAIT:
                    return answer
                if cycle_is_closed(self.ledger.entries, self.cycle):
                    return _CLOSED, 0, 0
                time.sleep(POLL_S)
            return _WAIT, 0, 0

        while True:
            code, *values = ranks.agreed(poll)
            if code == _SUPERSEDED:
                log.error("another controller has taken the run's lease; stopping")
                sys.exit(SUPERSEDED)
            if code != _WAIT:
                self.ledger.refresh()
                return code, values[0], values[1]
