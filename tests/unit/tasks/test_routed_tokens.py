"""Rows aligned to segments, by hand and then from a real engine under updates in flight."""

import asyncio

import numpy as np
import pytest

from schemas.config import SamplingSection
from tasks.engines.protocol import Generation, Request, Routing
from tasks.engines.torch_engine import TorchEngine
from tasks.environments.protocol import Task, Verdict
from tasks.lake.lake import Lake
from tasks.lake.lease import take_lease
from tasks.policy import make_tokenizer
from tasks.record import Window, record_rollouts
from tasks.renderers import Renderer
from tasks.rollout import Rollout, RolloutContext, sample_group
from tasks.routed_tokens import RoutedTokens
from tests.engine_models import attached, publish, recomputed_experts, turn_loop
from tests.factories import GATE1_LIMITS

VOCAB = 300


def routing(*values: int, dtype=np.uint8, layers: int = 1) -> Routing:
    """One row a value: [value, value + 1] in each layer."""
    rows = [[[value, value + 1]] * layers for value in values]
    return Routing(np.array(rows, dtype).reshape(len(values), layers, 2))


def segment(index: int, start: int, length: int) -> dict:
    return {
        "trajectory_id": "t",
        "sequence_index": 0,
        "segment_index": index,
        "start_position": start,
        "token_ids": [0] * length,
    }


def first_experts(tokens: RoutedTokens, *segments: dict) -> dict[int, list[int]]:
    return {
        row["segment_index"]: list(row["experts"][:: 2 * row["num_layers"]])
        for row in tokens.rows(segments)
    }


def test_a_row_is_the_first_one_reported_and_the_last_token_gets_its_own_from_the_next_request():
    tokens = RoutedTokens()
    # Prompt 0-2, action 3-4; an abort; the same turn goes on with 5-6; observation 7; action 8.
    tokens.add(routing(10, 11, 12, 13), num_prompt=3, num_output=2)
    tokens.add(routing(20, 21, 22, 23, 24, 25), num_prompt=5, num_output=2)
    tokens.add(routing(30, 31, 32, 33, 34, 35, 36, 37), num_prompt=8, num_output=1)
    parts = segment(0, 0, 3), segment(1, 3, 2), segment(2, 5, 2), segment(3, 7, 1), segment(4, 8, 1)
    assert first_experts(tokens, *parts) == {
        0: [10, 11, 12],
        1: [13, 24],
        2: [25, 36],
        3: [37],
    }


def test_a_request_that_sampled_nothing_leaves_its_positions_to_the_next():
    tokens = RoutedTokens()
    tokens.add(None, num_prompt=3, num_output=0)
    tokens.add(routing(10, 11), num_prompt=3, num_output=0)
    tokens.add(routing(20, 21, 22), num_prompt=3, num_output=1)
    assert first_experts(tokens, segment(0, 0, 3), segment(1, 3, 1)) == {0: [20, 21, 22]}


@pytest.mark.parametrize("short", [routing(10, 11), None])
def test_rows_that_a_request_left_out_are_not_filled_in_by_another(short):
    tokens = RoutedTokens()
    tokens.add(short, num_prompt=2, num_output=2)
    tokens.add(routing(20, 21, 22, 23, 24), num_prompt=5, num_output=1)
    expected = {} if short is None else {0: [10, 11]}
    assert first_experts(tokens, segment(0, 0, 2), segment(1, 2, 2), segment(2, 4, 1)) == expected


def test_rows_are_stored_row_major_and_little_endian():
    tokens = RoutedTokens()
    tokens.add(routing(256, 1, dtype=np.uint16, layers=2), num_prompt=2, num_output=1)
    (row,) = tokens.rows([segment(0, 0, 2)])
    assert row["experts"] == bytes([0, 1, 1, 1, 0, 1, 1, 1, 1, 0, 2, 0, 1, 0, 2, 0])
    assert (row["num_rows"], row["num_layers"], row["top_k"], row["dtype"]) == (2, 2, 2, "uint16")


def test_another_model_in_the_middle_of_a_rollout_is_refused():
    for other in (routing(1, 2, 3, layers=2), routing(1, 2, 3, dtype=np.uint16)):
        tokens = RoutedTokens()
        tokens.add(routing(1, 2), num_prompt=2, num_output=1)
        with pytest.raises(ValueError, match="serve one model in a run"):
            tokens.add(other, num_prompt=3, num_output=1)


class ThreeTurns:
    """Answers are never right; the third ends the rollout."""

    name = "three_turns"

    def sample(self, seed: int) -> Task:
        return Task("task", self.name, "train", ({"role": "user", "content": "2+2="},), None)

    def heldout(self, num_tasks: int) -> list[Task]:
        return []

    def verify(self, task: Task, answer: str, turn_index: int) -> Verdict:
        return Verdict(0.0, {}, turn_index == 2, "no")


