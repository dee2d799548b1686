"""Run by torchrun: three optimizer steps on fixed data, and what came of them.

    rank_worker.py POLICY OUT [CHECKPOINT]

Writes the gradients of two objectives at the first step, the masters after the last and a
checkpoint to OUT. With CHECKPOINT it starts from there instead of the policy's weights.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from trainers import checkpoint, ranks
from trainers.losses import ClipRange
from trainers.optimizer import AdamWSettings, MasterAdamW
from trainers.packing import TrainingSequence
from trainers.policy import Policy
from trainers.recorded_experts import MISSING
from trainers.scoring import forward
from trainers.truncation import Truncation
from trainers.update import Objective, TokenData, accumulate_gradients

SETTINGS = AdamWSettings(
    beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.01, max_gradient_norm=1.0
)
TOKEN_BUDGET = 40


def data():
    """21 sequences of two turns each, of which three share five tokens, two of them actions;
    per-token values of their action tokens."""
    generator = torch.Generator().manual_seed(11)
    starts = torch.randint(0, 32, (7, 5), generator=generator)
    sequences = []
    for number in range(21):
        length = int(torch.randint(8, 24, (), generator=generator))
        mask = torch.zeros(length, dtype=torch.bool)
        mask[3:5] = mask[7:] = True
        ids = torch.randint(0, 32, (length,), generator=generator)
        ids[:5] = starts[number // 3]
        sequences.append(TrainingSequence(ids, mask))
    count = sum(int(sequence.action_mask.sum()) for sequence in sequences)
    advantages = torch.randn(count, generator=generator)
    weights = torch.rand(count, generator=generator) * 2
    return sequences, advantages, weights


def routed(sequences, layers):
    """With experts for every token but each sequence's last two; of three sequences that share
    tokens, the first two share their experts, and the third does up to the third token."""
    generator = torch.Generator().manual_seed(12)
    with_experts = []
    for number, sequence in enumerate(sequences):
        scores = torch.rand(
            len(sequence.token_ids), len(layers.places), layers.num_experts, generator=generator
        )
        experts = scores.topk(layers.top_k).indices.sort(-1).values.to(torch.int16)
        if number % 3 == 0:
            shared = experts[:5].clone()
        num_alike = (5, 5, 3)[number % 3]
        experts[:num_alike] = shared[:num_alike]
        experts[-2:] = MISSING
        with_experts.append(replace(sequence, experts=experts))
    return with_experts


def main() -> None:
    policy_folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    device = ranks.start(num_threads=1)
    policy = Policy(policy_folder, torch.float32, device, routing_replay=True)
    optimizer = MasterAdamW(policy, SETTINGS)
    if len(sys.argv) > 3:
        checkpoint.load(Path(sys.argv[3]), optimizer)
    else:
        optimizer.load(load_file(policy_folder / "model.safetensors").items(), "policy")
    sequences, advantages, weights = data()
    if policy.routed_layers is not None:
        sequences = routed(sequences, policy.routed_layers)
    temperatures = torch.full_like(advantages, 0.8)
    # Every other token is sampled from a nucleus.
    odd = torch.arange(len(advantages)) % 2
    truncation = Truncation(torch.zeros_like(odd), 1 - 0.1 * odd, torch.zeros_like(advantages))
    old, entropies = forward(policy, sequences, temperatures, truncation, TOKEN_BUDGET)
    ids = torch.repeat_interleave(torch.tensor([int(s.action_mask.sum()) for s in sequences]))
    tokens = TokenData(old, advantages, weights, ids, ids // 3, temperatures, truncation)
    objective = Objective("ppo_clip", ClipRange(0.2, 0.2))
    kept = {"old": old, "entropies": entropies}
    by_sequence = Objective(
        "gspo", ClipRange(0.2, 0.2), "group", kl_coefficient=0.1, entropy_coefficient=0.1
    )
    reference = (old - 0.2 * advantages.abs()).clamp(max=0.0)
    penalised = replace(tokens, reference_logprobs=reference)
    accumulate_gradients(policy, sequences, penalised, by_sequence, TOKEN_BUDGET)
    for name, parameter in policy.parameters.items():
        kept[f"by_sequence.{name}"] = parameter.grad.full_tensor().clone()
        parameter.grad = None
    for step in range(3):
        report = accumulate_gradients(policy, sequences, tokens, objective, TOKEN_BUDGET)
        kept[f"loss.{step}"] = torch.tensor(report.loss)
        if step == 0:
            for name, value in report.routing.items():
                kept[name] = torch.tensor(value)
            for name, parameter in policy.parameters.items():
                kept[f"gradient.{name}"] = parameter.grad.full_tensor().clone()
        kept[f"norm.{step}"] = torch.tensor(optimizer.step(1e-3))
    for name, value in optimizer.sharded_state().items():
        kept[name] = value.full_tensor().clone()
    checkpoint.save(out / "checkpoint", optimizer, batch=1)
    if dist.get_rank() == 0:
        save_file(kept, out / "kept.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
