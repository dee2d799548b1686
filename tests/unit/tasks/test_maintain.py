"""What maintenance merges, expires, drops and deletes, and what it must leave alone."""

import io
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from schemas.config import MaintenanceSection
from schemas.tables import TABLES
from tasks.lake import Lake, take_lease
from tasks.lake.delta import FilesChanged, TableFile
from tasks.lake.files import lease_of, new_merged_name, new_write_id, written_at
from tasks.lake.writer import merged_rows
from tasks.maintain import TableReport, maintain_run, run_policy
from tasks.maintain import plan as planning
from tests.small_run import RUN, SmallRun, rows_of

FOREVER = MaintenanceSection()
LATER = timedelta(days=8)
"""Longer than the default grace period."""


@pytest.fixture
def run(tmp_path: Path) -> SmallRun:
    return SmallRun.create(Lake.create(tmp_path / "lake"))


def maintain(
    lake: Lake,
    policy: MaintenanceSection = FOREVER,
    *,
    after: timedelta = timedelta(),
    **options: Any,
) -> dict[str, TableReport]:
    reports = maintain_run(lake, RUN, policy, now=datetime.now(UTC) + after, **options)
    return {report.table: report for report in reports}


def dead_lease(run: SmallRun) -> None:
    """The lease passes to a process that has ended; rows under it are nobody's any more."""
    script = (
        "import sys; from tasks.lake import *\n"
        "print(take_lease(Lake.open(sys.argv[1]).ledger('demo'), take_over=True))"
    )
    command = [sys.executable, "-c", script, run.lake.uri]
    run.lease = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def num_files(lake: Lake, table: str, cycle: int) -> int:
    return len(lake.files(table, run_id=RUN, cycle=cycle))


def test_a_closed_cycle_becomes_one_file_a_table(lake_uri: str):
    run = SmallRun.create(Lake.create(lake_uri))
    run.whole_cycle()
    run.record(9)
    open_files = {name: run.lake.files(name, cycle=1) for name in TABLES}
    before = rows_of(run.lake)
    report = maintain(run.lake)
    assert rows_of(Lake.open(lake_uri)) == before
    for table in ("trajectories", "segments", "requests", "routing", "scores", "batches"):
        assert (report[table].files_before, report[table].files_after) == (
            (3, 2) if table in ("trajectories", "segments", "requests", "routing") else (2, 1)
        )
        assert num_files(run.lake, table, 0) == 1
    # run_created, lease_taken, version 0, cycle_opened, five rows a batch, cycle_closed.
    assert report["ledger"].files_before == 15 + 2
    assert num_files(run.lake, "ledger", 0) == 1
    assert {name: run.lake.files(name, cycle=1) for name in TABLES} == open_files
    # The ledger goes on, for those that read it before and those that open it now.
    run.commit("lease_renewed")
    assert [e.seq for e in run.ledger.entries] == list(range(18))
    assert Lake.open(lake_uri).ledger(RUN).entries == run.ledger.entries
    again = maintain(run.lake)
    assert all(r.files_before == r.files_after and not r.bytes_released for r in again.values())


def test_a_merged_file_is_written_as_any_other(run: SmallRun):
    # Groups arrive out of order; the merged file is in the table's.
    for group in (5, 3, 4):
        run.record(group)
    run.close()
    (single, *_) = run.lake.files("segments", cycle=0)
    maintain(run.lake)
    (path,) = run.lake.files("segments", cycle=0)
    assert Path(path).name.startswith("merged-")
    merged, metadata = pq.read_table(path, partitioning=None), pq.read_metadata(path)
    keys = [merged.column(key).to_pylist() for key in TABLES["segments"].sort_by]
    assert list(zip(*keys, strict=True)) == sorted(zip(*keys, strict=True))
    assert len(set(merged.column("write_id").to_pylist())) == 3
    original = pq.read_metadata(single)
    for column in range(metadata.num_columns):
        new, old = metadata.row_group(0).column(column), original.row_group(0).column(column)
        assert (new.path_in_schema, new.compression, new.encodings) == (
            (old.path_in_schema, old.compression, old.encodings)
        )
    table = DeltaTable(f"{run.lake.uri}/segments")
    (action,) = pa.table(table.get_add_actions(flatten=True)).to_pylist()
    assert (action["min.trajectory_id"], action["max.trajectory_id"], action["num_records"]) == (
        ("00000003-000-0", "00000005-001-0", 12)
    )


def test_a_look_up_opens_one_file_a_table(run: SmallRun):
    for _ in range(3):
        run.whole_cycle(batches=3)
    name = "00000005-001-0"
    maintain(run.lake)
    for table in ("trajectories", "segments", "scores"):
        predicate = f"trajectory_id = '{name}'"
        assert len(run.lake.files(table)) == 3
        (file,) = run.lake.files(table, run_id=RUN, predicate=predicate)
        rows = run.lake.read(
            table, run_id=RUN, where="trajectory_id = ?", params=[name], predicate=predicate
        )
        assert rows.num_rows > 0 and "/cycle=1/" in file


