"""A whole synchronous run: what it leaves in the lake, with every number derived again."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from schemas.expectations import RULES
from tasks.lake.batches import trajectories_hash
from tasks.query import connect
from tests.recompute import TOLERANCE, largest_error
from tests.tiny_run import REPOSITORY, ROLLHOUSE, RUN_ID, TinyRun, count


def test_the_json_document_says_what_happened(finished_run):
    tiny, document = finished_run
    assert document["run_id"] == RUN_ID
    assert (document["cycles"], document["steps"], document["versions"]) == (2, 8, 5)
    assert document["lake"] == str(tiny.root / "lake")
    assert "cycle-000001/index.html" in Path(document["data_docs"]).read_text()
    assert document["trajectories"] == {"trained": 128}
    for name in ("pass_at_1_before", "pass_at_1_after", "pass_at_1_gain"):
        assert document[name]["ci_low"] <= document[name]["mean"] <= document[name]["ci_high"]
    assert document["tokens_sampled"] > document["tokens_trained"] > 0
    assert {"sample", "record", "judge", "publish", "evaluate", "train"} <= document[
        "seconds"
    ].keys()


@pytest.mark.parametrize("version", range(5))
def test_rollout_logprobs_are_those_of_the_published_weights(finished_run, version: int):
    tiny, _ = finished_run
    entry = tiny.lake.ledger(RUN_ID).last("version_published", version=version)
    folder = tiny.root / "store" / RUN_ID / entry.details["uri"]
    num_tokens, worst = largest_error(tiny.lake, RUN_ID, version, folder)
    assert num_tokens > 0
    assert worst <= TOLERANCE


def test_synchronous_means_no_version_lag(finished_run):
    tiny, _ = finished_run
    rows = connect(tiny.lake).sql(
        "SELECT max(lag_versions), min(lag_versions), max(lag_steps) FROM token_scores"
    )
    assert rows.fetchone() == (0, 0, 1)


def test_every_admitted_trajectory_is_trained_once(finished_run):
    tiny, _ = finished_run
    connection = connect(tiny.lake)
    assert tiny.trained_twice() == []
    admitted = connection.sql("SELECT count(*), count(DISTINCT trajectory_id) FROM batches")
    assert admitted.fetchone() == (128, 128)
    for entry in tiny.entries:
        if entry.kind == "batch_trained":
            ids = (
                tiny.lake.read(
                    "batches",
                    run_id=RUN_ID,
                    where="batch = ?",
                    params=[entry.batch],
                    order_by="batch_position",
                )
                .column("trajectory_id")
                .to_pylist()
            )
            assert entry.trajectories_hash == trajectories_hash(ids)


def test_old_logprobs_and_weights_of_the_trainer_agree_with_the_engine(finished_run):
    tiny, _ = finished_run
    row = (
        connect(tiny.lake)
        .sql("SELECT max(abs_logprob_diff_max), sum(num_audited), max(w_max) FROM mismatch_by_step")
        .fetchone()
    )
    assert row is not None and row[0] <= 0.002 and row[1] > 0
    assert row[2] == pytest.approx(1.0, abs=0.002)


def test_signals_and_stored_columns_tell_the_same_story(finished_run):
    tiny, _ = finished_run
    connection = connect(tiny.lake)
    signals = connection.sql("FROM signals_by_step ORDER BY step").to_arrow_table().to_pylist()
    assert [row["step"] for row in signals] == list(range(1, 9))
    for row in signals:
        rewards, entropies, w_max = connection.execute(
            "SELECT (SELECT avg(t.reward) FROM step_trajectories st"
            "        JOIN trajectories t USING (run_id, trajectory_id) WHERE st.step = $1),"
            " avg(entropy), exp(max(delta)) FROM token_scores WHERE step = $1",
            [row["step"]],
        ).fetchone()
        assert row["reward_mean"] == pytest.approx(rewards)
        assert row["entropy_mean"] == pytest.approx(entropies, rel=1e-5)
        assert row["max_w"] == pytest.approx(w_max, rel=1e-5)
        assert row["gradient_norm"] >= 0 and row["stall_s"] >= 0
    evaluated = [row["heldout_pass_at_1"] for row in signals]
    assert evaluated[:4] == [evaluated[0]] * 4 and None not in evaluated


def test_versions_are_contiguous_and_engines_attested_each(finished_run):
    tiny, _ = finished_run
    versions = [e.version for e in tiny.entries if e.kind == "version_published"]
    assert versions == list(range(5))
    rows = tiny.lake.read("attestations", run_id=RUN_ID, where="ok").to_pylist()
    published = {e.version: e.root_hash for e in tiny.entries if e.kind == "version_published"}
    assert {row["version"]: row["root_hash"] for row in rows} == published


def test_every_rule_was_judged_and_held(finished_run):
    tiny, document = finished_run
    rows = tiny.lake.read("validations", run_id=RUN_ID).to_pylist()
    assert {row["gate"] for row in rows} == {0, 1, 2}
    assert [row["rule"] for row in rows if not row["ok"]] == []
    assert tiny.lake.read("quarantine", run_id=RUN_ID).num_rows == 0
    assert {(row["gate"], row["rule"]) for row in rows if row["gate"]} >= {
        (gate, rule.id) for gate, rules in RULES.items() for rule in rules
    }
    assert document["warnings"] == []
    waits = [row["expected"] for row in rows if row["rule"] == "reward_collapse"]
    assert waits == [f"any: needs 10 batches, has {k}" for k in range(4)]


def test_train_and_heldout_problems_are_distinct(finished_run):
    tiny, _ = finished_run
    rows = tiny.lake.read("trajectories", run_id=RUN_ID, columns=["task_id", "split"]).to_pylist()
    train = {row["task_id"] for row in rows if row["split"] == "train"}
    heldout = {row["task_id"] for row in rows if row["split"] == "heldout"}
    assert len(heldout) == 16 and train and not train & heldout


def test_running_again_does_nothing(finished_run):
    tiny, document = finished_run
    before = len(tiny.entries)
    result = tiny.run("--json", "--no-prefect")
    assert result.returncode == 0, result.stderr
    again = json.loads(result.stdout)
    assert len(tiny.entries) == before
    assert again["pass_at_1_after"] == document["pass_at_1_after"]


def test_a_changed_run_file_is_refused_by_key(finished_run):
    tiny, _ = finished_run
    changed = TinyRun(tiny.root, tiny.policies, ("trainer.learning_rate=0.5",))
    result = changed.run("--no-prefect")
    assert result.returncode == 2
    assert "trainer.learning_rate (0.0003 -> 0.5)" in result.stderr
    assert "Traceback" not in result.stderr


def rollhouse(tiny: TinyRun, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*ROLLHOUSE, *arguments, "--lake", str(tiny.root / "lake")],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_inspecting_commands_answer(finished_run, tmp_path: Path):
    tiny, _ = finished_run
    rows = json.loads(rollhouse(tiny, "sql", "--json", "SELECT count(*) AS n FROM tokens").stdout)
    assert rows[0]["n"] > 0
    csv = rollhouse(tiny, "sql", "--csv", "SELECT step FROM steps ORDER BY step").stdout.split()
    assert csv == ["step", *map(str, range(1, 9))]
    status = json.loads(rollhouse(tiny, "status", "--json").stdout)[0]
    assert (status["cycles_closed"], status["batches_trained"]) == (2, 4)
    assert status["engines"] == "torch-0 at 4" and status["waiting_for"] == "nothing"
    versions = json.loads(rollhouse(tiny, "weights", "list", "--json").stdout)
    assert [row["version"] for row in versions] == list(range(5))
    shown = json.loads(rollhouse(tiny, "trajectory", "--json").stdout)
    actions = [token for token in shown["tokens"] if token["kind"] == "action"]
    assert actions and all(token["log_mu"] <= 0 and token["w"] > 0 for token in actions)
    assert "".join(token["text"] for token in shown["tokens"]).startswith("<|user|>Calculate")
    assert "log_mu" in rollhouse(tiny, "trajectory").stdout
    refused = rollhouse(tiny, "trajectory", "absent")
    assert refused.returncode == 2 and "no recorded trajectory absent" in refused.stderr
    refused = rollhouse(tiny, "sql", "DROP TABLE steps")
    assert refused.returncode == 2 and "read-only" in refused.stderr


def test_an_exported_version_is_a_hugging_face_folder(finished_run, tmp_path: Path):
    tiny, _ = finished_run
    folder = tmp_path / "exported"
    result = rollhouse(tiny, "weights", "export", "4", "--to", str(folder))
    assert result.returncode == 0, result.stderr
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert sum(np.prod(p.shape) for p in model.parameters()) > 10_000
    refused = rollhouse(tiny, "weights", "export", "9", "--to", str(tmp_path / "nine"))
    assert (
        refused.returncode == 2 and "has not published version 9; it has 0 to 4" in refused.stderr
    )
    refused = rollhouse(tiny, "weights", "export", "4", "--to", str(folder))
    assert refused.returncode == 2 and "not an empty directory" in refused.stderr


def test_cycles_open_and_close_in_turn(finished_run):
    tiny, _ = finished_run
    assert count(tiny.entries, "cycle_opened") == count(tiny.entries, "cycle_closed") == 2
    assert [e.cycle for e in tiny.entries] == sorted(e.cycle for e in tiny.entries)
