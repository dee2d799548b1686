import json
import math
import os
import re
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, QueryBuilder, write_deltalake
from deltalake.exceptions import DeltaError

from schemas.tables import SCHEMA_VERSION, TABLES
from tasks.lake import Lake
from tasks.lake.files import new_write_id, partition_dir, uuid7
from tasks.lake.ledger import Ledger
from tasks.lake.writer import delta_statistics
from tasks.storage import StorageError
from tests.tables import rows_of

RUN = "demo"


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "lake")


def opened(lake: Lake, run_id: str = RUN) -> Ledger:
    """A ledger with its first row; rows under lease 0 follow."""
    ledger = lake.ledger(run_id)
    ledger.append("run_created", lease=0)
    return ledger


OTHERS = [name for name in TABLES if name != "ledger"]


def test_every_table_round_trips(lake: Lake):
    for table in OTHERS:
        rows = rows_of(table, 5)
        write_id = lake.append(table, rows.take([4, 2, 0, 1, 3]), run_id=RUN, cycle=3, lease=12)
        assert re.fullmatch(r"000012-[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-.*", write_id)
        read = lake.read(table, run_id=RUN, write_ids=[write_id])
        assert read.schema.equals(TABLES[table].schema), table
        assert read.select(rows.column_names).to_pylist() == rows.to_pylist(), table
        assert set(read.column("cycle").to_pylist()) == {3}
        assert set(read.column("run_id").to_pylist()) == {RUN}
        assert set(read.column("write_id").to_pylist()) == {write_id}


def test_empty_tables_have_types(lake: Lake):
    for name, table in TABLES.items():
        read = lake.read(name, run_id="nobody")
        assert read.num_rows == 0
        assert read.schema.equals(table.schema), name
    segments = lake.read("segments", run_id="nobody", columns=["token_ids", "cycle"])
    assert segments.schema.types == [pa.list_(pa.int32()), pa.int64()]


def test_null_and_nan_stay_apart(lake: Lake):
    rows = rows_of("quarantine", 3).drop_columns("observed")
    rows = rows.append_column("observed", pa.array([None, math.nan, 0.0], pa.float64()))
    write_id = lake.append("quarantine", rows, run_id=RUN, cycle=0, lease=0)
    observed = lake.read("quarantine", run_id=RUN, write_ids=[write_id]).column("observed")
    assert observed.null_count == 1
    assert math.isnan(observed[1].as_py())
    assert observed[2].as_py() == 0.0
    logprobs = pa.array([[-0.5, None], None, [math.nan]], pa.list_(pa.float32()))
    segments = rows_of("segments", 3).drop_columns("rollout_logprobs")
    segments = segments.append_column("rollout_logprobs", logprobs)
    write_id = lake.append("segments", segments, run_id=RUN, cycle=0, lease=0)
    read = lake.read("segments", run_id=RUN, write_ids=[write_id]).column("rollout_logprobs")
    assert read[0].as_py() == [-0.5, None]
    assert read[1].as_py() is None
    assert math.isnan(read[2].as_py()[0])


def test_rows_count_only_if_the_ledger_names_their_write(lake: Lake):
    ledger = opened(lake)
    named = lake.append("evals", rows_of("evals", 2), run_id=RUN, cycle=0, lease=0)
    lake.append("evals", rows_of("evals", 3), run_id=RUN, cycle=0, lease=0)
    assert lake.read("evals", run_id=RUN).num_rows == 0
    ledger.append("evaluated", lease=0, write_ids=[named])
    assert set(lake.read("evals", run_id=RUN).column("write_id").to_pylist()) == {named}
    assert lake.read("evals", run_id=RUN).num_rows == 2
    assert lake.read("evals", run_id=RUN, write_ids="all").num_rows == 5
    assert lake.read("evals", run_id=RUN, write_ids=[]).num_rows == 0