def test_large_files_are_left_alone_and_bins_converge():
    def files(*sizes: int) -> list[TableFile]:
        return [TableFile(f"{i}", RUN, 0, s * 2**20, 1, i, f"{i}") for i, s in enumerate(sizes)]

    def sizes(*given: int) -> list[list[int]]:
        return [[f.size_bytes >> 20 for f in g] for g in planning._bins(files(*given))]

    assert planning.MERGED_BYTES == 64 * 2**20
    assert sizes(30, 30, 30, 30, 90, 1, 1) == [[30, 30], [30, 30], [1, 1]]
    assert sizes(60, 60) == [] and sizes(64) == [] and sizes() == []


def test_a_file_older_than_a_column_gets_it_as_null(run: SmallRun):
    table = TABLES["requests"]
    run.record(1)
    (path,) = run.lake.files("requests")
    new = Path(path).read_bytes()
    buffer = io.BytesIO()
    pq.write_table(pq.read_table(path, partitioning=None).drop_columns(["prefix_hit_rate"]), buffer)
    rows = merged_rows(table, [new, buffer.getvalue()])
    assert rows.schema.equals(table.file_schema)
    assert rows.num_rows == 4 and rows.column("prefix_hit_rate").null_count == 4


def test_rows_expire_by_policy_and_say_so(lake_uri: str):
    run = SmallRun.create(Lake.create(lake_uri))
    run.whole_cycle()
    run.whole_cycle()
    policy = MaintenanceSection(tokens_days=90, routing_days=7)
    named = {
        table: set(run.lake.read(table, run_id=RUN, columns=["write_id"]).column(0).to_pylist())
        for table in ("segments", "scores", "routing")
    }
    kept = {name: rows for name, rows in rows_of(run.lake).items() if name not in named}
    week = maintain(run.lake, policy, after=LATER)
    # Two cycles of two batches of two rollouts of two segments.
    assert {name: r.rows_expired for name, r in week.items() if r.rows_expired} == {"routing": 16}
    assert run.lake.files("routing", run_id=RUN) == []
    assert len(run.lake.read("segments", run_id=RUN)) == 16
    quarter = maintain(run.lake, policy, after=timedelta(days=91))
    expired = {name: r.rows_expired for name, r in quarter.items() if r.rows_expired}
    assert expired == {"segments": 16, "scores": 8}
    assert all(len(run.lake.read(table, run_id=RUN)) == 0 for table in named)
    left = rows_of(run.lake)
    records = left.pop("maintenance")
    assert {name: rows for name, rows in left.items() if name not in named} == {
        name: rows for name, rows in kept.items() if name != "maintenance"
    }
    assert sorted((r["table_name"], r["cycle"], r["num_rows"], r["policy"]) for r in records) == [
        ("routing", 0, 8, "maintenance.routing_days = 7"),
        ("routing", 1, 8, "maintenance.routing_days = 7"),
        ("scores", 0, 4, "maintenance.tokens_days = 90"),
        ("scores", 1, 4, "maintenance.tokens_days = 90"),
        ("segments", 0, 8, "maintenance.tokens_days = 90"),
        ("segments", 1, 8, "maintenance.tokens_days = 90"),
    ]
    for table, ids in named.items():
        told = [r["expired_write_ids"] for r in records if r["table_name"] == table]
        assert sorted(i for some in told for i in some) == sorted(ids)
    assert {r["action"] for r in records} == {"expire"}


def test_what_the_ledger_needs_does_not_expire(run: SmallRun):
    policy = MaintenanceSection(tokens_days=1)

    def expired(**options: Any) -> int:
        return maintain(run.lake, policy, dry_run=True, **options)["segments"].rows_expired

    rollouts = run.record(1)
    assert expired(after=LATER) == 0, "an open cycle"
    run.close()
    assert expired(after=LATER) == 0, "a group that waits for a batch"
    admission = run.admit(1, rollouts)
    assert expired(after=LATER) == 0, "an admitted batch"
    run.train(1, admission, rollouts)
    assert expired(after=LATER) == 0, "a version to be published"
    run.publish(1)
    assert expired(after=timedelta(hours=23)) == 0, "younger than the policy"
    assert expired(after=timedelta(hours=25)) == 4


