import statistics
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from blake3 import blake3

from schemas.tables import TABLES
from tasks.lake import Lake, LeaseHeld, LeaseLost, Ledger, renew_if_due, take_lease
from tasks.lake.batches import read_batch, trajectories_hash, write_batch
from tasks.lake.lease import Process

RUN = "demo"


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "lake")


@pytest.fixture
def ledger(lake: Lake) -> Ledger:
    ledger = lake.ledger(RUN)
    ledger.append("run_created", lease=0, details={"seed": 1})
    return ledger


def another(lake: Lake) -> Ledger:
    """The same ledger as another process would hold it: no handle is shared."""
    return Lake.open(lake.uri).ledger(RUN)


def evals(version: int) -> pa.Table:
    return pa.table(
        {
            "weight_version": [version],
            "environment": ["sums"],
            "split": ["heldout"],
            "k": pa.array([1], pa.int32()),
            "num_tasks": pa.array([2], pa.int32()),
            "num_samples": pa.array([1], pa.int32()),
            "pass_at_k": [0.5],
            "ci_low": [0.1],
            "ci_high": [0.9],
            "engine": ["torch"],
            "seconds": [0.1],
        }
    )


def test_entries_round_trip(lake: Lake, ledger: Ledger):
    lease = take_lease(ledger)
    write_id = lake.append("evals", evals(3), run_id=RUN, cycle=2, lease=lease)
    before = datetime.now(UTC)
    written = ledger.append(
        "evaluated",
        lease=lease,
        cycle=2,
        batch=3,
        version=3,
        write_ids=[write_id],
        num_trajectories=4,
        trajectories_hash="aa",
        checkpoint="checkpoints/3",
        root_hash="bb",
        details={"note": "é", "list": [1, None]},
    )
    (*_, read) = another(lake).entries
    assert read == written
    assert (read.seq, read.lease, read.cycle, read.batch, read.version) == (2, 1, 2, 3, 3)
    assert read.write_ids == (write_id,)
    assert (read.num_trajectories, read.trajectories_hash) == (4, "aa")
    assert (read.checkpoint, read.root_hash) == ("checkpoints/3", "bb")
    assert read.details == {"note": "é", "list": [1, None]}
    assert before <= read.committed_at <= datetime.now(UTC)


def test_sequence_and_cycle_go_on(ledger: Ledger):
    lease = take_lease(ledger)
    ledger.append("cycle_opened", lease=lease, cycle=5)
    ledger.append("lease_renewed", lease=lease)
    assert [entry.seq for entry in ledger.entries] == [0, 1, 2, 3]
    assert [entry.cycle for entry in ledger.entries] == [0, 0, 5, 5]
    assert [entry.lease for entry in ledger.entries] == [0, 1, 1, 1]
    assert ledger.entries[0].details == {"seed": 1}


def test_last_filters(ledger: Ledger):
    lease = take_lease(ledger)
    for batch in (1, 2):
        ledger.append("batch_admitted", lease=lease, batch=batch)
        ledger.append("batch_accepted", lease=lease, batch=batch)
    last = ledger.last("batch_admitted")
    assert last is not None and last.seq == 4
    first = ledger.last("batch_admitted", batch=1)
    assert first is not None and first.seq == 2
    assert ledger.last("batch_admitted", batch=3) is None
    assert ledger.last("batch_trained") is None


def test_refresh_follows_another_process(lake: Lake, ledger: Ledger):
    reader = another(lake)
    lease = take_lease(ledger)
    assert len(reader.entries) == 1
    reader.refresh()
    assert [entry.kind for entry in reader.entries] == ["run_created", "lease_taken"]
    assert reader.lease == lease == 1


def test_runs_have_ledgers_of_their_own(lake: Lake, ledger: Ledger):
    other = lake.ledger("other")
    other.append("run_created", lease=0)
    assert take_lease(ledger) == 1
    assert take_lease(other) == 1
    assert len(lake.ledger(RUN).entries) == len(lake.ledger("other").entries) == 2
    assert lake.run_ids() == ["demo", "other"]


def test_its_own_row_is_as_others_read_it(lake: Lake, ledger: Ledger):
    details = {"pairs": [["a", 1], ["b", 2.5]], "none": None}
    own = ledger.append("cycle_opened", lease=0, cycle=3, details=details)
    (_, read) = Lake.open(lake.uri).ledger(ledger.run_id).entries
    assert own == read and own.details == read.details == details


def test_idle_refresh_is_cheap(ledger: Ledger):
    lease = take_lease(ledger)
    for _ in range(40):
        ledger.append("lease_renewed", lease=lease)
    seconds = []
    for _ in range(20):
        started = time.perf_counter()
        ledger.refresh()
        seconds.append(time.perf_counter() - started)
    assert statistics.median(seconds) < 0.02


