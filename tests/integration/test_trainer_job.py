"""The trainer job under torchrun, against a real lake."""

import pytest
import torch
from safetensors import safe_open
from trainer_world import FIRST, OBSERVATION, PROMPT, SECOND, TEMPERATURE, World, finish
from transformers import AutoModelForCausalLM

from tasks.weights.checkpoints import published_values, read_manifest
from tasks.weights.hashing import root_hash_of_stream


def _train_one(world: World, batch: int, ids: list[str]):
    """Drives one batch through the job; (scores, steps) as it wrote them."""
    admission = world.admit(batch, ids)
    job = world.start(until_batch=batch)
    scores = world.wait_for(job, "scores", f"admission = {admission}")
    world.accept(batch, admission, scores)
    steps = world.wait_for(job, "steps", f"batch = {batch}")
    finish(job)
    return scores, steps


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Batch 1 trained once, by one rank."""
    world = World.create(tmp_path_factory.mktemp("world"))
    ids = world.record(range(4))
    scores, steps = _train_one(world, 1, ids)
    return world, ids, scores, steps


def test_scores_are_one_row_an_action_segment(trained):
    world, ids, scores, _ = trained
    rows = scores.to_pylist()
    assert [(row["trajectory_id"], row["segment_index"]) for row in rows] == [
        (name, index) for name in ids for index in (1, 3)
    ]
    segments = world.lake.read("segments", run_id="tiny", where="kind = 'action'").to_pylist()
    for row, segment in zip(rows, segments, strict=True):
        delta = torch.tensor(row["old_logprobs"]) - torch.tensor(segment["rollout_logprobs"])
        assert delta.abs().max().item() <= 2e-5
        assert row["own_version_logprobs"] == row["old_logprobs"]
        weights = torch.tensor(row["correction_weights"])
        torch.testing.assert_close(weights, delta.exp(), rtol=0, atol=1e-6)
        assert all(row["included"])
        assert len(row["entropies"]) == len(segment["token_ids"])


def test_entropies_are_at_the_sampling_temperature(trained):
    world, _, scores, _ = trained
    model = AutoModelForCausalLM.from_pretrained(world.policy, dtype=torch.float32)
    segments = world.lake.read("segments", run_id="tiny").to_pylist()[:4]
    ids = torch.tensor([[token for segment in segments for token in segment["token_ids"]]])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0].double() / TEMPERATURE
    entropies = torch.distributions.Categorical(logits=logits).entropy()
    first, second = scores.slice(0, 2).column("entropies").to_pylist()
    assert first == pytest.approx(entropies[3 : 3 + FIRST].tolist(), abs=1e-5)
    assert second == pytest.approx(entropies[10 : 10 + SECOND].tolist(), abs=1e-5)


def test_steps_say_what_was_done(trained):
    world, _, scores, steps = trained
    first, second = steps.to_pylist()
    assert [row["step"] for row in (first, second)] == [1, 2]
    assert [row["minibatch"] for row in (first, second)] == [1, 2]
    assert [row["mean_lag_steps"] for row in (first, second)] == [0.0, 1.0]
    assert first["num_action_tokens"] == 8 * (FIRST + SECOND)
    assert first["num_tokens"] == 8 * 13
    assert first["checkpoint"] is None
    assert second["stall_s"] == second["score_s"] == first["checkpoint_s"] == 0.0
    assert first["gradient_norm"] > 0
    # At pi_theta = pi_old the surrogate is the mean of w A over tokens, and w is nearly 1.
    assert first["loss"] == pytest.approx(0.0, abs=1e-3)
    assert dict(second["metrics"])["update/kl_k3"] > 0
    rewards = world.lake.read("trajectories", run_id="tiny").column("reward").to_pylist()
    assert first["reward_mean"] == pytest.approx(sum(rewards[:8]) / 8)
    assert scores.column("write_id")[0] != steps.column("write_id")[0]


def _forwarded_once(world: World, ids: list[str]) -> tuple[int, int, int]:
    """Tokens, pairs of tokens and predicting positions of a group's contexts, each counted once."""
    contexts: dict[str, list[int]] = {}
    for row in world.lake.read("segments", run_id="tiny").to_pylist():
        contexts.setdefault(row["trajectory_id"], []).extend(row["token_ids"])
    turn = PROMPT + FIRST + OBSERVATION
    read = {tuple(contexts[name][:size]) for name in ids for size in range(1, turn + SECOND)}
    before_actions = {*range(PROMPT, PROMPT + FIRST), *range(turn, turn + SECOND)}
    positions = sum(len(prefix) in before_actions for prefix in read)
    return len(read), sum(map(len, read)), positions


