"""Tables that admission, the trainer and publication write."""

import pyarrow as pa

from schemas.tables.rollouts import SEGMENT_INDEX, SEQUENCE_INDEX, TRAJECTORY_ID
from schemas.tables.table import TIMESTAMP, Table, optional, required

ADMISSION = required(
    "admission",
    pa.int64(),
    "Ledger seq of the `batch_admitted` row. A batch refused and admitted again has another.",
)
BATCH = required(
    "batch", pa.int64(), "Batch number from 1; it takes weight version batch - 1 to batch."
)

BATCHES = Table(
    name="batches",
    description="Which trajectories each admission froze, in training order.",
    columns=(
        ADMISSION,
        BATCH,
        required(
            "batch_position", pa.int32(), "Place in the batch, in (group_id, sample_index) order."
        ),
        TRAJECTORY_ID,
    ),
    sort_by=("admission", "batch_position"),
    dictionary=("trajectory_id",),
)

SCORES = Table(
    name="scores",
    description="The trainer's view of each action segment, written before any backward pass.",
    columns=(
        ADMISSION,
        BATCH,
        TRAJECTORY_ID,
        SEQUENCE_INDEX,
        SEGMENT_INDEX,
        required(
            "old_logprobs",
            pa.list_(pa.float32()),
            "Log-probability of each token under version batch - 1, recomputed by the trainer at "
            "the sampling temperature, truncated as the rollout was.",
        ),
        optional(
            "own_version_logprobs",
            pa.list_(pa.float32()),
            "The same under the version that sampled the token; NULL outside the audit sample. "
            "Separates engine mismatch from policy drift.",
        ),
        optional(
            "reference_logprobs",
            pa.list_(pa.float32()),
            "The same under the reference policy: version trainer.reference_version, or batch - 1 "
            "while that is older. NULL without trainer.kl_coefficient. What a KL penalty used.",
        ),
        required(
            "entropies",
            pa.list_(pa.float32()),
            "Entropy in nats of the distribution that old_logprobs are of.",
        ),
        required(
            "correction_weights",
            pa.list_(pa.float32()),
            "Factor outside the surrogate, after the cap; 0 where included is false.",
        ),
        required("included", pa.list_(pa.bool_()), "False where trainer.mask left the token out."),
    ),
    sort_by=("trajectory_id", "sequence_index", "segment_index"),
    byte_stream_split=(
        "old_logprobs.list.element",
        "own_version_logprobs.list.element",
        "reference_logprobs.list.element",
        "entropies.list.element",
        "correction_weights.list.element",
    ),
    dictionary=("trajectory_id",),
)

STEPS = Table(
    name="steps",
    description="One row an optimizer step, written after the batch's checkpoint is durable.",
    columns=(
        required("step", pa.int64(), "Optimizer step of the run, from 1."),
        BATCH,
        ADMISSION,
        required(
            "minibatch",
            pa.int32(),
            "Step within the batch, from 1; its extra lag is minibatch - 1.",
        ),
        required("max_w", pa.float64(), "Largest importance weight before any cap."),
        required(
            "mean_lag_steps",
            pa.float64(),
            "Average staleness of action tokens, in optimizer steps.",
        ),
        required(
            "stall_s",
            pa.float64(),
            "Seconds the trainer waited for this batch; 0 after its first step.",
        ),
        optional(
            "mfu",
            pa.float64(),
            "model_flops over train_s times the devices' dense peak at compute_dtype, as the "
            "vendor states it; NULL where no peak is known, as of CPUs.",
        ),
        optional(
            "model_flops",
            pa.float64(),
            "FLOPs of the forward and backward passes that the loss needs, counted by the trainer "
            "from parameter shapes and what is forwarded, shared prefixes once: 6 a weight and "
            "token, of experts those that a token meets, of attention the causal pairs, of the "
            "head the positions with a loss. NULL in rows older than the column.",
        ),
        required("reward_mean", pa.float64(), "Mean reward of the minibatch's trajectories."),
        required(
            "entropy_mean",
            pa.float64(),
            "Mean entropy of action tokens, nats, at the sampling temperature and truncation.",
        ),
        required("gradient_norm", pa.float64(), "Global norm before clipping."),
        required("learning_rate", pa.float64(), "Used for this step."),
        required("loss", pa.float64(), "Value of the objective that was minimised."),
        required(
            "metrics",
            pa.map_(pa.string(), pa.float64()),
            "Every other metric by its dictionary name.",
        ),
        required("num_trajectories", pa.int32(), "Trajectories in the minibatch."),
        required("num_sequences", pa.int32(), "Sequences in the minibatch."),
        required("num_tokens", pa.int64(), "Tokens forwarded, shared prompts counted each time."),
        required("num_action_tokens", pa.int64(), "Tokens eligible for the loss."),
        required(
            "score_s",
            pa.float64(),
            "Seconds recomputing old logprobs; 0 after the batch's first step.",
        ),
        required("train_s", pa.float64(), "Seconds of forward, backward and optimizer."),
        required(
            "checkpoint_s",
            pa.float64(),
            "Seconds writing the checkpoint; 0 but on the batch's last step.",
        ),
        optional(
            "composition",
            pa.map_(pa.string(), pa.int64()),
            "Groups of the minibatch, and its trajectories by environment, finish_reason and "
            "weight_version_min, as `name/value`. NULL in rows older than the column.",
        ),
        optional(
            "sequence_lengths",
            pa.list_(pa.int64()),
            "Histogram of sequences by tokens: the entry at place i, from 0, counts those of 2^i "
            "to 2^(i+1) - 1. NULL in rows older than the column.",
        ),
        optional(
            "logprobs_from",
            pa.map_(pa.string(), pa.int64()),
            "How mu was obtained: trajectories by `engine, logprobs_mode`, whose rollout "
            "log-probabilities the correction divides by. NULL in rows older than the column.",
        ),
        required("hardware", pa.string(), "Device kind and count that did the work."),
        optional(
            "processor",
            pa.string(),
            "Processor of rank 0's machine, model and architecture; another one may round "
            "otherwise. NULL in rows older than the column.",
        ),
        optional(
            "software",
            pa.string(),
            "Versions of Python, torch, CUDA and transformers; others may round otherwise. NULL "
            "in rows older than the column.",
        ),
        required("num_ranks", pa.int32(), "Processes in the trainer job."),
        required(
            "compute_dtype",
            pa.string(),
            "float32, bfloat16 or float16; masters are always float32.",
        ),
        required("loss_name", pa.string(), "Surrogate that was used."),
        required("correction", pa.string(), "Importance correction that was used."),
        optional(
            "checkpoint",
            pa.string(),
            "Checkpoint path relative to the run; NULL but on the batch's last step.",
        ),
        optional(
            "root_hash",
            pa.string(),
            "Root hash of the published values after the batch; NULL where checkpoint is.",
        ),
        required("finished_at", TIMESTAMP, "When the step ended."),
    ),
    sort_by=("step",),
    dictionary=("hardware", "processor", "software", "compute_dtype", "loss_name", "correction"),
)

