"""Rows 1 and 2: appending the reference batch to the lake, against plain Parquet and JSON Lines.

The lake's side is `Lake.append`: checks, sorting, write id, Parquet, statistics, fsync and commit.
The Parquet side is `pyarrow.parquet.write_table` of the same Arrow rows with the encodings that
suit them best (Zstandard level 1, dictionaries on the same columns, BYTE_STREAM_SPLIT on the
log-probabilities); pyarrow's defaults would put token ids in a dictionary, which is slower and
larger. The JSON Lines side is `json.dumps` of one dict a segment, already Python values, with a
float's digits as they come from an engine, and gzip at Python's default, level 9. Neither baseline
calls fsync or commits anything. A context line gives the JSON Lines that somebody who cares about
bytes would write: no spaces, and the fewest digits that are the same float32.
"""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from schemas.tables import TABLES
from tasks.lake.lake import Lake
from tests.benchmarks.lake.measure import by_turns, verdict
from tests.benchmarks.lake.reference_batch import make_batch

SEGMENTS = TABLES["segments"]


def write_parquet(rows: pa.Table, path: Path) -> None:
    pq.write_table(
        rows,
        path,
        compression="zstd",
        compression_level=1,
        use_dictionary=list(SEGMENTS.dictionary),
        use_byte_stream_split=list(SEGMENTS.byte_stream_split),
    )


def write_json_lines(rows: list[dict], path: Path) -> None:
    with open(path, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def shortest_json(rows: list[dict]) -> bytes:
    shortened = [
        row
        if row["rollout_logprobs"] is None
        else row
        | {"rollout_logprobs": [float(str(np.float32(x))) for x in row["rollout_logprobs"]]}
        for row in rows
    ]
    return "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in shortened).encode()


def lines(folder: Path) -> Iterator[str]:
    batch = make_batch(0)
    rows, num_tokens = batch.segments, batch.num_tokens
    plain = rows.to_pylist()
    lake = Lake.create(folder / "lake")
    parquet, jsonl = folder / "segments.parquet", folder / "segments.jsonl"

    def append() -> None:
        lake.append("segments", rows, run_id="run", cycle=0, lease=1)

    def speeds(pairs) -> str:
        ours, theirs = (num_tokens / ms / 1e3 for ms in pairs.medians_ms())
        return f"{ours:.1f} against {theirs:.1f} Mtok/CPU-s"

    against = by_turns(append, lambda: write_json_lines(plain, jsonl), num_pairs=9)
    yield verdict(
        "append: speed / JSON Lines, one line a segment",
        against.speedup(),
        ">=",
        5,
        speeds(against),
    )
    against = by_turns(append, lambda: write_parquet(rows, parquet), num_pairs=41)
    yield verdict("append: speed / plain Parquet", against.speedup(), ">=", 0.85, speeds(against))

    ours = Path(lake.files("segments")[0]).stat().st_size / num_tokens
    plain_bytes = jsonl.stat().st_size / num_tokens
    gz = len(gzip.compress(jsonl.read_bytes())) / num_tokens
    shortest = shortest_json(plain)
    yield verdict("size: bytes a token", [ours], "<=", 1.65)
    yield verdict(
        "size: bytes / gzipped JSON Lines",
        [ours / gz],
        "<=",
        0.7,
        f"JSON Lines {plain_bytes:.2f}, gzipped {gz:.2f} bytes a token, "
        f"plain Parquet {parquet.stat().st_size / num_tokens:.3f}",
    )
    yield (
        f"context: the shortest JSON Lines take {len(shortest) / num_tokens:.2f} bytes a token, "
        f"gzipped {len(gzip.compress(shortest)) / num_tokens:.2f}"
    )
