"""A query as of a ledger row sees what a query saw when that row was the last."""

from typing import Any

import pyarrow as pa
import pytest

from schemas.tables import TABLES
from schemas.views import view_sources
from tasks.lake import Lake
from tasks.lake.batches import trajectories_hash, write_batch
from tasks.query import connect, connect_as_of
from tasks.record import Window, quarantine_rows
from tests.factories import window

RUN = "r"


def everything(connection) -> dict[str, Any]:
    query = f"FROM {{}} WHERE run_id = '{RUN}'"
    names = [*TABLES, *view_sources()]
    return {n: sorted(connection.sql(query.format(n)).fetchall(), key=repr) for n in names}


def record(lake: Lake, run_id: str, first_group: int, *, named: bool = True) -> None:
    """A window of four groups, the last of them dropped; not in the ledger unless `named`."""
    rollouts = window(first_group, first_group=first_group, groups=4, version=0)
    rows = Window.of(rollouts)
    dropped = quarantine_rows(
        [r.trajectory for r in rollouts[-4:]], rule="stale", action="drop", reason="too old"
    )
    quarantined = pa.Table.from_pylist(dropped, schema=TABLES["quarantine"].own_schema)
    options: dict[str, Any] = {"run_id": run_id, "cycle": first_group // 4, "lease": 0}
    write_ids = [
        lake.append("trajectories", rows.trajectories, **options),
        lake.append("segments", rows.segments, **options),
        lake.append("quarantine", quarantined, **options),
    ]
    if named:
        lake.ledger(run_id).append("rollouts_recorded", lease=0, write_ids=write_ids)


def admit(lake: Lake) -> None:
    ledger = lake.ledger(RUN)
    ids = [f"{group:08d}-{sample:03d}-0" for group in range(2) for sample in range(4)]
    write_id = write_batch(
        lake, run_id=RUN, cycle=0, lease=0, admission=len(ledger.entries), batch=1,
        trajectory_ids=ids,
    )  # fmt: skip
    ledger.append(
        "batch_admitted", lease=0, batch=1, write_ids=[write_id], num_trajectories=len(ids),
        trajectories_hash=trajectories_hash(ids),
    )  # fmt: skip


def test_the_past_is_what_it_was(lake_uri: str):
    lake = Lake.create(lake_uri)
    for run_id in (RUN, "other"):
        lake.ledger(run_id).append("run_created", lease=0)
    seen = [everything(connect(lake))]
    for act in (
        lambda: record(lake, RUN, 0),
        lambda: admit(lake),
        lambda: record(lake, RUN, 4),
        lambda: lake.ledger(RUN).append(
            "batch_refused", lease=0, batch=1, details={"admission": 2, "gate": 2, "reason": "x"}
        ),
    ):
        record(lake, "other", 8 * len(seen))
        act()
        seen.append(everything(connect(lake)))
        # What a crash leaves is neither in the present nor in the past.
        record(lake, RUN, 100 + 8 * len(seen), named=False)
    reader = Lake.open(lake_uri)
    for seq, then in enumerate(seen):
        connection = connect_as_of(reader, RUN, seq)
        assert everything(connection) == then
        assert connection.sql("SELECT DISTINCT run_id FROM ledger").fetchall() == [(RUN,)]
    assert [len(then["trajectories"]) for then in seen] == [0, 16, 16, 32, 32]
    assert [len(then["batches"]) for then in seen] == [0, 0, 8, 8, 8]
    for seq in (-1, 5):
        with pytest.raises(ValueError, match=f"rows 0 to 4, not {seq}"):
            connect_as_of(reader, RUN, seq)
