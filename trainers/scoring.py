"""Old log-probabilities, entropies and correction weights of a batch, before any gradient.

pi_old is version b - 1 at the sampling temperature, truncated where the rollout was, computed by
the trainer's own forward pass.
Gate 2 compares it with what the engine reported. A reference policy is scored in the same way, by
the published version that it is. On a seeded sample of trajectories the tokens are
also scored under the version that sampled them, which separates what the engine got wrong from how
far the policy has moved; each of these versions costs one load of the weights.

Shapes: N = action tokens of the batch.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from torch import Tensor

from schemas.tables import TABLES
from schemas.trainer_section import TrainerSection
from trainers.corrections import NO_LIMITS, Correction, MaskLimits, corrected
from trainers.packing import TrainingSequence, assign, empty_microbatch, pack
from trainers.policy import Policy
from trainers.sequences import TrainingBatch
from trainers.truncation import Truncation

Weights = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class Scores:
    """Per action token, float32 on the CPU: `old_logprobs`, `entropies` [N] in nats;
    `own_logprobs` [N], NaN where not recomputed, and `own_known` [N] bool where it was;
    `reference_logprobs` [N] under the reference policy, None without one."""

    old_logprobs: Tensor
    entropies: Tensor
    own_logprobs: Tensor
    own_known: Tensor
    reference_logprobs: Tensor | None = None


@torch.no_grad()
def forward(
    policy: Policy,
    sequences: Sequence[TrainingSequence],
    temperatures: Tensor,
    truncation: Truncation,
    token_budget: int,
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of every action token of `sequences`, on every rank.

    `temperatures`, `truncation` and both results are over those action tokens, in order.
    """
    results = torch.zeros(2, len(temperatures))
    share = assign(pack(sequences, token_budget), dist.get_world_size())[dist.get_rank()]
    for microbatch in share:
        microbatch = microbatch or empty_microbatch()
        index = microbatch.action_index
        scored = policy.logprobs(microbatch, temperatures[index], truncation[index])
        results[:, index] = torch.stack(scored).cpu()
    # Each token is computed on one rank and zero on the others, so the sum is exact.
    dist.all_reduce(results)
    return results[0], results[1]


def score(
    policy: Policy,
    batch: TrainingBatch,
    *,
    token_budget: int,
    audit_fraction: float,
    seed: int,
    read_version: Callable[[int], Weights],
    reference_version: int | None = None,
) -> Scores:
    """Scores a batch under version batch - 1, which `policy` holds on entry and on return.

    `read_version(v)` gives the whole published tensors of version v. The reference is
    `reference_version`, or the newest version up to it that is published.
    """
    newest = batch.batch - 1
    old, entropies = forward(
        policy, batch.sequences, batch.temperatures, batch.truncation, token_budget
    )
    version, own_known = _audited(batch, audit_fraction, seed)
    own = torch.full_like(old, torch.nan)
    own[own_known] = old[own_known]
    reference = None if reference_version is None else min(reference_version, newest)
    reference_logprobs = None if reference is None else old.clone()
    others = {*version[own_known].tolist(), newest if reference is None else reference} - {newest}
    current = list(policy.local_values()) if others else []
    for v in sorted(others):
        values = policy.layout.joined(read_version(v))
        policy.set_local_values((n, policy.local(n, t)) for n, t in values)
        audited = own_known & (version == v)
        wanted = torch.ones_like(audited) if v == reference else audited
        logprobs = _logprobs_where(policy, batch, wanted, token_budget)
        own[audited] = logprobs[audited]
        if v == reference:
            reference_logprobs = logprobs
    if others:
        policy.set_local_values(current)
    return Scores(old, entropies, own, own_known, reference_logprobs)


def _logprobs_where(
    policy: Policy, batch: TrainingBatch, wanted: Tensor, token_budget: int
) -> Tensor:
    """Log-probabilities [N] under what `policy` holds, of every sequence with a wanted token; NaN
    in the others."""
    chosen = torch.unique(batch.action_sequence[wanted]).tolist()
    tokens = torch.isin(batch.action_sequence, torch.tensor(chosen))
    logprobs = torch.full_like(batch.rollout_logprobs, torch.nan)
    logprobs[tokens], _ = forward(
        policy,
        [batch.sequences[i] for i in chosen],
        batch.temperatures[tokens],
        batch.truncation[tokens],
        token_budget,
    )
    return logprobs