def test_a_stale_view_is_refused(lake: Lake, ledger: Ledger):
    lease = take_lease(ledger)
    stale = another(lake)
    ledger.append("cycle_opened", lease=lease)
    entry = ledger.entries[-1]
    # The race itself: checked on one version of the table, committed after another was written.
    with pytest.raises(LeaseLost, match=r"wrote row 2 .* first"):
        stale._commit(entry)
    stale.refresh()
    assert [e.seq for e in stale.entries] == [0, 1, 2]
    assert stale.entries[2] == entry


def test_renewed_credentials_do_not_move_a_checked_view(lake: Lake, ledger: Ledger):
    stale = replace(ledger.entries[0], seq=1, kind="cycle_opened")
    another(lake).append("cycle_opened", lease=0)
    lake.tables["ledger"]._options = {"AWS_SESSION_TOKEN": "of an hour ago"}
    with pytest.raises(LeaseLost):
        ledger._commit(stale)
    assert len(another(lake).entries) == 2


def test_a_zombie_is_refused_and_its_rows_stay_invisible(lake: Lake, ledger: Ledger):
    old = take_lease(ledger)
    write_id = lake.append("evals", evals(1), run_id=RUN, cycle=0, lease=old)
    successor = another(lake)
    new = take_lease(successor, take_over=True)
    assert (old, new) == (1, 2)
    with pytest.raises(LeaseLost, match=r"Lease 1 of run demo is no longer the newest \(2 is\)"):
        ledger.append("evaluated", lease=old, write_ids=[write_id])
    successor.append("cycle_opened", lease=new)
    assert lake.read("evals", run_id=RUN).num_rows == 0
    assert [entry.lease for entry in another(lake).entries] == [0, 1, 2, 2]


def test_two_creators_make_one_run(lake: Lake, ledger: Ledger):
    with pytest.raises(LeaseLost, match="was created by another controller"):
        another(lake).append("run_created", lease=0)


def test_a_row_names_only_committed_writes(lake: Lake, ledger: Ledger):
    lease = take_lease(ledger)
    with pytest.raises(AssertionError, match="not written"):
        ledger.append("evaluated", lease=lease, write_ids=["000001-nothing"])
    orphan = Path(lake.uri) / "evals" / "run_id=demo" / "cycle=0" / "000001-orphan.parquet"
    orphan.parent.mkdir(parents=True)
    orphan.write_bytes(b"")
    with pytest.raises(AssertionError, match="not written"):
        ledger.append("evaluated", lease=lease, write_ids=["000001-orphan"])
    assert len(ledger.entries) == 2


def test_a_lease_can_be_taken_again_by_its_own_process(lake: Lake, ledger: Ledger):
    assert take_lease(ledger) == 1
    assert take_lease(ledger) == 2
    details = ledger.entries[-1].details
    assert Process(**{k: v for k, v in details.items() if k != "ttl_s"}) == Process.current()


def taken_by(ledger: Ledger, ttl_s: float = 60.0, **changes: object) -> int:
    """A lease of a process that differs from this one in some fields."""
    details = {**Process.current().__dict__, **changes, "ttl_s": ttl_s}
    entry = ledger.append("lease_taken", lease=len(ledger.entries), details=details)
    return entry.seq


def test_a_holder_elsewhere_is_waited_for(ledger: Ledger):
    taken_by(ledger, host="elsewhere", boot_id="another", pid=4711)
    with pytest.raises(LeaseHeld, match=r"held by process 4711 on host elsewhere since .*--take-o"):
        take_lease(ledger)
    assert take_lease(ledger, take_over=True) == 2


def test_an_expired_lease_is_free(ledger: Ledger):
    taken_by(ledger, ttl_s=0.0, boot_id="another")
    assert take_lease(ledger) == 2


def test_any_row_renews_the_lease(ledger: Ledger):
    lease = taken_by(ledger, ttl_s=1.5, boot_id="another")
    time.sleep(1.6)
    ledger.append("cycle_opened", lease=lease)
    with pytest.raises(LeaseHeld):
        take_lease(ledger)


def test_a_reused_process_id_is_another_process(ledger: Ledger):
    taken_by(ledger, start_ticks=Process.current().start_ticks - 1)
    assert take_lease(ledger) == 2


def test_a_process_of_another_container_is_not_looked_up(ledger: Ledger):
    taken_by(ledger, pid_namespace="pid:[1]", pid=2**22 + 1)
    with pytest.raises(LeaseHeld):
        take_lease(ledger)


def test_renewal_waits_for_a_third_of_the_time_to_live(ledger: Ledger):
    lease = take_lease(ledger, ttl_s=3.0)
    renew_if_due(ledger, lease)
    assert len(ledger.entries) == 2
    time.sleep(1.1)
    renew_if_due(ledger, lease)
    assert [entry.kind for entry in ledger.entries] == [
        "run_created",
        "lease_taken",
        "lease_renewed",
    ]


