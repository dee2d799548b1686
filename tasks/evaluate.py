"""Held-out evaluation: pass@k per weight version, and the paired gain between two versions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tasks.lake.lake import Lake

Z_95 = 1.959963984540054
"""Two-sided 95 % quantile of the normal distribution."""


@dataclass(frozen=True)
class Estimate:
    """A mean over problems with its 95 % confidence interval."""

    mean: float
    ci_low: float
    ci_high: float
    num_tasks: int


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimator 1 - C(n - c, k) / C(n, k) of the chance that one of k rollouts passes.

    Source: Chen et al. 2021, equation 1. Raises `ValueError` if k > n.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(
            f"pass@{k} needs at least {k} rollouts a problem, there are {num_samples}."
        )
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def estimate_mean(values: Sequence[float]) -> Estimate:
    """Mean and normal 95 % interval of independent values, one a problem."""
    array = np.asarray(values, dtype=np.float64)
    assert array.size > 0, "an estimate needs at least one problem"
    mean = float(array.mean())
    spread = float(array.std(ddof=1)) if array.size > 1 else math.inf
    half = Z_95 * spread / math.sqrt(array.size)
    return Estimate(mean, mean - half, mean + half, array.size)


def heldout_results(
    lake: Lake, run_id: str, version: int, pass_reward: float
) -> dict[str, tuple[int, int]]:
    """Per held-out problem that `version` was evaluated on: rollouts and how many passed."""
    ledger = lake.ledger(run_id)
    entry = ledger.last("evaluated", version=version)
    if entry is None:
        raise ValueError(f"Run {run_id} has no evaluation of version {version}.")
    quarantined = set(
        lake.read("quarantine", run_id=run_id, write_ids=entry.write_ids)
        .column("trajectory_id")
        .to_pylist()
    )
    rows = lake.read(
        "trajectories",
        run_id=run_id,
        columns=["trajectory_id", "task_id", "reward"],
        where="split = 'heldout'",
        write_ids=entry.write_ids,
    )
    results: dict[str, tuple[int, int]] = {}
    for row in rows.to_pylist():
        if row["trajectory_id"] not in quarantined:
            rollouts, passed = results.get(row["task_id"], (0, 0))
            passes = row["reward"] >= pass_reward
            results[row["task_id"]] = (rollouts + 1, passed + passes)
    return results


def estimate_pass_at_k(results: dict[str, tuple[int, int]], k: int) -> Estimate:
    return estimate_mean([pass_at_k(n, c, k) for n, c in results.values()])


def paired_gain(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> Estimate:
    """Gain in pass@1 over the problems that both versions answered, paired by problem."""
    shared = sorted(before.keys() & after.keys())
    if not shared:
        raise ValueError("The two evaluations share no problem, so their gain cannot be paired.")
    return estimate_mean([after[t][1] / after[t][0] - before[t][1] / before[t][0] for t in shared])
