"""Rollouts with known answers, as an engine would return them, for tests to judge and to break."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np

from tasks.rollout import Rollout
from tasks.seeds import derive_seed

VOCAB_SIZE = 100
STOP_TOKEN = 1
MAX_TOKENS = 16
RUN_SEED = 11
STARTED = datetime(2026, 1, 1, tzinfo=UTC)

GATE1_LIMITS = {
    "published_version": 3,
    "vocab_size": VOCAB_SIZE,
    "max_tokens": MAX_TOKENS,
    "max_model_tokens": 256,
    "stop_token_ids": [STOP_TOKEN],
    "run_seed": RUN_SEED,
    "oldest_version": None,
    "max_lag": 2,
    "temperature": 1.0,
    "heldout_temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "group_size": 4,
    "num_samples": 1,
    "reward_min": 0.0,
    "reward_max": 1.0,
    "tokenizer_sha256": "t" * 64,
    "chat_template_sha256": "c" * 64,
    "engine": "engine-1",
    "first_engine": None,
    "first_tokenizer_sha256": None,
    "first_chat_template_sha256": None,
    "num_experts": None,
    "num_routed_layers": None,
    "num_experts_per_token": None,
}
GATE2_LIMITS = {
    "admission": 7,
    "old_version": 3,
    "max_lag": 1,
    "logprob_tolerance": 0.002,
    "off_factor": 2.0,
    "max_share_off": 0.1,
    "correction": "token_tis",
    "w_cap": 2.0,
    "mask": "none",
    "mask_low": None,
    "mask_high": None,
    "reference_version": None,
    "drift_batches": 10,
    "rounding_step": 0.0005,
    "reward_step": 0.1,
}
ROUTED_LIMITS = {"num_experts": 8, "num_routed_layers": 3, "num_experts_per_token": 2}


def rollout(
    rng: np.random.Generator,
    group: int,
    sample: int,
    *,
    version: int = 3,
    turns: int = 1,
    routed: bool = False,
    lengths: Sequence[int] | None = None,
    reward: float | None = None,
    surprisal: float = 1.0,
    max_tokens: int = MAX_TOKENS,
) -> Rollout:
    """One honest rollout; `turns` > 1 puts observations between its actions, `routed` gives every
    token but the last its experts.

    `lengths` are the actions' tokens, one a turn, and the last one ends at the cap where it asks
    for more than `max_tokens`; `surprisal` is the mean of -log mu in nats. The prompt is the
    group's.
    """
    trajectory_id = f"{group:08d}-{sample:03d}-0"
    shared = np.random.default_rng([RUN_SEED, group])
    segments: list[dict[str, Any]] = []
    position = 0

    def add(kind: str, turn: int, ids: list[int]) -> None:
        nonlocal position
        is_action = kind == "action"
        logprobs = (-rng.exponential(surprisal, len(ids))).astype(np.float32).tolist()
        segments.append(
            {
                "trajectory_id": trajectory_id,
                "sequence_index": 0,
                "segment_index": len(segments),
                "start_position": position,
                "turn_index": turn,
                "kind": kind,
                "weight_version": version if is_action else None,
                "kv_version_min": version if is_action else None,
                "token_ids": ids,
                "rollout_logprobs": logprobs if is_action else None,
            }
        )
        position += len(ids)

    def tokens(source: np.random.Generator, length: int) -> list[int]:
        return source.integers(STOP_TOKEN + 1, VOCAB_SIZE, length).tolist()

    if lengths is None:
        lengths = rng.integers(2, 12, turns).tolist()
    for turn, length in enumerate(lengths):
        source = rng if turn else shared
        add("observation" if turn else "prompt", turn, tokens(source, int(source.integers(3, 8))))
        stops = [STOP_TOKEN] if length <= max_tokens else []
        add("action", turn, tokens(rng, min(length, max_tokens) - len(stops)) + stops)
    truncated = lengths[-1] > max_tokens
    actions = [segment for segment in segments if segment["kind"] == "action"]
    reward = float(rng.integers(0, 2)) if reward is None else reward
    trajectory = _trajectory(trajectory_id, group, sample, version, position, actions, reward)
    trajectory["sampling"]["max_tokens"] = max_tokens
    routing = [
        _routing(shared if segment is segments[0] else rng, segment, segment is segments[-1])
        for segment in segments
    ]
    requests = [_request(action) for action in actions]
    if truncated:
        requests[-1]["finish_reason"] = trajectory["finish_reason"] = "length"
        trajectory["status"] = "truncated"
    return Rollout(trajectory, segments, requests, routing if routed else [])


def update_in_flight(r: Rollout, kept: int) -> None:
    """The last action as a `keep` update leaves it: `kept` tokens of the version before its own, as
    all actions before it, then the rest over a cache that both computed. Not for routed rollouts.
    """
    last = r.segments[-1]
    version = last["weight_version"]
    for segment in r.segments[:-1]:
        if segment["kind"] == "action":
            segment["weight_version"] = segment["kv_version_min"] = version - 1
    rest = {
        **last,
        "segment_index": last["segment_index"] + 1,
        "start_position": last["start_position"] + kept,
        "kv_version_min": version - 1,
        "token_ids": last["token_ids"][kept:],
        "rollout_logprobs": last["rollout_logprobs"][kept:],
    }
    last |= {
        "weight_version": version - 1,
        "kv_version_min": version - 1,
        "token_ids": last["token_ids"][:kept],
        "rollout_logprobs": last["rollout_logprobs"][:kept],
    }
    r.segments.append(rest)
    r.trajectory["weight_version_min"] = version - 1


def _routing(rng: np.random.Generator, segment: dict[str, Any], last: bool) -> dict[str, Any]:
    num_rows = len(segment["token_ids"]) - last
    num_experts, num_layers, top_k = ROUTED_LIMITS.values()
    experts = rng.random((num_rows, num_layers, num_experts)).argsort(-1)[..., :top_k]
    return {
        "trajectory_id": segment["trajectory_id"],
        "sequence_index": 0,
        "segment_index": segment["segment_index"],
        "num_layers": num_layers,
        "top_k": top_k,
        "dtype": "uint8",
        "num_rows": num_rows,
        "experts": experts.astype(np.uint8).tobytes(),
    }


def _trajectory(
    trajectory_id: str,
    group: int,
    sample: int,
    version: int,
    num_tokens: int,
    actions: list[dict[str, Any]],
    reward: float,
) -> dict[str, Any]:
    return {
        "trajectory_id": trajectory_id,
        "group_id": group,
        "sample_index": sample,
        "attempt": 0,
        "task_id": f"task-{group}",
        "environment": "sums",
        "split": "train",
        "parent_trajectory_id": None,
        "status": "completed",
        "finish_reason": "stop",
        "reward": reward,
        "reward_components": [("exact", 1.0)],
        "num_sequences": 1,
        "num_turns": len(actions),
        "num_tokens": num_tokens,
        "num_action_tokens": sum(len(segment["token_ids"]) for segment in actions),
        "weight_version_min": version,
        "weight_version_max": version,
        "engine_id": "engine",
        "engine": "engine-1",
        "sampling": {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "max_tokens": MAX_TOKENS,
            "seed": derive_seed(RUN_SEED, group, sample, 0, 0),
        },
        "logprobs_mode": "processed_logprobs",
        "renderer": "chat",
        "chat_template_sha256": "c" * 64,
        "tokenizer_sha256": "t" * 64,
        "started_at": STARTED,
        "finished_at": STARTED + timedelta(seconds=1),
        "messages": "[]",
    }


def _request(action: dict[str, Any]) -> dict[str, Any]:
    return {
        "trajectory_id": action["trajectory_id"],
        "turn_index": action["turn_index"],
        "part_index": 0,
        "num_prompt_tokens": action["start_position"],
        "num_cached_tokens": 0,
        "num_output_tokens": len(action["token_ids"]),
        "num_drafted_tokens": None,
        "num_accepted_tokens": None,
        "finish_reason": "stop",
        "drift": "clean",
        "queued_s": 0.0,
        "prefill_s": 0.1,
        "decode_s": 0.2,
        "engine_id": "engine",
        "cached_version_min": None,
    }


def window(
    seed: int = 0, *, groups: int = 4, size: int = 4, first_group: int = 0, **options: Any
) -> list[Rollout]:
    """Whole groups of honest rollouts."""
    rng = np.random.default_rng(seed)
    return [
        rollout(rng, group, sample, **options)
        for group in range(first_group, first_group + groups)
        for sample in range(size)
    ]


def scored(
    rollouts: list[Rollout], drift: float = 0.0, noise: float = 1e-5
) -> list[dict[str, Any]]:
    """Honest scores of the rollouts' action segments: old = rollout + drift + rounding noise."""
    rng = np.random.default_rng(9)
    segments = [s for r in rollouts for s in r.segments if s["kind"] == "action"]
    rows = []
    for segment in segments:
        mu = np.asarray(segment["rollout_logprobs"])
        own = np.minimum(mu + rng.normal(0, noise, len(mu)), 0)
        old = np.minimum(own + rng.normal(0, drift, len(mu)), 0) if drift else own
        stale = segment["weight_version"] < GATE2_LIMITS["old_version"]
        rows.append(
            {
                "admission": 7,
                "batch": 4,
                "trajectory_id": segment["trajectory_id"],
                "sequence_index": 0,
                "segment_index": segment["segment_index"],
                "old_logprobs": old.tolist(),
                "own_version_logprobs": own.tolist() if stale else None,
                "entropies": [1.0] * len(mu),
                "correction_weights": np.exp(np.minimum(old - mu, np.log(2))).tolist(),
                "included": [True] * len(mu),
            }
        )
    return rows
