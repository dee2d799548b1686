"""The M optimizer steps of a batch and their rows in the `steps` table.

pi_old is fixed at the batch's start: scores and advantages are computed once and every minibatch
reads its slice of them.
"""

import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
import torch.distributed as dist

from schemas.config import RunConfig
from schemas.tables import TABLES
from tasks.weights.checkpoints import published_values
from tasks.weights.hashing import root_hash_of_stream
from trainers.advantages import ADVANTAGES, permuted_rewards
from trainers.corrections import Correction
from trainers.flops import ModelCost, model_cost, peak_flops
from trainers.hardware import hardware, processor, software
from trainers.losses import UNCLIPPED, ClipRange
from trainers.optimizer import MasterAdamW
from trainers.policy import Policy
from trainers.schedules import learning_rate
from trainers.scoring import Scores
from trainers.sequences import Minibatch, TrainingBatch, lag_steps, minibatches
from trainers.update import GradientReport, Objective, TokenData, take_step

Row = dict[str, Any]

COMPOSED_OF = ("environment", "finish_reason", "weight_version_min")
"""Columns of `trajectories` whose values `composition` counts."""


def token_data(
    batch: TrainingBatch, scores: Scores, correction: Correction, config: RunConfig
) -> TokenData:
    """What the surrogate reads of each action token of the batch, [N]."""
    rewards = batch.rewards
    if config.trainer.reward_control == "permuted":
        rewards = permuted_rewards(rewards, config.run.seed, batch.batch)
    _, group_ids = torch.unique(batch.group_ids, return_inverse=True)
    advantages = ADVANTAGES[config.trainer.advantage](rewards, batch.group_ids).float()
    return TokenData(
        old_logprobs=scores.old_logprobs,
        advantages=advantages[batch.action_trajectory],
        weights=correction.weights,
        sequence_ids=batch.action_sequence,
        group_ids=group_ids[batch.action_trajectory],
        temperatures=batch.temperatures,
        truncation=batch.truncation,
        reference_logprobs=scores.reference_logprobs,
    )


def objective_of(config: RunConfig) -> Objective:
    """What a run maximises in each of its minibatches."""
    trainer, batch = config.trainer, config.batch
    clip = UNCLIPPED
    if trainer.clip_low is not None and trainer.clip_high is not None:
        clip = ClipRange(trainer.clip_low, trainer.clip_high)
    return Objective(
        loss=trainer.loss,
        clip=clip,
        reduction=trainer.reduction,
        constant=batch.trajectories / batch.minibatches * config.sampling.max_tokens,
        kl_coefficient=trainer.kl_coefficient,
        kl_estimator=trainer.kl_estimator or "k3",
        entropy_coefficient=trainer.entropy_coefficient,
    )


def train_batch(
    policy: Policy,
    optimizer: MasterAdamW,
    batch: TrainingBatch,
    scores: Scores,
    correction: Correction,
    config: RunConfig,
) -> list[Row]:
    """Takes the batch's optimizer steps on every rank; one row of `steps` each, times and
    checkpoint still open."""
    trainer = config.trainer
    data = token_data(batch, scores, correction, config)
    objective = objective_of(config)
    cost = policy_cost(policy)
    peak = None
    if policy.device.type == "cuda":
        peak = peak_flops(torch.cuda.get_device_name(policy.device), trainer.compute_dtype)
    rows = []
    for minibatch in minibatches(batch, config.batch.minibatches):
        started = time.monotonic()
        actions = minibatch.actions
        rate = learning_rate(optimizer.num_steps + 1, trainer)
        report, norm = take_step(
            policy,
            optimizer,
            batch.sequences[minibatch.sequences],
            data[actions],
            objective,
            trainer.token_budget,
            rate,
        )
        train_s = time.monotonic() - started
        flops = cost.step_flops(report.forwarded)
        rows.append(
            _row(batch, minibatch, scores, report, config)
            | _contents(batch, minibatch)
            | {
                "step": optimizer.num_steps,
                "learning_rate": rate,
                "gradient_norm": norm,
                "train_s": train_s,
                "model_flops": flops,
                "mfu": peak and flops / (train_s * peak * dist.get_world_size()),
                "hardware": hardware(policy.device),
                "processor": processor(),
                "software": software(),
                "finished_at": datetime.now(UTC),
            }
        )
    return rows


