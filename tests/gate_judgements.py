"""Rollouts and scores of a test through the gates."""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from schemas.tables import TABLES
from tasks.profile import profile_rollouts, profile_scores
from tasks.record import Window
from tasks.rollout import Rollout
from tasks.validate import Judgement, judge
from tests.factories import GATE1_LIMITS, GATE2_LIMITS


def recorded(*ids: str) -> pa.Table:
    return pa.table({"trajectory_id": pa.array(ids, pa.string())})


def gate1(rollouts: list[Rollout], known: pa.Table | None = None, **limits: object) -> Judgement:
    rows = Window.of(rollouts)
    bounds: dict[str, Any] = {**GATE1_LIMITS, **limits}
    profile = profile_rollouts(
        rows.trajectories,
        rows.segments,
        rows.requests,
        rows.routing,
        recorded() if known is None else known,
        bounds,
    )
    return judge(1, "test", profile, bounds)


def gate2(
    rollouts: list[Rollout],
    scores: list[dict[str, Any]],
    history: Mapping[str, Sequence[float]] | None = None,
    **limits: object,
) -> Judgement:
    rows = Window.of(rollouts)
    bounds: dict[str, Any] = {**GATE2_LIMITS, **limits}
    table = pa.Table.from_pylist(scores, schema=TABLES["scores"].own_schema)
    actions = rows.segments.filter(pc.field("kind") == "action")
    profile = profile_scores(rows.trajectories, actions, table, bounds)
    return judge(2, "admission 7", profile, bounds, history=history or {})


def failed_rules(judgement: Judgement) -> set[str]:
    return {result.rule for result in judgement.results if not result.ok}