TRAJECTORY = {
    "task_id": "t",
    "environment": "sums",
    "split": "train",
    "status": "completed",
    "finish_reason": "stop",
}


def record(lake: Lake, lease: int, samples: list[tuple[int, int]]) -> list[str]:
    """Writes and records one trajectory of two segments for each (group, sample)."""
    ids = [f"{group:08d}-{sample:03d}-0" for group, sample in samples]
    schema = TABLES["trajectories"].own_schema
    trajectories = [
        dict.fromkeys(schema.names)
        | TRAJECTORY
        | {"trajectory_id": name, "group_id": group, "sample_index": sample}
        for name, (group, sample) in zip(ids, samples, strict=True)
    ]
    segment_schema = TABLES["segments"].own_schema
    segments = [
        dict.fromkeys(segment_schema.names)
        | {"trajectory_id": name, "sequence_index": 0, "segment_index": index}
        | {"kind": kind, "token_ids": [group, sample, index]}
        for name, (group, sample) in zip(ids, samples, strict=True)
        for index, kind in enumerate(("prompt", "action"))
    ]
    write_ids = [
        lake.append(table, pa.Table.from_pylist(rows, schema=s), run_id=RUN, cycle=0, lease=lease)
        for table, rows, s in (
            ("trajectories", trajectories, schema),
            ("segments", segments, segment_schema),
        )
    ]
    lake.ledger(RUN).append("rollouts_recorded", lease=lease, write_ids=write_ids)
    return ids


def admit(lake: Lake, lease: int, ids: list[str], **changes: object) -> int:
    ledger = lake.ledger(RUN)
    admission = len(ledger.entries)
    write_id = write_batch(
        lake,
        run_id=RUN,
        cycle=0,
        lease=lease,
        admission=admission,
        batch=1,
        trajectory_ids=ids,
    )
    facts: dict = {
        "write_ids": [write_id],
        "num_trajectories": len(ids),
        "trajectories_hash": trajectories_hash(ids),
    }
    return ledger.append("batch_admitted", lease=lease, batch=1, **facts | changes).seq


def test_batch_keeps_its_order(lake: Lake, ledger: Ledger):
    lease = take_lease(ledger)
    first = record(lake, lease, [(3, 0), (3, 1), (1, 0), (1, 1)])
    second = record(lake, lease, [(2, 0), (2, 1)])
    ids = [second[1], first[0], first[3]]
    admission = admit(lake, lease, ids)
    batch = read_batch(Lake.open(lake.uri), RUN, admission)
    assert (batch.batch, batch.admission) == (1, admission)
    assert batch.trajectories.column("trajectory_id").to_pylist() == ids
    assert batch.trajectories.column("group_id").to_pylist() == [2, 3, 1]
    assert batch.segments.column("token_ids").to_pylist() == [
        [2, 1, 0],
        [2, 1, 1],
        [3, 0, 0],
        [3, 0, 1],
        [1, 1, 0],
        [1, 1, 1],
    ]


def test_trajectories_hash_is_blake3_of_lines():
    assert trajectories_hash(["a", "b"]) == blake3(b"a\nb\n").hexdigest()
    assert trajectories_hash(["b", "a"]) != trajectories_hash(["a", "b"])


def test_batch_that_disagrees_with_the_ledger_is_refused(lake: Lake, ledger: Ledger):
    lease = take_lease(ledger)
    ids = record(lake, lease, [(1, 0), (1, 1)])
    short = admit(lake, lease, ids, num_trajectories=3)
    with pytest.raises(ValueError, match=r"has 2 rows .* do not match the ledger's 3"):
        read_batch(lake, RUN, short)
    reordered = admit(lake, lease, ids, trajectories_hash=trajectories_hash(ids[::-1]))
    with pytest.raises(ValueError, match="do not match the ledger"):
        read_batch(lake, RUN, reordered)
    absent = admit(lake, lease, [*ids, "00000009-000-0"])
    with pytest.raises(ValueError, match=r"missing: \['00000009-000-0'\]"):
        read_batch(lake, RUN, absent)
    with pytest.raises(ValueError, match="no batch_admitted row 1;"):
        read_batch(lake, RUN, 1)


def test_batch_with_a_trajectory_recorded_twice_is_refused(lake: Lake, ledger: Ledger):
    lease = take_lease(ledger)
    ids = record(lake, lease, [(1, 0), (1, 1)])
    record(lake, lease, [(1, 1)])
    admission = admit(lake, lease, ids)
    with pytest.raises(ValueError, match="has 2 trajectories, the lake shows 3 rows"):
        read_batch(lake, RUN, admission)
