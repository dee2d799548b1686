"""The rules of both gates."""

from schemas.expectations import gate1, gate2
from schemas.expectations.rule import Rule

RULES: dict[int, tuple[Rule, ...]] = {1: gate1.RULES, 2: gate2.RULES}

__all__ = ["RULES", "Rule"]
