"""Forward passes over the slots: prefill new rows, decode one token for every active row.

Knows tensors and slots, and nothing of requests, versions or sampling. Prompts are padded on the
right: with causal attention no real token sees a pad, so a prefill needs no mask and takes the fast
kernel, and the columns a pad wrote are masked in decoding until a real token overwrites them.

Shapes: M rows in prefill, N active rows, P padded prompt length, V vocabulary; L routed layers and
K experts a token of a mixture.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from tasks.engines.expert_recorder import ExpertRecorder
from tasks.engines.kv_cache import SlotCache

# Bounds the activations of one prefill pass, whatever is queued.
_MAX_PREFILL_TOKENS = 8192


class ModelRunner:
    """One cache, and the passes that fill it. The model is an argument: it changes in flight.

    Every model given to it has been attached to `experts`.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        num_slots: int,
        capacity: int,
        dtype: torch.dtype,
        experts: ExpertRecorder,
    ) -> None:
        num_layers = config.get_text_config().num_hidden_layers
        self._cache = SlotCache(num_layers, num_slots, capacity)
        self._dtype = dtype
        self._experts = experts

    @torch.inference_mode()
    def prefill(
        self, model: PreTrainedModel, first_row: int, prompts: Sequence[tuple[int, ...]]
    ) -> tuple[Tensor, list[int], list[np.ndarray] | None]:
        """Fill rows from `first_row` on, computing equal prompts once.

        Returns:
            Logits [M, V] after the last token of each prompt; for each prompt the number of its
            tokens that another row's computation covered, none or all of them; and for each prompt
            the experts of its tokens, [len(prompt), L, K], or None for a dense model.
        """
        rank = {prompt: index for index, prompt in enumerate(dict.fromkeys(prompts))}
        distinct, source = list(rank), [rank[prompt] for prompt in prompts]
        logits: list[Tensor] = []
        experts: list[np.ndarray] = []
        for start, end in _chunks([len(prompt) for prompt in distinct]):
            self._cache.begin_prefill(first_row + start)
            logits.append(self._prefill_chunk(model, distinct[start:end]))
            experts += self._prompt_experts(distinct[start:end])
        if len(distinct) < len(prompts):
            target = list(range(first_row, first_row + len(prompts)))
            num_columns = max(len(prompt) for prompt in distinct)
            self.copy_rows([first_row + index for index in source], target, num_columns)
        computed: set[int] = set()
        num_cached = []
        for prompt, index in zip(prompts, source, strict=True):
            num_cached.append(len(prompt) if index in computed else 0)
            computed.add(index)
        by_prompt = [experts[index] for index in source] if experts else None
        return torch.cat(logits)[source], num_cached, by_prompt

    def _prompt_experts(self, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """[len(prompt), L, K] of each prompt of the pass that just ended, without its padding."""
        taken = self._experts.take()
        if taken is None:
            return []
        padded = taken.reshape(len(prompts), -1, *taken.shape[1:])
        return [rows[: len(prompt)] for rows, prompt in zip(padded, prompts, strict=True)]

    def _prefill_chunk(self, model: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> Tensor:
        padded_length = max(len(prompt) for prompt in prompts)
        token_ids = torch.tensor(
            [[*prompt, *([0] * (padded_length - len(prompt)))] for prompt in prompts]
        )
        last = torch.tensor([len(prompt) - 1 for prompt in prompts])
        # The head runs at every distinct last position of the chunk, far fewer than all positions.
        positions, inverse = last.unique(return_inverse=True)
        output = model(
            input_ids=token_ids,
            position_ids=torch.arange(padded_length)[None].expand(len(prompts), -1),
            cache=self._cache,
            use_cache=True,
            logits_to_keep=positions,
        )
        return output.logits[torch.arange(len(prompts)), inverse]

    @torch.inference_mode()
    def decode(
        self, model: PreTrainedModel, token_ids: Sequence[int], lengths: Sequence[int]
    ) -> tuple[Tensor, np.ndarray | None]:
        """One more token on each of the first N rows, `lengths` long so far.

        Returns:
            Logits [N, V] after it, and its experts [N, L, K], or None for a dense model.
        """
        positions = torch.tensor(lengths)
        attends = self._cache.begin_decode(positions)
        mask = torch.zeros(attends.shape, dtype=self._dtype).masked_fill_(~attends, -torch.inf)
        output = model(
            input_ids=torch.tensor(token_ids)[:, None],
            position_ids=positions[:, None],
            attention_mask=mask[:, None, None],
            cache=self._cache,
            use_cache=True,
        )
        return output.logits[:, 0], self._experts.take()

    @torch.inference_mode()
    def copy_rows(self, source: list[int], target: list[int], num_columns: int) -> None:
        """Copy rows `source`, which hold at most `num_columns` tokens, over rows `target`."""
        self._cache.copy_rows(source, target, num_columns)


def _chunks(prompt_lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Consecutive [start, end) ranges whose padded size stays within the token bound."""
    start, longest = 0, 0
    for index, length in enumerate(prompt_lengths):
        longest = max(longest, length)
        if index > start and (index + 1 - start) * longest > _MAX_PREFILL_TOKENS:
            yield start, index
            start, longest = index, length
    yield start, len(prompt_lengths)
