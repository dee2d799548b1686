"""How far engine and trainer disagree on the same tokens, by what each computes in.

    make bench-precision
    python -m tests.benchmarks.precision FOLDER   # of another policy for the demo's problems

The torch engine samples the demo's warm start, once in float32 and once in bfloat16. float16 is a
dtype of the trainer alone, so for the case that both sides have it, the tokens sampled in float32
are scored by transformers in float16, one sequence at a time. All sides hold the same weights:
delta = log pi_old - log mu is arithmetic and nothing else, and a run would correct it by
w = exp(delta).

The gradient is that of the demo's objective for advantages of +1 and -1 in turn, on the tokens
sampled in float32 with their float32 log-probabilities as old ones, so that only the trainer's
dtype differs.
"""

import asyncio
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from flows.run_file import load_run_file
from tasks.engines.protocol import Request, Sampling
from tasks.engines.torch_engine import TorchEngine
from tasks.environments import make_environment
from tasks.renderers import Renderer
from tasks.warm_start import starting_checkpoint
from tasks.weights.hashing import root_hash
from tests.plain_transformers import action_logits
from trainers.optimizer import AdamWSettings, MasterAdamW
from trainers.packing import TrainingSequence
from trainers.policy import Policy
from trainers.scoring import forward
from trainers.steps import objective_of
from trainers.truncation import Truncation
from trainers.update import TokenData, accumulate_gradients

RUN_FILE = Path(__file__).parents[2] / "infra/runs/demo.toml"
DEMO = load_run_file(RUN_FILE)
NUM_PROMPTS, GROUP_SIZE = 128, 8
DTYPES = ("float32", "bfloat16", "float16")
SETTINGS = AdamWSettings(0.9, 0.95, 1e-8, 0.0, 1.0)


class Rollouts:
    """Tokens, and log mu [N] of each that was sampled."""

    def __init__(self, sequences: Sequence[TrainingSequence], logprobs: Tensor):
        self.sequences, self.logprobs = sequences, logprobs
        counts = torch.tensor([int(sequence.action_mask.sum()) for sequence in sequences])
        self.sequence_ids = torch.repeat_interleave(counts)
        ones = torch.ones_like(logprobs)
        self.ones, zeros = ones, torch.zeros_like(ones)
        self.truncation = Truncation(zeros.long(), ones, zeros)


async def sample(folder: Path, compute_dtype: str) -> Rollouts:
    """Answers of the torch engine, at temperature 1."""
    environment = make_environment(DEMO.environment.name, DEMO.environment.options)
    renderer = Renderer(folder)
    engine = TorchEngine(
        folder,
        num_slots=256,
        max_model_tokens=DEMO.engine.max_model_tokens,
        compute_dtype=compute_dtype,
        num_threads=1,
        engine_id="engine-0",
    )
    weights = root_hash(load_file(folder / "model.safetensors"))
    attestation = await engine.update(0, folder, weights, "wait")
    assert attestation.ok, attestation.reason
    prompts = [renderer.prompt(environment.sample(n).messages) for n in range(NUM_PROMPTS)]
    requests = [
        Request(
            f"{number}-{index}",
            tuple(prompt),
            Sampling(1.0, 1.0, 0, 0.0, DEMO.sampling.max_tokens, number * GROUP_SIZE + index),
            renderer.stop_token_ids,
        )
        for number, prompt in enumerate(prompts)
        for index in range(GROUP_SIZE)
    ]
    answers = await asyncio.gather(*(engine.generate(request) for request in requests))
    await engine.close()
    sequences = []
    for request, answer in zip(requests, answers, strict=True):
        ids = torch.tensor([*request.token_ids, *answer.token_ids])
        mask = torch.arange(len(ids)) >= len(request.token_ids)
        sequences.append(TrainingSequence(ids, mask))
    return Rollouts(sequences, torch.tensor([p for a in answers for p in a.logprobs]))


