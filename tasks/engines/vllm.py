"""A rollout engine that is one vLLM server, over `/inference/v1/generate`: token ids in and out.

The server must be started with what `infra/vllm/` passes; `connect` names the flag that is missing.
Two things are never taken from the server on trust: what a token's version span says must be a
version that was attested here, and an attestation is made of hashes and of a canary whose
log-probabilities are recomputed from the publication.

Keys and values of old weights live on in a server's prefix cache. With `prefix_cache = "salt"`
every version has its own cache, and running requests keep theirs over a `keep` update, so that
their tokens name the older version as `kv_version_min`. With `"clear"` the cache is emptied at each
update and running requests are computed again under the new weights.
"""

import asyncio
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from aiolimiter import AsyncLimiter

from tasks.engines.canary import Canary
from tasks.engines.protocol import (
    UPDATE_MODES,
    Attestation,
    EngineDescription,
    EngineLoad,
    EngineLost,
    EngineTimeout,
    Generation,
    Request,
    UpdateMode,
)
from tasks.engines.vllm_fitness import unfit
from tasks.engines.vllm_http import VllmHttp
from tasks.engines.vllm_launch import LocalServer
from tasks.engines.vllm_wire import Answer, payload, read_answer

PrefixCache = Literal["salt", "clear"]

RELEASE = "0.32"
LOAD_PERIOD_S = 1.0


@dataclass(frozen=True)
class VllmSettings:
    """How the client treats a server; seconds, counts, and requests a second (None: no limit)."""

    max_in_flight: int
    request_timeout_s: float
    requests_per_s: float | None = None
    prefix_cache: PrefixCache = "salt"
    colocated: bool = False


