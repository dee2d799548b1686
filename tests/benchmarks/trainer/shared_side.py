"""This project's update: every token once, prefixes shared, in one row."""

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from tests.benchmarks.trainer.shapes import CLIP, MAX_GRADIENT_NORM, Minibatch
from trainers.losses import ClipRange
from trainers.optimizer import AdamWSettings, MasterAdamW
from trainers.packing import TrainingSequence
from trainers.policy import Policy
from trainers.truncation import Truncation
from trainers.update import Objective, TokenData, accumulate_gradients

BUDGET = 1 << 20
OBJECTIVE = Objective("ppo_clip", ClipRange(CLIP, CLIP))


class SharedSide:
    activation_checkpointing = False

    def __init__(self, folder: Path):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.policy = Policy(
            folder,
            torch.float32,
            torch.device("cpu"),
            activation_checkpointing=self.activation_checkpointing,
        )
        self.optimizer = MasterAdamW(
            self.policy, AdamWSettings(0.9, 0.999, 1e-8, 0.0, MAX_GRADIENT_NORM)
        )
        self.optimizer.load(load_file(folder / "model.safetensors").items(), str(folder))

    def prepare(self, minibatch: Minibatch) -> None:
        self.sequences = [
            TrainingSequence(*pair) for pair in zip(minibatch.ids, minibatch.masks, strict=True)
        ]
        ids = torch.repeat_interleave(minibatch.action_counts)
        ones = torch.ones(len(ids))
        self.data = TokenData(
            old_logprobs=minibatch.old_logprobs,
            advantages=minibatch.advantages,
            weights=ones,
            sequence_ids=ids,
            group_ids=torch.zeros_like(ids),
            temperatures=ones,
            truncation=Truncation(torch.zeros_like(ids), ones, torch.zeros_like(ones)),
        )

    def backward(self) -> None:
        accumulate_gradients(self.policy, self.sequences, self.data, OBJECTIVE, BUDGET)

    def step(self) -> None:
        self.optimizer.step(0.0)

    def gradients(self) -> dict[str, Tensor]:
        return {n: p.grad.full_tensor() for n, p in self.policy.parameters.items()}
