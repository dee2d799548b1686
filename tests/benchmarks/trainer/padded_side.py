"""The plain way: transformers on one row a sequence, padded to the longest; logits at action tokens
only, and the same loss."""

from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from tests.benchmarks.trainer.shapes import CLIP, MAX_GRADIENT_NORM, Minibatch
from trainers.losses import LOSSES, ClipRange


class PaddedSide:
    def __init__(self, folder: Path):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.adamw = torch.optim.AdamW(
            self.model.parameters(), lr=0.0, weight_decay=0.0, fused=True
        )

    def prepare(self, minibatch: Minibatch) -> None:
        self.minibatch = minibatch
        self.ids = pad_sequence(minibatch.ids, batch_first=True)
        self.actions = pad_sequence(minibatch.masks, batch_first=True)
        ones = [torch.ones_like(ids) for ids in minibatch.ids]
        self.attention_mask = pad_sequence(ones, batch_first=True)

    def backward(self) -> None:
        hidden = self.model.model(
            input_ids=self.ids[:, :-1], attention_mask=self.attention_mask[:, :-1], use_cache=False
        ).last_hidden_state
        logits = self.model.lm_head(hidden[self.actions[:, 1:]])
        logprobs = logits.log_softmax(-1).gather(1, self.ids[self.actions][:, None])[:, 0]
        values, _ = LOSSES["ppo_clip"](
            logprobs,
            self.minibatch.old_logprobs,
            self.minibatch.advantages,
            torch.repeat_interleave(self.minibatch.action_counts),
            ClipRange(CLIP, CLIP),
        )
        (-values.mean()).backward()

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRADIENT_NORM)
        self.adamw.step()
        self.adamw.zero_grad()

    def gradients(self) -> dict[str, Tensor]:
        return {n: p.grad.clone() for n, p in self.model.named_parameters()}
