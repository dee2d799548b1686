"""What the cycle and the evaluation share: gate 1's bounds, and the commit of a window."""

from typing import Any

from flows.opening import OpenRun
from tasks.lake.batches import trajectories_hash
from tasks.lake.ledger import Entry
from tasks.profile import Limits
from tasks.record import Recorded
from tasks.rollout import RolloutContext


def gate1_limits(run: OpenRun, context: RolloutContext) -> Limits:
    """The bounds that gate 1's rules reach as `limits.<name>`."""
    config = run.config
    engine = context.engine.describe()
    published = run.ledger.last("version_published")
    assert published is not None and published.version is not None
    return {
        "published_version": published.version,
        "vocab_size": engine.vocab_size,
        "max_tokens": config.sampling.max_tokens,
        "max_model_tokens": engine.max_model_tokens,
        "stop_token_ids": context.renderer.stop_token_ids,
        "run_seed": context.run_seed,
        # Without samples in flight there is no older version to sample with.
        "oldest_version": published.version if config.asynchrony.k == 0 else None,
        "max_lag": config.asynchrony.lag_bound,
        "temperature": config.sampling.temperature,
        "heldout_temperature": config.evaluation.temperature,
        "top_p": config.sampling.top_p,
        "top_k": config.sampling.top_k,
        "min_p": config.sampling.min_p,
        "group_size": config.batch.group_size,
        "num_samples": config.evaluation.num_samples,
        "reward_min": config.gates.reward_min,
        "reward_max": config.gates.reward_max,
        "tokenizer_sha256": context.renderer.tokenizer_sha256,
        "chat_template_sha256": context.renderer.chat_template_sha256,
        "engine": engine.engine,
        "num_experts": engine.num_experts,
        "num_routed_layers": engine.num_routed_layers,
        "num_experts_per_token": engine.num_experts_per_token,
    }


def commit_window(
    run: OpenRun,
    recorded: Recorded,
    *,
    kind: str = "rollouts_recorded",
    version: int | None = None,
    more_writes: tuple[str, ...] = (),
    details: dict[str, Any] | None = None,
) -> Entry:
    return run.commit(
        kind,
        version=version,
        write_ids=(*recorded.write_ids, *more_writes),
        num_trajectories=len(recorded.trajectory_ids),
        trajectories_hash=trajectories_hash(recorded.trajectory_ids),
        details={"quarantined": recorded.num_quarantined, **(details or {})},
    )
