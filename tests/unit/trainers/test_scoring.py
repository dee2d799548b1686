"""Scores: what is audited, what is loaded for it, and the rows that come of it."""

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file

from schemas.tables import TABLES
from schemas.trainer_section import TrainerSection
from tasks.lake import Batch
from trainers.optimizer import AdamWSettings, MasterAdamW
from trainers.scoring import Scores, correct, score, scores_from_table, scores_table
from trainers.sequences import training_batch

SETTINGS = AdamWSettings(
    beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.0, max_gradient_norm=1.0
)
SAMPLING = {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
SEGMENTS = [
    # segment, start, kind, version, kv_version, token_ids: version 2 is what the trainer holds
    (0, 0, "prompt", None, None, [1, 2]),
    (1, 2, "action", 1, 1, [3, 9]),
    (2, 4, "action", 2, 1, [4, 5]),  # continued over an older cache: not comparable
    (3, 6, "action", 2, 2, [6]),
]


def _batch():
    rows = [
        {
            "trajectory_id": name,
            "sequence_index": 0,
            "segment_index": segment,
            "start_position": start,
            "kind": kind,
            "weight_version": version,
            "kv_version_min": kv_version,
            "token_ids": ids,
            "rollout_logprobs": [-2.0] * len(ids) if kind == "action" else None,
        }
        for name in ("a", "b")
        for segment, start, kind, version, kv_version, ids in SEGMENTS
    ]
    trajectories = [
        {"trajectory_id": name, "group_id": 0, "reward": 0.0, "sampling": SAMPLING}
        for name in ("a", "b")
    ]
    return training_batch(
        Batch(
            batch=3,
            admission=9,
            trajectories=pa.Table.from_pylist(trajectories, TABLES["trajectories"].own_schema),
            segments=pa.Table.from_pylist(rows, TABLES["segments"].own_schema),
        )
    )


@pytest.fixture
def scored(make_policy, policy_folder):
    policy = make_policy()
    values = load_file(policy_folder / "model.safetensors")
    MasterAdamW(policy, SETTINGS).load(values.items(), "anchor")
    asked = []

    def read_version(version):
        asked.append(version)
        return ((name, value * 0.5) for name, value in values.items())

    def run(fraction, reference_version=None):
        return score(
            policy,
            _batch(),
            token_budget=64,
            audit_fraction=fraction,
            seed=0,
            read_version=read_version,
            reference_version=reference_version,
        )

    return policy, values, asked, run


def test_stale_tokens_are_scored_under_their_own_version(scored):
    policy, values, asked, run = scored
    scores = run(1.0)
    assert asked == [1]
    assert scores.own_known.int().tolist() == [1, 1, 0, 0, 1] * 2
    assert torch.equal(scores.own_logprobs[[4, 9]], scores.old_logprobs[[4, 9]])
    assert torch.equal(scores.own_logprobs.isnan(), ~scores.own_known)
    for name, value in policy.local_values():
        assert torch.equal(value, values[name]), "version batch - 1 is back"
    policy.set_local_values((name, value * 0.5) for name, value in values.items())
    halved = run(0.0).old_logprobs
    assert torch.equal(scores.own_logprobs[[0, 1, 5, 6]], halved[[0, 1, 5, 6]])
    assert (halved - scores.old_logprobs).abs().max() > 0.01


def test_without_an_audit_no_version_is_read(scored):
    _, _, asked, run = scored
    scores = run(0.0)
    assert asked == []
    assert not scores.own_known.any()


def test_the_reference_is_scored_under_its_own_version(scored):
    policy, values, asked, run = scored
    plain = run(0.0)
    assert plain.reference_logprobs is None
    scores = run(0.0, reference_version=0)
    assert asked == [0]
    assert torch.equal(scores.old_logprobs, plain.old_logprobs)
    for name, value in policy.local_values():
        assert torch.equal(value, values[name]), "version batch - 1 is back"
    policy.set_local_values((name, value * 0.5) for name, value in values.items())
    assert torch.equal(scores.reference_logprobs, run(0.0).old_logprobs)


def test_a_version_is_read_once_for_the_audit_and_the_reference(scored):
    _, _, asked, run = scored
    scores = run(1.0, reference_version=1)
    assert asked == [1]
    stale = [0, 1, 5, 6]
    assert torch.equal(scores.own_logprobs[stale], scores.reference_logprobs[stale])
    assert scores.own_known.int().tolist() == [1, 1, 0, 0, 1] * 2


@pytest.mark.parametrize("version", [2, 7])
def test_the_newest_version_is_the_reference_until_the_named_one_is_there(scored, version):
    _, _, asked, run = scored
    scores = run(0.0, reference_version=version)
    assert asked == []
    assert torch.equal(scores.reference_logprobs, scores.old_logprobs)


@pytest.mark.parametrize("with_reference", [False, True])
def test_rows_and_back(with_reference):
    batch = _batch()
    old = -torch.arange(1, 11).float() / 4
    known = torch.tensor([True, True, False, False, True] * 2)
    reference = old * 2 if with_reference else None
    scores = Scores(old, old.abs(), torch.where(known, old, torch.nan), known, reference)
    correction = correct(batch, scores, TrainerSection(learning_rate=1e-4))
    table = scores_table(batch, scores, correction)
    assert table.schema == TABLES["scores"].own_schema
    first, second, third = table.slice(0, 3).to_pylist()
    assert (first["trajectory_id"], first["segment_index"], first["admission"]) == ("a", 1, 9)
    assert first["old_logprobs"] == [-0.25, -0.5]
    assert second["own_version_logprobs"] is None
    assert third["own_version_logprobs"] == [-1.25]
    # delta = old + 2: e^1.75 and e^1.5 are capped at 2, e^0.75 = 2.117 too.
    assert first["correction_weights"] == pytest.approx([2.0, 2.0])
    last = table.to_pylist()[-1]
    assert last["correction_weights"] == pytest.approx([0.6065307], abs=1e-6)
    again = scores_from_table(batch, table)
    assert torch.equal(again.old_logprobs, old)
    assert torch.equal(again.entropies, old.abs())
    if reference is None:
        assert second["reference_logprobs"] is again.reference_logprobs is None
    else:
        assert first["reference_logprobs"] == [-0.5, -1.0]
        assert torch.equal(again.reference_logprobs, reference)
    with pytest.raises(ValueError, match="are not those of its action segments"):
        scores_from_table(batch, table.slice(1))


def test_masked_tokens_have_no_weight():
    batch = _batch()
    # delta = old + 2: w = e^0.4 for the first trajectory, and 1 for the other.
    old = torch.tensor([-1.6] * 5 + [-2.0] * 5)
    scores = Scores(old, old.abs(), old, torch.ones(10, dtype=torch.bool))
    for options in (
        {"mask": "token", "mask_high": 1.4, "correction": "none"},
        {"mask": "sequence", "mask_high": 7.0},
        {"mask": "geometric", "mask_high": 1.4},
    ):
        trainer = TrainerSection(learning_rate=1e-4, **options)
        correction = correct(batch, scores, trainer)
        assert correction.included.tolist() == [False] * 5 + [True] * 5
        assert correction.weights.tolist() == [0.0] * 5 + [1.0] * 5
