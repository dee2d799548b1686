"""Which options of [trainer] go together: what is not given follows the loss, and an option that
would have no effect, or would undo what another one means, is refused.

A loss by name is a recipe: a surrogate together with the reductions, advantages and corrections
under which it is what its paper calls by that name. `trainers.losses` has the formulas.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

ADVANTAGES = ("group_mean_std", "group_mean", "leave_one_out")
REDUCTIONS = ("token", "sequence", "group", "constant")
TOKEN_CORRECTIONS = ("token_is", "token_tis")
SEQUENCE_CORRECTIONS = ("sequence_is", "sequence_tis")
CAPPED = ("token_tis", "sequence_tis")
DEFAULT_W_CAP = 2.0
FALLING = ("linear", "cosine")
"""Schedules of the learning rate that end at min_learning_rate."""


@dataclass(frozen=True)
class Recipe:
    """`clip` is (clip_low, clip_high), None where nothing is clipped. Of `reductions` and
    `advantages`, all that the loss goes with, the first is taken where none is given."""

    clip: tuple[float, float] | None
    reductions: tuple[str, ...] = REDUCTIONS
    advantages: tuple[str, ...] = ADVANTAGES
    correction: str = "token_tis"


RECIPES = {
    "reinforce": Recipe(clip=None),
    "ppo_clip": Recipe(clip=(0.2, 0.2)),
    # Yu et al. (2025), section 4.1; their Eq. (8) is the group reduction.
    "dapo": Recipe(clip=(0.2, 0.28), reductions=("token", "group")),
    "dr_grpo": Recipe(clip=(0.2, 0.2), reductions=("constant",), advantages=("group_mean",)),
    # Zheng et al. (2025), section 5.1: ratios of whole sequences lie within 1e-3 of 1.
    "gspo": Recipe(clip=(3e-4, 4e-4), reductions=("sequence",), correction="sequence_tis"),
    # No lower bound as in MiniMax-M1 (2025); weights of at most 5 as in ScaleRL (2025).
    "cispo": Recipe(clip=(1.0, 4.0)),
}

MASK_LIMITS = {"token": (0.5, 2.0), "sequence": (0.5, 2.0), "geometric": (0.999, 1.001)}
"""mask_low and mask_high where they are not given."""


class TrainerOptions(Protocol):
    """What `refusal` reads of the section."""

    @property
    def loss(self) -> str: ...
    @property
    def advantage(self) -> str: ...
    @property
    def reduction(self) -> str: ...
    @property
    def clip_low(self) -> float | None: ...
    @property
    def clip_high(self) -> float | None: ...
    @property
    def correction(self) -> str: ...
    @property
    def w_cap(self) -> float | None: ...
    @property
    def mask(self) -> str: ...
    @property
    def mask_low(self) -> float | None: ...
    @property
    def mask_high(self) -> float | None: ...
    @property
    def kl_coefficient(self) -> float: ...
    @property
    def kl_estimator(self) -> str | None: ...
    @property
    def reference_version(self) -> int | None: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def warmup_steps(self) -> int: ...
    @property
    def learning_rate_schedule(self) -> str: ...
    @property
    def decay_steps(self) -> int | None: ...
    @property
    def min_learning_rate(self) -> float | None: ...


def with_defaults(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """The section's keys with those filled in that depend on others. Values of a wrong type or
    name are left to the section's own checks."""
    recipe = RECIPES.get(str(trainer.get("loss", "ppo_clip")))
    defaults: dict[str, Any] = {}
    if recipe is not None:
        defaults |= {
            "reduction": recipe.reductions[0],
            "advantage": recipe.advantages[0],
            "correction": recipe.correction,
        }
        if recipe.clip is not None:
            defaults |= {"clip_low": recipe.clip[0], "clip_high": recipe.clip[1]}
    if trainer.get("correction", defaults.get("correction")) in CAPPED:
        defaults["w_cap"] = DEFAULT_W_CAP
    limits = MASK_LIMITS.get(str(trainer.get("mask")))
    if limits is not None:
        defaults |= {"mask_low": limits[0], "mask_high": limits[1]}
    if trainer.get("kl_coefficient"):
        defaults["kl_estimator"] = "k3"
    if trainer.get("learning_rate_schedule") in FALLING:
        defaults["min_learning_rate"] = 0.0
    return defaults | {key: value for key, value in trainer.items() if value is not None}


