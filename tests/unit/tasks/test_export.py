"""An export is what the lake holds, bit for bit, in every format, and whole or absent."""

import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from schemas.tables import TABLES
from tasks.interchange import targets
from tasks.interchange.exported import BATCH_COLUMNS, Rows, batch_rows, query_rows
from tasks.interchange.json_lines import json_lines
from tasks.interchange.targets import write_export
from tasks.lake.batches import trajectories_hash, write_batch
from tasks.lake.lake import Lake
from tasks.lake.lease import take_lease
from tasks.query import QueryRefused
from tasks.rollout import Rollout
from tests.factories import rollout

RUN = "r"


@pytest.fixture(scope="module")
def rollouts() -> list[Rollout]:
    """Two groups of two with two turns; the last has a second sequence and hard floats."""
    rng = np.random.default_rng(3)
    made = [rollout(rng, g, s, turns=2) for g in range(2) for s in range(2)]
    last = made[-1]
    last.trajectory["num_sequences"] = 2
    last.trajectory["reward_components"] = [('the "sum"', 1 / 3), ("né", None)]
    hard = [-0.0, -1e-45, -3.4028235e38, -0.1, -1.1754944e-38]
    for index, (kind, ids) in enumerate([("prompt", [1, 2]), ("action", [3, 4, 5, 6, 7])]):
        last.segments.append(
            last.segments[index]
            | {
                "sequence_index": 1,
                "segment_index": index,
                "start_position": 2 * index,
                "kind": kind,
                "token_ids": ids,
                "rollout_logprobs": hard if kind == "action" else None,
            }
        )
    return made


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory, rollouts: list[Rollout]) -> Lake:
    """Batch 1 admitted in reverse order; batch 2 admitted and refused."""
    lake = Lake.create(tmp_path_factory.mktemp("lake"))
    ledger = lake.ledger(RUN)
    ledger.append("run_created", lease=0, details={"config": {}})
    lease = take_lease(ledger)

    def append(table: str, found: list[dict[str, Any]]) -> str:
        typed = pa.Table.from_pylist(found, schema=TABLES[table].own_schema)
        return lake.append(table, typed, run_id=RUN, cycle=0, lease=lease)

    writes = [
        append("trajectories", [r.trajectory for r in rollouts]),
        append("segments", [segment for r in rollouts for segment in r.segments]),
    ]
    ledger.append("rollouts_recorded", lease=lease, write_ids=writes)
    ids = [r.trajectory["trajectory_id"] for r in rollouts][::-1]
    for batch in (1, 2):
        seq = len(ledger.entries)
        write = write_batch(
            lake,
            run_id=RUN,
            cycle=0,
            lease=lease,
            admission=seq,
            batch=batch,
            trajectory_ids=ids,
        )
        ledger.append(
            "batch_admitted",
            lease=lease,
            batch=batch,
            write_ids=[write],
            num_trajectories=len(ids),
            trajectories_hash=trajectories_hash(ids),
        )
    ledger.append("batch_refused", lease=lease, details={"admission": seq, "reason": "shifted"})
    return lake


def bits(values: list[float | None]) -> list[int | None]:
    return [None if v is None else int(np.float32(v).view(np.uint32)) for v in values]


def expected_rows(rollouts: list[Rollout]) -> list[dict[str, Any]]:
    """The batch by hand: from the first action on is completion, in reverse order of rollouts."""
    rows = []
    for position, r in enumerate(rollouts[::-1]):
        for sequence in range(r.trajectory["num_sequences"]):
            segments = [s for s in r.segments if s["sequence_index"] == sequence]
            first = next(i for i, s in enumerate(segments) if s["kind"] == "action")
            row: dict[str, Any] = {
                "trajectory_id": r.trajectory["trajectory_id"],
                "batch_position": position,
                "reward": r.trajectory["reward"],
                "prompt_ids": [t for s in segments[:first] for t in s["token_ids"]],
                "completion_ids": [],
                "completion_mask": [],
                "rollout_logprobs": [],
                "weight_versions": [],
            }
            for s in segments[first:]:
                length = len(s["token_ids"])
                row["completion_ids"] += s["token_ids"]
                row["completion_mask"] += [s["kind"] == "action"] * length
                row["rollout_logprobs"] += bits(s["rollout_logprobs"] or [None] * length)
                row["weight_versions"] += [s["weight_version"]] * length
            rows.append(row)
    return rows