def test_age_counts_from_the_row_that_names_a_write(run: SmallRun):
    run.record(1)
    run.commit("cycle_closed")
    closed = run.ledger.entries[-1].committed_at
    names = run.lake.read("trajectories", run_id=RUN).to_pylist()
    rows = [
        {"trajectory_id": row["trajectory_id"], "group_id": 1, "rule": "surplus", "observed": None}
        | {"action": "drop", "reason": "surplus"}
        for row in names
    ]
    segments = run.lake.read("segments", run_id=RUN).drop_columns(["run_id", "cycle", "write_id"])
    late = run.append("segments", segments)
    run.commit("rollouts_recorded", write_ids=[late, run.append("quarantine", rows)])
    named = run.ledger.entries[-1].committed_at
    policy = MaintenanceSection(tokens_days=1)

    def expired(cutoff: datetime) -> int:
        now = cutoff + timedelta(days=1)
        reports = maintain_run(run.lake, RUN, policy, now=now, dry_run=True)
        return sum(report.rows_expired for report in reports)

    assert closed < named
    assert expired(closed + (named - closed) / 2) == 0
    assert expired(named + timedelta(seconds=1)) == 8


def test_writes_that_never_counted_are_dropped_after_the_grace_period(run: SmallRun):
    run.record(1)
    run.write(run.record(2))
    run.close()
    before = rows_of(run.lake)
    # Its own process holds the lease and could name them yet.
    assert sum(r.rows_dropped for r in maintain(run.lake, after=LATER).values()) == 0
    dead_lease(run)
    assert sum(r.rows_dropped for r in maintain(run.lake, after=timedelta(days=6)).values()) == 0
    assert {k: v for k, v in rows_of(run.lake).items() if k != "ledger"} == {
        k: v for k, v in before.items() if k != "ledger"
    }
    report = maintain(run.lake, after=LATER)
    dropped = {name: r.rows_dropped for name, r in report.items() if r.rows_dropped}
    assert dropped == {"trajectories": 2, "segments": 4, "requests": 2, "routing": 4}
    for table in dropped:
        everything = run.lake.read(table, run_id=RUN, write_ids="all")
        assert everything.num_rows == run.lake.read(table, run_id=RUN).num_rows > 0
    records = run.lake.read("maintenance", run_id=RUN).to_pylist()
    assert {(r["action"], r["policy"]) for r in records} == {
        ("drop", "maintenance.grace_hours = 168")
    }


@pytest.mark.parametrize("decision", ["approve", "waive"])
def test_rows_of_an_open_refusal_are_kept(run: SmallRun, decision: str):
    held = run.write(run.record(1))
    refusal = run.commit("batch_refused", batch=1, details={"admission": None, "held": held})
    run.close()
    dead_lease(run)

    def dropped() -> int:
        reports = maintain(run.lake, after=timedelta(days=365), dry_run=True).values()
        return sum(report.rows_dropped for report in reports)

    assert dropped() == 0
    run.commit("decision_adopted", details={"refusal": refusal, "decision": decision})
    assert dropped() == (12 if decision == "approve" else 0)
    # What a waiver has judged again is named, or refused again.
    run.commit("batch_refused", batch=1, details={"admission": None, "refusal": refusal})
    assert dropped() == 12


def test_a_batch_of_an_open_refusal_does_not_expire(run: SmallRun):
    rollouts = run.record(1)
    details: dict[str, Any] = {"admission": run.admit(1, rollouts)}
    refusal = run.commit("batch_refused", batch=1, details=details)
    run.close()

    def expired() -> int:
        policy = MaintenanceSection(tokens_days=1)
        return maintain(run.lake, policy, after=LATER, dry_run=True)["segments"].rows_expired

    assert expired() == 0
    run.commit("decision_adopted", details={"refusal": refusal, "decision": "waive"})
    assert expired() == 0
    run.commit("batch_accepted", batch=1, details={**details, "refusal": refusal})
    assert expired() == 0
    run.commit("batch_trained", batch=1, details=details)
    run.publish(1)
    assert expired() == 4


def test_a_decision_waits_for_its_adoption_however_long(run: SmallRun):
    refusal = run.commit("batch_refused", batch=1, details={"admission": None})
    row = {"decision": "approve", "refusal": refusal, "admission": None, "rule": None}
    row |= {"reviewer": "ada", "reason": "seen", "decided_at": datetime.now(UTC)}
    rows = pa.Table.from_pylist([row, row], schema=TABLES["decisions"].own_schema)
    options = {"run_id": RUN, "cycle": 0, "lease": 0}
    first, second = (run.lake.append("decisions", rows, **options) for _ in range(2))
    run.close()
    dead_lease(run)
    maintain(run.lake, after=timedelta(days=365))
    names = sorted(Path(file).stem for file in run.lake.files("decisions"))
    assert names == sorted([first, second])
    details = {"refusal": refusal, "decision": "approve"}
    again = Lake.open(run.lake.uri).ledger(RUN)
    again.append("decision_adopted", lease=again.lease, cycle=1, write_ids=[first], details=details)
    assert run.lake.read("decisions", run_id=RUN).num_rows == 2