def without_idle_options(trainer: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section as a ledger keeps it, without the values that nothing reads.

    Runs begun before such options were refused have the defaults of the time written down, and
    know no `mask`; those that know no `routing_replay` trained without.
    """
    trainer = {"routing_replay": False, **trainer}
    if "mask" in trainer:
        return trainer
    idle = set()
    if trainer["loss"] == "reinforce":
        idle |= {"clip_low", "clip_high"}
    if trainer["correction"] not in CAPPED:
        idle |= {"w_cap"}
    return {key: value for key, value in trainer.items() if key not in idle}


def refusal(trainer: TrainerOptions) -> str | None:
    """Why the options do not go together and what to do; None where they do."""
    return (
        _refused_loss(trainer)
        or _refused_correction(trainer)
        or _refused_mask(trainer)
        or _refused_reference(trainer)
        or _refused_schedule(trainer)
    )


def _refused_loss(trainer: TrainerOptions) -> str | None:
    loss, recipe = trainer.loss, RECIPES[trainer.loss]
    if recipe.clip is None:
        for key in ("clip_low", "clip_high"):
            if getattr(trainer, key) is not None:
                return (
                    f'{key} has no effect with loss = "{loss}", which clips no ratio; remove it '
                    'or give loss = "ppo_clip"'
                )
    if loss == "dapo":
        assert trainer.clip_low is not None and trainer.clip_high is not None
        if trainer.clip_high <= trainer.clip_low:
            return (
                f'loss = "dapo" clips higher above than below, and clip_high = {trainer.clip_high} '
                f"is not above clip_low = {trainer.clip_low}; raise clip_high or give "
                'loss = "ppo_clip"'
            )
    meant = {
        "dapo": "weighs tokens alike, so that long answers count",
        "dr_grpo": "divides neither by lengths nor by standard deviations",
        "gspo": "has one ratio a sequence, whose gradient is a mean over its tokens",
    }
    for key, allowed in (("reduction", recipe.reductions), ("advantage", recipe.advantages)):
        given = getattr(trainer, key)
        if given not in allowed:
            names = " or ".join(f'"{name}"' for name in allowed)
            return (
                f'loss = "{loss}" {meant[loss]}, which {key} = "{given}" undoes; give '
                f'{key} = {names}, or loss = "ppo_clip"'
            )
    return None


def _refused_correction(trainer: TrainerOptions) -> str | None:
    correction = trainer.correction
    if trainer.loss == "gspo" and correction in TOKEN_CORRECTIONS:
        return (
            f'correction = "{correction}" gives the tokens of a sequence different weights, and '
            'loss = "gspo" has one ratio for all of them; give "sequence_is", "sequence_tis" or '
            '"none"'
        )
    if trainer.w_cap is None:
        return None
    if correction not in CAPPED:
        fix = "remove it"
        if correction != "none":
            fix += f' or give correction = "{correction.replace("_is", "_tis")}"'
        return f'w_cap has no effect with correction = "{correction}", which caps nothing; {fix}'
    if trainer.w_cap < 1:
        return (
            f"w_cap = {trainer.w_cap} is below 1 and would shrink tokens on which engine and "
            "trainer agree; give at least 1"
        )
    return None


def _refused_mask(trainer: TrainerOptions) -> str | None:
    mask, low, high = trainer.mask, trainer.mask_low, trainer.mask_high
    if mask == "none":
        for key, value in (("mask_low", low), ("mask_high", high)):
            if value is not None:
                return (
                    f"{key} has no effect without a mask; remove it or give "
                    'mask = "token", "sequence" or "geometric"'
                )
        return None
    assert low is not None and high is not None
    if not low < 1 < high:
        return (
            f"mask_low = {low} and mask_high = {high} leave out tokens on which engine and "
            "trainer agree; give mask_low < 1 < mask_high"
        )
    if mask == "token" and trainer.loss == "gspo":
        return (
            'mask = "token" takes single tokens out of sequences, and loss = "gspo" has one ratio '
            'for all of a sequence; give mask = "sequence" or "geometric"'
        )
    if mask == "token" and trainer.correction in SEQUENCE_CORRECTIONS:
        return (
            f'mask = "token" takes single tokens out of sequences that correction = '
            f'"{trainer.correction}" weighs as a whole; give mask = "sequence" or "geometric"'
        )
    if trainer.correction == f"{mask}_tis":
        assert trainer.w_cap is not None
        if high <= trainer.w_cap:
            return (
                f'w_cap = {trainer.w_cap} never binds, because mask = "{mask}" leaves out all '
                f'above mask_high = {high}; give a lower w_cap or correction = "{mask}_is"'
            )
    return None


def _refused_reference(trainer: TrainerOptions) -> str | None:
    if trainer.kl_coefficient > 0:
        if trainer.reference_version is None:
            return (
                f"kl_coefficient = {trainer.kl_coefficient} has no policy to hold to; give "
                "reference_version = 0, the starting checkpoint, or another version"
            )
        return None
    for key in ("reference_version", "kl_estimator"):
        if getattr(trainer, key) is not None:
            return f"{key} has no effect without a penalty; remove it or give kl_coefficient"
    return None


def _refused_schedule(trainer: TrainerOptions) -> str | None:
    schedule = trainer.learning_rate_schedule
    if schedule not in FALLING:
        for key in ("decay_steps", "min_learning_rate"):
            if getattr(trainer, key) is not None:
                return (
                    f'{key} has no effect with learning_rate_schedule = "{schedule}"; remove it or '
                    'give learning_rate_schedule = "linear" or "cosine"'
                )
        return None
    if trainer.decay_steps is None:
        return (
            f'learning_rate_schedule = "{schedule}" has no end; give decay_steps, the optimizer '
            "steps after the warmup in which the rate falls"
        )
    assert trainer.min_learning_rate is not None
    if trainer.min_learning_rate >= trainer.learning_rate:
        return (
            f"min_learning_rate = {trainer.min_learning_rate} is not below learning_rate = "
            f"{trainer.learning_rate}, so nothing falls; give a lower one or "
            'learning_rate_schedule = "constant"'
        )
    return None


def steps_without_a_rate(trainer: TrainerOptions, num_steps: int) -> str | None:
    """Why a run of `num_steps` optimizer steps would end with steps that move nothing, and what to
    do; None where it would not."""
    if trainer.decay_steps is None or trainer.min_learning_rate != 0:
        return None
    last = trainer.warmup_steps + trainer.decay_steps
    if num_steps <= last:
        return None
    return (
        f"the learning rate is 0 from optimizer step {last + 1} on, and the run takes {num_steps}; "
        "begin it with more decay_steps or a min_learning_rate above 0, or lower run.num_cycles"
    )
