"""The `[trainer]` table of the run TOML; `schemas.objective` says which keys go together."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from schemas import objective
from schemas.section import MAY_CHANGE, Positive, Section


class TrainerSection(Section):
    ranks: Positive = 1
    threads: Annotated[int, Field(gt=0, json_schema_extra=MAY_CHANGE)] = 2
    """Threads over all ranks."""
    compute_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """float16 rounds eight times finer than bfloat16, and its range is small: the loss is scaled,
    and values beyond 65,504 are refused."""
    activation_checkpointing: bool = False
    """Keeps the inputs of decoder layers instead of their activations, and computes these again in
    the backward pass: less memory, up to a third more computation, the same gradient."""
    token_budget: Positive = 1024
    """Tokens a packed microbatch holds at most, prefixes that its sequences share once."""
    routing_replay: bool = True
    """Of a mixture of experts, whether the trainer's forward passes take the experts that the
    engine recorded, so that the gradient is of the policy that sampled: where engine and trainer
    round otherwise, they choose otherwise. A token without recorded experts, as all are of an
    engine that records none, takes the trainer's own and is counted. No effect on dense models."""
    learning_rate: Annotated[float, Field(gt=0)]
    """Of every step, or the highest one of a schedule."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps, from the run's first, over which the rate rises linearly to learning_rate.
    """
    learning_rate_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate goes on after the warmup: constant, or falling to min_learning_rate."""
    decay_steps: Annotated[int | None, Field(gt=0)] = None
    """Optimizer steps after the warmup in which it falls; later ones have min_learning_rate."""
    min_learning_rate: Annotated[float | None, Field(ge=0)] = None
    """0.0 where the rate falls and it is not given."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_gradient_norm: Annotated[float, Field(gt=0)] = 1.0
    loss: Literal["reinforce", "ppo_clip", "dapo", "dr_grpo", "gspo", "cispo"] = "ppo_clip"
    advantage: Literal["group_mean_std", "group_mean", "leave_one_out"] = "group_mean_std"
    """`group_mean` where loss = "dr_grpo"."""
    reduction: Literal["token", "sequence", "group", "constant"] = "token"
    """What the loss is a mean over: tokens; sequences or groups, each a mean over its tokens; or
    the sum over B/M * sampling.max_tokens. "sequence" where loss = "gspo", "constant" where it is
    "dr_grpo"."""
    clip_low: Annotated[float | None, Field(gt=0, le=1)] = None
    """The ratio is clipped below at 1 - clip_low: 0.2 where it is not given, 3e-4 for gspo, 1.0 (no
    bound) for cispo, none for reinforce."""
    clip_high: Annotated[float | None, Field(gt=0)] = None
    """And above at 1 + clip_high: 0.2 where it is not given, 0.28 for dapo, 4e-4 for gspo, 4.0 for
    cispo, none for reinforce."""
    correction: Literal["none", "token_is", "token_tis", "sequence_is", "sequence_tis"] = (
        "token_tis"
    )
    """`sequence_tis` where loss = "gspo"."""
    w_cap: Annotated[float | None, Field(gt=0)] = None
    """Largest weight of `token_tis` and `sequence_tis`, 2.0 where it is not given."""
    mask: Literal["none", "token", "sequence", "geometric"] = "none"
    """Leaves out tokens by their w, or sequences by the product or the geometric mean of it."""
    mask_low: Annotated[float | None, Field(ge=0)] = None
    """Left out below this: 0.5 where it is not given, 0.999 of a geometric mean."""
    mask_high: Annotated[float | None, Field(gt=0)] = None
    """Left out above this: 2.0 where it is not given, 1.001 of a geometric mean."""
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL divergence from the reference policy in the loss."""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """k3 where it is not given."""
    reference_version: Annotated[int | None, Field(ge=0)] = None
    """The version that is the reference, 0 the starting checkpoint. Until it is published the
    reference is the newest version there is."""
    entropy_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the policy's entropy in the objective."""
    reward_control: Literal["none", "permuted"] = "none"
    """permuted: advantages come from the batch's rewards in a random order, the null control
    that shows a gain is earned by the rewards."""
    audit_fraction: Annotated[float, Field(ge=0, le=1)] = 0.25
    """Share of a batch's trajectories whose stale tokens are recomputed at their own version."""
    timeout_s: Annotated[float, Field(gt=0, json_schema_extra=MAY_CHANGE)] = 600.0
    """Longest the controller waits for a sign of life from the trainer job."""

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_loss(cls, data: Any):
        return objective.with_defaults(data) if isinstance(data, Mapping) else data

    @model_validator(mode="after")
    def _options_that_go_together(self):
        if reason := objective.refusal(self):
            raise ValueError(reason)
        return self
