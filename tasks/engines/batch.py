"""The requests that decode together: one step of prefill, decoding, sampling and finishing.

Invariant: `entries[i]` owns row i of the cache, so the rows in use are always the first ones.

Shapes: N rows, V vocabulary.
"""

import time
from collections.abc import Collection

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tasks.engines.model_runner import ModelRunner
from tasks.engines.protocol import FinishReason
from tasks.engines.running import Running
from tasks.engines.sampling import draw, processed_logprobs


class Batch:
    """Running requests in row order, over the cache of one `ModelRunner`."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.entries: list[Running] = []

    def step(self, model: PreTrainedModel, version: int, admitted: list[Running]) -> None:
        """Prefill the admitted requests together, then decode one token for every row."""
        first_row = len(self.entries)
        self.entries += admitted
        if admitted:
            now_s = time.perf_counter()
            prompts = [entry.request.token_ids for entry in admitted]
            logits, num_cached, experts = self._runner.prefill(model, first_row, prompts)
            for entry, num_cached_tokens in zip(admitted, num_cached, strict=True):
                entry.admit(now_s, num_cached_tokens)
            if experts is not None:
                for entry, rows in zip(admitted, experts, strict=True):
                    entry.routed(rows)
            self._sample(admitted, logits, version)
        if self.entries:
            last_ids = [entry.token_ids[-1] for entry in self.entries]
            lengths = [entry.num_tokens - 1 for entry in self.entries]
            logits, chosen = self._runner.decode(model, last_ids, lengths)
            if chosen is not None:
                for row, entry in enumerate(self.entries):
                    entry.routed(chosen[row : row + 1])
            self._sample(self.entries, logits, version)

    def abort(self) -> None:
        """Hand out what every request has, and free all rows."""
        self._finish(dict.fromkeys(self.entries, "abort"))

    def release(self, leaving: Collection[Running]) -> None:
        """Free the rows of `leaving`; the last rows move into the holes below the new row count."""
        if not leaving:
            return
        kept = [row for row, entry in enumerate(self.entries) if entry not in leaving]
        num_kept = len(kept)
        holes = sorted(set(range(num_kept)).difference(kept))
        movers = [row for row in kept if row >= num_kept]
        if movers:
            num_columns = max(self.entries[row].num_tokens for row in movers)
            self._runner.copy_rows(movers, holes, num_columns)
        for source, target in zip(movers, holes, strict=True):
            self.entries[target] = self.entries[source]
        del self.entries[num_kept:]

    def _processed(self, entries: list[Running], logits: Tensor) -> Tensor:
        """Log-probabilities [N, V] that the rows' next tokens are drawn from."""
        parameters = [entry.request.sampling for entry in entries]
        return processed_logprobs(
            logits,
            temperature=torch.tensor([p.temperature for p in parameters], dtype=torch.float32),
            top_k=torch.tensor([p.top_k for p in parameters]),
            top_p=torch.tensor([p.top_p for p in parameters], dtype=torch.float32),
            min_p=torch.tensor([p.min_p for p in parameters], dtype=torch.float32),
        )

    def _sample(self, entries: list[Running], logits: Tensor, version: int) -> None:
        """Draw one token for each entry from its logits [N, V], and finish those that end."""
        logprobs = self._processed(entries, logits)
        uniform = torch.tensor([entry.next_uniform() for entry in entries], dtype=torch.float64)
        tokens = draw(logprobs, uniform)
        chosen = logprobs.gather(1, tokens[:, None])[:, 0]
        finished: dict[Running, FinishReason] = {}
        for entry, token, logprob in zip(entries, tokens.tolist(), chosen.tolist(), strict=True):
            reason = entry.append(token, logprob, version)
            if reason is not None:
                finished[entry] = reason
        self._finish(finished)

    def _finish(self, finished: dict[Running, FinishReason]) -> None:
        """Hand out generations and free the rows, in row order."""
        for entry, reason in finished.items():
            if not entry.future.done():
                entry.future.set_result(entry.generation(reason))
        self.release(finished.keys())
