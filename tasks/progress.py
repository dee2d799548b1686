"""Where a run stands, derived from the lake each time it is asked.

There is no second copy: the controller keeps nothing that a resumed one could not read here, so a
crash at any point leaves the same next action.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from tasks.admit import FinishedGroup
from tasks.lake.lake import Lake
from tasks.lake.ledger import Entry, Ledger


@dataclass(frozen=True)
class Progress:
    """`open_admission` is the newest one that is neither trained nor refused. The trajectories of
    a refused one wait for no other batch: a reviewer either confirms that, and they are dropped,
    or has them trained as admitted."""

    batches_trained: int
    published_version: int | None
    num_recorded: int
    """Train trajectories recorded."""
    num_dropped: int
    """Of those, the ones that will never be trained."""
    finished: tuple[FinishedGroup, ...]
    """Whole usable groups that wait for a batch."""
    recorded_groups: frozenset[int]
    open_admission: Entry | None
    accepted: bool
    """Whether the open admission was accepted."""

    def next_groups(self, in_flight: Iterable[int]) -> "GroupNumbers":
        return GroupNumbers(set(self.recorded_groups) | set(in_flight))


class GroupNumbers:
    """Hands out group numbers from 0 that are not taken, so a group lost in a crash is sampled
    again under its own number and seeds."""

    def __init__(self, taken: set[int]):
        self._taken = taken
        self._next = 0

    def take(self) -> int:
        while self._next in self._taken:
            self._next += 1
        self._taken.add(self._next)
        return self._next


def read_progress(lake: Lake, run_id: str) -> Progress:
    ledger = lake.ledger(run_id)
    trained = ledger.last("batch_trained")
    published = ledger.last("version_published")
    position = {
        write_id: entry.seq
        for entry in ledger.entries
        if entry.kind in ("rollouts_recorded", "evaluated")
        for write_id in entry.write_ids
    }
    rows = lake.read(
        "trajectories",
        run_id=run_id,
        columns=["trajectory_id", "group_id", "split", "weight_version_min", "origin", "write_id"],
    ).to_pylist()
    out = set(
        lake.read("quarantine", run_id=run_id, columns=["trajectory_id"])
        .column("trajectory_id")
        .to_pylist()
    )
    admitted = set(
        lake.read("batches", run_id=run_id, columns=["trajectory_id"])
        .column("trajectory_id")
        .to_pylist()
    )
    waiting: dict[int, FinishedGroup] = {}
    num_recorded = num_dropped = 0
    for row in rows:
        if row["split"] != "train":
            continue
        num_recorded += 1
        num_dropped += row["trajectory_id"] in out
        if row["trajectory_id"] in out or row["trajectory_id"] in admitted:
            continue
        # Nothing imported waits for a batch.
        if row["origin"] is not None:
            continue
        group = row["group_id"]
        oldest = row["weight_version_min"]
        if group in waiting:
            oldest = min(oldest, waiting[group].weight_version_min)
        waiting[group] = FinishedGroup(group, position[row["write_id"]], oldest)
    open_admission, accepted = _open_admission(ledger, trained)
    return Progress(
        batches_trained=0 if trained is None else trained.batch or 0,
        published_version=None if published is None else published.version,
        num_recorded=num_recorded,
        num_dropped=num_dropped,
        finished=tuple(waiting.values()),
        recorded_groups=frozenset(row["group_id"] for row in rows),
        open_admission=open_admission,
        accepted=accepted,
    )


def _open_admission(ledger: Ledger, trained: Entry | None) -> tuple[Entry | None, bool]:
    entry = ledger.last("batch_admitted")
    if entry is None or (trained is not None and trained.seq > entry.seq):
        return None, False
    # The newest word counts: a waiver has a refused admission accepted after all.
    word = None
    for e in ledger.entries[entry.seq :]:
        judged = e.kind in ("batch_accepted", "batch_refused")
        if judged and e.details["admission"] == entry.seq:
            word = e.kind
    return (None, False) if word == "batch_refused" else (entry, word == "batch_accepted")


def unpublished_batch(ledger: Ledger) -> Entry | None:
    """The trained batch whose version is not published yet, or None."""
    trained = ledger.last("batch_trained")
    if trained is None or ledger.last("version_published", version=trained.batch):
        return None
    return trained
