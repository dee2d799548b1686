"""verl's rollout dump: `trainer.rollout_data_dir` and `trainer.validation_data_dir`.

One file a step, `<step>.jsonl`, one rollout a line: input and output as decoded text without
special tokens, gts, score (the sum of the token-level scores), step, whatever the reward function
returned, and the keys `request_id` or `uid` where the trainer has them. Token ids,
log-probabilities and versions are not in it, and nothing here re-encodes the text.

Format read at verl-project/verl 1dda039 (0.10.0.dev), `_write_generations` and `_log_rollout_data`
of `trainer/ppo/ray_trainer.py` and `trainer/ppo/v1/trainer_base.py`.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from blake3 import blake3

from tasks.interchange.source import (
    NUMBER,
    Options,
    Source,
    SourceRollout,
    Span,
    by_number,
    read_json_lines,
    take,
)

_UID = re.compile(r"(.+)_\d+_\d+")
"""`{sample}_{rollout}_{output}`, of which the first part is shared by a group."""


def task_id_of(text: str) -> str:
    """Hash of a problem's text, 32 hex digits."""
    return blake3(text.encode()).hexdigest()[:32]


def text_messages(prompt: str, completion: str) -> str:
    """Text without roles: a decoded prompt runs system and user together."""
    turns = [{"role": "prompt", "content": prompt}, {"role": "completion", "content": completion}]
    return json.dumps(turns, ensure_ascii=False)


def _find(folder: Path) -> tuple[list[Path], list[tuple[Path, str]]]:
    return sorted(folder.glob("*.jsonl"), key=by_number), []


def _read(file: Path, options: Options, span: Span) -> Iterator[SourceRollout]:
    for place, record in read_json_lines(file, span):
        prompt = take(record, "input", str, place)
        completion = take(record, "output", str, place)
        reward = take(record, "score", NUMBER, place)
        if prompt is None or completion is None:
            raise place.fault("'input' or 'output' is null")
        uid = record.get("uid")
        match = _UID.fullmatch(uid) if isinstance(uid, str) else None
        yield SourceRollout(
            group=(record.get("step"), match[1] if match else uid or prompt),
            columns={
                "task_id": task_id_of(prompt),
                "split": options.split,
                "reward": reward,
                "messages": text_messages(prompt, completion),
            },
            segments=None,
            details=record,
        )


SOURCE = Source(find=_find, read=_read, grows=False)
