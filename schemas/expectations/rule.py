"""What one rule is: a counter in a profile, and the range it may lie in.

A profile is made by one DuckDB scan; Great Expectations judges its columns. Counters are never
NULL, because an expectation counts NULL and NaN as missing and passes over them: a column of NaN
rewards would satisfy any range. So a rule counts what is wrong and bounds the count. Only a drift
rule's statistic is NULL, where nothing was there to measure.
"""

from dataclasses import dataclass
from typing import Literal

Severity = Literal["row", "group", "batch", "warning"]
Level = Literal["segment", "trajectory", "window"]


@dataclass(frozen=True)
class Drift:
    """How far a statistic may lie from its median over the run's last batches.

    The distance is the largest of `spreads` times their spread, `relative` times |median| and
    `absolute` (a number, or the name of a limit). The spread is the larger of the standard
    deviation and 1.4826 times the median absolute deviation: the latter of a few numbers can be
    near 0 by luck. `direction` says which side counts.
    """

    statistic: str
    """Rule that records the statistic, whose observed values are its history."""
    direction: Literal["up", "down", "both"]
    spreads: float
    relative: float
    absolute: float | str


@dataclass(frozen=True)
class Rule:
    """One expectation.

    `counter` is a SQL expression. At gate 1's level `segment` it is evaluated for each segment and
    summed over the trajectory; at level `trajectory` it is evaluated once a trajectory, at gate 2
    as an aggregate over its tokens; at level `window` it is an aggregate over all that the gate
    judges. `limits.<name>` reaches the bounds the run configured. `maximum` is a number or the name
    of such a bound; a rule with `drift` has none, its range follows from the run's history.

    Severity says what a fault costs: `row` the trajectory (and the group it leaves short),
    `group` the group, `batch` everything judged, `warning` nothing.
    """

    id: str
    severity: Severity
    level: Level
    counter: str
    description: str
    protects_against: str
    maximum: float | str = 0.0
    drift: Drift | None = None
