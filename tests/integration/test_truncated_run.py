"""A run that samples from a nucleus: what the trainer recomputes is what was sampled from."""

import math
from pathlib import Path

import pytest

from tasks.query import connect
from tests.recompute import largest_error
from tests.tiny_run import RUN_ID, TinyRun
from tests.vllm_world import run_at

TOP_P = 0.9
NUCLEUS = (f"sampling.top_p={TOP_P}", "run.num_cycles=1", "run.batches_per_cycle=1")


@pytest.fixture(scope="module", params=["torch", pytest.param("vllm", marks=pytest.mark.vllm)])
def finished(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_policies: Path
) -> TinyRun:
    engine = run_at(request.getfixturevalue("url")) if request.param == "vllm" else ()
    settings = (*NUCLEUS, "sampling.allow_truncation=true", *engine)
    tiny = TinyRun(tmp_path_factory.mktemp("nucleus"), tiny_policies, settings)
    tiny.execute()
    return tiny


def test_truncation_that_nobody_allowed_is_refused_with_the_key(tiny_run):
    result = tiny_run(*NUCLEUS).run("--no-prefect")
    assert result.returncode == 2
    assert "set sampling.allow_truncation = true" in result.stderr
    assert "Traceback" not in result.stderr


def test_old_logprobs_are_of_the_distribution_that_was_sampled_from(finished: TinyRun):
    rows = connect(finished.lake).sql(
        "SELECT count(*), max(abs(delta)), max(abs(own_version_logprob - rollout_logprob))"
        " FROM token_scores WHERE minibatch = 1"
    )
    num_tokens, largest, largest_own = rows.fetchone()
    assert num_tokens > 0
    assert largest <= 0.002 and largest_own <= 0.002
    steps = finished.lake.read("steps", run_id=RUN_ID).to_pylist()
    assert len(steps) == 2 and all(step["gradient_norm"] > 0 for step in steps)


def test_the_whole_distribution_does_not_explain_them(finished: TinyRun):
    entry = finished.lake.ledger(RUN_ID).last("version_published", version=0)
    folder = finished.root / "store" / RUN_ID / entry.details["uri"]
    num_tokens, largest = largest_error(finished.lake, RUN_ID, 0, folder)
    assert num_tokens > 0
    # What the nucleus lacks of the whole mass is at most 1 - top_p, and here close to it somewhere.
    assert -0.8 * math.log(TOP_P) <= largest <= -math.log(TOP_P) + 1e-5


def test_every_rule_held(finished: TinyRun):
    rows = finished.lake.read("validations", run_id=RUN_ID).to_pylist()
    assert {row["gate"] for row in rows} == {0, 1, 2}
    assert [row["rule"] for row in rows if not row["ok"]] == []


def test_evaluations_are_truncated_alike(finished: TinyRun):
    rows = finished.lake.read("trajectories", run_id=RUN_ID).to_pylist()
    assert {row["split"] for row in rows} == {"train", "heldout"}
    assert {row["sampling"]["top_p"] for row in rows} == {TOP_P}
