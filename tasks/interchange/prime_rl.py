"""prime-rl's rollouts: episode records and token exports, both JSON lines.

- `<output_dir>/rollouts/step_<n>/<kind>/<subset>/traces.jsonl`, one verifiers episode a line, with
  the message graph of each trace: messages, token ids, masks, log-probabilities, rewards, timing.
- `<output_dir>/token_exports/step_<n>/rank_<r>.jsonl`, one packed training sequence a line, as the
  trainer saw it, without reward or messages.

`effective` files repeat episodes of the `all` file beside them and are left out. The transport's
`rank_<r>.bin` files are not read: packing has dropped what tells rollouts apart.

Formats read at PrimeIntellect-ai/prime-rl 559b447 (0.8.0), `monitors/file.py` and
`trainer/rl/token_export.py`; `Episode.to_record` of verifiers a60a606 and 0.4.1.dev86.
"""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tasks.interchange.message_graph import MessageGraph, runs_of_mask
from tasks.interchange.source import (
    Options,
    Place,
    Source,
    SourceRollout,
    Span,
    by_number,
    checked_ids,
    checked_logprobs,
    read_json_lines,
    take,
)

_SPLITS = {"train": "train", "eval": "heldout"}
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed")


def _find(folder: Path) -> tuple[list[Path], list[tuple[Path, str]]]:
    traces = sorted(folder.rglob("traces.jsonl"), key=by_number)
    exports = sorted(folder.rglob("step_*/rank_*.jsonl"), key=by_number)
    if traces and exports:
        raise ValueError(
            f"{folder} holds episodes (traces.jsonl) and token exports of the same rollouts; give "
            "the folder of one of them, such as its rollouts/."
        )
    repeated = [
        file
        for file in traces
        if file.parent.name == "effective" and (file.parent.parent / "all" / file.name) in traces
    ]
    left_out = [(file, "its episodes are in the `all` file beside it") for file in repeated]
    return [file for file in (*traces, *exports) if file not in repeated], left_out


def _read(file: Path, options: Options, span: Span) -> Iterator[SourceRollout]:
    for place, record in read_json_lines(file, span):
        if "traces" in record:
            yield from _episode(record, options, place)
        elif "export_sequence_idx" in record:
            yield _exported(record, place)
        else:
            raise place.fault(
                "neither an episode (it has no 'traces') nor a token export (it has no "
                "'export_sequence_idx')"
            )


def _episode(record: dict[str, Any], options: Options, place: Place) -> Iterator[SourceRollout]:
    traces = take(record, "traces", list, place)
    task = record.get("task") or {}
    work = (record.get("run") or {}).get("work") or {}
    environment = record.get("env") or {}
    columns = {
        "task_id": task.get("hash") or task.get("key"),
        "environment": environment.get("name") or environment.get("id") or None,
        "split": _SPLITS.get(str(work.get("type")), options.split),
    }
    group = (record.get("group") or {}).get("id") or record.get("id") or place.number
    if not traces:
        # The environment failed before any agent did anything.
        error = (record.get("errors") or [{}])[-1].get("type", "no trace")
        failed = {**columns, "status": "failed", "finish_reason": error, "messages": "[]"}
        yield SourceRollout(group, failed, None, record)
    for trace in traces:
        if not isinstance(trace, dict):
            raise place.fault("'traces' holds something that is no trace")
        yield _trace(trace, record, columns, group, work.get("policy"), place)


def _trace(
    trace: dict[str, Any],
    record: dict[str, Any],
    columns: dict[str, Any],
    group: Any,
    policy: dict[str, int] | None,
    place: Place,
) -> SourceRollout:
    graph = MessageGraph.take_from(trace, policy, place)
    rewards = {
        name: part["score"] * part.get("weight", 1.0)
        for name, part in (take(trace, "rewards", dict, place) or {}).items()
        if part is not None
    }
    calls = trace.get("calls") or []
    last = calls[-1] if calls else {}
    status, finish_reason = "completed", last.get("finish_reason")
    if not trace.get("ok"):
        errors = trace.get("errors") or [{}]
        status, finish_reason = "failed", errors[-1].get("type") or trace.get("stop_condition")
    elif finish_reason == "length":
        status = "truncated"
    # A reward that was never given is missing; a failure's is no wrong answer either.
    reward = sum(rewards.values()) if rewards and status != "failed" else None
    timing = trace.get("timing") or {}
    return SourceRollout(
        group=group,
        columns={
            **columns,
            "status": status,
            "finish_reason": finish_reason,
            "reward": reward,
            "reward_components": list(rewards.items()),
            "num_turns": graph.num_turns,
            "weight_version_min": graph.weight_version_min,
            "weight_version_max": graph.weight_version_max,
            "sampling": _sampling(calls[0].get("sampling") if calls else None),
            "logprobs_mode": graph.logprobs_mode,
            "started_at": _moment(timing.get("start")),
            "finished_at": _moment((timing.get("scoring") or {}).get("end")),
            "messages": json.dumps(graph.messages, ensure_ascii=False),
        },
        segments=graph.segments,
        details={**record, "trace": trace},
    )


def _sampling(sent: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if sent is None else {name: sent.get(name) for name in _SAMPLING}


def _moment(seconds: float | None) -> datetime | None:
    """0.0 stands for "not reached" in a verifiers timing."""
    return datetime.fromtimestamp(seconds, UTC) if seconds else None


def _exported(record: dict[str, Any], place: Place) -> SourceRollout:
    ids = checked_ids(take(record, "token_ids", list, place), "token_ids", place)
    mask = take(record, "loss_mask", list, place)
    if not isinstance(mask, list) or len(mask) != len(ids):
        raise place.fault(f"'loss_mask' is not a list of {len(ids)} booleans, one a token")
    logprobs = checked_logprobs(
        take(record, "inference_logprobs", list, place), "inference_logprobs", len(ids), place
    )
    segments = []
    turn = 0
    for start, end, sampled in runs_of_mask(mask):
        kind = "action" if sampled else "observation" if segments else "prompt"
        segments.append(
            {
                "sequence_index": 0,
                "segment_index": len(segments),
                "start_position": start,
                "turn_index": turn,
                "kind": kind,
                "token_ids": ids[start:end],
                "rollout_logprobs": logprobs[start:end] if sampled else None,
            }
        )
        turn += sampled
    # The exporter writes the temperatures nowhere, nor which rollouts were one group.
    return SourceRollout(
        group=(place.file, place.number),
        columns={
            "environment": record.pop("env_name", None),
            "split": "train",
            "num_turns": sum(segment["kind"] == "action" for segment in segments),
            "messages": "[]",
        },
        segments=segments,
        details=record,
    )


SOURCE = Source(find=_find, read=_read, grows=True)