def test_where_order_and_columns(lake: Lake):
    lake.append("evals", rows_of("evals", 6), run_id=RUN, cycle=0, lease=0)
    read = lake.read(
        "evals",
        run_id=RUN,
        columns=["weight_version"],
        where="weight_version >= ? AND k < ? OR false",
        params=[2, 5],
        write_ids="all",
        order_by="weight_version DESC",
    )
    assert read.to_pydict() == {"weight_version": [4, 3, 2]}
    with pytest.raises(ValueError, match=r"evals has no columns \['reward'\]"):
        lake.read("evals", run_id=RUN, columns=["reward"])
    with pytest.raises(ValueError, match="no table rollouts"):
        lake.read("rollouts", run_id=RUN)


def test_files_are_pruned_by_partition_and_statistics(lake: Lake):
    for cycle in range(3):
        rows = rows_of("evals", 2 * cycle + 1).slice(2 * cycle)
        lake.append("evals", rows, run_id=RUN, cycle=cycle, lease=0)
    lake.append("evals", rows_of("evals", 9), run_id="other", cycle=0, lease=0)
    assert len(lake.files("evals")) == 4
    assert len(lake.files("evals", run_id=RUN)) == 3
    assert len(lake.files("evals", cycle=0)) == 2
    (file,) = lake.files("evals", run_id=RUN, predicate="weight_version > 3")
    assert "/run_id=demo/cycle=2/" in file
    assert len(lake.files("evals", run_id=RUN, predicate="weight_version > 3 OR k = 0")) == 2
    assert lake.read("evals", run_id="nobody", write_ids="all").num_rows == 0


def test_reading_one_write_opens_one_file(lake: Lake):
    ids = [
        lake.append("evals", rows_of("evals", 1), run_id=RUN, cycle=0, lease=n) for n in range(3)
    ]
    span = f"write_id >= '{ids[1]}' AND write_id <= '{ids[1]}'"
    assert [Path(f).stem for f in lake.files("evals", run_id=RUN, predicate=span)] == [ids[1]]


@pytest.mark.parametrize("run_id", ["a b/ü%=x", "it's", "007", "100%25", "../up", "[*]?"])
def test_any_run_id_is_a_partition(lake: Lake, run_id: str):
    opened(lake, "another")
    ledger = opened(lake, run_id)
    write_id = lake.append("evals", rows_of("evals", 1), run_id=run_id, cycle=0, lease=0)
    ledger.append("evaluated", lease=0, write_ids=[write_id])
    (row,) = lake.read("evals", run_id=run_id).to_pylist()
    assert row["run_id"] == run_id
    assert lake.run_ids() == sorted(["another", run_id])
    (file,) = lake.files("evals", run_id=run_id)
    root = Path(lake.uri) / "evals"
    assert Path(file) == root / partition_dir(run_id, 0) / f"{write_id}.parquet"
    delta = DeltaTable(str(root)).to_pyarrow_table().column("run_id").to_pylist()
    assert delta == [run_id]


def test_a_lake_may_lie_anywhere(lake_uri: str):
    lake = Lake.create(f"{lake_uri}/my lakes/ü+1'")
    ledger = opened(lake)
    write_id = lake.append("evals", rows_of("evals", 2), run_id=RUN, cycle=0, lease=0)
    ledger.append("evaluated", lease=0, write_ids=[write_id])
    again = Lake.open(lake.uri)
    assert again.read("evals", run_id=RUN).num_rows == 2
    assert [entry.kind for entry in again.ledger(RUN).entries] == ["run_created", "evaluated"]


@pytest.mark.parametrize("name", ["50%", "a?b", "run#1", "[1]"])
def test_a_lake_at_an_address_that_delta_would_change_is_refused(lake_uri: str, name: str):
    with pytest.raises(ValueError, match="choose a path without"):
        Lake.create(f"{lake_uri}/{name}")


