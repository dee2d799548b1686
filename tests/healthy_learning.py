"""Clean batches as healthy learning makes them, for the gates to let pass.

Four families of runs, each 50 batches from the first to the last of what learning does: lengths
grow threefold, rewards rise from 0.1 to 0.9 with plateaus and noise, entropy falls, groups whose
rewards are all alike become more, and with them the policy moves while samples are in flight.

Nothing here knows a bound of any rule: the numbers come from the description of learning above,
and were written down with their seed before the rules that judge them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tasks.rollout import Rollout
from tests.factories import rollout, update_in_flight

BATCHES = 50
MAX_TOKENS = 96


@dataclass(frozen=True)
class Family:
    """`length` is the median action's tokens at the start, `sigma` its log-normal spread;
    `max_lag` bounds the versions a sample may be behind."""

    seed: int
    groups: int
    size: int
    turns: int
    length: float
    sigma: float
    max_lag: int
    plateaus: int
    in_flight: bool = False


FAMILIES = {
    "synchronous": Family(101, 8, 4, 1, length=5, sigma=0.4, max_lag=0, plateaus=1),
    "large groups": Family(102, 3, 8, 1, length=9, sigma=0.7, max_lag=1, plateaus=2),
    "multi-turn": Family(103, 4, 4, 3, length=3, sigma=0.5, max_lag=2, plateaus=3),
    "asynchronous": Family(
        104, 6, 2, 2, length=6, sigma=1.0, max_lag=3, plateaus=0, in_flight=True
    ),
}


@dataclass(frozen=True)
class CleanBatch:
    """`scores` are rows of that table, in the order of the action segments."""

    batch: int
    rollouts: list[Rollout]
    scores: list[dict[str, Any]]


def learned(family: Family) -> np.ndarray:
    """Share of the way from the first policy to the last one at each batch, [50], in 0 to 1:
    rises, but for plateaus of five batches."""
    rises = np.ones(BATCHES)
    for plateau in range(family.plateaus):
        start = (plateau + 1) * BATCHES // (family.plateaus + 1)
        rises[start : start + 5] = 0
    return np.cumsum(rises) / rises.sum()


def clean_batches(family: Family) -> Iterator[CleanBatch]:
    rng = np.random.default_rng(family.seed)
    for index, progress in enumerate(learned(family)):
        yield _clean_batch(rng, family, index + 1, float(progress))


def _clean_batch(
    rng: np.random.Generator, family: Family, batch: int, progress: float
) -> CleanBatch:
    mean_reward = 0.1 + 0.8 * progress
    # Tasks polarise as they are learned: the spread of their success rates widens to 0 and 1.
    concentration = 4.0 * (1 - progress) + 0.6
    length = family.length * 3.0**progress
    entropy = 1.2 * (1 - progress) + 0.1
    rollouts = []
    for group in range((batch - 1) * family.groups, batch * family.groups):
        success = rng.beta(mean_reward * concentration, (1 - mean_reward) * concentration)
        for sample in range(family.size):
            lag = int(rng.integers(0, min(family.max_lag, batch - 1) + 1))
            lengths = np.ceil(rng.lognormal(np.log(length), family.sigma, family.turns)).astype(int)
            # Only the last turn may meet the cap, which ends the rollout.
            lengths[:-1] = lengths[:-1].clip(1, MAX_TOKENS)
            r = rollout(
                rng,
                group,
                sample,
                version=batch - 1 - lag,
                lengths=lengths.tolist(),
                reward=float(rng.random() < success),
                surprisal=entropy,
                max_tokens=MAX_TOKENS,
            )
            spans = lengths[-1] > 2 and r.trajectory["weight_version_min"] > max(
                0, batch - 1 - family.max_lag
            )
            if family.in_flight and spans and rng.random() < 0.3:
                update_in_flight(r, int(rng.integers(1, min(lengths[-1], MAX_TOKENS))))
            rollouts.append(r)
    scores = [
        _score(rng, segment, batch, entropy)
        for r in rollouts
        for segment in r.segments
        if segment["kind"] == "action"
    ]
    return CleanBatch(batch, rollouts, scores)


def _score(
    rng: np.random.Generator, segment: dict[str, Any], batch: int, entropy: float
) -> dict[str, Any]:
    """Rounding noise of 1e-4 between engine and trainer; the policy moves by 0.03 a version, more
    for unlikely tokens."""
    mu = np.asarray(segment["rollout_logprobs"])
    lag = batch - 1 - segment["weight_version"]
    own = np.minimum(mu + rng.normal(0, 1e-4, len(mu)), 0)
    old = np.minimum(own + lag * rng.normal(0, 0.03, len(mu)) * (1 - own), 0) if lag else own
    own_cache = segment["kv_version_min"] == segment["weight_version"]
    entropies = np.abs(rng.normal(entropy, 0.3 * entropy, len(mu)))
    return {
        "admission": 10 * batch,
        "batch": batch,
        "trajectory_id": segment["trajectory_id"],
        "sequence_index": segment["sequence_index"],
        "segment_index": segment["segment_index"],
        "old_logprobs": old.tolist(),
        "own_version_logprobs": own.tolist() if lag and own_cache else None,
        "entropies": entropies.tolist(),
        "correction_weights": np.exp(np.minimum(np.float32(old) - np.float32(mu), np.log(2.0)))
        .astype(np.float32)
        .tolist(),
        "included": [True] * len(mu),
    }