@torch.no_grad()
def scored_by_transformers(folder: Path, rollouts: Rollouts, dtype: torch.dtype) -> Rollouts:
    """The same tokens, their log-probabilities as transformers has them."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    logprobs = []
    for sequence in rollouts.sequences:
        log_softmax = action_logits(model, sequence).float().log_softmax(-1)
        ids = sequence.token_ids[sequence.action_mask]
        logprobs.append(log_softmax.gather(1, ids[:, None])[:, 0])
    return Rollouts(rollouts.sequences, torch.cat(logprobs))


def loaded(folder: Path, dtype: str) -> tuple[Policy, MasterAdamW]:
    policy = Policy(folder, getattr(torch, dtype), torch.device("cpu"))
    optimizer = MasterAdamW(policy, SETTINGS)
    optimizer.load(load_file(folder / "model.safetensors").items(), str(folder))
    return policy, optimizer


def old_logprobs(policy: Policy, rollouts: Rollouts) -> Tensor:
    """log pi_old [N], as a run scores a batch."""
    logprobs, _ = forward(
        policy,
        rollouts.sequences,
        rollouts.ones,
        rollouts.truncation,
        DEMO.trainer.token_budget,
    )
    return logprobs


def gradient(policy: Policy, rollouts: Rollouts, old: Tensor, scale: float) -> Tensor:
    """Of all parameters, flat."""
    signs = 1.0 - 2.0 * (rollouts.sequence_ids % 2)
    ids = rollouts.sequence_ids
    data = TokenData(
        old, signs, rollouts.ones, ids, ids // GROUP_SIZE, rollouts.ones, rollouts.truncation
    )
    budget = DEMO.trainer.token_budget
    accumulate_gradients(policy, rollouts.sequences, data, objective_of(DEMO), budget, scale)
    parts = []
    for parameter in policy.parameters.values():
        assert parameter.grad is not None
        parts.append(parameter.grad.to_local().flatten() / scale)
        parameter.grad = None
    return torch.cat(parts)


def mismatch(delta: Tensor) -> str:
    size, delta = delta.abs(), delta.double()
    return (
        f"|delta| mean {size.mean():.1e}, p99 {size.quantile(0.99):.1e}, max {size.max():.1e}; "
        f"off by a factor of 2: {100 * (size > math.log(2)).double().mean():.2f} %; "
        f"k3 KL {(delta.expm1() - delta).mean():.1e}"
    )


def main(folders: list[str]) -> None:
    logging.disable_progress_bar()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    folder = Path(folders[0]) if folders else starting_checkpoint(DEMO)
    sides = {f"engine {dtype}": asyncio.run(sample(folder, dtype)) for dtype in DTYPES[:2]}
    exact = sides["engine float32"]
    sides["transformers float16"] = scored_by_transformers(folder, exact, torch.float16)
    gradients: dict[str, Tensor] = {}
    old: Tensor | None = None
    for dtype in DTYPES:
        policy, optimizer = loaded(folder, dtype)
        for side, rollouts in sides.items():
            logprobs = old_logprobs(policy, rollouts)
            old = logprobs if old is None else old
            print(f"{side}, trainer {dtype}: {mismatch(logprobs - rollouts.logprobs)}", flush=True)
        assert old is not None
        gradients[dtype] = gradient(policy, exact, old, optimizer.loss_scale.value)
    reference = gradients["float32"]
    for dtype in DTYPES[1:]:
        difference = float((gradients[dtype] - reference).norm() / reference.norm())
        print(f"gradient in {dtype} against float32: relative L2 {difference:.1e}")
    values = load_file(folder / "model.safetensors").values()
    rounded = sum(int((v.to(torch.float16).float() != v.float()).sum()) for v in values)
    total = sum(v.numel() for v in values)
    print(
        f"context: {len(exact.logprobs)} tokens sampled in float32, "
        f"{len(sides['engine bfloat16'].logprobs)} in bfloat16; "
        f"float16 rounds {rounded} of {total} weights"
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
