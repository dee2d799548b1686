"""The learning rate of a step: a pure function of its number, so that a resumed or replayed run
needs no state of a scheduler."""

import math

from schemas.trainer_section import TrainerSection


def learning_rate(step: int, trainer: TrainerSection) -> float:
    """The rate of optimizer step `step`, counted from 1 over the whole run.

    With W warmup_steps, D decay_steps, the peak p = learning_rate and the floor
    m = min_learning_rate:

        step <= W:   p * step / W
        "constant":  p
        "linear":    p + (m - p) * t
        "cosine":    m + (p - m) * (1 + cos(pi * t)) / 2,  t = min(1, (step - W - 1) / D)

    So steps W and W + 1 have the peak, and from step W + D + 1 on all have the floor. The cosine is
    half a period of Loshchilov and Hutter (2017), Eq. (5).
    """
    assert step >= 1, "steps are counted from 1"
    peak, floor = trainer.learning_rate, trainer.min_learning_rate
    if step <= trainer.warmup_steps:
        return peak * step / trainer.warmup_steps
    if trainer.learning_rate_schedule == "constant":
        return peak
    assert trainer.decay_steps is not None and floor is not None
    share = min(1.0, (step - trainer.warmup_steps - 1) / trainer.decay_steps)
    if share == 1.0:
        return floor
    if trainer.learning_rate_schedule == "linear":
        return peak + (floor - peak) * share
    return floor + (peak - floor) * (1.0 + math.cos(math.pi * share)) / 2.0