def policy_cost(policy: Policy) -> ModelCost:
    """What forwarding the policy costs, from the whole parameters' shapes."""
    shapes = {name: parameter.shape for name, parameter in policy.parameters.items()}
    model = policy.model
    # By module: FSDP puts another parameter in its place while a layer is whole.
    places = {id(module): f"{name}.weight" for name, module in model.named_modules()}
    embedding = places[id(model.get_input_embeddings())]
    head = places[id(model.get_output_embeddings())]
    return model_cost(shapes, embedding, head if head in shapes else embedding, model.config)


def _contents(batch: TrainingBatch, minibatch: Minibatch) -> Row:
    """What the minibatch is made of, counted."""
    span = minibatch.trajectories
    # Not all columns: the conversations are most of a row.
    columns = [*COMPOSED_OF, "group_id", "engine", "logprobs_mode"]
    rows = batch.rows.select(columns).slice(span.start, span.stop - span.start).to_pylist()
    composition = Counter(f"{name}/{row[name]}" for row in rows for name in COMPOSED_OF)
    composition["groups"] = len({row["group_id"] for row in rows})
    lengths = [len(s.token_ids) for s in batch.sequences[minibatch.sequences]]
    by_size = Counter(length.bit_length() - 1 for length in lengths)
    sampled = Counter(f"{row['engine']}, {row['logprobs_mode']}" for row in rows)
    return {
        "composition": sorted(composition.items()),
        "sequence_lengths": [by_size[size] for size in range(max(by_size) + 1)],
        "logprobs_from": sorted(sampled.items()),
    }


def _row(
    batch: TrainingBatch,
    minibatch: Minibatch,
    scores: Scores,
    report: GradientReport,
    config: RunConfig,
) -> Row:
    trainer, actions = config.trainer, minibatch.actions
    delta = (scores.old_logprobs - batch.rollout_logprobs)[actions]
    versions = batch.segments.per_token(batch.segments.weight_version)[actions]
    lags = lag_steps(versions, batch.batch, minibatch.number, config.batch.minibatches)
    return {
        "batch": batch.batch,
        "admission": batch.admission,
        "minibatch": minibatch.number,
        "max_w": float(delta.max().double().exp()),
        "mean_lag_steps": float(lags.double().mean()),
        "stall_s": 0.0,
        "reward_mean": float(batch.rewards[minibatch.trajectories].mean()),
        "entropy_mean": float(scores.entropies[actions].double().mean()),
        "loss": report.loss,
        "metrics": list(_metrics(batch, minibatch, report, trainer.compute_dtype).items()),
        "num_trajectories": minibatch.trajectories.stop - minibatch.trajectories.start,
        "num_sequences": minibatch.sequences.stop - minibatch.sequences.start,
        "num_tokens": report.num_tokens,
        "num_action_tokens": actions.stop - actions.start,
        "score_s": 0.0,
        "checkpoint_s": 0.0,
        "num_ranks": dist.get_world_size(),
        "compute_dtype": trainer.compute_dtype,
        "loss_name": trainer.loss,
        "correction": trainer.correction,
        "checkpoint": None,
        "root_hash": None,
    }


def _metrics(
    batch: TrainingBatch, minibatch: Minibatch, report: GradientReport, compute_dtype: str
) -> dict[str, float]:
    rewards = batch.rewards[minibatch.trajectories]
    _, group = torch.unique(batch.group_ids[minibatch.trajectories], return_inverse=True)
    constant = [bool((rewards[group == g] == rewards[group == g][0]).all()) for g in group.unique()]
    found = {}
    if report.reference_kl is not None:
        found["reference/kl_k3"] = report.reference_kl
    if compute_dtype == "float16":
        found["update/loss_scale"] = report.loss_scale
    own = {
        "update/clip_frac": report.clip_frac,
        "update/kl_k3": report.update_kl,
        "reward/zero_variance_group_frac": sum(constant) / len(constant),
    }
    return found | report.routing | own


def finished_rows(rows: list[Row], folder: Path, path: str, saving_since: float) -> pa.Table:
    """The rows as a table, the last one naming the durable checkpoint and what it publishes.

    `saving_since`: when the checkpoint was begun, on the monotonic clock.
    """
    root_hash = root_hash_of_stream(published_values(folder / path))
    rows[-1] |= {
        "checkpoint": path,
        "root_hash": root_hash,
        "checkpoint_s": time.monotonic() - saving_since,
    }
    return pa.Table.from_pylist(rows, schema=TABLES["steps"].own_schema)
