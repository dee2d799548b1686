"""A run with every option away from its default: what it wrote is derived again."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tasks.query import connect
from tests.tiny_run import RUN_ID, TinyRun

OPTIONS = {
    "loss": '"gspo"',
    "advantage": '"leave_one_out"',
    "correction": '"sequence_tis"',
    "w_cap": "1.01",
    "mask": '"geometric"',
    "mask_low": "0.95",
    "mask_high": "1.05",
    "kl_coefficient": "0.05",
    "kl_estimator": '"k3"',
    "reference_version": "0",
    "entropy_coefficient": "0.01",
}
SETTINGS = (
    *(f"trainer.{key}={value}" for key, value in OPTIONS.items()),
    "asynchrony.k=1",
    "run.num_cycles=1",
    "run.batches_per_cycle=3",
    # Rollouts of one version behind, so that w is not 1 everywhere.
    "trainer.learning_rate=3e-4",
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_policies: Path) -> TinyRun:
    tiny = TinyRun(tmp_path_factory.mktemp("objective"), tiny_policies, SETTINGS)
    tiny.execute()
    return tiny


@pytest.fixture(scope="module")
def tokens(finished: TinyRun) -> dict[str, np.ndarray]:
    rows = connect(finished.lake).sql(
        "SELECT step, minibatch, batch, trajectory_id, position, delta, correction_weight, included"
        " FROM token_scores ORDER BY batch, trajectory_id, position"
    )
    return rows.fetchnumpy()


def test_weights_and_masks_are_of_whole_sequences(tokens):
    names, ids = np.unique(
        [f"{b} {t}" for b, t in zip(tokens["batch"], tokens["trajectory_id"], strict=True)],
        return_inverse=True,
    )
    counts = np.bincount(ids)
    log_product = np.bincount(ids, tokens["delta"])[ids]
    geometric = np.exp(log_product / counts[ids])
    inside = (geometric > 0.95) & (geometric < 1.05)
    assert len(names) == 96 and inside.any() and not inside.all()
    assert np.array_equal(tokens["included"], inside)
    expected = np.where(inside, np.exp(np.minimum(log_product, np.log(1.01))), 0.0)
    np.testing.assert_allclose(tokens["correction_weight"], expected, rtol=1e-5)
    assert (inside & (log_product > np.log(1.01))).any(), "the cap binds"


def test_reference_logprobs_are_those_of_the_starting_checkpoint(finished: TinyRun):
    entry = finished.lake.ledger(RUN_ID).last("version_published", version=0)
    folder = finished.root / "store" / RUN_ID / entry.details["uri"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = connect(finished.lake).sql(
        "SELECT c.batch, s.trajectory_id, c.segment_index, c.reference_logprobs, c.old_logprobs,"
        " (SELECT flatten(list(p.token_ids ORDER BY p.segment_index)) FROM segments p"
        "  WHERE p.trajectory_id = s.trajectory_id AND p.segment_index <= s.segment_index) AS ids"
        " FROM scores c JOIN segments s USING (trajectory_id, sequence_index, segment_index)"
    )
    largest = moved = 0.0
    for row in rows.to_arrow_table().to_pylist():
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row["ids"]]), use_cache=False).logits[0]
        count = len(row["reference_logprobs"])
        chosen = torch.tensor(row["ids"][-count:])[:, None]
        logprobs = logits[-count - 1 : -1].double().log_softmax(-1).gather(1, chosen)[:, 0]
        reference = torch.tensor(row["reference_logprobs"], dtype=torch.float64)
        largest = max(largest, (reference - logprobs).abs().max().item())
        if row["batch"] > 1:
            old = torch.tensor(row["old_logprobs"], dtype=torch.float64)
            moved = max(moved, (reference - old).abs().max().item())
    assert largest <= 2e-5
    assert moved > 0.01


def test_steps_say_what_was_minimised(finished: TinyRun):
    steps = finished.lake.read("steps", run_id=RUN_ID).sort_by("step").to_pylist()
    assert len(steps) == 6
    for step in steps:
        assert (step["loss_name"], step["correction"]) == ("gspo", "sequence_tis")
        metrics = dict(step["metrics"])
        assert metrics["reference/kl_k3"] >= 0 and step["gradient_norm"] > 0
    # Batch 1 starts at the reference, batch 3 does not.
    assert dict(steps[0]["metrics"])["reference/kl_k3"] == pytest.approx(0.0, abs=1e-9)
    assert dict(steps[4]["metrics"])["reference/kl_k3"] > 1e-5


def test_every_rule_held(finished: TinyRun):
    rows = finished.lake.read("validations", run_id=RUN_ID).to_pylist()
    assert [row["rule"] for row in rows if not row["ok"] and row["severity"] == "batch"] == []
    assert finished.broken_invariants() == []


def test_options_that_contradict_each_other_end_the_command(tiny_run):
    result = tiny_run('trainer.loss="reinforce"', "trainer.clip_low=0.2").run("--no-prefect")
    assert result.returncode == 2
    assert "clip_low has no effect" in result.stderr and "Traceback" not in result.stderr
