"""What maintenance has to know of a run, from its ledger and its small tables."""

from dataclasses import dataclass
from datetime import datetime

from schemas.config import MaintenanceSection, parse_maintenance
from tasks.decisions import undecided, unfinished_waivers
from tasks.lake.files import lease_of, written_at
from tasks.lake.lake import Lake
from tasks.lake.lease import holder_may_write
from tasks.lake.ledger import Entry, Ledger


@dataclass(frozen=True)
class RunFacts:
    """`named` gives, for each write, the time of the newest ledger row that names it; `closed`, for
    each closed cycle, when it closed; `undecided` are writes that may count yet because a
    reviewer may waive what refused them."""

    run_id: str
    named: dict[str, datetime]
    closed: dict[int, datetime]
    undecided: frozenset[str]
    lease: int
    lease_is_alive: bool

    def is_unnamed(self, write_id: str | None) -> bool:
        """Of a file's single write; a file of several holds named ones only."""
        return write_id is not None and write_id not in self.named

    def may_drop(self, write_id: str, cutoff: datetime) -> bool:
        """Whether nobody can name the write any more: it is older than the grace period, waits for
        no decision, and its lease is not that of a controller that may be at work."""
        if self.lease_is_alive and lease_of(write_id) >= self.lease:
            return False
        return written_at(write_id) < cutoff and write_id not in self.undecided


def run_policy(ledger: Ledger) -> MaintenanceSection:
    """The policy of the run's newest controller; the defaults for a run that has none."""
    source = f"the ledger of run {ledger.run_id}"
    for entry in reversed(ledger.entries):
        if entry.kind == "lease_taken" and "maintenance" in entry.details:
            return parse_maintenance(entry.details["maintenance"], source)
    began_with = ledger.entries[0].details.get("config", {})
    return parse_maintenance(began_with.get("maintenance", {}), source)


def read_facts(ledger: Ledger) -> RunFacts:
    return RunFacts(
        run_id=ledger.run_id,
        named={
            write_id: entry.committed_at for entry in ledger.entries for write_id in entry.write_ids
        },
        closed={
            entry.cycle: entry.committed_at
            for entry in ledger.entries
            if entry.kind == "cycle_closed"
        },
        undecided=frozenset(
            write_id
            for refusal in _open_refusals(ledger)
            for write_id in refusal.details.get("held", ())
        ),
        lease=ledger.lease,
        lease_is_alive=holder_may_write(ledger),
    )


def _open_refusals(ledger: Ledger) -> list[Entry]:
    """Refusals whose data may count yet: nobody has decided, or a waiver is still to be judged."""
    waived = (e.details["refusal"] for e in unfinished_waivers(ledger.entries))
    return [*undecided(ledger.entries), *(ledger.entries[seq] for seq in waived)]


def settled_trajectories(lake: Lake, run_id: str) -> set[str]:
    """Trajectories that no batch needs any more: trained and published, out for good, held out."""
    ledger = lake.ledger(run_id)
    published = {e.version for e in ledger.entries if e.kind == "version_published"}
    trained = {
        e.details["admission"]
        for e in ledger.entries
        if e.kind == "batch_trained" and e.batch in published
    }
    # The newest word counts: a waiver has a refused admission accepted after all.
    words = {
        e.details["admission"]: e
        for e in ledger.entries
        if e.kind in ("batch_accepted", "batch_refused")
    }
    open_refusals = {e.seq for e in _open_refusals(ledger)}
    refused = {
        admission
        for admission, word in words.items()
        if word.kind == "batch_refused" and word.seq not in open_refusals
    }
    batches = lake.read("batches", run_id=run_id, columns=["admission", "trajectory_id"])
    done, needed = set(), set()
    for row in batches.to_pylist():
        if row["admission"] in trained:
            done.add(row["trajectory_id"])
        elif row["admission"] not in refused:
            needed.add(row["trajectory_id"])
    out = lake.read("quarantine", run_id=run_id, columns=["trajectory_id"])
    heldout = lake.read(
        "trajectories", run_id=run_id, columns=["trajectory_id"], where="split = 'heldout'"
    )
    done.update(out.column("trajectory_id").to_pylist())
    done.update(heldout.column("trajectory_id").to_pylist())
    return done - needed
