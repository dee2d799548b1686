"""What one rule is: a counter in a profile, and the largest value it may have.

A profile is made by one DuckDB scan; Great Expectations judges its columns. Counters are never
NULL, because an expectation counts NULL and NaN as missing and passes over them: a column of NaN
rewards would satisfy any range. So a rule counts what is wrong and bounds the count.
"""

from dataclasses import dataclass
from typing import Literal

Severity = Literal["row", "group", "batch", "warning"]
Level = Literal["segment", "trajectory", "window"]


@dataclass(frozen=True)
class Rule:
    """One expectation.

    `counter` is a SQL expression. At level `segment` it is evaluated for each segment and summed
    over the trajectory; at level `trajectory` it is evaluated once a trajectory; at level
    `window` it is an aggregate over all that the gate judges. `limits.<name>` reaches the bounds
    the run configured. `maximum` is a number or the name of such a bound.

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
