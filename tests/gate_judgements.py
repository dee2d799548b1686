"""Rollouts of a test through gate 1."""

import pyarrow as pa

from tasks.profile import profile_rollouts
from tasks.record import Window
from tasks.rollout import Rollout
from tasks.validate import Judgement, judge
from tests.factories import GATE1_LIMITS


def recorded(*ids: str) -> pa.Table:
    return pa.table({"trajectory_id": pa.array(ids, pa.string())})


def gate1(rollouts: list[Rollout], known: pa.Table | None = None, **limits: object) -> Judgement:
    rows = Window.of(rollouts)
    bounds = {**GATE1_LIMITS, **limits}
    profile = profile_rollouts(
        rows.trajectories,
        rows.segments,
        rows.requests,
        rows.routing,
        recorded() if known is None else known,
        bounds,
    )
    return judge(1, "test", profile, bounds)


def failed_rules(judgement: Judgement) -> set[str]:
    return {result.rule for result in judgement.results if not result.ok}
