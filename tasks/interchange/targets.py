"""Write exported rows to a new file or folder, whole or not at all.

Rows are written as they come, under a hidden name beside the target, brought to the disk and then
renamed. A Hugging Face dataset is a folder of Parquet files with a card that names them:
`datasets.load_dataset(FOLDER)` reads it, and so does anything that reads Parquet; `load_from_disk`
would need a format of the `datasets` package's own.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tasks.durable import explain_os_errors, fsync_dir, fsync_file, make_durable_dirs
from tasks.interchange.exported import BATCH_COLUMNS, Rows
from tasks.interchange.json_lines import as_lists, json_lines

SHARD_BYTES = 256 << 20
"""Parquet bytes after which a dataset folder's next shard begins."""


def write_export(rows: Rows, format: str, to: Path) -> dict[str, Any]:
    """Writes the rows as `jsonl`, `parquet` or `hf`; path, rows and bytes of what was written.

    Raises:
        ValueError: the target exists, or a value cannot be written; nothing is left behind.
        OSError: the disk is full or the directory cannot be written; nothing is left behind.
    """
    if to.exists() or to.is_symlink():
        raise ValueError(f"{to} exists; give --to a path that does not, or remove it.")
    partial = to.parent / f".{to.name}.{uuid4().hex}.partial"
    checked = _Checked(rows)
    with explain_os_errors(f"write {to}"):
        make_durable_dirs(to.parent)
        try:
            {"jsonl": _write_jsonl, "parquet": _write_parquet, "hf": _write_dataset}[format](
                partial, checked
            )
            files = sorted(partial.rglob("*")) if partial.is_dir() else [partial]
            for file in files:
                fsync_file(file)
            num_bytes = sum(file.stat().st_size for file in files if file.is_file())
            if partial.is_dir():
                fsync_dir(partial)
            if to.exists():
                raise ValueError(f"{to} was made by somebody else meanwhile; give another --to.")
            os.rename(partial, to)
            fsync_dir(to.parent)
        except BaseException:
            if partial.is_dir():
                shutil.rmtree(partial)
            partial.unlink(missing_ok=True)
            raise
    return {"path": str(to), "format": format, "rows": checked.count, "bytes": num_bytes}


class _Checked:
    """The rows, counted, each number of them finite."""

    def __init__(self, rows: Rows):
        self.title = rows.title
        self.schema = rows.schema
        self.count = 0
        self._batches = rows.batches

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for batch in self._batches:
            for index, name in enumerate(batch.schema.names):
                if _has_nonfinite(batch.column(index)):
                    raise ValueError(
                        f"Column {name} holds NaN or an infinity, in rows {self.count} to "
                        f"{self.count + batch.num_rows - 1}; a value that is missing is NULL: "
                        "write CASE WHEN isfinite(x) THEN x END for it in the query."
                    )
            self.count += batch.num_rows
            yield batch


def _has_nonfinite(array: pa.Array) -> bool:
    kind = array.type
    if pa.types.is_floating(kind):
        finite = pc.call_function("is_finite", [array.drop_null()])
        return finite.true_count < len(finite)
    if pa.types.is_map(kind):
        return _has_nonfinite(as_lists(array))
    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
        return _has_nonfinite(array.flatten())
    if pa.types.is_struct(kind):
        return any(_has_nonfinite(column) for column in array.flatten())
    return False


def _write_jsonl(path: Path, rows: _Checked) -> None:
    with open(path, "xb") as file:
        for batch in rows:
            file.write(json_lines(batch))


def _parquet_writer(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    try:
        return pq.ParquetWriter(path, schema, compression="zstd")
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
        raise ValueError(
            f"The result cannot be written as Parquet ({error}); cast the column in the query."
        ) from None


def _write_parquet(path: Path, rows: _Checked) -> None:
    with _parquet_writer(path, rows.schema) as writer:
        for batch in rows:
            writer.write_batch(batch)


def _write_dataset(path: Path, rows: _Checked) -> None:
    data = path / "data"
    data.mkdir(parents=True)
    schema = pa.schema([(f.name, _as_feature(pa.nulls(0, f.type)).type) for f in rows.schema])
    batches = iter(rows)
    shards: list[Path] = []
    more = True
    while more:
        shards.append(data / f"shard-{len(shards)}.parquet")
        more = _write_shard(shards[-1], schema, batches)
    for index, shard in enumerate(shards):
        shard.rename(data / f"train-{index:05d}-of-{len(shards):05d}.parquet")
    (path / "README.md").write_text(_card(rows, schema))


def _write_shard(path: Path, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> bool:
    """Writes batches up to the size of a shard; whether it stopped for that."""
    with _parquet_writer(path, schema) as writer:
        for batch in batches:
            columns = [_as_feature(batch.column(i)) for i in range(batch.num_columns)]
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
            if path.stat().st_size > SHARD_BYTES:
                return True
    return False


def _as_feature(array: pa.Array) -> pa.Array:
    """The array as `datasets` can hold it: it has no maps."""
    return as_lists(array) if pa.types.is_map(array.type) else array


def _card(rows: _Checked, schema: pa.Schema) -> str:
    lines = [f"| `{f.name}` | `{f.type}` | {BATCH_COLUMNS.get(f.name, '')} |" for f in schema]
    return "\n".join(
        [
            "---",
            "configs:",
            "- config_name: default",
            "  data_files:",
            "  - split: train",
            "    path: data/train-*.parquet",
            "---",
            "",
            f"# {rows.title}",
            "",
            f"{rows.count} rows, exported by Rollhouse. NULL means that a value does not apply or "
            "was not observed.",
            "",
            "| column | type | meaning |",
            "| --- | --- | --- |",
            *lines,
            "",
        ]
    )
