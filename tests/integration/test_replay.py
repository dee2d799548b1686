"""Finished runs replayed by real trainer jobs: equal as they are, reported where changed."""

import json
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from blake3 import blake3

from tasks.lake.lake import Lake
from tasks.query import connect
from tasks.replay import replay
from tests.tiny_run import REPOSITORY, ROLLHOUSE, RUN_ID, TinyRun

pytestmark = pytest.mark.slow


@pytest.fixture
def copy(finished_run: tuple[TinyRun, dict[str, Any]], tmp_path: Path) -> Path:
    """The finished run's lake and store, two minibatches a batch, that may be changed."""
    tiny, _ = finished_run
    for name in ("lake", "store"):
        shutil.copytree(tiny.root / name, tmp_path / name)
    return tmp_path


def contents(root: Path) -> dict[str, str]:
    files = [f for name in ("lake", "store") for f in (root / name).rglob("*") if f.is_file()]
    return {str(file): blake3(file.read_bytes()).hexdigest() for file in files}


def rollhouse(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    places = ("--lake", str(root / "lake"), "--store", str(root / "store"))
    return subprocess.run(
        [*ROLLHOUSE, "replay", *places, *options],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
    )


def replayed(root: Path, step: int | None = None) -> list[dict[str, Any]]:
    lake, store = Lake.open(root / "lake"), str(root / "store")
    return list(replay(lake, RUN_ID, step=step, store_uri=store, tolerance=0.0))


def test_every_step_of_a_run_is_equal_and_nothing_is_written(copy: Path):
    before = contents(copy)
    done = rollhouse(copy)
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, summary = done.stdout.splitlines()
    assert summary == "8 steps: 8 equal."
    assert lines[0] == "step 1 (batch 1, minibatch 1, from version 0): equal"
    assert lines[3].startswith("step 4 (batch 2, minibatch 2, from the replay of batch 1): equal: ")
    assert lines[3].endswith("tensors of version 2")
    assert [line.split()[1] for line in lines] == [str(step) for step in range(1, 9)]
    assert contents(copy) == before


def test_an_asynchronous_run_of_two_ranks_on_patches_is_equal(tiny_run: Callable[..., TinyRun]):
    tiny = tiny_run("publication.anchor_every=5", "asynchrony.k=1", "trainer.ranks=2")
    tiny.execute()
    before = contents(tiny.root)
    rows = replayed(tiny.root)
    assert [row["verdict"] for row in rows] == ["equal"] * 8, rows
    assert {row["kind"] for row in tiny.lake.read("publications", run_id=RUN_ID).to_pylist()} == {
        "anchor",
        "patch",
    }
    scores = tiny.lake.read("scores", run_id=RUN_ID, columns=["own_version_logprobs"])
    assert scores.column(0).null_count < scores.num_rows, "stale tokens were scored again"
    assert contents(tiny.root) == before


@pytest.mark.parametrize(
    ("gone", "origin"),
    [
        ((), "the checkpoint of batch 2"),
        ((2,), "the checkpoint of batch 1, batch 2 trained again"),
        ((1, 2, 3, 4), "version 0, batches 1 to 2 trained again"),
    ],
)
def test_a_checkpoint_that_is_gone_is_come_to_again(copy: Path, gone: tuple[int, ...], origin: str):
    for batch in gone:
        (folder,) = (copy / "store" / RUN_ID / "checkpoints").glob(f"b{batch:08d}-*")
        shutil.rmtree(folder)
    first, last = replayed(copy, step=6)
    assert [(row["step"], row["verdict"], row["origin"]) for row in (first, last)] == [
        (5, "equal", origin),
        (6, "equal", origin),
    ]


def rewrite(
    root: Path, table: str, batch: int, column: str, change: Callable[[np.ndarray], object]
) -> str:
    """Changes one list of one row in a Parquet file of the lake: the first of the batch's first
    trajectory that has a gradient, its group's rewards being different. Returns the trajectory."""
    lake = Lake.open(root / "lake")
    (name, position) = (
        connect(lake)
        .execute(
            "SELECT trajectory_id, batch_position FROM batches JOIN trajectories"
            " USING (run_id, trajectory_id) WHERE batch = ?"
            " QUALIFY min(reward) OVER (PARTITION BY group_id) < max(reward) OVER (PARTITION BY"
            " group_id) ORDER BY batch_position LIMIT 1",
            [batch],
        )
        .fetchall()[0]
    )
    assert position < 16, "it is in the first minibatch"
    for path in lake.files(table, run_id=RUN_ID):
        rows = pq.ParquetFile(path).read()
        lists = rows.column(column).to_pylist()
        for index, found in enumerate(rows.column("trajectory_id").to_pylist()):
            if found == name:
                kind = rows.schema.field(column).type
                values = np.array(lists[index], kind.value_type.to_pandas_dtype())
                change(values)
                lists[index] = values
                place = rows.column_names.index(column)
                pq.write_table(rows.set_column(place, column, pa.array(lists, kind)), path)
                return name
    raise AssertionError(f"no {table} row of {name}")


def test_one_changed_byte_of_a_score_is_reported(copy: Path):
    changed: dict[int, tuple[str, float]] = {}

    def flip(batch: int, mask: int) -> None:
        def change(values: np.ndarray) -> None:
            before = float(values[1])
            values.view(np.uint32)[1] ^= mask
            changed[batch] = "", abs(before - float(values[1]))

        name = rewrite(copy, "scores", batch, "old_logprobs", change)
        changed[batch] = name, changed[batch][1]

    flip(2, 0x00000001)
    flip(3, 0x00400000)
    rows = replayed(copy)
    for batch, step in ((2, 3), (3, 5)):
        name, largest = changed[batch]
        row = rows[step - 1]
        (first, *_) = row["differences"]
        assert (row["step"], row["verdict"], row["ok"]) == (step, "differs", False)
        assert (first["quantity"], first["num_differing"]) == ("old_logprobs", 1)
        assert first["largest"] == largest
        assert f"trajectory {name}, segment 1, token 1: recorded" in row["found"]
    # A bit of the mantissa's end moves no weight by as much as bf16 shows; its begin does.
    assert rows[5]["verdict"] == "differs" and rows[5]["tensors"]
    tensor = rows[5]["tensors"][0]
    assert 0 < tensor["num_differing"] <= tensor["num_values"] and tensor["largest"] > 0
    assert f"{tensor['tensor']} is the first, in {tensor['num_differing']} of" in rows[5]["found"]
    assert [row["verdict"] for row in (*rows[:2], *rows[6:])] == ["equal"] * 4
    assert rows[6]["origin"] == "the checkpoint of batch 3", "the difference is not carried on"


def test_one_changed_token_is_reported_and_breaks_nothing(copy: Path):
    def other_token(values: np.ndarray) -> None:
        values[1] -= 1

    def no_token(values: np.ndarray) -> None:
        values[1] = 10_000

    rewrite(copy, "segments", 2, "token_ids", other_token)
    name = rewrite(copy, "segments", 3, "token_ids", no_token)
    before = contents(copy)
    done = rollhouse(copy, "--json")
    assert done.returncode == 1 and done.stderr == "", done.stderr
    rows = json.loads(done.stdout)
    assert [row["verdict"] for row in rows] == [
        *("equal", "equal"),
        *("differs", "differs"),
        *("differs", "differs"),
        *("equal", "equal"),
    ]
    assert rows[2]["differences"][0]["quantity"] == "old_logprobs"
    assert rows[3]["tensors"]
    assert f"trajectory {name} has a token that is not in the model's" in rows[4]["found"]
    assert rows[4]["found"] == rows[5]["found"]
    assert contents(copy) == before


@pytest.mark.parametrize(
    ("kind", "has_hashes", "found"),
    [
        ("exp_avg", True, "safetensors does not have the hash that its manifest.json gives"),
        ("master", False, "differs: the checkpoint of batch 1 holds root hash"),
        ("exp_avg", False, "tensors of version 2 differ: "),
    ],
)
def test_a_changed_checkpoint_is_reported(copy: Path, kind: str, has_hashes: bool, found: str):
    (shard,) = (copy / "store" / RUN_ID / "checkpoints").glob("b00000001-*/*.safetensors")
    data = bytearray(shard.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    start, end = header[f"{kind}.model.embed_tokens.weight"]["data_offsets"]
    # The last of a float's four bytes has its sign.
    for place in range(8 + length + start + 3, 8 + length + end, 4):
        data[place] ^= 0x80
    shard.write_bytes(data)
    if not has_hashes:
        manifest = shard.with_name("manifest.json")
        older = {k: v for k, v in json.loads(manifest.read_text()).items() if k != "hashes"}
        manifest.write_text(json.dumps(older))
    done = rollhouse(copy, "--step", "3")
    assert done.returncode == 1, done.stderr
    assert found in done.stdout
