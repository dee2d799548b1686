"""What the ledger asks of the trainer, row by row."""

from datetime import UTC, datetime

from tasks.lake import Entry
from trainers.following import cycle_is_closed, is_superseded, standing


def _ledger(*rows):
    """Entries from (kind, fields): fields are batch, cycle and admission."""
    return [
        Entry(
            seq=seq,
            kind=kind,
            cycle=fields.get("cycle", 0),
            batch=fields.get("batch"),
            version=None,
            lease=1,
            committed_at=datetime.now(UTC),
            write_ids=(),
            num_trajectories=None,
            trajectories_hash=None,
            checkpoint=None,
            root_hash=None,
            details={"admission": fields["admission"]} if "admission" in fields else {},
        )
        for seq, (kind, fields) in enumerate(rows)
    ]


ROWS = [
    ("run_created", {}),
    ("lease_taken", {}),
    ("batch_admitted", {"batch": 1}),
    ("batch_admitted", {"batch": 2}),
    ("batch_refused", {"batch": 1, "admission": 2}),
    ("batch_accepted", {"batch": 2, "admission": 3}),
    ("batch_admitted", {"batch": 1}),
    ("batch_accepted", {"batch": 1, "admission": 6}),
]


def _seen(num_rows, batch):
    now = standing(_ledger(*ROWS[:num_rows]), batch)
    return None if now is None else (now.admission, now.accepted.seq if now.accepted else None)


def test_the_newest_admission_that_was_not_refused_counts():
    assert _seen(2, 1) is None
    assert _seen(3, 1) == (2, None)
    assert _seen(5, 1) is None
    assert _seen(7, 1) == (6, None)
    assert _seen(8, 1) == (6, 7)
    assert _seen(8, 2) == (3, 5)
    assert _seen(8, 3) is None


def test_a_waiver_has_the_refused_admission_accepted_after_all():
    rows = [
        ("run_created", {}),
        ("batch_admitted", {"batch": 1}),
        ("batch_refused", {"batch": 1, "admission": 1}),
        ("decision_adopted", {"batch": 1}),
        ("batch_accepted", {"batch": 1, "admission": 1}),
    ]
    assert standing(_ledger(*rows[:4]), 1) is None
    now = standing(_ledger(*rows), 1)
    assert now is not None and now.accepted is not None
    assert (now.admission, now.accepted.seq) == (1, 4)


def test_the_end_of_a_cycle_and_of_a_lease():
    entries = _ledger(*ROWS, ("cycle_closed", {"cycle": 4}), ("lease_taken", {}))
    assert cycle_is_closed(entries, 4)
    assert not cycle_is_closed(entries, 5)
    assert is_superseded(entries, 1)
    assert not is_superseded(entries, 9)
