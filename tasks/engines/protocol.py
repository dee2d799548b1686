"""What a rollout engine is: token ids in, token ids out, with the log-probability of every draw.

The protocol is small on purpose. Text, chat templates and retries live elsewhere; an engine knows
token ids, one weight version at a time, and how to prove which weights it holds. Every sampling
parameter is part of every request, so that no engine default can slip into the distribution unseen.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, get_args

import numpy as np

UpdateMode = Literal["wait", "keep", "abort"]
FinishReason = Literal["stop", "length", "abort"]
LogprobsMode = Literal["processed_logprobs", "raw_logprobs"]

UPDATE_MODES: tuple[UpdateMode, ...] = get_args(UpdateMode)


@dataclass(frozen=True)
class Sampling:
    """The distribution a token is drawn from, always in full.

    `top_k = 0`, `top_p = 1.0` and `min_p = 0.0` switch their truncation off. `max_tokens` counts
    output tokens; `seed` is in [0, 2**63).

    Raises:
        ValueError: a parameter lies outside its range.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_tokens: int
    seed: int

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(
                f"temperature must be a finite number above 0, got {self.temperature}; "
                "for greedy decoding set top_k = 1."
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}; 1.0 switches it off.")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 or more, got {self.top_k}; 0 switches it off.")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must lie in [0, 1], got {self.min_p}; 0.0 switches it off.")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be 1 or more, got {self.max_tokens}.")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must lie in [0, 2**63), got {self.seed}.")


@dataclass(frozen=True)
class Request:
    """One engine call: continue `token_ids` until a stop token or a length limit.

    Requests of one `affinity` share a prompt; a front to several engines sends them to the same
    one, so that the prompt is computed once.
    """

    request_id: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    stop_token_ids: tuple[int, ...]
    affinity: str = ""


@dataclass(frozen=True)
class VersionSpan:
    """Output tokens [start, end) whose logits came from `weight_version`.

    `kv_version_min` is the oldest version that computed any key or value these tokens attended to;
    it is below `weight_version` only after a `keep` update.
    """

    start: int
    end: int
    weight_version: int
    kv_version_min: int


@dataclass(frozen=True, eq=False)
class Routing:
    """The experts that a mixture-of-experts engine chose for the tokens it forwarded.

    `experts` is [rows, layers, top_k], uint8 or uint16; row i is the choice for position i of
    prompt and output, by the pass whose logits drew the token at i + 1. The last sampled token was
    never forwarded, so there are `num_prompt + num_output - 1` rows at most. Only trailing rows may
    be missing; a missing row is missing, never expert 0.

    Raises:
        ValueError: another shape or element type.
    """

    experts: np.ndarray

    def __post_init__(self) -> None:
        shape, dtype = self.experts.shape, self.experts.dtype
        if len(shape) != 3 or 0 in shape[1:]:
            raise ValueError(
                f"routing has shape {list(shape)}; it must be [rows, layers, top_k], with one "
                "layer and one expert or more."
            )
        if dtype not in (np.uint8, np.uint16):
            raise ValueError(
                f"routing has element type {dtype}; it must be uint8, or uint16 above 256 experts."
            )


@dataclass(frozen=True)
class EngineLoad:
    """An engine server's own counters, read about a second before a request ended at most, or
    when the first one ended after a while without any.

    `kv_cache_usage` and `prefix_hit_rate` are shares in [0, 1], the latter of all prompt tokens
    since the server started, None before the first; `num_preemptions` counts since the start too.
    """

    kv_cache_usage: float
    num_preemptions: int
    prefix_hit_rate: float | None


@dataclass(frozen=True)
class Generation:
    """The sampled tokens of one request.

    `token_ids` and `logprobs` have the same length; a stop token is one of them. Log-probabilities
    are float32 values of the renormalised distribution that was really drawn from. `spans` tile the
    output. `cached_version_min` is the oldest version behind the cached prompt tokens, None without
    any; drafted and accepted tokens are None without a drafter. `queued_s` runs until the request
    is sent to the engine or, inside this process, takes a slot; `prefill_s` is None where the
    engine does not tell it from decoding, and `decode_s` then covers all that the engine did.
    `routing` is None for a dense model, or where the engine does not report it.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    num_cached_tokens: int
    cached_version_min: int | None
    num_drafted_tokens: int | None
    num_accepted_tokens: int | None
    queued_s: float
    prefill_s: float | None
    decode_s: float
    engine_id: str
    load: EngineLoad | None
    routing: Routing | None = None


@dataclass(frozen=True)
class Attestation:
    """An engine's statement of what it holds. `root_hash` is recomputed from the loaded tensors.

    `canary_max_abs_diff` is the largest |log-probability - recomputation from the publication|
    over a fixed sequence, in nats: hashes show what was loaded, it shows what is computed with.
    None where the tensors that are hashed are the ones that compute.
    """

    engine_id: str
    version: int
    root_hash: str
    canary_max_abs_diff: float | None
    ok: bool
    reason: str | None
    seconds: float


@dataclass(frozen=True)
class EngineDescription:
    """Facts about an engine; `weight_version` is None until it has attested one.

    `num_experts` counts the experts of a routed layer, of an engine that reports `routing` with
    every generation; None for a dense model, or where routing is not reported. The routing's other
    extents are None then too, or where they are not known.
    """

    engine_id: str
    engine: str
    vocab_size: int
    max_model_tokens: int
    logprobs_mode: LogprobsMode
    compute_dtype: str
    weight_version: int | None
    num_experts: int | None = None
    num_routed_layers: int | None = None
    num_experts_per_token: int | None = None


class EngineLost(RuntimeError):
    """The engine is gone, or holds what it cannot attest; the request has no result, and never
    will have one, so another engine may be asked."""


class EngineTimeout(RuntimeError):
    """The engine took too long. It is not asked again: that would favour short answers."""


class RolloutEngine(Protocol):
    """One engine."""

    def describe(self) -> EngineDescription: ...

    async def connect(self) -> None:
        """Start what this process has to start, and find out what the engine is.

        Whatever it had attested is forgotten. Raises `EngineLost` if it cannot be reached, and
        `ValueError`, with the setting to change, if it is not what the run needs.
        """
        ...

    async def generate(self, request: Request) -> Generation:
        """Sample; ValueError for a bad request, RuntimeError while no version is attested,
        `EngineLost` once it is gone."""
        ...

    async def update(
        self, version: int, weights_dir: Path, root_hash: str, mode: UpdateMode
    ) -> Attestation:
        """Load `weights_dir`, attest it against `root_hash`, and serve it as `version`.

        `wait` lets running requests finish first, `keep` lets them go on with their cache, `abort`
        returns them at once with what they have. If the hash differs, the old weights stay.

        Raises `EngineLost` or `EngineTimeout` if the engine cannot be reached or hangs.
        """
        ...

    async def pause(self) -> None:
        """Run no further step; an engine that shares its device with the trainer leaves it."""
        ...

    async def resume(self) -> None: ...

    async def close(self) -> None: ...