def test_other_readers_see_the_same_rows(lake: Lake):
    rows = rows_of("segments", 4)
    lake.append("segments", rows, run_id=RUN, cycle=0, lease=0)
    lake.append("segments", rows, run_id=RUN, cycle=1, lease=0)
    (path, *_) = lake.files("segments", run_id=RUN, cycle=1)
    names = [field.name for field in rows.schema]
    assert pq.ParquetFile(path).read().select(names).to_pylist() == rows.to_pylist()
    duck = duckdb.sql(f"SELECT {', '.join(names)} FROM read_parquet('{path}')")
    assert duck.to_arrow_table().to_pylist() == rows.to_pylist()
    delta = DeltaTable(f"{lake.uri}/segments")
    both = sorted(delta.to_pyarrow_table().select(names).to_pylist(), key=str)
    assert both == sorted(rows.to_pylist() * 2, key=str)
    found = (
        QueryBuilder()
        .register("segments", delta)
        .execute("SELECT cycle, token_ids FROM segments WHERE segment_index = 2 AND cycle = 1")
        .read_all()
    )
    assert pa.table(found).to_pylist() == [{"cycle": 1, "token_ids": [2, 3, 4]}]


def test_encodings(lake: Lake):
    lake.append("segments", rows_of("segments", 50), run_id=RUN, cycle=0, lease=0)
    metadata = pq.read_metadata(lake.files("segments")[0])
    columns = {
        metadata.row_group(0).column(index).path_in_schema: metadata.row_group(0).column(index)
        for index in range(metadata.num_columns)
    }
    assert {column.compression for column in columns.values()} == {"ZSTD"}
    assert "BYTE_STREAM_SPLIT" in columns["rollout_logprobs.list.element"].encodings
    assert set(columns["token_ids.list.element"].encodings) == {"PLAIN", "RLE"}
    assert "RLE_DICTIONARY" in columns["trajectory_id"].encodings
    split = [name for name, c in columns.items() if "BYTE_STREAM_SPLIT" in c.encodings]
    assert {columns[name].physical_type for name in split} == {"FLOAT"}


def test_statistics_never_prune_what_matches():
    moment = datetime(2026, 1, 1, 0, 0, 0, 1500, tzinfo=UTC)
    rows = pa.table(
        {
            "i": pa.array([3, None, -1], pa.int16()),
            "finite": [0.5, -2.0, None],
            "nan": [1.0, math.nan, None],
            "infinite": [1.0, math.inf, 0.0],
            "short": ["b", "a", None],
            "long": ["x" * 65, "a", "b"],
            "when": pa.array([moment, moment, None], pa.timestamp("us", "UTC")),
            "flag": [True, False, None],
            "nothing": pa.array([None] * 3, pa.string()),
            "list": [[1], [2], None],
        }
    )
    found = json.loads(delta_statistics(rows))
    low, high = "2026-01-01T00:00:00.001Z", "2026-01-01T00:00:00.002Z"
    assert found["numRecords"] == 3
    assert found["minValues"] == {"i": -1, "finite": -2.0, "short": "a", "when": low}
    assert found["maxValues"] == {"i": 3, "finite": 0.5, "short": "b", "when": high}
    assert found["nullCount"] == {
        "i": 1,
        "finite": 1,
        "nan": 1,
        "infinite": 0,
        "short": 1,
        "long": 0,
        "when": 1,
        "flag": 1,
        "nothing": 3,
    }


def test_checks_are_evaluated_before_the_commit(lake: Lake):
    rows = rows_of("segments", 3).drop_columns("kind")
    rows = rows.append_column("kind", pa.array(["action", "acton", None]))
    with pytest.raises(ValueError, match=r"1 of 3 rows for table segments .* kind_known"):
        lake.append("segments", rows, run_id=RUN, cycle=0, lease=0)
    assert lake.files("segments") == []


def test_checks_bind_other_delta_writers(lake: Lake):
    rows = rows_of("segments", 1).to_pylist()[0] | {"kind": "acton", "run_id": RUN, "cycle": 0}
    table = pa.Table.from_pylist([rows], schema=TABLES["segments"].schema)
    with pytest.raises(DeltaError, match="failed validation"):
        write_deltalake(f"{lake.uri}/segments", table, mode="append")


