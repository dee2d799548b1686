"""The rules of both gates."""

from schemas.expectations import drift, routing, scores, segments, trajectories, windows
from schemas.expectations.rule import Drift, Rule

RULES: dict[int, tuple[Rule, ...]] = {
    1: (*segments.RULES, *routing.RULES, *trajectories.RULES, *windows.RULES),
    2: (*scores.RULES, *drift.RULES),
}

__all__ = ["RULES", "Drift", "Rule"]