def test_steps_say_what_a_claim_about_them_needs(trained):
    world, ids, _, steps = trained
    for number, row in enumerate(steps.to_pylist()):
        assert dict(row["composition"]) == {
            "environment/tiny": 8,
            "finish_reason/stop": 8,
            "weight_version_min/0": 8,
            "groups": 2,
        }
        # Eight sequences of 14 tokens, between 8 and 15.
        assert row["sequence_lengths"] == [0, 0, 0, 8]
        assert row["logprobs_from"] == [("test, processed_logprobs", 8)]
        assert row["hardware"] == "1 CPU threads"
        assert f"torch {torch.__version__}" in row["software"] and row["processor"]
        assert row["mfu"] is None
        # 16 x 8 x 4 + 16 x 16 weights of attention a layer. A row has room for one group of 4.
        weights = 2 * (16 * 8 * 4 + 16 * 16 + 3 * 16 * 24)
        groups = [ids[8 * number :][:4], ids[8 * number :][4:8]]
        forward = 0
        for tokens, pairs, positions in (_forwarded_once(world, group) for group in groups):
            forward += 2 * weights * tokens + 2 * 32 * 16 * positions + 4 * 2 * 8 * 2 * pairs
        assert row["model_flops"] == 3 * forward


def test_checkpoint_publishes_what_the_steps_row_says(trained):
    world, _, _, steps = trained
    last = steps.to_pylist()[-1]
    assert last["checkpoint"] == f"checkpoints/b00000001-{world.lease:06d}"
    values = dict(published_values(world.store / last["checkpoint"]))
    assert root_hash_of_stream(values.items()) == last["root_hash"]
    model = AutoModelForCausalLM.from_pretrained(world.policy, dtype=torch.bfloat16)
    before = dict(model.named_parameters())
    assert values.keys() == before.keys()
    assert any(not torch.equal(value, before[name]) for name, value in values.items())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rerun_gives_the_same_weights(trained, tmp_path, ranks):
    _, _, scores, steps = trained
    runs = []
    for number in range(1 if ranks == 1 else 2):
        world = World.create(tmp_path / str(number), ranks=ranks)
        runs.append(_train_one(world, 1, world.record(range(4))))
    if ranks == 1:
        runs.append((scores, steps))
    (first_scores, first), (second_scores, second) = runs
    assert first.column("root_hash")[-1].as_py() == second.column("root_hash")[-1].as_py()
    for name in ("old_logprobs", "entropies", "correction_weights"):
        assert first_scores.column(name).to_pylist() == second_scores.column(name).to_pylist()


def test_a_crash_after_acceptance_resumes_from_the_accepted_scores(tmp_path, trained):
    _, _, _, steps = trained
    world = World.create(tmp_path)
    admission = world.admit(1, world.record(range(4)))
    job = world.start(until_batch=1)
    scores = world.wait_for(job, "scores", f"admission = {admission}")
    job.stdin.close()  # the controller dies
    assert "exitcode  : 3" in finish(job, code=1)
    world.accept(1, admission, scores)
    job = world.start(until_batch=1)
    resumed = world.wait_for(job, "steps", "batch = 1")
    finish(job)
    assert len(world.written("scores", f"admission = {admission}")) == len(scores)
    assert resumed.column("root_hash")[-1].as_py() == steps.column("root_hash")[-1].as_py()
    assert resumed.column("score_s").to_pylist() == [0.0, 0.0]


