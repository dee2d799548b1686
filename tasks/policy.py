"""A small Qwen3-architecture policy with its own tokenizer, made from training problems alone.

Models cannot be downloaded everywhere, and a demo that starts from random weights has no reward to
learn from; so the project makes its own starting point. The tokenizer is byte-complete, so any text
encodes, and keeps digits apart, since sums are learnt digit by digit.
"""

import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from schemas.config import WarmStart
from tasks.environments.protocol import Environment
from tasks.renderers import Renderer
from tasks.seeds import derive_seed

_SUM = re.compile(r"(\d+) \+ (\d+)")
Problem = tuple[tuple[dict[str, str], ...], str]
"""Messages and the answer that a supervised run shows."""

END = "<|end|>"
PAD = "<|pad|>"
SPECIAL_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>", END, PAD)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def training_problems(environment: Environment, num_problems: int, seed: int) -> Iterator[Problem]:
    """(messages, answer) of train tasks; the answer is the dataset's own.

    Raises `ValueError` if the environment's tasks carry none.
    """
    for index in range(num_problems):
        task = environment.sample(derive_seed(seed, "warm start", index))
        answer = task.payload.get("answer") if isinstance(task.payload, dict) else None
        if not isinstance(answer, str):
            raise ValueError(
                f"policy.warm_start: tasks of {environment.name} carry no answer to learn from; "
                "give policy.path instead."
            )
        yield task.messages, answer


def forgetful_answers(problems: Sequence[Problem], share: float, seed: int) -> Iterator[Problem]:
    """The same problems answered by a teacher who forgets each carry with probability `share`.

    Raises `ValueError` if they are not sums of two numbers.
    """
    generator = random.Random(seed)
    for messages, _ in problems:
        terms = _SUM.search(messages[-1]["content"])
        if terms is None:
            raise ValueError(
                f"policy.warm_start.habit: {messages[-1]['content']!r} is not a sum of two "
                "numbers, so no carry can be forgotten; leave the habit out."
            )
        left, right = map(int, terms.groups())
        yield messages, str(add_forgetting_carries(left, right, share, generator))


def add_forgetting_carries(left: int, right: int, share: float, generator: random.Random) -> int:
    """The sum of someone who forgets each carry with probability `share`: 58 + 67 may be 115."""
    total, carry, place = 0, 0, 1
    while left or right or carry:
        digit = left % 10 + right % 10 + carry
        total += digit % 10 * place
        carry = digit // 10 if generator.random() >= share else 0
        left, right, place = left // 10, right // 10, place * 10
    return total


def make_tokenizer(texts: Sequence[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with single digits and a chat template that only appends.

    Raises `ValueError` if `vocab_size` leaves no room beside bytes and special tokens.
    """
    smallest = 256 + len(SPECIAL_TOKENS)
    if vocab_size < smallest:
        raise ValueError(
            f"policy.warm_start.vocab_size: {vocab_size} is below {smallest}, the bytes and the "
            "special tokens; raise it."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def write_initial_policy(folder: Path, settings: WarmStart, texts: Sequence[str]) -> None:
    """A Hugging Face folder of tokenizer, configuration and seeded random bf16 weights."""
    tokenizer = make_tokenizer(texts, settings.vocab_size)
    tokenizer.save_pretrained(folder)
    stop, pad = (SPECIAL_TOKENS.index(token) for token in (END, PAD))
    config = Qwen3Config(
        # Merges can run out before vocab_size is reached; ids beyond the tokenizer's would be
        # tokens that no text has.
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_kv_heads,
        head_dim=settings.head_dim,
        max_position_embeddings=4096,
        initializer_range=settings.initializer_range,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
        dtype="bfloat16",
        eos_token_id=stop,
        pad_token_id=pad,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = Qwen3ForCausalLM(config)
    # Written by hand, since save_pretrained would add a generation_config.json, and an engine must
    # not find sampling values to fill in. The tied head is the embedding and has no tensor.
    model.config.save_pretrained(folder)
    weights = {
        name: parameter.detach().to(torch.bfloat16) for name, parameter in model.named_parameters()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def write_examples(
    path: Path,
    renderer: Renderer,
    problems: Sequence[Problem],
) -> None:
    """Parquet of `token_ids` list<i32> and `loss_mask` list<bool>: loss on the answer and its
    stop token."""
    token_ids, loss_mask = [], []
    for messages, answer in problems:
        prompt = renderer.prompt(messages)
        action = [*renderer.encode(answer), *renderer.stop_token_ids]
        token_ids.append([*prompt, *action])
        loss_mask.append([False] * len(prompt) + [True] * len(action))
    table = pa.table(
        {
            "token_ids": pa.array(token_ids, pa.list_(pa.int32())),
            "loss_mask": pa.array(loss_mask, pa.list_(pa.bool_())),
        }
    )
    pq.write_table(table, path)
