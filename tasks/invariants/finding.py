"""What an invariant is, and what checking it found."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tasks.invariants.snapshot import Snapshot

SHOWN_FAULTS = 3

RESTORE = "stop the run and restore the whole lake and its store from one backup"


@dataclass(frozen=True)
class Invariant:
    """`faults` returns a sentence for each place where the promise is broken, and `holds` says what
    was looked at where there is none."""

    name: str
    faults: Callable[[Snapshot], Sequence[str]]
    holds: Callable[[Snapshot], str]
    fix: str = RESTORE

    def check(self, snapshot: Snapshot) -> "Finding":
        faults = tuple(self.faults(snapshot))
        return Finding(
            run_id=snapshot.run_id,
            invariant=self.name,
            ok=not faults,
            found=_listed(faults) if faults else self.holds(snapshot),
            fix=self.fix if faults else "",
            faults=faults,
        )


@dataclass(frozen=True)
class Finding:
    """`found` is one line: what holds, or the first faults of all in `faults`."""

    run_id: str | None
    invariant: str
    ok: bool
    found: str
    fix: str
    faults: tuple[str, ...] = ()


def _listed(faults: Sequence[str]) -> str:
    more = len(faults) - SHOWN_FAULTS
    return "; ".join(faults[:SHOWN_FAULTS]) + (f"; and {more} more" if more > 0 else "")