class VllmEngine:
    """A `RolloutEngine` behind a URL; `connect` before anything else.

    Args:
        url: such as http://10.0.0.3:8000.
        engine_id: name in attestations and trajectories.
        max_model_tokens: prompt and output tokens of one request.
        compute_dtype: what the server must compute in.
        canary: recomputes log-probabilities from a publication; None skips that proof.
        server: the process behind the URL, where it is ours to start, restart and stop.
    """

    def __init__(
        self,
        url: str,
        *,
        engine_id: str,
        max_model_tokens: int,
        compute_dtype: str,
        settings: VllmSettings,
        canary: Canary | None,
        server: LocalServer | None = None,
    ) -> None:
        self._http = VllmHttp(
            url, max_connections=settings.max_in_flight, timeout_s=settings.request_timeout_s
        )
        self._engine_id = engine_id
        self._max_model_tokens = max_model_tokens
        self._compute_dtype = compute_dtype
        self._settings = settings
        self._canary = canary
        self._server = server
        self._slots = asyncio.Semaphore(settings.max_in_flight)
        per_s = settings.requests_per_s
        self._limiter = AsyncLimiter(1, 1 / per_s) if per_s is not None else None
        self._release = "unknown"
        self._vocab_size = 0
        self._routing: tuple[int | None, int | None, int | None] = (None, None, None)
        self._version: int | None = None
        self._attested: dict[str, int] = {}
        """Label that the server gives its weights, to the version they are."""
        self._attachment = ""
        self._settled = asyncio.Event()
        self._settled.set()
        self._load: tuple[float, EngineLoad | None] = (0.0, None)

    @property
    def url(self) -> str:
        return self._http.url

    def describe(self) -> EngineDescription:
        return EngineDescription(
            engine_id=self._engine_id,
            engine=f"vllm-{self._release}",
            vocab_size=self._vocab_size,
            max_model_tokens=self._max_model_tokens,
            logprobs_mode="processed_logprobs",
            compute_dtype=self._compute_dtype,
            weight_version=self._version,
            num_experts=self._routing[0],
            num_routed_layers=self._routing[1],
            num_experts_per_token=self._routing[2],
        )

    async def connect(self) -> None:
        """Starts the server if it is ours and not alive, and asks it what it is.

        Raises:
            ValueError: it was started in another way than needed; the sentence names the flag.
            EngineLost: it cannot be reached.
        """
        self._version = None
        self._attested.clear()
        # Part of every label and salt, so that neither the weights of another controller at work on
        # this server nor the cache of an earlier one can be taken for ours.
        self._attachment = secrets.token_hex(4)
        if self._server is not None:
            self._server.start_if_dead()
            await self._server.ready(self._http.healthy)
        self._release = (await self._http.get("/version"))["version"]
        if not self._release.startswith(f"{RELEASE}."):
            raise self._unfit(f"is no {RELEASE}; install vllm=={RELEASE}.*")
        if not await self._http.exists("/collective_rpc"):
            raise self._unfit("has no weight routes; set VLLM_SERVER_DEV_MODE=1")
        info = (await self._http.get("/server_info?config_format=json"))["vllm_config"]
        reason = unfit(
            info, compute_dtype=self._compute_dtype, max_model_tokens=self._max_model_tokens
        )
        if reason is not None:
            raise self._unfit(reason)
        if not await self._http.exists("/inference/v1/generate"):
            raise self._unfit("has no token-in, token-out route; set --enable-scale-out")
        held = (await self._ask_workers("held_weights"))[0]
        self._vocab_size = held["vocab_size"]
        if info["aux_output_config"]["enable_return_routed_experts"]:
            self._routing = (held["num_experts"], held["num_layers"], held["num_experts_per_token"])
        self._load = (time.perf_counter(), await self._http.load())
        if self._settings.colocated:
            # A controller that was killed may have left it asleep.
            await self.resume()

    async def generate(self, request: Request) -> Generation:
        """One attempt; cancelling the call has the server abort the request.

        Raises `EngineLost` too if the answer names weights that this server has not attested.
        """
        self._check(request)
        queued_at_s = time.perf_counter()
        async with self._slots:
            if self._limiter is not None:
                await self._limiter.acquire()
            # A request sent during an update would name one version and meet another's cache.
            await self._settled.wait()
            version = self._version
            if version is None:
                raise EngineLost(f"engine {self._engine_id} has not attested any version.")
            label = self._label(version)
            sent_at_s = time.perf_counter()
            salt = label if self._settings.prefix_cache == "salt" else None
            asked = payload(request, salt, self._max_model_tokens)
            body = await self._http.post("/inference/v1/generate", asked)
            answered_at_s = time.perf_counter()
        # A version that is being attested counts once it is.
        await self._settled.wait()
        answer = self._read(request, body, version, label)
        return answer.generation(
            version=version,
            cache_outlives_update=self._settings.prefix_cache == "salt",
            queued_s=sent_at_s - queued_at_s,
            decode_s=answered_at_s - sent_at_s,
            engine_id=self._engine_id,
            load=await self._recent_load(),
        )

    async def update(
        self, version: int, weights_dir: Path, root_hash: str, mode: UpdateMode
    ) -> Attestation:
        """Pause, load, compare hashes, label, resume, and run the canary.

        Raises:
            ValueError: bad arguments.
            EngineLost, EngineTimeout: the server is gone or hangs; it has attested nothing.
        """
        if mode not in UPDATE_MODES:
            raise ValueError(f"update mode must be one of {list(UPDATE_MODES)}, got {mode!r}.")
        started_s = time.perf_counter()
        self._settled.clear()
        held_hash, difference, reason = "", None, "the update was interrupted"
        try:
            clear = self._settings.prefix_cache == "clear"
            await self._http.post("/pause", mode=mode, clear_cache=clear)
            held_hash, reason = await self._transfer(version, weights_dir, root_hash)
            await self._http.post("/resume")
            if reason is None and self._canary is not None:
                difference, reason = await self._run_canary(self._canary, weights_dir)
        finally:
            if reason is None:
                self._version = version
                self._attested[self._label(version)] = version
            else:
                # What runs on may be of neither version, and its tokens must not count.
                self._version = None
                self._attested.clear()
            self._settled.set()
        return Attestation(
            self._engine_id,
            version,
            held_hash,
            canary_max_abs_diff=difference,
            ok=reason is None,
            reason=reason,
            seconds=time.perf_counter() - started_s,
        )

    async def pause(self) -> None:
        """Stops the scheduler; a colocated server also leaves the device to the trainer."""
        if self._settings.colocated:
            await self._http.post("/sleep", level=1, mode="keep")
        else:
            await self._http.post("/pause", mode="keep", clear_cache=False)

    async def resume(self) -> None:
        await self._http.post("/wake_up" if self._settings.colocated else "/resume")

    async def close(self) -> None:
        await self._http.close()
        if self._server is not None:
            await asyncio.to_thread(self._server.stop)

    def _unfit(self, reason: str) -> ValueError:
        return ValueError(
            f"Engine {self._engine_id} at {self._http.url} (vLLM {self._release}) {reason} when "
            "starting it, as the scripts in infra/vllm do."
        )

    def _check(self, request: Request) -> None:
        num_prompt = len(request.token_ids)
        if not 0 < num_prompt < self._max_model_tokens:
            raise ValueError(
                f"request {request.request_id} has {num_prompt} prompt tokens; send one or more, "
                f"and fewer than max_model_tokens = {self._max_model_tokens}."
            )

    def _label(self, version: int) -> str:
        return f"{self._attachment}-{version}"

    def _read(self, request: Request, body: Any, sent_under: int, label: str) -> Answer:
        """The answer to a request sent under a version with that label, all weights attested."""
        try:
            answer = read_answer(request, body, self._attested)
            if any(version < sent_under for _, _, version in answer.spans):
                raise ValueError(f"a token of a version before {sent_under}, when it was sent")
        except (ValueError, KeyError, TypeError, IndexError) as error:
            # Unless the request is from before an attestation that says more than this; an earlier
            # attachment may have had the same version, so its number would not tell.
            if label in self._attested:
                self._version = None
            raise EngineLost(
                f"engine {self._engine_id} answered request {request.request_id} with what is no "
                f"generation under version {sent_under} ({type(error).__name__}: {error})."
            ) from error
        return answer

    async def _transfer(
        self, version: int, weights_dir: Path, root_hash: str
    ) -> tuple[str, str | None]:
        """The root hash that every worker holds afterwards, and why it is not the right one."""
        # A controller that was killed in the middle of an update may have left it open, and vLLM
        # would refuse another.
        await self._ask_workers("end_interrupted_update")
        await self._http.post("/start_weight_update")
        info = {
            "uri": str(weights_dir.absolute()),
            "version": version,
            "parent": version - 1 if version > 0 else None,
            "root_hash": root_hash,
        }
        await self._http.post("/update_weights", {"update_info": info})
        held = await self._ask_workers("held_weights")
        refusals = [worker["refusal"] for worker in held if worker["refusal"] is not None]
        hashes = {worker["root_hash"] for worker in held}
        if refusals or hashes != {root_hash}:
            await self._http.post("/finish_weight_update", {"weight_version": None})
            found = sorted(found or "" for found in hashes)
            reason = refusals[0] if refusals else f"its workers hold {found}, not {root_hash}"
            return found[0], reason
        await self._http.post("/finish_weight_update", {"weight_version": self._label(version)})
        return root_hash, None

    async def _ask_workers(self, method: str) -> list[Any]:
        return (await self._http.post("/collective_rpc", {"method": method}))["results"]

    async def _run_canary(
        self, canary: Canary, weights_dir: Path
    ) -> tuple[float | None, str | None]:
        """Largest |difference| in nats, and why that is too much; None if it was not measured."""
        expected = await asyncio.to_thread(canary.recompute, weights_dir)
        body = await self._http.post("/inference/v1/generate", canary.payload())
        if body["usage"]["prompt_tokens_details"] is None:
            return None, "it does not count cached tokens; set --enable-prompt-tokens-details"
        difference = canary.largest_difference(expected, body)
        if difference <= canary.tolerance:
            return difference, None
        return difference, (
            f"its log-probabilities of a fixed sequence are off by up to {difference:.3g} nats "
            f"(allowed {canary.tolerance:g}), although it loaded the published values"
        )

    async def _recent_load(self) -> EngineLoad | None:
        read_at_s, load = self._load
        now_s = time.perf_counter()
        if now_s - read_at_s > LOAD_PERIOD_S:
            # Set first: the requests that end meanwhile take the reading before.
            self._load = (now_s, load)
            try:
                self._load = (now_s, await self._http.load())
            except (EngineLost, EngineTimeout, ValueError):
                self._load = (now_s, None)
        return self._load[1]
