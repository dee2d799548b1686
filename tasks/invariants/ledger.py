"""Invariants of the ledger itself: its rows in a line, its leases, and what may follow what."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from schemas.tables import LEDGER_KINDS
from tasks.invariants.finding import Invariant
from tasks.invariants.snapshot import Snapshot


def ledger_faults(snapshot: Snapshot) -> Iterator[str]:
    """seq 0, 1, 2 ... once each, as many as the table's application transaction counts."""
    seqs = [entry["seq"] for entry in snapshot.entries]
    missing = sorted(set(range(max(seqs, default=-1) + 1)) - set(seqs))
    if missing:
        yield f"rows {missing} are gone"
    for seq in sorted({seq for seq in seqs if seqs.count(seq) > 1}):
        yield f"row {seq} is there {seqs.count(seq)} times"
    counted = -1 if snapshot.transaction_version is None else snapshot.transaction_version
    if max(seqs, default=-1) != counted:
        yield (
            f"the last row is {max(seqs, default=-1)}, but the table's log counts up to {counted}:"
            " the table was restored to another version, or edited"
        )
    for entry in snapshot.entries:
        if entry["kind"] not in LEDGER_KINDS:
            yield f"row {entry['seq']} is of unknown kind {entry['kind']}"
        if (entry["kind"] == "run_created") != (entry["seq"] == 0):
            yield f"row {entry['seq']} is {entry['kind']}"


def lease_faults(snapshot: Snapshot) -> Iterator[str]:
    """Each row names the newest lease before it, a lease_taken row itself."""
    newest = 0
    for entry in snapshot.entries:
        if entry["kind"] == "lease_taken":
            newest = entry["seq"]
        if entry["lease"] != newest:
            yield f"row {entry['seq']} ({entry['kind']}) names lease {entry['lease']}, not {newest}"


@dataclass
class _Course:
    """Where a run stands after some of its rows."""

    trained: int = 0
    published: int | None = None
    admitted: dict[str, Any] | None = None
    word: str | None = None
    """Gate 2's word on the open admission: batch_accepted, batch_refused, or None so far."""
    open_cycle: int | None = None
    closed_cycle: int = -1

    def take(self, entry: dict[str, Any]) -> str | None:
        """Moves on by one row; why it may not stand here, or None."""
        match entry["kind"]:
            case "cycle_opened":
                return self._open(entry["cycle"])
            case "cycle_closed":
                expected, self.open_cycle = self.open_cycle, None
                self.closed_cycle = entry["cycle"]
                return None if expected == entry["cycle"] else f"cycle {expected} is open"
            case "batch_admitted":
                return self._admit(entry)
            case "batch_accepted" | "batch_refused":
                return self._judge(entry)
            case "batch_trained":
                return self._train(entry)
            case "version_published":
                return self._publish(entry)
            case "evaluated":
                newest, version = self.published, entry["version"]
                known = None not in (newest, version) and version <= newest
                return None if known else f"version {newest} is the newest published"
        return None

    def _open(self, cycle: int) -> str | None:
        before, self.open_cycle = self.open_cycle, cycle
        if before is not None:
            return f"cycle {before} is still open"
        return None if cycle == self.closed_cycle + 1 else f"{self.closed_cycle} was closed last"

    def _admit(self, entry: dict[str, Any]) -> str | None:
        open_before = self.admitted if self.word != "batch_refused" else None
        self.admitted, self.word = entry, None
        if open_before is not None:
            return f"admission {open_before['seq']} is still open"
        if self.published != self.trained:
            return f"version {self.trained} is not published"
        expected = self.trained + 1
        return None if entry["batch"] == expected else f"batch {expected} is the next"

    def _judge(self, entry: dict[str, Any]) -> str | None:
        admission = entry["details"].get("admission")
        if admission is None:
            return None if entry["kind"] == "batch_refused" else "it names no admission"
        if self.admitted is None or self.admitted["seq"] != admission:
            return f"admission {admission} is not open"
        before, self.word = self.word, entry["kind"]
        # A refused batch is judged again where a reviewer waived the rules it stood on.
        if before is None or (before == "batch_refused" and "refusal" in entry["details"]):
            return self._same_batch(entry, self.admitted)
        return f"admission {admission} has its {before} already"

    def _train(self, entry: dict[str, Any]) -> str | None:
        admitted, word = self.admitted, self.word
        self.admitted, self.word, self.trained = None, None, entry["batch"]
        if admitted is None or entry["details"].get("admission") != admitted["seq"]:
            return "no such admission is open"
        if word != "batch_accepted":
            return f"admission {admitted['seq']} was not accepted"
        return self._same_batch(entry, admitted)

    def _same_batch(self, entry: dict[str, Any], admitted: dict[str, Any]) -> str | None:
        for name in ("batch", "num_trajectories", "trajectories_hash"):
            if entry[name] != admitted[name]:
                return f"its {name} is {entry[name]}, its admission's {admitted[name]}"
        return None

    def _publish(self, entry: dict[str, Any]) -> str | None:
        before, self.published = self.published, entry["version"]
        expected = 0 if before is None else before + 1
        if entry["version"] != expected:
            return f"version {expected} is the next"
        if entry["version"] > self.trained:
            return f"batch {entry['version']} is not trained"
        return None


def order_faults(snapshot: Snapshot) -> Iterator[str]:
    """admitted, accepted or refused, trained, published; batches and versions without gaps; a cycle
    opened before it is closed."""
    course = _Course()
    for entry in snapshot.entries:
        if fault := course.take(entry):
            subject = [
                f"{name} {entry[name]}" for name in ("batch", "version") if entry[name] is not None
            ]
            place = ", ".join([f"cycle {entry['cycle']}", *subject])
            yield f"row {entry['seq']} ({entry['kind']}, {place}) may not stand here: {fault}"


INVARIANTS = (
    Invariant("ledger", lambda s: list(ledger_faults(s)), lambda s: f"{len(s.entries)} rows"),
    Invariant(
        "leases",
        lambda s: list(lease_faults(s)),
        lambda s: f"{len(s.of_kind('lease_taken'))} leases",
    ),
    Invariant(
        "order",
        lambda s: list(order_faults(s)),
        lambda s: (
            f"{len(s.of_kind('batch_admitted'))} admissions,"
            f" {len(s.of_kind('batch_trained'))} trained,"
            f" {len(s.of_kind('version_published'))} versions"
        ),
    ),
)
