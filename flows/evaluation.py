"""Evaluate the version that the engine serves on held-out problems, and record every rollout."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from flows.opening import OpenRun
from flows.windows import commit_window, gate1_limits
from tasks.evaluate import estimate_mean, pass_at_k
from tasks.progress import read_progress
from tasks.record import Window
from tasks.rollout import RolloutContext, sample_group


class EvaluationRefused(RuntimeError):
    """Gate 1 refused the held-out rollouts."""


async def evaluate(
    run: OpenRun, context: RolloutContext, version: int, record: Callable[..., Any]
) -> float:
    """Samples each held-out problem, commits `evaluated` with pass@k for k = 1 and n, and returns
    pass@1."""
    config = run.config.evaluation
    await context.engine.served()
    served = context.engine.describe()
    assert served.weight_version == version, f"version {version} is not being served"
    started = time.monotonic()
    sampling = run.config.sampling.model_copy(update={"temperature": config.temperature})
    numbers = read_progress(run.lake, run.run_id).next_groups(())
    groups = await asyncio.gather(
        *(
            sample_group(context, task, sampling, numbers.take(), config.num_samples)
            for task in context.environment.heldout(config.num_tasks)
        )
    )
    rollouts = [rollout for group in groups for rollout in group]
    recorded = record(
        run.lake,
        Window.of(rollouts),
        gate1_limits(run, context),
        run_id=run.run_id,
        cycle=run.cycle,
        lease=run.lease,
        scope=f"evaluation of version {version}",
    )
    if not recorded.judgement.ok:
        run.commit(
            "batch_refused",
            version=version,
            write_ids=recorded.write_ids,
            details={"admission": None, "gate": 1, "reason": recorded.judgement.reason},
        )
        raise EvaluationRefused(
            f"Gate 1 refused the evaluation of version {version}: {recorded.judgement.reason}. "
            "Mend the cause and run again."
        )
    correct: dict[str, list[bool]] = {}
    for rollout in rollouts:
        reward = rollout.trajectory["reward"]
        if rollout.trajectory["trajectory_id"] not in recorded.quarantined:
            passes = correct.setdefault(rollout.trajectory["task_id"], [])
            passes.append(reward >= config.pass_reward)
    rows = []
    for k in sorted({1, config.num_samples}):
        values = [pass_at_k(len(c), sum(c), k) for c in correct.values() if len(c) >= k]
        if not values:
            continue
        estimate = estimate_mean(values)
        rows.append(
            {
                "weight_version": version,
                "environment": context.environment.name,
                "split": "heldout",
                "k": k,
                "num_tasks": estimate.num_tasks,
                "num_samples": config.num_samples,
                "pass_at_k": estimate.mean,
                "ci_low": estimate.ci_low,
                "ci_high": estimate.ci_high,
                "engine": served.engine,
                "seconds": time.monotonic() - started,
            }
        )
    commit_window(
        run,
        recorded,
        kind="evaluated",
        version=version,
        more_writes=(run.append("evals", rows),),
        details={"pass_at_1": rows[0]["pass_at_k"]},
    )
    return rows[0]["pass_at_k"]