def check_batch(found: list[dict[str, Any]], rollouts: list[Rollout]) -> None:
    expected = expected_rows(rollouts)
    assert len(found) == len(expected) == 5
    for row, by_hand in zip(found, expected, strict=True):
        assert list(row) == list(BATCH_COLUMNS)
        row["rollout_logprobs"] = bits(row["rollout_logprobs"])
        assert {name: row[name] for name in by_hand} == by_hand


def test_a_batch_in_json_lines(lake: Lake, rollouts: list[Rollout], tmp_path: Path):
    written = write_export(batch_rows(lake, RUN, 1), "jsonl", tmp_path / "b.jsonl")
    text = (tmp_path / "b.jsonl").read_text()
    assert written == {
        "path": str(tmp_path / "b.jsonl"),
        "format": "jsonl",
        "rows": 5,
        "bytes": len(text.encode()),
    }
    found = [json.loads(line) for line in text.splitlines()]
    check_batch(found, rollouts)
    assert found[0]["reward_components"] == {'the "sum"': 1 / 3, "né": None}
    # The shortest text of a float32, not that of the double it becomes.
    assert ",-0.1," in text and "-0.10000000149" not in text


def test_a_batch_in_parquet(lake: Lake, rollouts: list[Rollout], tmp_path: Path):
    write_export(batch_rows(lake, RUN, 1), "parquet", tmp_path / "b.parquet")
    table = pq.read_table(tmp_path / "b.parquet")
    assert table.schema.field("rollout_logprobs").type.value_type == pa.float32()
    assert table.schema.field("completion_ids").type.value_type == pa.int32()
    check_batch(table.to_pylist(), rollouts)