def test_wrong_columns_and_types_are_refused(lake: Lake):
    rows = rows_of("evals", 1)
    with pytest.raises(ValueError, match=r"lack columns \['k'\] and have unknown columns \['z'\]"):
        lake.append("evals", rows.rename_columns({"k": "z"}), run_id=RUN, cycle=0, lease=0)
    wrong = rows.drop_columns("k").append_column("k", pa.array([2**40]))
    with pytest.raises(ValueError, match="do not fit its types"):
        lake.append("evals", wrong, run_id=RUN, cycle=0, lease=0)
    assert lake.files("evals") == []


def test_old_files_get_new_columns(lake: Lake):
    lake.append("evals", rows_of("evals", 1), run_id=RUN, cycle=0, lease=0)
    (path,) = lake.files("evals")
    old = pq.ParquetFile(path).read().drop_columns("ci_low")
    pq.write_table(old, path)
    lake.append("evals", rows_of("evals", 2), run_id=RUN, cycle=0, lease=0)
    read = lake.read("evals", run_id=RUN, write_ids="all")
    assert sorted(read.column("ci_low").to_pylist(), key=str) == [0.25, 1.25, None]


def test_create_is_idempotent_and_checkpoints_the_log(tmp_path: Path, lake: Lake):
    lake.append("evals", rows_of("evals", 1), run_id=RUN, cycle=0, lease=0)
    again = Lake.create(lake.uri)
    assert len(again.files("evals")) == 1
    for _ in range(10):
        again.append("evals", rows_of("evals", 1), run_id=RUN, cycle=0, lease=0)
    log = os.listdir(tmp_path / "lake" / "evals" / "_delta_log")
    assert "00000000000000000009.checkpoint.parquet" in log
    assert len(Lake.open(lake.uri).files("evals")) == 11


def test_opening_what_is_no_lake(tmp_path: Path):
    with pytest.raises(ValueError, match=r"No lake at .*/none; `rollhouse run RUN.toml` makes one"):
        Lake.open(tmp_path / "none")
    assert not (tmp_path / "none").exists()
    for opener in (Lake.open, Lake.create):
        with pytest.raises(ValueError, match="path of a directory or s3://bucket/prefix"):
            opener("gs://bucket/lake")


def test_a_newer_table_is_refused(lake: Lake):
    DeltaTable(f"{lake.uri}/evals").alter.set_table_properties(
        {"rollhouse.schemaVersion": str(SCHEMA_VERSION + 1)}, raise_if_not_exists=False
    )
    with pytest.raises(ValueError, match=f"schema version {SCHEMA_VERSION + 1}.*upgrade Rollhouse"):
        Lake.open(lake.uri)


def test_write_ids_are_version_7_uuids():
    before = datetime.now(UTC)
    identifier = uuid7()
    assert identifier.version == 7
    assert identifier.variant == "specified in RFC 4122"
    stamped = datetime.fromtimestamp((identifier.int >> 80) / 1000, UTC)
    assert abs(stamped - before) < timedelta(seconds=5)
    assert new_write_id(1234567).startswith("1234567-")
    assert len({new_write_id(1) for _ in range(1000)}) == 1000


def test_a_read_only_lake_says_so():
    # Permissions do not bind root; `nobody` stands in.
    user = 65534 if os.geteuid() == 0 else os.geteuid()
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        lake = Lake.create(f"{folder}/lake")
        for path in Path(folder).rglob("*"):
            path.chmod(0o555 if path.is_dir() else 0o444)
        os.seteuid(user)
        try:
            with pytest.raises(StorageError, match=r"Cannot write .*/evals/.* writable"):
                lake.append("evals", rows_of("evals", 1), run_id=RUN, cycle=0, lease=0)
            with pytest.raises(StorageError, match=r"Cannot make .*/inner"):
                Lake.create(f"{folder}/lake/inner")
            assert Lake.open(f"{folder}/lake").files("evals") == []
        finally:
            os.seteuid(os.getuid())
            for path in [Path(folder), *Path(folder).rglob("*")]:
                path.chmod(0o755)
