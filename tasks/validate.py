"""Judge a profile with Great Expectations, and say what each fault costs.

Great Expectations decides whether a rule holds; DuckDB's profile names the trajectories where it
does not. Importing it takes seconds, so it is imported when the first profile is judged.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Any

import pyarrow as pa

from schemas.expectations import RULES, Rule
from schemas.tables import TABLES
from tasks.profile import Limits, Profile

MAX_ROW_FAULT_SHARE = 0.25
"""More than this share of a window with row faults is a fault of the window: dropping most of what
an engine returns and sampling it again would hide that the engine is broken."""


@dataclass(frozen=True)
class RuleResult:
    rule: str
    severity: str
    observed: float | None
    expected: str
    ok: bool
    num_failed: int


@dataclass(frozen=True)
class Fault:
    """One trajectory that a rule found wrong."""

    rule: str
    trajectory_id: str
    group_id: int
    observed: float


@dataclass(frozen=True)
class Judgement:
    """What a gate found. `faults` are those of single trajectories; `refusals` stop the cycle."""

    gate: int
    scope: str
    results: tuple[RuleResult, ...]
    faults: tuple[Fault, ...]
    refusals: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.refusals

    @property
    def reason(self) -> str:
        """One sentence that names the rules and the trajectories."""
        named = sorted({fault.trajectory_id for fault in self.faults})
        shown = ", ".join(named[:5]) + (f" and {len(named) - 5} more" if len(named) > 5 else "")
        return "; ".join(self.refusals) + (f"; trajectories {shown}" if named else "")

    def validations(self) -> pa.Table:
        now = datetime.now(UTC)
        rows = [
            {
                "gate": self.gate,
                "rule": r.rule,
                "severity": r.severity,
                "scope": self.scope,
                "observed": r.observed,
                "expected": r.expected,
                "ok": r.ok,
                "num_failed": r.num_failed,
                "judged_at": now,
            }
            for r in self.results
        ]
        return pa.Table.from_pylist(rows, schema=TABLES["validations"].own_schema)


@cache
def _great_expectations() -> Any:
    os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")
    import great_expectations as gx
    from great_expectations.data_context.types.base import ProgressBarsConfig

    # It announces each temporary folder it makes, in the middle of other people's output.
    logging.getLogger("great_expectations.data_context.types.base").setLevel(logging.WARNING)
    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = ProgressBarsConfig(globally=False)
    source = context.data_sources.add_pandas("profiles")
    batch = source.add_dataframe_asset("profile").add_batch_definition_whole_dataframe("all")
    return gx, batch


def _maximum(rule: Rule, limits: Limits) -> float:
    if not isinstance(rule.maximum, str):
        return rule.maximum
    bound = limits[rule.maximum]
    assert bound is not None, f"{rule.maximum} bounds a rule, so it is always known"
    return float(bound)


def _judge(
    rules: Sequence[Rule], table: pa.Table, limits: Limits
) -> dict[str, tuple[bool, float | None]]:
    """Whether each rule holds over `table`, and the largest value of its counter."""
    gx, batch_definition = _great_expectations()
    expect = gx.expectations
    suite = gx.ExpectationSuite(
        name="gate",
        expectations=[
            expect.ExpectTableRowCountToBeBetween(min_value=1, meta={"rule": "rows"}),
            *(
                expect.ExpectColumnMaxToBeBetween(
                    column=rule.id, max_value=_maximum(rule, limits), meta={"rule": rule.id}
                )
                for rule in rules
            ),
        ],
    )
    batch = batch_definition.get_batch({"dataframe": table.to_pandas()})
    outcome = batch.validate(suite, result_format="BASIC")
    found = {}
    for result in outcome.results:
        value = result.result.get("observed_value")
        found[result.expectation_config.meta["rule"]] = (
            bool(result.success),
            None if value is None else float(value),
        )
    return found


def judge(
    gate: int,
    scope: str,
    profile: Profile,
    limits: Limits,
    rules: Sequence[Rule] | None = None,
) -> Judgement:
    """The judgement of `gate` over a profile, by its own rules or by those it was made with. A
    profile without rows is refused: an empty one would satisfy every bound."""
    rules = RULES[gate] if rules is None else rules
    window_rules = [rule for rule in rules if rule.level == "window"]
    found = _judge(window_rules, profile.window, limits)
    by_trajectory = profile.by_trajectory
    if by_trajectory is not None:
        row_rules = [rule for rule in rules if rule.level != "window"]
        found |= _judge(row_rules, by_trajectory, limits)

    results, faults, refusals = [], [], []
    for rule in rules:
        ok, observed = found[rule.id]
        maximum = _maximum(rule, limits)
        failed = []
        if not ok and by_trajectory is not None and rule.level != "window":
            failed = [
                Fault(rule.id, row["trajectory_id"], row["group_id"], row[rule.id])
                for row in by_trajectory.select(["trajectory_id", "group_id", rule.id]).to_pylist()
                if row[rule.id] > maximum
            ]
        faults += failed
        results.append(
            RuleResult(
                rule.id, rule.severity, observed, f"<= {maximum:g}", ok, len(failed) or int(not ok)
            )
        )
        if not ok and rule.severity == "batch":
            refusals.append(
                f"rule {rule.id} ({rule.protects_against.rstrip('.')}): observed {observed:g}, "
                f"allowed {maximum:g}"
                if observed is not None
                else f"rule {rule.id}: nothing was counted"
            )
    num_rows = int(profile.window["num_rows"][0].as_py())
    present = num_rows > 0
    results.append(
        RuleResult("rows_present", "batch", float(num_rows), ">= 1", present, int(not present))
    )
    if num_rows == 0:
        refusals.append("rule rows_present: there is nothing to judge")
    share = len({fault.trajectory_id for fault in faults}) / max(num_rows, 1)
    if by_trajectory is not None:
        ok = share <= MAX_ROW_FAULT_SHARE
        results.append(
            RuleResult(
                "row_fault_share", "batch", share, f"<= {MAX_ROW_FAULT_SHARE}", ok, int(not ok)
            )
        )
        if not ok:
            broken = sorted({fault.rule for fault in faults})
            refusals.append(
                f"rule row_fault_share: {share:.0%} of the trajectories break {', '.join(broken)}"
            )
    return Judgement(gate, scope, tuple(results), tuple(faults), tuple(refusals))
