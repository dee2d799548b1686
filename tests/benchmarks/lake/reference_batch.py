"""The reference batch: what a tool-using batch of rollouts looks like in the lake.

8 groups of 8 rollouts; a prompt of 2,000 tokens that a group shares; 4 turns of 200 sampled and
1,500 observed tokens: 563,200 tokens in 576 segments, 51,200 of them sampled. Ids follow Zipf's law
with exponent 1.2, folded into a vocabulary of 151,936, and each action ends with a stop token;
log-probabilities are those of an exponential law with mean -0.5 nats, in float32, whose mantissas
no codec can shorten.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa

from schemas.tables import TABLES
from tasks.seeds import derive_seed
from tests.factories import GATE1_LIMITS, RUN_SEED

VOCAB_SIZE = 151_936
VERSION = 7
STARTED = datetime(2026, 1, 1, tzinfo=UTC)
STOP_TOKEN = VOCAB_SIZE - 1
LIMITS = GATE1_LIMITS | {
    "published_version": VERSION,
    "vocab_size": VOCAB_SIZE,
    "max_tokens": 200,
    "max_model_tokens": 16_384,
    "stop_token_ids": [STOP_TOKEN],
    "group_size": 8,
    "num_samples": 8,
}


@dataclass(frozen=True)
class Shape:
    """Tokens of a rollout: a prompt, then `num_turns` times `sampled` and `observed`."""

    prompt: int
    num_turns: int
    sampled: int
    observed: int
    num_groups: int = 8
    group_size: int = 8

    @property
    def num_tokens(self) -> int:
        """Of one rollout."""
        return self.prompt + self.num_turns * (self.sampled + self.observed)

    @property
    def num_rollouts(self) -> int:
        return self.num_groups * self.group_size


REFERENCE = Shape(prompt=2000, num_turns=4, sampled=200, observed=1500)


@dataclass(frozen=True)
class RolloutTables:
    """Rows of the lake's tables, in the tables' own schemas and order."""

    trajectories: pa.Table
    segments: pa.Table
    requests: pa.Table
    num_tokens: int

    @property
    def routing(self) -> pa.Table:
        return TABLES["routing"].own_schema.empty_table()


def zipf_ids(rng: np.random.Generator, count: int) -> np.ndarray:
    """Any token but the one that ends an action."""
    return ((rng.zipf(1.2, count) - 1) % STOP_TOKEN).astype(np.int32)


def make_batch(seed: int, shape: Shape = REFERENCE, *, first_group: int = 0) -> RolloutTables:
    """Whole groups from `first_group` on, honest by every rule of gate 1."""
    rng = np.random.default_rng(seed)
    segments, trajectories, requests = [], [], []
    for group in range(first_group, first_group + shape.num_groups):
        prompt = zipf_ids(rng, shape.prompt)
        for sample in range(shape.group_size):
            name = f"{group:08d}-{sample:03d}-0"
            segments += _segments(rng, name, prompt, shape)
            trajectories.append(_trajectory(name, group, sample, shape))
            requests += [_request(name, turn, shape) for turn in range(shape.num_turns)]
    return RolloutTables(
        _table("trajectories", trajectories),
        _table("segments", segments),
        _table("requests", requests),
        shape.num_rollouts * shape.num_tokens,
    )


def _table(name: str, rows: list[dict]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=TABLES[name].own_schema)


def _segments(rng: np.random.Generator, name: str, prompt: np.ndarray, shape: Shape) -> list[dict]:
    rows: list[dict] = []
    position = 0

    def add(kind: str, turn: int, ids: np.ndarray) -> None:
        nonlocal position
        action = kind == "action"
        logprobs = -rng.exponential(0.5, len(ids)).astype(np.float32) if action else None
        rows.append(
            {
                "trajectory_id": name,
                "sequence_index": 0,
                "segment_index": len(rows),
                "start_position": position,
                "turn_index": turn,
                "kind": kind,
                "weight_version": VERSION if action else None,
                "kv_version_min": VERSION if action else None,
                "token_ids": ids,
                "rollout_logprobs": logprobs,
            }
        )
        position += len(ids)

    add("prompt", 0, prompt)
    for turn in range(shape.num_turns):
        add("action", turn, np.append(zipf_ids(rng, shape.sampled - 1), np.int32(STOP_TOKEN)))
        if shape.observed:
            add("observation", turn, zipf_ids(rng, shape.observed))
    return rows


def _trajectory(name: str, group: int, sample: int, shape: Shape) -> dict:
    return {
        "trajectory_id": name,
        "group_id": group,
        "sample_index": sample,
        "attempt": 0,
        "task_id": f"task-{group}",
        "environment": "tools",
        "split": "train",
        "parent_trajectory_id": None,
        "status": "completed",
        "finish_reason": "stop",
        "reward": float(sample % 2),
        "reward_components": [("exact", float(sample % 2))],
        "num_sequences": 1,
        "num_turns": shape.num_turns,
        "num_tokens": shape.num_tokens,
        "num_action_tokens": shape.num_turns * shape.sampled,
        "weight_version_min": VERSION,
        "weight_version_max": VERSION,
        "engine_id": "engine",
        "engine": "engine-1",
        "sampling": {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "max_tokens": shape.sampled,
            "seed": derive_seed(RUN_SEED, group, sample, 0, 0),
        },
        "logprobs_mode": "processed_logprobs",
        "renderer": "chat",
        "chat_template_sha256": "c" * 64,
        "tokenizer_sha256": "t" * 64,
        "started_at": STARTED,
        "finished_at": STARTED + timedelta(seconds=60),
        "messages": "[]",
    }


def _request(name: str, turn: int, shape: Shape) -> dict:
    return {
        "trajectory_id": name,
        "turn_index": turn,
        "part_index": 0,
        "num_prompt_tokens": shape.prompt + turn * (shape.sampled + shape.observed),
        "num_cached_tokens": 0,
        "num_output_tokens": shape.sampled,
        "finish_reason": "stop",
        "drift": "clean",
        "queued_s": 0.0,
        "prefill_s": 0.1,
        "decode_s": 0.2,
        "engine_id": "engine",
    }