class Remembering(TorchEngine):
    """Keeps what was asked and answered, and by which version it was asked."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.calls: list[tuple[Request, Generation]] = []

    async def generate(self, request: Request) -> Generation:
        generation = await super().generate(request)
        self.calls.append((request, generation))
        return generation


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    folders = [tmp_path_factory.mktemp(name) for name in ("old", "new")]
    published = [
        publish(folder, "qwen3_moe", seed=seed, vocab_size=VOCAB, max_position_embeddings=256)
        for seed, folder in enumerate(folders)
    ]
    make_tokenizer(["2+2=", "no"], VOCAB).save_pretrained(folders[0])
    return published


async def rollouts_under_an_abort(policies) -> tuple[Remembering, list[Rollout], dict]:
    old, new = policies
    engine = Remembering(
        old.path, num_slots=4, max_model_tokens=160, num_threads=1, engine_id="torch-0"
    )
    await engine.update(0, old.path, old.root_hash, "wait")
    environment, renderer = ThreeTurns(), Renderer(old.path)
    context = RolloutContext(engine, environment, renderer, 7)
    sampling = SamplingSection(max_tokens=16)
    group = asyncio.create_task(sample_group(context, environment.sample(0), sampling, 0, 4))
    await turn_loop(60)
    assert (await engine.update(1, new.path, new.root_hash, "abort")).ok
    rollouts = await group
    description = engine.describe()
    limits = {
        **GATE1_LIMITS,
        "vocab_size": VOCAB,
        "max_tokens": 16,
        "max_model_tokens": description.max_model_tokens,
        "stop_token_ids": renderer.stop_token_ids,
        "run_seed": context.run_seed,
        "engine": description.engine,
        "tokenizer_sha256": renderer.tokenizer_sha256,
        "chat_template_sha256": renderer.chat_template_sha256,
        "num_experts": description.num_experts,
        "num_routed_layers": description.num_routed_layers,
        "num_experts_per_token": description.num_experts_per_token,
    }
    return engine, rollouts, limits


def expected_rows(models, rollout: Rollout, calls) -> np.ndarray:
    """For each position the row of the request that sampled the token after it, or, before the
    first action, of the first request: each from a plain forward pass over that request alone."""
    name = rollout.trajectory["trajectory_id"]
    rows: dict[int, np.ndarray] = {}
    for request, generation in calls:
        if request.request_id.split("/")[0] != name:
            continue
        (version,) = {span.weight_version for span in generation.spans}
        tokens = (*request.token_ids, *generation.token_ids)
        fresh = recomputed_experts(models[version], tokens[:-1])
        sampled = range(len(request.token_ids) - 1, len(tokens) - 1)
        context = range(max(rows, default=-1) + 1, len(request.token_ids))
        rows |= {position: fresh[position] for position in (*context, *sampled)}
    return np.stack([rows[position] for position in sorted(rows)])


def test_a_rollout_of_turns_and_aborts_is_recorded_with_the_rows_that_drew_its_tokens(
    policies, tmp_path
):
    engine, rollouts, limits = asyncio.run(rollouts_under_an_abort(policies))
    assert any(request["finish_reason"] == "abort" for r in rollouts for request in r.requests)
    models = [published.model for published in policies]
    first_reported_matters = False
    for rollout in rollouts:
        expected = expected_rows(models, rollout, engine.calls)
        rows = {row["segment_index"]: row for row in rollout.routing}
        assert len(expected) == rollout.trajectory["num_tokens"] - 1
        for part in rollout.segments:
            start = part["start_position"]
            wanted = expected[start : start + len(part["token_ids"])].astype(np.uint8)
            assert rows[part["segment_index"]]["num_rows"] == len(wanted)
            assert rows[part["segment_index"]]["experts"] == wanted.tobytes()
        tokens = [token for part in rollout.segments for token in part["token_ids"]]
        newest = recomputed_experts(models[1], tokens[:-1])
        first_reported_matters |= not np.array_equal(newest, expected)
    assert first_reported_matters

    lake = Lake.create(tmp_path / "lake")
    ledger = lake.ledger("run")
    ledger.append("run_created", lease=0, cycle=0)
    lease = take_lease(ledger)
    recorded = record_rollouts(
        lake, Window.of(rollouts), limits, run_id="run", cycle=0, lease=lease, scope="test"
    )
    assert recorded.judgement.ok, recorded.judgement.reason
    assert not recorded.quarantined
    assert lake.read("routing", run_id="run").num_rows == 0
    ledger.append("rollouts_recorded", lease=lease, write_ids=list(recorded.write_ids))
    stored = lake.read("routing", run_id="run").to_pylist()
    fields = ("trajectory_id", "segment_index", "num_rows", "experts")
    assert {tuple(row[name] for name in fields) for row in stored} == {
        tuple(row[name] for name in fields) for r in rollouts for row in r.routing
    }


def test_a_dense_policy_writes_no_routing(tmp_path):
    dense = publish(tmp_path, vocab_size=VOCAB, max_position_embeddings=256)
    make_tokenizer(["2+2="], VOCAB).save_pretrained(tmp_path)

    async def main():
        engine = await attached(dense, max_model_tokens=160)
        context = RolloutContext(engine, ThreeTurns(), Renderer(tmp_path), 7)
        return await sample_group(
            context, ThreeTurns().sample(0), SamplingSection(max_tokens=4), 0, 2
        )

    rollouts = asyncio.run(main())
    assert [rollout.routing for rollout in rollouts] == [[], []]
    assert Window.of(rollouts).routing.num_rows == 0
