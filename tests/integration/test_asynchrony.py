"""Sampling ahead of training: bounded lag, updates in flight, and an end for every rollout.

A policy that was hardly trained seldom stops, so its rollouts are long; and two slots make sampling
slower than training. So weights change while requests run. Partial credit rewards the long answers
that happen to hold the right digit.
"""

from pathlib import Path

import pytest

from tasks.query import connect
from tests.recompute import TOLERANCE, largest_error
from tests.tiny_run import RUN_ID, TinyRun, count

SLOW_SAMPLING = (
    "policy.warm_start.steps=1",
    'environment.options.reward="score"',
    "sampling.max_tokens=40",
    "engine.max_model_tokens=96",
    "engine.num_slots=2",
    "batch.trajectories=16",
    "evaluation.num_tasks=4",
    "run.num_cycles=1",
    "run.batches_per_cycle=4",
    "trainer.learning_rate=5e-5",
)


@pytest.fixture(scope="module", params=["keep", "abort", "wait"])
def finished(request, tmp_path_factory: pytest.TempPathFactory, tiny_policies: Path):
    tiny = TinyRun(
        tmp_path_factory.mktemp(request.param),
        tiny_policies,
        (
            *SLOW_SAMPLING,
            "asynchrony.k=2",
            "asynchrony.max_lag=2",
            f"asynchrony.update={request.param}",
        ),
    )
    tiny.execute()
    return tiny, request.param


def test_lag_is_positive_and_bounded(finished):
    tiny, _ = finished
    row = (
        connect(tiny.lake)
        .sql("SELECT max(lag_versions), min(lag_versions), max(lag_steps) FROM token_scores")
        .fetchone()
    )
    assert row is not None
    assert 0 < row[0] <= 2 and row[1] >= 0
    assert row[2] <= 2 * 2 + 1


def test_every_rollout_ends_once_and_with_a_reason(finished):
    tiny, _ = finished
    connection = connect(tiny.lake)
    ends = connection.sql("SELECT ended, reason, step FROM trajectory_ends").fetchall()
    assert {row[0] for row in ends} <= {"trained", "dropped"}
    assert sum(row[0] == "trained" for row in ends) == 64
    assert all((row[1] is not None) == (row[0] == "dropped") for row in ends)
    assert tiny.trained_twice() == []
    assert tiny.broken_invariants() == []


def test_weights_changed_while_rollouts_ran(finished):
    tiny, mode = finished
    connection = connect(tiny.lake)
    spans = connection.sql(
        "SELECT count(*) FROM trajectories WHERE weight_version_max > weight_version_min"
    ).fetchone()
    aborted = connection.sql("SELECT count(*) FROM requests WHERE finish_reason = 'abort'")
    parts = connection.sql("SELECT count(*) FROM requests WHERE part_index > 0").fetchone()
    # A rollout of one turn that an update waits for has one version.
    assert spans is not None and (spans[0] > 0) == (mode != "wait")
    assert (aborted.fetchone()[0] > 0) == (mode == "abort")
    assert (parts[0] > 0) == (mode == "abort")


def test_no_action_token_is_lost_or_doubled_by_an_update(finished):
    tiny, _ = finished
    rows = connect(tiny.lake).sql(
        "SELECT count(*) FROM (SELECT trajectory_id, num_action_tokens FROM trajectories) t"
        " JOIN (SELECT trajectory_id, sum(num_output_tokens) AS sampled FROM requests GROUP BY 1) r"
        " USING (trajectory_id) WHERE t.num_action_tokens <> r.sampled"
    )
    assert rows.fetchone() == (0,)


def test_tokens_fit_the_weights_that_sampled_them(finished):
    tiny, _ = finished
    connection = connect(tiny.lake)
    checked = 0
    for entry in tiny.entries:
        if entry.kind == "version_published":
            folder = tiny.root / "store" / RUN_ID / entry.details["uri"]
            num_tokens, worst = largest_error(tiny.lake, RUN_ID, entry.version, folder)
            assert worst <= TOLERANCE
            checked += num_tokens
    assert checked > 0
    audited = connection.sql(
        "SELECT sum(num_audited), max(engine_mismatch_max_abs), max(policy_drift_mean_abs)"
        " FROM mismatch_by_step"
    ).fetchone()
    assert audited is not None and audited[0] > 0
    assert audited[1] <= TOLERANCE


def test_a_cache_older_than_its_weights_is_recorded_only_under_keep(finished):
    tiny, mode = finished
    rows = connect(tiny.lake).sql(
        "SELECT count(*) FROM segments WHERE kv_version_min < weight_version"
    )
    assert (rows.fetchone()[0] > 0) == (mode == "keep")


def test_stale_rollouts_are_dropped_with_their_bias(tiny_run):
    tiny = tiny_run(*SLOW_SAMPLING, "asynchrony.k=2", "asynchrony.max_lag=0")
    tiny.execute()
    connection = connect(tiny.lake)
    assert connection.sql("SELECT max(lag_versions) FROM token_scores").fetchone() == (0,)
    dropped = connection.sql(
        "SELECT count(*) FROM trajectory_ends WHERE ended = 'dropped' AND reason LIKE 'stale%'"
    ).fetchone()
    assert dropped is not None and dropped[0] > 0
    biased = connection.sql(
        "SELECT count(*) FROM staleness_by_step WHERE dropped_frac > 0"
        " AND dropped_length_bias IS NOT NULL AND dropped_reward_bias IS NOT NULL"
    ).fetchone()
    assert biased is not None and biased[0] > 0
    assert count(tiny.entries, "batch_trained") == 4
