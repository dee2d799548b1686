"""Activation checkpointing computes layers again in the backward pass and changes nothing else."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.engine_models import publish
from trainers.packing import TrainingSequence, pack
from trainers.policy import Policy

SEQUENCES = [
    TrainingSequence(torch.arange(1, 13), torch.arange(12) >= 4),
    TrainingSequence(torch.arange(1, 11).roll(3), torch.arange(10) % 3 == 2),
]


def _policy(folder: Path, recomputed: bool, values) -> Policy:
    policy = Policy(
        folder,
        torch.float32,
        torch.device("cpu"),
        routing_replay=True,
        activation_checkpointing=recomputed,
    )
    policy.set_local_values(values)
    return policy


def _sequences(policy: Policy) -> list[TrainingSequence]:
    """Of a mixture with any experts: what layers compute again must be with the same."""
    layers = policy.routed_layers
    if layers is None:
        return SEQUENCES
    generator = torch.Generator().manual_seed(0)
    shape = len(layers.places), layers.num_experts
    return [
        replace(
            sequence,
            experts=torch.rand(len(sequence.token_ids), *shape, generator=generator)
            .topk(layers.top_k)
            .indices.short(),
        )
        for sequence in SEQUENCES
    ]


@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen3_moe"])
def test_layers_run_again_in_the_backward_pass_alone(one_rank, tmp_path, kind):
    published = publish(tmp_path / "policy", kind)
    values = [(n, p.detach()) for n, p in published.model.named_parameters()]
    found = []
    for recomputed in (False, True):
        policy = _policy(published.path, recomputed, values)
        (microbatch,) = pack(_sequences(policy), 64)
        ones = torch.ones(len(microbatch.target_ids))
        assert policy.parameters.keys() == {name for name, _ in values}
        calls = []
        for layer in policy.model.model.layers:
            layer.self_attn.k_proj.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        num_layers = len(policy.model.model.layers)
        with torch.no_grad():
            scored, _ = policy.logprobs(microbatch, ones)
        assert len(calls) == num_layers
        logprobs, entropies = policy.logprobs(microbatch, ones)
        assert torch.equal(logprobs, scored)
        assert len(calls) == 2 * num_layers
        (entropies - logprobs).sum().backward()
        assert len(calls) == (3 if recomputed else 2) * num_layers
        found.append({n: p.grad.to_local() for n, p in policy.parameters.items()})
    kept, again = found
    for name, gradient in kept.items():
        assert gradient.any(), name
        assert torch.equal(again[name], gradient), name