def _audited(batch: TrainingBatch, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Weight version and membership of the audit sample of each action token, both [N].

    Tokens that attended to a cache older than their own version are left out: no single version
    reproduces them.
    """
    digest = hashlib.sha256(f"audit/{seed}/{batch.batch}".encode()).digest()
    draws = np.random.default_rng(list(digest)).random(len(batch.trajectory_ids))
    segments = batch.segments
    own_cache = segments.kv_version_min == segments.weight_version
    # At least one trajectory that can be compared, or a small batch might have none by chance.
    smallest = draws[segments.trajectory[own_cache]].min(initial=1.0)
    audited = draws < max(fraction, np.nextafter(smallest, 1.0)) if fraction > 0 else draws < 0
    chosen = audited[segments.trajectory] & own_cache
    return segments.per_token(segments.weight_version), segments.per_token(chosen)


def correct(batch: TrainingBatch, scores: Scores, trainer: TrainerSection) -> Correction:
    """Correction weights and mask of each action token, [N]."""
    limits = NO_LIMITS
    if trainer.mask_low is not None and trainer.mask_high is not None:
        limits = MaskLimits(trainer.mask_low, trainer.mask_high)
    return corrected(
        scores.old_logprobs - batch.rollout_logprobs,
        batch.action_sequence,
        weight=trainer.correction,
        w_cap=math.inf if trainer.w_cap is None else trainer.w_cap,
        mask=trainer.mask,
        limits=limits,
    )


def scores_table(batch: TrainingBatch, scores: Scores, correction: Correction) -> pa.Table:
    """Rows of the `scores` table, one an action segment."""
    segments = batch.segments
    offsets = pa.array(segments.starts, pa.int32())
    count = len(segments.trajectory)

    def lists(values: Tensor, null: np.ndarray | None = None) -> pa.Array:
        mask = None if null is None else pa.array(null)
        return pa.ListArray.from_arrays(offsets, pa.array(values.numpy()), mask=mask)

    unknown = ~scores.own_known.numpy()[segments.starts[:-1]]
    reference = scores.reference_logprobs
    schema = TABLES["scores"].own_schema
    columns = {
        "admission": np.full(count, batch.admission),
        "batch": np.full(count, batch.batch),
        "trajectory_id": [batch.trajectory_ids[t] for t in segments.trajectory],
        "sequence_index": segments.sequence_index,
        "segment_index": segments.segment_index,
        "old_logprobs": lists(scores.old_logprobs),
        "own_version_logprobs": lists(scores.own_logprobs, unknown),
        "reference_logprobs": pa.nulls(count) if reference is None else lists(reference),
        "entropies": lists(scores.entropies),
        "correction_weights": lists(correction.weights),
        "included": lists(correction.included),
    }
    return pa.table([pa.array(columns[n]) for n in schema.names], schema.names).cast(schema)


def scores_from_table(batch: TrainingBatch, rows: pa.Table) -> Scores:
    """What a resumed job reads instead of scoring again: all but the audit.

    `rows` are those of one admission, in the table's order. Raises `ValueError` where they are not
    the batch's action segments.
    """
    expected = pa.table(
        {
            "trajectory_id": [batch.trajectory_ids[t] for t in batch.segments.trajectory],
            "sequence_index": pa.array(batch.segments.sequence_index, pa.int16()),
            "segment_index": pa.array(batch.segments.segment_index, pa.int32()),
        }
    )
    old, entropies, reference = (
        torch.from_numpy(np.array(rows.column(name).combine_chunks().flatten(), np.float32))
        for name in ("old_logprobs", "entropies", "reference_logprobs")
    )
    keys = rows.select(expected.column_names).to_pydict()
    lengths = {len(old), len(entropies), len(reference) or len(old)}
    if keys != expected.to_pydict() or lengths != {batch.num_actions}:
        raise ValueError(
            f"the accepted scores of batch {batch.batch} (admission {batch.admission}) are not "
            "those of its action segments; restore the lake from a backup."
        )
    unknown = torch.zeros(len(old), dtype=torch.bool)
    own = torch.full_like(old, torch.nan)
    return Scores(old, entropies, own, unknown, reference if len(reference) else None)
