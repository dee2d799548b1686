"""Judge a profile with Great Expectations, and say what each fault costs.

Great Expectations decides whether a rule holds; DuckDB's profile names the trajectories where it
does not. Importing it takes seconds, so it is imported when the first profile is judged.
"""

import logging
import os
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from schemas.expectations import RULES, Drift, Rule
from schemas.tables import TABLES
from tasks.profile import Limits, Profile

History = Mapping[str, Sequence[float]]
"""Values that statistics had in the run's last accepted batches, by rule."""

ROWS_PRESENT = "rows_present"

MAX_ROW_FAULT_SHARE = 0.25
"""More than this share of a window with row faults is a fault of the window: dropping most of what
an engine returns and sampling it again would hide that the engine is broken."""


Waivers = Mapping[str, int]
"""Rules whose findings do not count, by the seq of the `decision_adopted` row that says so."""

NO_WAIVERS: Waivers = MappingProxyType({})


@dataclass(frozen=True)
class RuleResult:
    rule: str
    severity: str
    observed: float | None
    expected: str
    ok: bool
    num_failed: int
    waived_by: int | None = None


@dataclass(frozen=True)
class Fault:
    """One trajectory that a rule found wrong."""

    rule: str
    trajectory_id: str
    group_id: int
    observed: float


@dataclass(frozen=True)
class Judgement:
    """What a gate found. `faults` are those of single trajectories; `refusals` stop the cycle,
    `warnings` are shown and stop nothing."""

    gate: int
    scope: str
    results: tuple[RuleResult, ...]
    faults: tuple[Fault, ...]
    refusals: tuple[str, ...]
    warnings: tuple[str, ...] = ()

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
                "waived_by": r.waived_by,
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


@dataclass(frozen=True)
class _Range:
    """What a rule allows; None is no bound. `waits` says why a rule is not judged yet."""

    low: float | None = None
    high: float | None = None
    waits: str | None = None

    def __str__(self) -> str:
        if self.waits is not None:
            return self.waits
        parts = [(">=", self.low), ("<=", self.high)]
        return " and ".join(f"{sign} {bound:g}" for sign, bound in parts if bound is not None)


def _bound(value: float | str, limits: Limits) -> float:
    if not isinstance(value, str):
        return value
    bound = limits[value]
    assert isinstance(bound, int | float), f"{value} bounds a rule, so it is always known"
    return float(bound)


def usual_range(drift: Drift, values: Sequence[float], limits: Limits) -> tuple[float, float]:
    """Lowest and highest value that the history `values` (two or more) makes expected."""
    median = statistics.median(values)
    deviation = statistics.median(abs(value - median) for value in values)
    spread = max(1.4826 * deviation, statistics.stdev(values))
    distance = max(
        drift.spreads * spread,
        drift.relative * abs(median),
        _bound(drift.absolute, limits),
    )
    return median - distance, median + distance


def _range(rule: Rule, observed: float | None, limits: Limits, history: History) -> _Range:
    if rule.drift is None:
        return _Range(high=_bound(rule.maximum, limits))
    needed, values = int(_bound("drift_batches", limits)), history.get(rule.drift.statistic, ())
    if observed is None:
        return _Range(waits="any: the batch has none to measure")
    if len(values) < needed:
        return _Range(waits=f"any: needs {needed} batches, has {len(values)}")
    low, high = usual_range(rule.drift, values[-needed:], limits)
    return _Range(
        low=None if rule.drift.direction == "up" else low,
        high=None if rule.drift.direction == "down" else high,
    )


def _judge(
    ranges: Mapping[str, _Range], table: pa.Table, *, count_rows: bool
) -> dict[str, tuple[bool, float | None]]:
    """Whether each rule holds over `table`, and the largest value of its counter; with
    `count_rows` also whether there are rows, as the rule `rows_present`."""
    gx, batch_definition = _great_expectations()
    expect = gx.expectations
    rules = [
        expect.ExpectColumnMaxToBeBetween(
            column=rule, min_value=allowed.low, max_value=allowed.high, meta={"rule": rule}
        )
        for rule, allowed in ranges.items()
    ]
    if count_rows:
        meta = {"rule": ROWS_PRESENT}
        rules.append(expect.ExpectTableRowCountToBeBetween(min_value=1, meta=meta))
    suite = gx.ExpectationSuite(name="gate", expectations=rules)
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


