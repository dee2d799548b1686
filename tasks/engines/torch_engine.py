"""The in-process rollout engine: continuous batching over a transformers causal LM.

One pump task runs each step inline in the event loop. Between two steps it lets every ready
callback run, so that scoring and follow-up turns happen at a fixed point: the batches, and with
them the last bits of every logit, depend only on the requests and not on timing. The price is that
the loop stands still during a step (tens of milliseconds on the small models this engine is for),
and during a load.
"""

import asyncio
import time
from collections import deque
from pathlib import Path

import torch
import transformers

from tasks.engines.batch import Batch
from tasks.engines.expert_recorder import ExpertRecorder
from tasks.engines.loading import WeightLoader, read_config
from tasks.engines.model_runner import ModelRunner
from tasks.engines.protocol import (
    UPDATE_MODES,
    Attestation,
    EngineDescription,
    Generation,
    Request,
    UpdateMode,
)
from tasks.engines.running import Running
from tasks.weights.hashing import root_hash as compute_root_hash

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# A turn that is scored and followed up takes some loop iterations (future, task, gather).
_SETTLE_ROUNDS = 8


class TorchEngine:
    """A `RolloutEngine` on this process's CPU.

    Args:
        model_dir: folder with the model's config.json; weights come from `update` alone.
        num_slots: requests that decode together.
        max_model_tokens: prompt and output tokens of one request.
        compute_dtype: float32 (exact against a float32 recomputation) or bfloat16.
        num_threads: torch threads, process-wide; the count is part of the last bits of a logit.
        engine_id: name in attestations and trajectories.

    Raises:
        ValueError: an unsupported model or a parameter out of range.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        num_slots: int,
        max_model_tokens: int,
        compute_dtype: str = "float32",
        num_threads: int,
        engine_id: str,
    ) -> None:
        if compute_dtype not in _DTYPES:
            raise ValueError(
                f"compute_dtype must be one of {sorted(_DTYPES)}, got {compute_dtype}."
            )
        if num_slots < 1 or num_threads < 1 or max_model_tokens < 2:
            raise ValueError(
                "num_slots and num_threads must be 1 or more and max_model_tokens 2 or more, "
                f"got {num_slots}, {num_threads} and {max_model_tokens}."
            )
        config = read_config(model_dir)
        torch.set_num_threads(num_threads)
        dtype = _DTYPES[compute_dtype]
        self._engine_id = engine_id
        self._compute_dtype = compute_dtype
        self._num_slots = num_slots
        self._max_model_tokens = max_model_tokens
        self._vocab_size: int = config.get_text_config().vocab_size
        self._loader = WeightLoader(config, dtype)
        self._experts = ExpertRecorder(self._loader.skeleton)
        self._batch = Batch(ModelRunner(config, num_slots, max_model_tokens, dtype, self._experts))
        self._model: transformers.PreTrainedModel | None = None
        self._version: int | None = None
        self._queue: deque[Running] = deque()
        self._paused = False
        self._closed = False
        self._pump_task: asyncio.Task[None] | None = None
        self._wakeup: asyncio.Future[None] | None = None
        self._drained: asyncio.Future[None] | None = None

    def describe(self) -> EngineDescription:
        torch_version = torch.__version__.split("+")[0]
        return EngineDescription(
            engine_id=self._engine_id,
            engine=f"torch-{torch_version}/transformers-{transformers.__version__}",
            vocab_size=self._vocab_size,
            max_model_tokens=self._max_model_tokens,
            logprobs_mode="processed_logprobs",
            compute_dtype=self._compute_dtype,
            weight_version=self._version,
            num_experts=self._experts.num_experts,
            num_routed_layers=self._experts.num_layers or None,
            num_experts_per_token=self._experts.top_k,
        )

    async def connect(self) -> None:
        self._version = None

    async def generate(self, request: Request) -> Generation:
        """Queue a request and wait for its tokens; cancelling the call frees its slot."""
        self._require_open()
        if self._version is None:
            raise RuntimeError(f"engine {self._engine_id} has not attested any version.")
        self._check(request)
        loop = asyncio.get_running_loop()
        entry = Running(request, loop.create_future(), self._max_model_tokens, self._engine_id)
        self._queue.append(entry)
        if self._pump_task is None or self._pump_task.done():
            self._pump_task = loop.create_task(self._pump())
        self._wake()
        return await entry.future

    async def update(
        self, version: int, weights_dir: Path, root_hash: str, mode: UpdateMode
    ) -> Attestation:
        """Load beside the weights being served, verify, then swap between two steps.

        Raises:
            ValueError: bad arguments or a folder that does not fit the model.
            RuntimeError: another update waits for its requests to finish, or `wait` on a pause.
        """
        if mode not in UPDATE_MODES:
            raise ValueError(f"update mode must be one of {list(UPDATE_MODES)}, got {mode!r}.")
        if version < 0:
            raise ValueError(f"weight version must be 0 or more, got {version}.")
        self._require_open()
        if self._drained is not None:
            raise RuntimeError(f"engine {self._engine_id} is in the middle of another update.")
        started_s = time.perf_counter()
        model, held = self._loader.load(weights_dir)
        held_hash, reason = compute_root_hash(held), None
        if held_hash != root_hash:
            reason = f"the loaded tensors hash to {held_hash}, the publication to {root_hash}"
        else:
            if mode == "abort":
                self._batch.abort()
            elif mode == "wait":
                await self._drain()
                self._require_open()
            self._experts.attach(model)
            self._model, self._version = model, version
            self._wake()
        seconds = time.perf_counter() - started_s
        return Attestation(
            self._engine_id,
            version,
            held_hash,
            canary_max_abs_diff=None,
            ok=reason is None,
            reason=reason,
            seconds=seconds,
        )

    async def pause(self) -> None:
        """Run no further step. Steps run inline, so none is in progress here."""
        self._paused = True

    async def resume(self) -> None:
        self._paused = False
        self._wake()

    async def close(self) -> None:
        """Fail what is queued or running, and end the pump."""
        self._closed = True
        self._fail(RuntimeError(f"engine {self._engine_id} was closed."))
        self._wake()
        if self._pump_task is not None and not self._pump_task.done():
            await self._pump_task

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"engine {self._engine_id} is closed.")

    def _check(self, request: Request) -> None:
        name, num_prompt = f"request {request.request_id}", len(request.token_ids)
        if num_prompt == 0:
            raise ValueError(f"{name} has an empty prompt; send one token or more.")
        for token_id in (*request.token_ids, *request.stop_token_ids):
            if not 0 <= token_id < self._vocab_size:
                raise ValueError(
                    f"{name} has token id {token_id}, outside the vocabulary of "
                    f"{self._vocab_size}; encode with the model's own tokenizer."
                )
        if num_prompt >= self._max_model_tokens:
            raise ValueError(
                f"{name} has {num_prompt} prompt tokens, which leaves no room below "
                f"max_model_tokens = {self._max_model_tokens}; shorten the prompt or raise it."
            )

    async def _drain(self) -> None:
        """Admit nothing until every running request has finished."""
        if not self._batch.entries:
            return
        if self._paused:
            raise RuntimeError(
                f"engine {self._engine_id} is paused with requests in flight, which an update in "
                "mode 'wait' would await for ever; resume it first, or update with 'keep'."
            )
        self._drained = asyncio.get_running_loop().create_future()
        try:
            await self._drained
        finally:
            self._drained = None
            self._wake()

    def _wake(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)

    async def _pump(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._settle()
            if self._closed:
                return
            self._drop_abandoned()
            self._report_drained()
            can_admit = self._queue and self._drained is None
            if self._paused or not (self._batch.entries or can_admit):
                self._wakeup = loop.create_future()
                await self._wakeup
                continue
            try:
                self._step()
            except Exception as error:
                # Delivered to every caller, who would otherwise wait for ever.
                self._fail(error)

    async def _settle(self) -> None:
        """Let ready callbacks run, until they have brought no new request for a while."""
        rounds = 0
        while rounds < _SETTLE_ROUNDS:
            num_queued = len(self._queue)
            await asyncio.sleep(0)
            rounds = rounds + 1 if len(self._queue) == num_queued else 0

    def _step(self) -> None:
        """Admit in order of arrival, then prefill and decode."""
        assert self._model is not None and self._version is not None
        num_free = self._num_slots - len(self._batch.entries) if self._drained is None else 0
        admitted = [self._queue.popleft() for _ in range(min(num_free, len(self._queue)))]
        self._batch.step(self._model, self._version, admitted)

    def _report_drained(self) -> None:
        if self._drained is not None and not self._drained.done() and not self._batch.entries:
            self._drained.set_result(None)

    def _drop_abandoned(self) -> None:
        """Forget requests whose caller has been cancelled."""
        self._queue = deque(entry for entry in self._queue if not entry.future.done())
        self._batch.release({entry for entry in self._batch.entries if entry.future.done()})

    def _fail(self, error: Exception) -> None:
        """End every queued and running request with an error."""
        for entry in (*self._batch.entries, *self._queue):
            if not entry.future.done():
                entry.future.set_exception(error)
        self._queue.clear()
        self._batch.release(set(self._batch.entries))
        self._report_drained()
