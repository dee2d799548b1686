"""The state of one request inside the torch engine, from the queue to its `Generation`."""

import asyncio
import time

import numpy as np

from tasks.engines.protocol import FinishReason, Generation, Request, Routing, VersionSpan
from tasks.engines.sampling import uniforms


class Running:
    """One request, its caller's future, and what has been sampled so far. Compared by identity."""

    __slots__ = (
        "_admitted_at_s",
        "_engine_id",
        "_experts",
        "_first_token_s",
        "_kv_version_min",
        "_limit",
        "_num_cached_tokens",
        "_queued_at_s",
        "_span_starts",
        "_stop_token_ids",
        "_uniforms",
        "future",
        "logprobs",
        "request",
        "token_ids",
    )

    def __init__(
        self,
        request: Request,
        future: asyncio.Future[Generation],
        max_model_tokens: int,
        engine_id: str,
    ) -> None:
        num_prompt = len(request.token_ids)
        self.request = request
        self.future = future
        self._engine_id = engine_id
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self._limit = min(request.sampling.max_tokens, max_model_tokens - num_prompt)
        self._stop_token_ids = frozenset(request.stop_token_ids)
        self._uniforms = uniforms(request.sampling.seed, num_prompt, self._limit)
        self._span_starts: list[tuple[int, int, int]] = []
        self._kv_version_min: int | None = None
        self._queued_at_s = time.perf_counter()
        self._admitted_at_s = 0.0
        self._first_token_s = 0.0
        self._num_cached_tokens = 0
        self._experts: list[np.ndarray] = []

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens; the last one has no key and value yet."""
        return len(self.request.token_ids) + len(self.token_ids)

    def admit(self, admitted_at_s: float, num_cached_tokens: int) -> None:
        """Note when its prefill began, and how much of its prompt came from another request."""
        self._admitted_at_s = admitted_at_s
        self._num_cached_tokens = num_cached_tokens

    def routed(self, experts: np.ndarray) -> None:
        """Take the experts [rows, layers, top_k] of its next tokens that were forwarded."""
        self._experts.append(experts)

    def next_uniform(self) -> float:
        """The uniform number that draws the next token."""
        return self._uniforms[len(self.token_ids)]

    def append(self, token_id: int, logprob: float, version: int) -> FinishReason | None:
        """Take a token whose logits `version` computed; why the request ends here, if it does.

        The pass behind a token also wrote keys and values, so its version joins those attended to.
        """
        if self._kv_version_min is None:
            self._first_token_s = time.perf_counter()
            self._kv_version_min = version
        if not self._span_starts or self._span_starts[-1][1] != version:
            self._kv_version_min = min(self._kv_version_min, version)
            self._span_starts.append((len(self.token_ids), version, self._kv_version_min))
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        if token_id in self._stop_token_ids:
            return "stop"
        return "length" if len(self.token_ids) == self._limit else None

    def generation(self, finish_reason: FinishReason) -> Generation:
        """Everything sampled so far."""
        assert self.token_ids, "only an admitted request can finish, and it has sampled"
        ends = [start for start, _, _ in self._span_starts[1:]] + [len(self.token_ids)]
        return Generation(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            spans=tuple(
                VersionSpan(start, end, version, kv_version_min)
                for (start, version, kv_version_min), end in zip(
                    self._span_starts, ends, strict=True
                )
            ),
            finish_reason=finish_reason,
            num_cached_tokens=self._num_cached_tokens,
            # A cached prompt was computed in the same pass.
            cached_version_min=self._span_starts[0][1] if self._num_cached_tokens else None,
            num_drafted_tokens=None,
            num_accepted_tokens=None,
            queued_s=self._admitted_at_s - self._queued_at_s,
            prefill_s=self._first_token_s - self._admitted_at_s,
            decode_s=time.perf_counter() - self._first_token_s,
            engine_id=self._engine_id,
            load=None,
            routing=Routing(np.concatenate(self._experts)) if self._experts else None,
        )
