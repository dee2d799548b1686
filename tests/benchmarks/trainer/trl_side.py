"""The update of TRL's GRPO trainer, with rollouts given instead of generated.

Prompts are padded on the left and completions on the right, and all go through the model in one
batch, as TRL does. The loss is its "dapo", the mean of the clipped surrogate over the tokens of the
minibatch; observations between turns are masked by its `tool_mask`. Float32 and without gradient
checkpointing, as the other sides.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from tests.benchmarks.trainer.shapes import CLIP, MAX_GRADIENT_NORM, Minibatch


class GivenRollouts(GRPOTrainer):
    """Trains on the batch it is given."""

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        return generation_batch


class TrlSide:
    def __init__(self, folder: Path):
        words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
        )
        config = GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=2,
            num_generations=2,
            beta=0.0,
            epsilon=CLIP,
            loss_type="dapo",
            temperature=1.0,
            learning_rate=0.0,
            weight_decay=0.0,
            max_grad_norm=MAX_GRADIENT_NORM,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            report_to=[],
        )
        self.trainer = GivenRollouts(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=config,
            train_dataset=Dataset.from_list([{"prompt": "<unk>"}] * 2),
            processing_class=tokenizer,
        )
        self.trainer.create_optimizer()
        self.trainer.current_gradient_accumulation_steps = 1
        self.model = self.trainer.model

    def prepare(self, minibatch: Minibatch) -> None:
        sequences = list(zip(minibatch.ids, minibatch.masks, minibatch.prompt_lengths, strict=True))
        prompts = [ids[:length] for ids, _, length in sequences]
        completions = [ids[length:] for ids, _, length in sequences]
        trained = [mask[length:] for _, mask, length in sequences]

        def left(rows: list[Tensor]) -> Tensor:
            return pad_sequence(rows, batch_first=True, padding_side="left")

        def right(rows: list[Tensor]) -> Tensor:
            return pad_sequence(rows, batch_first=True)

        # Old log-probabilities lie at the action tokens of their sequence.
        old = torch.zeros(len(trained), max(len(mask) for mask in trained))
        old[right(trained)] = minibatch.old_logprobs
        first_actions = minibatch.action_counts.cumsum(0) - minibatch.action_counts
        self.inputs = {
            "prompt_ids": left(prompts),
            "prompt_mask": left([torch.ones_like(ids) for ids in prompts]),
            "completion_ids": right(completions),
            "completion_mask": right([torch.ones_like(ids) for ids in completions]),
            "tool_mask": right([mask.long() for mask in trained]),
            "old_per_token_logps": old,
            "advantages": minibatch.advantages[first_actions],
            "num_items_in_batch": minibatch.action_counts.sum(),
        }

    def backward(self) -> None:
        self.trainer.training_step(self.model, self.inputs, None)

    def step(self) -> None:
        self.trainer.accelerator.clip_grad_norm_(self.model.parameters(), MAX_GRADIENT_NORM)
        self.trainer.optimizer.step()
        self.model.zero_grad()

    def gradients(self) -> dict[str, Tensor]:
        return {n: p.grad.clone() for n, p in self.model.named_parameters()}
