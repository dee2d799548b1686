"""Evaluate the version that the engine serves on held-out problems, and record every rollout."""

import asyncio
from collections.abc import Callable
from typing import Any

from flows.opening import OpenRun
from flows.refusals import refuse_window
from flows.windows import commit_window, gate1_limits
from tasks.evaluate import estimate_mean, pass_at_k
from tasks.progress import read_progress
from tasks.record import Recorded, Window
from tasks.rollout import RolloutContext, sample_group


async def evaluate(
    run: OpenRun, context: RolloutContext, version: int, record: Callable[..., Any]
) -> float | None:
    """Samples each held-out problem, commits `evaluated` with pass@k for k = 1 and n, and returns
    pass@1."""
    config = run.config.evaluation
    await context.engine.served()
    served = context.engine.describe()
    assert served.weight_version == version, f"version {version} is not being served"
    sampling = run.config.sampling.model_copy(update={"temperature": config.temperature})
    numbers = read_progress(run.lake, run.run_id).next_groups(())
    groups = await asyncio.gather(
        *(
            sample_group(context, task, sampling, numbers.take(), config.num_samples)
            for task in context.environment.heldout(config.num_tasks)
        )
    )
    window = Window.of([rollout for group in groups for rollout in group])
    limits, scope = gate1_limits(run, context), f"evaluation of version {version}"
    recorded = record(
        run.lake,
        window,
        limits,
        run_id=run.run_id,
        cycle=run.cycle,
        lease=run.lease,
        scope=scope,
    )
    if not recorded.judgement.ok:
        raise refuse_window(run, recorded, limits, scope, version=version)
    return commit_evaluation(run, window, recorded, version)


def commit_evaluation(
    run: OpenRun, window: Window, recorded: Recorded, version: int, **details: Any
) -> float | None:
    """Commits `evaluated` from a recorded window of held-out rollouts, and returns pass@1.

    None, and no result, if a reviewer waived the share of faults and no rollout is without one.
    """
    config = run.config.evaluation
    trajectories = window.trajectories.to_pylist()
    correct: dict[str, list[bool]] = {}
    for trajectory in trajectories:
        if trajectory["trajectory_id"] not in recorded.quarantined:
            passes = correct.setdefault(trajectory["task_id"], [])
            passes.append(trajectory["reward"] >= config.pass_reward)
    started = min(trajectory["started_at"] for trajectory in trajectories)
    finished = max(trajectory["finished_at"] for trajectory in trajectories)
    rows = []
    for k in sorted({1, config.num_samples}):
        values = [pass_at_k(len(c), sum(c), k) for c in correct.values() if len(c) >= k]
        if not values:
            continue
        estimate = estimate_mean(values)
        rows.append(
            {
                "weight_version": version,
                "environment": trajectories[0]["environment"],
                "split": "heldout",
                "k": k,
                "num_tasks": estimate.num_tasks,
                "num_samples": config.num_samples,
                "pass_at_k": estimate.mean,
                "ci_low": estimate.ci_low,
                "ci_high": estimate.ci_high,
                "engine": trajectories[0]["engine"],
                "seconds": (finished - started).total_seconds(),
            }
        )
    pass_at_1 = rows[0]["pass_at_k"] if rows else None
    commit_window(
        run,
        recorded,
        kind="evaluated",
        version=version,
        more_writes=(run.append("evals", rows),) if rows else (),
        details={"pass_at_1": pass_at_1, **details},
    )
    return pass_at_1
