"""A whole run of a mixture of experts: routed in bfloat16, recorded, replayed, trained, and trained
again from its lake."""

import tomllib
from pathlib import Path

import pytest
from safetensors.torch import load_file

from flows.run import execute_run_sync
from schemas.config import parse_run_config
from tasks.lake.lake import Lake
from tasks.query import connect
from tasks.replay import replay
from tasks.warm_start import starting_checkpoint
from tasks.weights.folders import MODEL_FILE
from tests.mixture_policy import write_mixture
from tests.tiny_run import RUN_FILE, RUN_ID, TinyRun

pytestmark = pytest.mark.slow


def _run(root: Path, policy: Path, **trainer):
    """The tiny run with this policy, its engine in bfloat16; its lake and store."""
    root.mkdir()
    data = tomllib.loads(RUN_FILE.read_text())
    data["policy"] = {"path": str(policy)}
    places = {name: str(root / name) for name in ("lake", "store", "cache")}
    data["run"] |= {**places, "num_cycles": 1}
    data["engine"] |= {"compute_dtype": "bfloat16", "logprob_tolerance": 0.2}
    data["trainer"] |= {"ranks": 2, **trainer}
    config = parse_run_config(data, "the test")
    execute_run_sync(config, "the test")
    return Lake.open(config.run.lake), root / "store"


@pytest.fixture(scope="module")
def policy(tmp_path_factory, tiny_policies) -> Path:
    root = tmp_path_factory.mktemp("mixture")
    return write_mixture(root / "policy", starting_checkpoint(TinyRun(root, tiny_policies).config))


def _metrics(lake: Lake) -> list[dict[str, float]]:
    rows = lake.read("steps", run_id=RUN_ID, order_by="step").to_pylist()
    assert len(rows) == 4 and all(row["gradient_norm"] > 0 for row in rows)
    return [dict(row["metrics"]) for row in rows]


def _mismatch(lake: Lake) -> list[float]:
    """Mean |log pi - log mu| of each batch."""
    rows = connect(lake).sql(
        "SELECT avg(abs(old_logprob - rollout_logprob)) FROM token_scores GROUP BY batch"
        " ORDER BY batch"
    )
    return [value for (value,) in rows.fetchall()]


def test_a_mixture_is_trained_on_the_experts_that_were_used(policy: Path, tmp_path: Path):
    lake, store = _run(tmp_path / "replayed", policy)
    routed = lake.read("routing", run_id=RUN_ID, columns=["num_layers", "top_k", "num_rows"])
    assert set(zip(*(routed.column(i).to_pylist() for i in (0, 1)), strict=True)) == {(2, 2)}
    steps = _metrics(lake)
    for metrics in steps:
        assert metrics["routing/num_not_replayed"] == 0 < metrics["routing/num_replayed"]
        shares = [metrics[f"routing/agreement_layer_{layer:03d}"] for layer in (0, 1)]
        assert min(shares) > 0.8
        assert metrics["routing/agreement"] == pytest.approx(sum(shares) / 2)
        assert metrics["routing/agreement"] <= metrics["routing/overlap"]
    # Rounding to bfloat16 decided some choices, of one expert of two mostly.
    assert min(metrics["routing/agreement"] for metrics in steps) < 1

    # The router learns, and versions keep the layout of the checkpoint they came from.
    before = load_file(policy / MODEL_FILE)
    (last,) = (
        entry
        for entry in lake.ledger(RUN_ID).entries
        if entry.kind == "version_published" and entry.version == 2
    )
    after = load_file(store / RUN_ID / last.details["uri"] / MODEL_FILE)
    assert after.keys() == before.keys()
    assert not after["model.layers.0.mlp.gate.weight"].equal(
        before["model.layers.0.mlp.gate.weight"]
    )

    verdicts = list(replay(lake, RUN_ID, store_uri=str(store), tolerance=0.0))
    assert [row["verdict"] for row in verdicts] == ["equal"] * 4, verdicts

    # The same batch 1 is sampled without replay, and further from the trainer's policy.
    without, _ = _run(tmp_path / "without", policy, routing_replay=False)
    assert not any(name.startswith("routing/") for m in _metrics(without) for name in m)
    assert _mismatch(lake)[0] < _mismatch(without)[0]
