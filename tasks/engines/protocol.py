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
    """One engine call: continue `token_ids` until a stop token or a length limit."""

    request_id: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    stop_token_ids: tuple[int, ...]


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
class Generation:
    """The sampled tokens of one request.

    `token_ids` and `logprobs` have the same length; a stop token is one of them. Log-probabilities
    are float32 values of the renormalised distribution that was really drawn from. `spans` tile the
    output. `routing` is None for a dense model, or where the engine does not report it.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    num_cached_tokens: int
    queued_s: float
    prefill_s: float
    decode_s: float
    routing: Routing | None = None


@dataclass(frozen=True)
class Attestation:
    """An engine's statement of what it holds. `root_hash` is recomputed from the loaded tensors."""

    engine_id: str
    version: int
    root_hash: str
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


class RolloutEngine(Protocol):
    """One engine, or a front to several of the same kind."""

    def describe(self) -> EngineDescription: ...

    async def generate(self, request: Request) -> Generation:
        """Sample; ValueError for a bad request, RuntimeError while no version is attested."""
        ...

    async def update(
        self, version: int, weights_dir: Path, root_hash: str, mode: UpdateMode
    ) -> Attestation:
        """Load `weights_dir`, attest it against `root_hash`, and serve it as `version`.

        `wait` lets running requests finish first, `keep` lets them go on with their cache, `abort`
        returns them at once with what they have. If the hash differs, the old weights stay.
        """
        ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def close(self) -> None: ...
