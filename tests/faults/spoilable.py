"""A clean batch with all that made it, for faults to be planted in: rollouts, scores, and the
logits behind every action token, so that another temperature or truncation is exact."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from tasks.rollout import Rollout
from tasks.validate import Judgement
from tests.factories import MAX_TOKENS, ROUTED_LIMITS, STOP_TOKEN, VOCAB_SIZE, rollout
from tests.gate_judgements import gate1, gate2, recorded

GROUPS, SIZE = 8, 4
TEMPERATURE = 0.7


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def chosen(log_probs: np.ndarray, ids: Sequence[int]) -> list[float]:
    return log_probs[np.arange(len(ids)), ids].astype(np.float32).tolist()


@dataclass
class Spoilable:
    """`logits` of each action, [tokens, vocabulary], by trajectory and segment; `limits`, `known`
    (ids recorded before) and `history` go to the gates beside it.

    Eight groups of four rollouts, two turns each. Version 3 sampled all but the last two groups,
    which version 2 did. Rollout (1, 3) was truncated.
    """

    rollouts: list[Rollout]
    scores: list[dict[str, Any]]
    logits: dict[tuple[str, int], np.ndarray]
    limits: dict[str, Any] = field(default_factory=dict)
    known: tuple[str, ...] = ()
    history: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def of(self, group: int, sample: int) -> Rollout:
        return self.rollouts[group * SIZE + sample]

    def actions(self, r: Rollout | None = None) -> list[dict[str, Any]]:
        rollouts = self.rollouts if r is None else [r]
        return [s for one in rollouts for s in one.segments if s["kind"] == "action"]

    def score(self, segment: Mapping[str, Any]) -> dict[str, Any]:
        key = (segment["trajectory_id"], segment["segment_index"])
        return next(s for s in self.scores if (s["trajectory_id"], s["segment_index"]) == key)

    def relog(self, change: Callable[[np.ndarray], np.ndarray]) -> None:
        """Rollout log-probabilities of `change(logits)` instead, for the same tokens."""
        for segment in self.actions():
            logits = self.logits[segment["trajectory_id"], segment["segment_index"]]
            segment["rollout_logprobs"] = chosen(log_softmax(change(logits)), segment["token_ids"])

    def reweigh(self) -> None:
        """Correction weights of the log-probabilities that stand there now."""
        for segment in self.actions():
            score = self.score(segment)
            log_w = np.float64(score["old_logprobs"]) - np.float64(segment["rollout_logprobs"])
            score["correction_weights"] = np.exp(np.minimum(log_w, np.log(2))).tolist()

    def judge(self, gate: int) -> Judgement:
        if gate == 1:
            return gate1(self.rollouts, recorded(*self.known), **self.limits)
        return gate2(self.rollouts, self.scores, self.history, **self.limits)


@cache
def _clean() -> Spoilable:
    rng = np.random.default_rng(42)
    rollouts, logits = [], {}
    for group in range(GROUPS):
        for sample in range(SIZE):
            lengths = rng.integers(9, MAX_TOKENS, 2).tolist()
            if (group, sample) == (1, 3):
                lengths[1] = MAX_TOKENS + 1
            version = 3 if group < GROUPS - 2 else 2
            r = rollout(rng, group, sample, version=version, lengths=lengths, routed=True)
            for segment in r.segments:
                if segment["kind"] == "action":
                    key = (segment["trajectory_id"], segment["segment_index"])
                    logits[key] = _sample(rng, segment)
            r.trajectory["reward"] = float(sample % 2)
            rollouts.append(r)
    scores = [_score(rng, s) for r in rollouts for s in r.segments if s["kind"] == "action"]
    batch = Spoilable(rollouts, scores, logits)
    batch.reweigh()
    return batch


def clean() -> Spoilable:
    """A fresh copy, to spoil."""
    batch = copy.deepcopy(_clean())
    batch.limits |= ROUTED_LIMITS
    return batch


def _sample(rng: np.random.Generator, segment: dict[str, Any]) -> np.ndarray:
    """Draws the action's tokens and writes down their log-probabilities; the stop token stays
    where it is."""
    ids = segment["token_ids"]
    logits = rng.normal(0, 1.5, (len(ids), VOCAB_SIZE))
    logits[:, : STOP_TOKEN + 1] = -9.0
    if ids[-1] == STOP_TOKEN:
        logits[-1, STOP_TOKEN] = 3.0
    log_probs = log_softmax(logits / TEMPERATURE)
    for position in range(len(ids) - (ids[-1] == STOP_TOKEN)):
        ids[position] = int(rng.choice(VOCAB_SIZE, p=np.exp(log_probs[position])))
        # The stop token would end the action here.
        ids[position] = max(ids[position], STOP_TOKEN + 1)
    segment["rollout_logprobs"] = chosen(log_probs, ids)
    return logits


def _score(rng: np.random.Generator, segment: dict[str, Any]) -> dict[str, Any]:
    mu = np.asarray(segment["rollout_logprobs"])
    own = np.minimum(mu + rng.normal(0, 1e-4, len(mu)), 0)
    stale = segment["weight_version"] < 3
    old = np.minimum(own + rng.normal(0, 0.05, len(mu)), 0) if stale else own
    return {
        "admission": 7,
        "batch": 4,
        "trajectory_id": segment["trajectory_id"],
        "sequence_index": 0,
        "segment_index": segment["segment_index"],
        "old_logprobs": old.tolist(),
        "own_version_logprobs": own.tolist() if stale else None,
        "entropies": rng.normal(2.5, 0.1, len(mu)).tolist(),
        "correction_weights": [1.0] * len(mu),
        "included": [True] * len(mu),
    }
