"""What routing replay is for: an engine in bfloat16 and a trainer in float32 route alike.

The engine is the torch engine, whose record is read from the lake's rows; the scores are the
trainer's. Run with `-s` to see the figures.
"""

import asyncio
import math
from dataclasses import replace

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from schemas.tables import TABLES
from tasks.engines.protocol import Request
from tasks.routed_tokens import RoutedTokens
from tasks.weights.hashing import root_hash
from tests.engine_models import PLAIN, Published, attached, generate_all, prompts, publish
from trainers.optimizer import AdamWSettings, MasterAdamW
from trainers.packing import TrainingSequence
from trainers.policy import Policy
from trainers.recorded_experts import recorded_experts
from trainers.scoring import forward
from trainers.truncation import Truncation

NUM_ROLLOUTS = 48
MAX_TOKENS = 40
EXPERT_SCALE = 3.0
"""Experts that say this much more, so that it matters which of them speak."""
SHAPE = {"num_hidden_layers": 4, "num_experts": 32, "num_experts_per_tok": 2}


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Published:
    folder = tmp_path_factory.mktemp("mixture")
    publish(folder, "qwen3_moe", **SHAPE)
    values = load_file(folder / "model.safetensors")
    for name in values:
        if ".experts." in name:
            values[name] = values[name] * EXPERT_SCALE
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return Published(folder, root_hash(values), model)


@pytest.fixture(scope="module")
def sampled(published):
    calls = [
        Request(f"r{i}", prompt, replace(PLAIN, max_tokens=MAX_TOKENS, seed=i), ())
        for i, prompt in enumerate(prompts(NUM_ROLLOUTS, seed=3))
    ]

    async def main():
        engine = await attached(published, num_slots=NUM_ROLLOUTS, compute_dtype="bfloat16")
        return await generate_all(engine, calls)

    return list(zip(calls, asyncio.run(main()), strict=True))


def _sequence(call, generation, layers):
    """One rollout as a recorder writes it and a trainer reads it."""
    num_prompt = len(call.token_ids)
    key = {"trajectory_id": "a", "sequence_index": 0}
    segments = [
        {**key, "segment_index": 0, "start_position": 0, "token_ids": list(call.token_ids)},
        {
            **key,
            "segment_index": 1,
            "start_position": num_prompt,
            "token_ids": list(generation.token_ids),
        },
    ]
    routed = RoutedTokens()
    routed.add(generation.routing, num_prompt, len(generation.token_ids))
    experts = recorded_experts(
        pa.Table.from_pylist(routed.rows(segments), TABLES["routing"].own_schema),
        pa.Table.from_pylist(segments, TABLES["segments"].own_schema),
        layers,
    )
    ids = torch.tensor([*call.token_ids, *generation.token_ids])
    return TrainingSequence(ids, torch.arange(len(ids)) >= num_prompt, experts)


def test_replay_cuts_tokens_off_by_a_factor_of_two(one_rank, published, sampled):
    policy = Policy(published.path, torch.float32, torch.device("cpu"), routing_replay=True)
    settings = AdamWSettings(
        beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.0, max_gradient_norm=1.0
    )
    values = load_file(published.path / "model.safetensors")
    MasterAdamW(policy, settings).load(values.items(), "the mixture")
    replayed = [_sequence(call, done, policy.routed_layers) for call, done in sampled]
    rollout = torch.tensor([value for _, done in sampled for value in done.logprobs])
    one, zero = torch.ones_like(rollout), torch.zeros_like(rollout)
    shares, means = [], []
    for sequences in ([replace(s, experts=None) for s in replayed], replayed):
        truncation = Truncation(zero.long(), one, zero)
        old, _ = forward(policy, sequences, one, truncation, token_budget=1024)
        delta = (old - rollout).abs()
        shares.append(float((delta > math.log(2)).double().mean()))
        means.append(float(delta.mean()))
    print(
        f"{len(rollout)} tokens off by more than a factor of two: {shares[0]:.2%} without replay, "
        f"{shares[1]:.2%} with; mean |log pi - log mu| {means[0]:.4f} and {means[1]:.4f}"
    )
    assert len(rollout) == NUM_ROLLOUTS * MAX_TOKENS
    assert shares[0] >= 0.02
    assert shares[1] <= shares[0] / 5
    assert means[1] < means[0] / 2