def test_vacuum_deletes_what_no_version_of_the_grace_period_holds(lake_uri: str):
    run = SmallRun.create(Lake.create(lake_uri))
    run.whole_cycle()
    table = run.lake.tables["segments"]
    table.storage.write(f"run_id={RUN}/cycle=0/{new_write_id(1)}.parquet", b"an orphan")
    before = table.update()
    merged = maintain(run.lake, after=timedelta(hours=1))
    assert merged["segments"].files_deleted == 0
    past = DeltaTable(table.storage.uri, version=before, storage_options=table.storage.options())
    assert past.to_pyarrow_table(columns=["trajectory_id"]).num_rows == 8
    rows = rows_of(run.lake)
    report = maintain(run.lake, after=LATER)
    # Two files that were merged, and the orphan.
    assert report["segments"].files_deleted == 3
    assert report["ledger"].files_deleted == 15
    assert rows_of(Lake.open(lake_uri)) == rows
    found = {file.path for file in table.storage.walk() if file.path.endswith(".parquet")}
    current = {file.path for file in table.current_files(RUN)}
    assert {path for path in found if not path.startswith("_delta_log")} == current


def test_a_file_taken_out_long_after_it_was_written_stays_for_the_grace_period(run: SmallRun):
    run.whole_cycle()
    # As if written and committed a month ago: files and log are that old.
    month = timedelta(days=30)
    maintain(run.lake, after=month)
    assert num_files(run.lake, "segments", 0) == 1
    # The tombstones are of today; a month on, they are past their grace period.
    report = maintain(run.lake, MaintenanceSection(grace_hours=1), after=timedelta(minutes=59))
    assert sum(r.files_deleted for r in report.values()) == 0
    report = maintain(run.lake, MaintenanceSection(grace_hours=1), after=timedelta(minutes=61))
    assert report["segments"].files_deleted == 2


def test_two_replacements_of_one_file_cannot_both_be_committed(lake_uri: str):
    run = SmallRun.create(Lake.create(lake_uri))
    for group in (1, 2, 3):
        run.record(group)
    ours, theirs = run.lake.tables["segments"], Lake.open(lake_uri).tables["segments"]
    first, second, third = ours.current_files(RUN)
    theirs.current_files(RUN)
    rows = merged_rows(ours.table, [ours.storage.read(f.path) for f in (first, second)])
    options = {"run_id": RUN, "cycle": 0, "data_change": False}
    add = ours.write_file(rows, new_merged_name(), **options)
    ours.replace_files([first, second], [add], data_change=False)
    with pytest.raises(FilesChanged):
        theirs.replace_files([second, third], [add], data_change=False)
    assert run.lake.read("segments", run_id=RUN).num_rows == 12
    # A commit whose answer was lost is recognised.
    theirs.replace_files([first, second], [add], data_change=False)
    assert theirs.update() == ours.update()


def test_ledger_transactions_survive_checkpoints_and_log_cleaning(run: SmallRun):
    run.whole_cycle()
    maintain(run.lake)
    table = DeltaTable(f"{run.lake.uri}/ledger")
    table.alter.set_table_properties({"delta.logRetentionDuration": "interval 0 days"})
    for _ in range(25):
        run.commit("lease_renewed")
    table.update_incremental()
    table.create_checkpoint()
    table.cleanup_metadata()
    log = sorted(Path(run.lake.uri, "ledger", "_delta_log").glob("*.json"))
    assert int(log[0].stem) > 0, "the log was cleaned"
    again = Lake.open(run.lake.uri).ledger(RUN)
    lease = take_lease(again)
    assert again.append("lease_renewed", lease=lease).seq == len(again.entries) - 1


def test_the_policy_is_that_of_the_newest_controller(run: SmallRun):
    assert run_policy(run.ledger) == FOREVER
    policy = {"tokens_days": 90.0}
    take_lease(run.ledger, details={"maintenance": policy})
    take_lease(run.ledger, details={"maintenance": {**policy, "routing_days": 7}})
    assert run_policy(run.ledger) == MaintenanceSection(tokens_days=90, routing_days=7)


def test_a_dry_run_prints_the_plan_and_changes_nothing(run: SmallRun):
    run.whole_cycle()
    root = Path(run.lake.uri)
    files = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    policy = MaintenanceSection(tokens_days=1)
    planned = maintain(run.lake, policy, after=LATER, dry_run=True)
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == files
    done = maintain(run.lake, policy, after=LATER)
    assert planned == done
    assert done["segments"].rows_expired == 8


def test_a_write_id_tells_its_lease_and_time():
    before = datetime.now(UTC)
    write_id = new_write_id(1234567)
    assert lease_of(write_id) == 1234567
    assert abs(written_at(write_id) - before) < timedelta(seconds=5)
