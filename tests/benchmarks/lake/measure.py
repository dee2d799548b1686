"""Two sides by turns in one process, and the line that a target gets.

All are CPU seconds of the process, every thread included: what else the machine does then hardly
counts, and waiting for the disk, which both sides of a commit do alike, cannot hide a difference.
"""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np


@dataclass(frozen=True)
class Pairs:
    """Seconds of `subject` and `baseline`, measured by turns: entry i of both is pair i."""

    subject: tuple[float, ...]
    baseline: tuple[float, ...]

    def slowdown(self) -> list[float]:
        """Subject's seconds over the baseline's, a pair each."""
        return [s / b for s, b in zip(self.subject, self.baseline, strict=True)]

    def speedup(self) -> list[float]:
        return [b / s for s, b in zip(self.subject, self.baseline, strict=True)]

    def medians_ms(self) -> tuple[float, float]:
        return float(np.median(self.subject)) * 1e3, float(np.median(self.baseline)) * 1e3


def by_turns(
    subject: Callable[[], object],
    baseline: Callable[[], object],
    *,
    num_pairs: int,
    warm_up: bool = True,
) -> Pairs:
    """Runs A B, B A, A B, … so that neither side always comes first."""

    def seconds(side: Callable[[], object]) -> float:
        gc.collect()
        started = time.process_time()
        side()
        return time.process_time() - started

    if warm_up:
        subject()
        baseline()
    pairs = []
    for number in range(num_pairs):
        if number % 2:
            second = seconds(baseline)
            pairs.append((seconds(subject), second))
        else:
            first = seconds(subject)
            pairs.append((first, seconds(baseline)))
    return Pairs(tuple(s for s, _ in pairs), tuple(b for _, b in pairs))


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the median: percentiles of 10,000 bootstrap medians; the range below 6."""
    values = np.asarray(ratios)
    if len(values) < 6:
        return float(values.min()), float(values.max())
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(values, (10_000, len(values))), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return float(low), float(high)


def verdict(
    name: str,
    ratios: Sequence[float],
    relation: Literal[">=", "<="],
    target: float,
    context: str = "",
) -> str:
    """`name  ratio [low, high]  target  OK|MISS  (context)`; one value has no interval."""
    middle = float(np.median(ratios))
    met = middle >= target if relation == ">=" else middle <= target
    measured = f"{middle:.3f}"
    if len(ratios) > 1:
        low, high = interval(ratios)
        measured += f" [{low:.3f}, {high:.3f}]"
    line = f"{name}: {measured}, target {relation} {target:g} {'OK' if met else 'MISS'}"
    return f"{line} ({context})" if context else line
