"""What the benchmarks measure is what a run would write."""

import pytest

from tasks.profile import profile_rollouts
from tasks.validate import judge
from tests.benchmarks.lake import views
from tests.benchmarks.lake.analysis_lake import SHAPE
from tests.benchmarks.lake.reference_batch import LIMITS, REFERENCE, make_batch
from tests.gate_judgements import recorded


@pytest.mark.parametrize(
    "shape",
    [pytest.param(REFERENCE, id="reference"), pytest.param(SHAPE, id="analysis")],
)
def test_gate_1_finds_nothing_in_a_measured_batch(shape):
    batch = make_batch(0, shape)
    limits = LIMITS | {"max_tokens": shape.sampled}
    profile = profile_rollouts(
        batch.trajectories, batch.segments, batch.requests, batch.routing, recorded(), limits
    )
    judgement = judge(1, "benchmark", profile, limits)
    assert (judgement.ok, judgement.reason, judgement.faults) == (True, "", ())


def test_the_measured_views_agree_with_sql_on_flat_files(tmp_path):
    """Each question's two answers are compared before a line is printed."""
    names = [line.split(":")[0] for line in views.lines(tmp_path, num_batches=2)]
    assert names == ["context", *(f"view {question}" for question in views.QUESTIONS), "views"]