def test_a_batch_as_a_hugging_face_dataset(
    lake: Lake, rollouts: list[Rollout], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_export(batch_rows(lake, RUN, 1), "hf", tmp_path / "dataset")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    cache = str(tmp_path / "cache")
    found = datasets.load_dataset(str(tmp_path / "dataset"), cache_dir=cache, split="train")
    assert found.features["rollout_logprobs"].feature.dtype == "float32"
    assert found.features["completion_mask"].feature.dtype == "bool"
    assert found.features["prompt_ids"].feature.dtype == "int32"
    check_batch(found.to_list(), rollouts)
    assert found[0]["reward_components"][0] == {"key": 'the "sum"', "value": 1 / 3}
    plain = datasets.load_dataset(
        "parquet", data_dir=str(tmp_path / "dataset" / "data"), cache_dir=cache, split="train"
    )
    assert plain.features == found.features and plain.num_rows == 5


def test_shards_of_a_large_dataset_keep_the_order(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(targets, "SHARD_BYTES", 1)
    rows = query_rows(lake, "SELECT range AS i FROM range(5000)")
    write_export(rows, "hf", tmp_path / "d")
    files = sorted((tmp_path / "d" / "data").iterdir())
    assert len(files) > 1
    assert files[-1].name == f"train-{len(files) - 1:05d}-of-{len(files):05d}.parquet"
    found = pa.concat_tables([pq.read_table(file) for file in files])
    assert found["i"].to_pylist() == list(range(5000))


def test_every_type_of_a_query_is_valid_json(lake: Lake, tmp_path: Path):
    sql = """
        SELECT 1::HUGEINT AS big, 1.50::DECIMAL(6,2) AS price, DATE '2026-01-02' AS day,
            TIMESTAMPTZ '2026-01-02 03:04:05.000006+00' AS moment, NULL AS nothing,
            [[1, NULL], NULL, []] AS nested, {'a': 'x"\\\n', 'b': NULL} AS pair,
            MAP {1: true} AS flags, 'a'::ENUM ('a', 'b') AS choice, 1e-7::DOUBLE AS small
    """
    write_export(query_rows(lake, sql), "jsonl", tmp_path / "q.jsonl")
    assert json.loads((tmp_path / "q.jsonl").read_text()) == {
        "big": 1,
        "price": 1.5,
        "day": "2026-01-02",
        "moment": "2026-01-02 03:04:05.000006Z",
        "nothing": None,
        "nested": [[1, None], None, []],
        "pair": {"a": 'x"\\\n', "b": None},
        "flags": {"1": True},
        "choice": "a",
        "small": 1e-07,
    }


def test_any_finite_float32_keeps_its_bits_in_json():
    drawn = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)
    values = drawn.view(np.float32)
    values = values[np.isfinite(values)]
    lines = json_lines(pa.record_batch({"x": pa.array(values)}))
    back = np.array([json.loads(line)["x"] for line in lines.splitlines()], np.float32)
    assert np.array_equal(back.view(np.uint32), values.view(np.uint32))


@pytest.mark.parametrize("format", ["jsonl", "parquet", "hf"])
@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("SELECT [1.0, 'nan'::FLOAT] AS w", "Column w holds NaN or an infinity"),
        ("SELECT {'a': 'inf'::DOUBLE} AS s", "Column s holds NaN"),
        ("SELECT MAP {'a': 'nan'::DOUBLE} AS m", "Column m holds NaN"),
        ("SELECT CASE WHEN i = 4000 THEN error('late') END FROM range(5000) t(i)", "late"),
    ],
)
def test_a_failure_leaves_nothing(lake: Lake, tmp_path: Path, format: str, sql: str, message: str):
    with pytest.raises(ValueError, match=message):
        write_export(query_rows(lake, sql), format, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing(tmp_path: Path):
    def batches() -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"x": [1]})
        raise OSError(errno.ENOSPC, "No space left on device")

    rows = Rows("t", pa.schema([("x", pa.int64())]), batches())
    with pytest.raises(OSError, match="Free disk space"):
        write_export(rows, "hf", tmp_path / "new" / "out")
    assert list((tmp_path / "new").iterdir()) == []


def test_a_type_without_a_json_form_names_the_column(lake: Lake, tmp_path: Path):
    with pytest.raises(ValueError, match="Column b has type binary"):
        write_export(query_rows(lake, "SELECT 'x'::BLOB AS b"), "jsonl", tmp_path / "out")
    with pytest.raises(ValueError, match="cannot be written as Parquet"):
        write_export(query_rows(lake, "SELECT INTERVAL 1 DAY AS i"), "parquet", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("format", ["jsonl", "parquet", "hf"])
def test_an_existing_target_is_kept(lake: Lake, tmp_path: Path, format: str):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ValueError, match="exists; give --to a path that does not"):
        write_export(query_rows(lake, "SELECT 1 AS x"), format, tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


def test_only_a_batch_that_stands_is_exported(lake: Lake):
    with pytest.raises(ValueError, match="has no batch 7; it has 1 to 2"):
        batch_rows(lake, RUN, 7)
    with pytest.raises(ValueError, match=r"Batch 2 of run r was refused \(shifted\)"):
        batch_rows(lake, RUN, 2)


@pytest.mark.parametrize("sql", ["DROP TABLE ledger", "SELECT 1; SELECT 2", "SELEC", "SELECT x"])
def test_the_guard_is_that_of_sql(lake: Lake, sql: str):
    with pytest.raises(QueryRefused):
        query_rows(lake, sql)


def test_an_empty_result_has_its_columns(lake: Lake, tmp_path: Path):
    for format in ("jsonl", "parquet", "hf"):
        rows = query_rows(lake, "SELECT 1 AS x WHERE false")
        assert write_export(rows, format, tmp_path / format)["rows"] == 0
    assert (tmp_path / "jsonl").read_text() == ""
    assert pq.read_table(tmp_path / "parquet").column_names == ["x"]
    shard = tmp_path / "hf" / "data" / "train-00000-of-00001.parquet"
    assert pq.read_table(shard).column_names == ["x"]