def test_refused_then_trained_then_stale(tmp_path):
    world = World.create(tmp_path)
    ids, other, stale = (world.record(range(g, g + 4)) for g in (0, 4, 8))
    refused = world.admit(1, ids)
    job = world.start(until_batch=2)
    world.wait_for(job, "scores", f"admission = {refused}")
    world.refuse(1, refused)
    admission = world.admit(1, other)
    scores = world.wait_for(job, "scores", f"admission = {admission}")
    assert len(world.written("steps", "true")) == 0
    assert not (world.store / "checkpoints").exists()
    world.accept(1, admission, scores)
    steps = world.wait_for(job, "steps", "batch = 1")
    assert set(steps.column("admission").to_pylist()) == {admission}
    world.trained(1, steps)

    # Batch 2 was sampled under version 0: its own version is loaded, compared, and put away.
    admission = world.admit(2, stale)
    scores = world.wait_for(job, "scores", f"admission = {admission}")
    segments = world.lake.read("segments", run_id="tiny", where="kind = 'action'").to_pylist()
    drift = 0.0
    for row, segment in zip(scores.to_pylist(), segments[-len(scores) :], strict=True):
        rollout = torch.tensor(segment["rollout_logprobs"])
        own = torch.tensor(row["own_version_logprobs"])
        assert (own - rollout).abs().max().item() <= 2e-5
        drift = max(drift, (torch.tensor(row["old_logprobs"]) - rollout).abs().max().item())
    assert drift > 1e-2
    world.accept(2, admission, scores)
    steps = world.wait_for(job, "steps", "batch = 2")
    assert steps.column("mean_lag_steps").to_pylist() == [2.0, 3.0]
    assert steps.column("step").to_pylist() == [3, 4]
    finish(job)

    # A job that starts at the checkpoint of batch 1 and reads the scores goes the same way.
    again = world.start(until_batch=2)
    repeated = world.wait_for(again, "steps", "batch = 2", num_rows=4)
    finish(again)
    assert len(set(repeated.column("root_hash").drop_null().to_pylist())) == 1


def test_the_job_ends_when_its_cycle_closes_or_its_lease_is_lost(tmp_path):
    world = World.create(tmp_path)
    job = world.start(until_batch=1)
    world.ledger.append("cycle_closed", lease=world.lease, cycle=0)
    assert "cycle 0 is closed" in finish(job)
    job = world.start(until_batch=1, lease=world.lease - 1)
    assert "exitcode  : 4" in finish(job, code=1)


def test_a_missing_checkpoint_has_a_clear_message(tmp_path):
    world = World.create(tmp_path)
    world.ledger.append(
        "batch_trained",
        lease=world.lease,
        batch=1,
        version=1,
        checkpoint="checkpoints/b00000001-000001",
        root_hash="0",
    )
    error = finish(world.start(until_batch=2), code=1)
    assert "is not a complete checkpoint: it has no manifest.json; resume from the one" in error


def test_a_changed_moment_is_refused_before_anything_is_trained(tmp_path):
    world = World.create(tmp_path)
    admission = world.admit(1, world.record(range(4)))
    job = world.start(until_batch=1)
    world.accept(1, admission, world.wait_for(job, "scores", f"admission = {admission}"))
    steps = world.wait_for(job, "steps", "batch = 1")
    world.trained(1, steps)
    finish(job)
    (shard,) = (world.store / steps.to_pylist()[-1]["checkpoint"]).glob("*.safetensors")
    with safe_open(shard, "pt") as file:
        moment = file.get_tensor("exp_avg.model.norm.weight").numpy().tobytes()
    data = shard.read_bytes()
    assert data.count(moment) == 1
    shard.write_bytes(data.replace(moment, bytes([moment[0] ^ 1]) + moment[1:]))
    world.admit(2, world.record(range(4, 8)))
    error = finish(world.start(until_batch=2), code=1)
    assert f"{shard} does not have the hash that its manifest.json gives" in error
    assert len(world.written("steps", "true")) == 2 and len(world.written("scores", "true")) == 32


def test_a_job_in_float16_says_its_loss_scale(tmp_path):
    world = World.create(tmp_path, compute_dtype="float16", activation_checkpointing=True)
    scores, steps = _train_one(world, 1, world.record(range(4)))
    rows = steps.to_pylist()
    assert [row["compute_dtype"] for row in rows] == ["float16", "float16"]
    assert [dict(row["metrics"])["update/loss_scale"] for row in rows] == [65536.0, 65536.0]
    manifest = read_manifest(world.store / rows[-1]["checkpoint"])
    assert manifest["loss_scale"] == {"dynamic": True, "value": 65536.0, "num_finite": 2}
    # Sampled in float32: what is left is float16's rounding, 2^-11 of numbers of about 1.
    segments = world.lake.read("segments", run_id="tiny", where="kind = 'action'").to_pylist()
    sampled = [value for row in segments for value in row["rollout_logprobs"]]
    old = [value for row in scores.to_pylist() for value in row["old_logprobs"]]
    assert 1e-5 < (torch.tensor(old) - torch.tensor(sampled)).abs().mean() < 10 * 2**-11
