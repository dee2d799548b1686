"""The updates that are measured: a tiny policy, and minibatches of three shapes.

A minibatch travels to the workers as one safetensors file of flat tensors: `token_ids` and
`action_mask` over all tokens, `lengths` and `prompt_lengths` of the sequences, and `old_logprobs`
and `advantages` over the action tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

VOCAB = 2048
CLIP = 0.2
MAX_GRADIENT_NORM = 1.0


def write_policy(folder: Path, num_layers: int = 4) -> None:
    """A Hugging Face folder: Qwen3, hidden 256, 2,048 tokens, bf16."""
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=0.05,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.to(torch.bfloat16).save_pretrained(folder)


@dataclass(frozen=True)
class Minibatch:
    """`ids`, `masks` a tensor a sequence; `prompt_lengths` [B]; the others over action tokens."""

    ids: list[Tensor]
    masks: list[Tensor]
    prompt_lengths: list[int]
    old_logprobs: Tensor
    advantages: Tensor

    def save(self, path: Path) -> None:
        save_file(
            {
                "token_ids": torch.cat(self.ids),
                "action_mask": torch.cat(self.masks),
                "lengths": torch.tensor([len(ids) for ids in self.ids]),
                "prompt_lengths": torch.tensor(self.prompt_lengths),
                "old_logprobs": self.old_logprobs,
                "advantages": self.advantages,
            },
            path,
        )

    @classmethod
    def load(cls, path: Path, num_sequences: int | None = None) -> "Minibatch":
        """The whole, or its first sequences."""
        flat = load_file(path)
        lengths = flat["lengths"].tolist()
        ids = list(flat["token_ids"].split(lengths))[:num_sequences]
        masks = list(flat["action_mask"].split(lengths))[:num_sequences]
        num_actions = sum(int(mask.sum()) for mask in masks)
        return cls(
            ids,
            masks,
            flat["prompt_lengths"].tolist()[:num_sequences],
            flat["old_logprobs"][:num_actions],
            flat["advantages"][:num_actions],
        )

    @property
    def action_counts(self) -> Tensor:
        return torch.tensor([int(mask.sum()) for mask in self.masks])


def _minibatch(prompts: list[int], turns: list[list[tuple[int, bool]]], groups: Tensor):
    """Random tokens; old log-probabilities near those of a policy that knows nothing, some of them
    beyond the clip.

    `prompts`: length of each group's prompt; `turns`: (tokens, are they actions) after the prompt,
    of each sequence; `groups`: its group.
    """
    generator = torch.Generator().manual_seed(1)

    def draw(count: int) -> Tensor:
        return torch.randint(0, VOCAB, (count,), generator=generator)

    starts = [draw(length) for length in prompts]
    ids, masks = [], []
    for group, parts in zip(groups.tolist(), turns, strict=True):
        start = starts[group]
        ids.append(torch.cat([start, *(draw(count) for count, _ in parts)]))
        flags = [torch.full((count,), action) for count, action in parts]
        masks.append(torch.cat([torch.zeros(len(start), dtype=torch.bool), *flags]))
    counts = torch.tensor([int(mask.sum()) for mask in masks])
    noise = torch.randn(int(counts.sum()), generator=generator)
    return Minibatch(
        ids,
        masks,
        [prompts[group] for group in groups.tolist()],
        0.2 * noise - float(np.log(VOCAB)),
        torch.randn(len(ids), generator=generator).repeat_interleave(counts),
    )


def prompt_heavy() -> Minibatch:
    """16 responses of 64 tokens to one prompt of 512."""
    return _minibatch([512], [[(64, True)]] * 16, torch.zeros(16, dtype=torch.int64))


def tool_heavy() -> Minibatch:
    """8 trajectories from one prompt of 250: four turns of 25 sampled and 188 observed tokens."""
    turns = [(25, True), (188, False)] * 4
    return _minibatch([250], [turns] * 8, torch.zeros(8, dtype=torch.int64))


def log_normal() -> Minibatch:
    """Four groups of eight, prompts of 64, responses log-normal: median 128, sigma 0.6."""
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.normal(np.log(128), 0.6, 32)).round().astype(int).tolist()
    return _minibatch(
        [64] * 4, [[(length, True)] for length in lengths], torch.arange(4).repeat_interleave(8)
    )


@dataclass(frozen=True)
class Shape:
    """A minibatch and the least speed against TRL that is aimed at."""

    make: Callable[[], Minibatch]
    target: float


SHAPES = {
    "prompt-heavy": Shape(prompt_heavy, 4.5),
    "tool-heavy": Shape(tool_heavy, 1.2),
    "log-normal": Shape(log_normal, 1.8),
}