PUBLICATIONS = Table(
    name="publications",
    description="Weight versions as published.",
    columns=(
        required("version", pa.int64(), "Weight version: 0 is the starting checkpoint."),
        optional("parent", pa.int64(), "Version it was made from; NULL for version 0."),
        required("kind", pa.string(), "anchor (a whole Hugging Face folder) or patch."),
        required("uri", pa.string(), "Path relative to the weight store."),
        required("bytes", pa.int64(), "Size of the weights as stored."),
        optional(
            "num_changed",
            pa.int64(),
            "bf16 values that differ from the parent's; NULL without a parent.",
        ),
        required("num_parameters", pa.int64(), "bf16 values in the model."),
        required(
            "root_hash", pa.string(), "BLAKE3 over the sorted lines name, dtype, shape, hash."
        ),
        required("seconds", pa.float64(), "Seconds to publish."),
    ),
    sort_by=("version",),
    dictionary=("kind",),
)

ATTESTATIONS = Table(
    name="attestations",
    description="What each engine proved about the weights it serves; no traffic without one.",
    columns=(
        required("engine_id", pa.string(), "The engine."),
        required("version", pa.int64(), "Version it was asked to serve."),
        required("root_hash", pa.string(), "Root hash of the tensors the engine holds."),
        optional(
            "canary_max_abs_diff",
            pa.float64(),
            "Largest log-probability difference on a fixed sequence; NULL if not run.",
        ),
        required("ok", pa.bool_(), "Whether the engine may serve the version."),
        optional("reason", pa.string(), "Why not; NULL if ok."),
        required("seconds", pa.float64(), "Seconds to load and hash."),
        required("attested_at", TIMESTAMP, "When."),
    ),
    sort_by=("engine_id", "version"),
    dictionary=("engine_id",),
)

EVALS = Table(
    name="evals",
    description="Held-out results by weight version.",
    columns=(
        required("weight_version", pa.int64(), "Version evaluated."),
        required("environment", pa.string(), "Environment of the problems."),
        required("split", pa.string(), "heldout, or train for a train-side probe."),
        required("k", pa.int32(), "k of pass@k."),
        required("num_tasks", pa.int32(), "Distinct problems."),
        required("num_samples", pa.int32(), "Rollouts a problem."),
        required("pass_at_k", pa.float64(), "Mean of the unbiased estimator 1 - C(n-c,k)/C(n,k)."),
        required("ci_low", pa.float64(), "Lower end of the 95 % interval over problems."),
        required("ci_high", pa.float64(), "Upper end of the 95 % interval over problems."),
        required("engine", pa.string(), "Engine build that sampled."),
        required("seconds", pa.float64(), "Seconds to sample and score."),
    ),
    sort_by=("weight_version", "environment", "k"),
    dictionary=("environment", "split", "engine"),
)
