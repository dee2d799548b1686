"""TRL's logged completions: GRPO and RLOO with `log_completions = True`.

`<output_dir>/completions/completions_<step>.parquet`, one rollout a row: step, prompt and
completion (text, or lists of messages), one float64 column a reward function, the user's extra
columns, advantage. Token ids, log-probabilities and the weights of the reward functions are not
in it.

TRL writes the last generation again at each logged step until there is a new one, so a file that
repeats the one before it is left out.

Format read at huggingface/trl f2cd577 (1.10.0.dev0) and in the release 1.16.0, `GRPOTrainer.log`;
since 1.16 prompt and completion keep their messages.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.interchange.source import (
    Options,
    Place,
    Source,
    SourceRollout,
    Span,
    by_number,
)
from tasks.interchange.verl import task_id_of, text_messages

ROWS_PER_READ = 1024
_COLUMNS = ("step", "prompt", "completion", "advantage")


def _find(folder: Path) -> tuple[list[Path], list[tuple[Path, str]]]:
    found = sorted(folder.glob("completions_*.parquet"), key=by_number) or sorted(
        (folder / "completions").glob("completions_*.parquet"), key=by_number
    )
    kept: list[Path] = []
    left_out: list[tuple[Path, str]] = []
    before: pa.Table | None = None
    for file in found:
        rows = _open(file).read()
        rows = rows.drop_columns([name for name in ("step",) if name in rows.column_names])
        if rows.num_rows == 0:
            left_out.append((file, "it has no rows"))
        elif before is not None and rows.equals(before):
            left_out.append((file, "it repeats the generation of the file before it"))
        else:
            kept.append(file)
        before = rows
    return kept, left_out


def _open(file: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(file)
    except pa.ArrowInvalid as error:
        raise ValueError(
            f"{file} is not a Parquet file ({error}); copy it again from where TRL wrote it."
        ) from None


def _read(file: Path, options: Options, span: Span) -> Iterator[SourceRollout]:
    parquet = _open(file)
    schema = parquet.schema_arrow
    if missing := [name for name in _COLUMNS if name not in schema.names]:
        raise ValueError(
            f"{file} has no columns {', '.join(missing)}, which TRL's logged completions have; it "
            f"has {', '.join(schema.names)}."
        )
    floats = [f.name for f in schema if pa.types.is_floating(f.type) and f.name not in _COLUMNS]
    if unknown := sorted(set(options.rewards) - set(floats)):
        raise ValueError(
            f"{file} has no reward column {', '.join(unknown)}; its numeric columns are "
            f"{', '.join(floats) or 'none'}."
        )
    number = 0
    for batch in parquet.iter_batches(ROWS_PER_READ):
        for row in batch.to_pylist():
            number += 1
            yield _rollout(row, floats, options, span, Place(str(file), "row", number))


def _rollout(
    row: dict[str, Any], floats: list[str], options: Options, span: Span, place: Place
) -> SourceRollout:
    prompt, completion = row.pop("prompt"), row.pop("completion")
    if type(prompt) is not type(completion) or not isinstance(prompt, str | list):
        raise place.fault("'prompt' and 'completion' are neither both text nor both messages")
    row["advantage"] = span.finite(row["advantage"])
    # A reward function gives None, written as NaN, where it does not apply.
    parts = {name: span.finite(row.pop(name)) for name in floats}
    known = {name: value for name, value in parts.items() if value is not None}
    reward = None
    if options.rewards and set(options.rewards) & set(known):
        reward = sum(w * known[name] for name, w in options.rewards.items() if name in known)
    if isinstance(prompt, str):
        text, messages = prompt, text_messages(prompt, completion)
    else:
        turns = [_without_nulls(message) for message in (*prompt, *completion)]
        messages = json.dumps(turns, ensure_ascii=False, default=str)
        text = json.dumps(turns[: len(prompt)], ensure_ascii=False, default=str)
    return SourceRollout(
        group=(row["step"], text),
        columns={
            "task_id": task_id_of(text),
            "split": options.split,
            "reward": reward,
            "reward_components": list(known.items()),
            "messages": messages,
        },
        segments=None,
        details=row,
    )


def _without_nulls(message: dict[str, Any]) -> dict[str, Any]:
    """Parquet gives every message the keys of all."""
    return {name: value for name, value in message.items() if value is not None}


SOURCE = Source(find=_find, read=_read, grows=False)