def _faults(rule: Rule, table: pa.Table, maximum: float) -> list[Fault]:
    """The trajectories where the rule's counter is too large."""
    rows = table.select(["trajectory_id", "group_id", rule.id])
    return [
        Fault(rule.id, row["trajectory_id"], row["group_id"], row[rule.id])
        for row in rows.filter(pc.field(rule.id) > maximum).to_pylist()
    ]


def _sentence(rule: Rule, result: RuleResult) -> str:
    observed = "nothing" if result.observed is None else f"{result.observed:g}"
    return (
        f"rule {rule.id} ({rule.protects_against.rstrip('.')}): observed {observed}, "
        f"allowed {result.expected}"
    )


def _results_of_any_gate(
    profile: Profile, rows_present: bool, faulted: Collection[str], waivers: Waivers
) -> list[RuleResult]:
    """Rules over the profile itself: an empty one would satisfy every bound, and one where faults
    are the rule comes from something broken."""
    num_rows = profile.by_trajectory.num_rows
    share = len(faulted) / max(num_rows, 1)
    holds = share <= MAX_ROW_FAULT_SHARE
    expected = f"<= {MAX_ROW_FAULT_SHARE}"
    return [
        RuleResult(
            ROWS_PRESENT, "batch", float(num_rows), ">= 1", rows_present, int(not rows_present)
        ),
        RuleResult(
            "row_fault_share",
            "batch",
            share,
            expected,
            holds,
            int(not holds),
            None if holds else waivers.get("row_fault_share"),
        ),
    ]


def judge(
    gate: int,
    scope: str,
    profile: Profile,
    limits: Limits,
    *,
    rules: Sequence[Rule] | None = None,
    history: History = MappingProxyType({}),
    waivers: Waivers = NO_WAIVERS,
) -> Judgement:
    """The judgement of `gate` over a profile, by its own rules or by those it was made with.

    A profile without rows is refused: an empty one would satisfy every bound. `history` holds the
    last `limits["drift_batches"]` values of each statistic; only gate 2 has such rules. `waivers`
    name rules of severity batch that do not refuse.
    """
    judged_by = {rule.id: rule for rule in (RULES[gate] if rules is None else rules)}
    statistics_of = profile.window.to_pylist()[0]
    ranges = {
        name: _range(rule, statistics_of.get(name), limits, history)
        for name, rule in judged_by.items()
    }
    # What has no range yet is recorded, as history for the batches to come.
    found = {n: (True, statistics_of[n]) for n, r in ranges.items() if r.waits is not None}
    due = {n: r for n, r in ranges.items() if n not in found}
    of_window = {n: r for n, r in due.items() if judged_by[n].level == "window"}
    found |= _judge(of_window, profile.window, count_rows=False)
    of_rows = {n: r for n, r in due.items() if judged_by[n].level != "window"}
    found |= _judge(of_rows, profile.by_trajectory, count_rows=True)
    results: list[RuleResult] = []
    faults: list[Fault] = []
    refusals, warnings = [], []
    for rule in judged_by.values():
        ok, observed = found[rule.id]
        failed = []
        if not ok and rule.level != "window":
            failed = _faults(rule, profile.by_trajectory, _bound(rule.maximum, limits))
        if rule.severity != "warning":
            faults += failed
        result = RuleResult(
            rule.id,
            rule.severity,
            observed,
            str(ranges[rule.id]),
            ok,
            len(failed) or int(not ok),
            None if ok else waivers.get(rule.id),
        )
        results.append(result)
        if not ok and rule.severity == "batch" and rule.id not in waivers:
            refusals.append(_sentence(rule, result))
        elif not ok and rule.severity == "warning":
            warnings.append(_sentence(rule, result))
    spoilt = [fault for fault in faults if judged_by[fault.rule].severity in ("row", "group")]
    present, share = _results_of_any_gate(
        profile, found[ROWS_PRESENT][0], {fault.trajectory_id for fault in spoilt}, waivers
    )
    if not present.ok:
        refusals.append(f"rule {ROWS_PRESENT}: there is nothing to judge")
    if not share.ok and share.waived_by is None:
        broken = ", ".join(sorted({fault.rule for fault in spoilt}))
        refusals.append(
            f"rule row_fault_share: {share.observed:.0%} of the trajectories break {broken}"
        )
    results += [present, share] if gate == 1 else [present]
    return Judgement(gate, scope, tuple(results), tuple(faults), tuple(refusals), tuple(warnings))
