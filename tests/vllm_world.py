"""Real vLLM servers on this machine's CPU, and publications of a tiny random model for them."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import DynamicCache, PreTrainedModel

from tasks.engines.canary import Canary
from tasks.engines.protocol import Generation, Request
from tasks.engines.vllm import VllmEngine, VllmSettings
from tasks.engines.vllm_http import VllmHttp
from tasks.engines.vllm_launch import LocalServer
from tasks.weights.anchors import write_anchor
from tasks.weights.folders import Publication
from tests.engine_models import processed, publish

REPOSITORY = Path(__file__).parent.parent
SCRIPT = REPOSITORY / "infra" / "vllm" / "serve-cpu.sh"
MAX_MODEL_TOKENS = 4096
# That of the tiny run's policy, so that one server can hold either. vLLM's attention on a CPU takes
# heads of 32 and more.
SHAPE = {
    "vocab_size": 270,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": MAX_MODEL_TOKENS,
}
_ON_VLLM = ("policy.warm_start.head_dim=32", "engine.backend=vllm")
# `--set` overrides of the tiny run: one server that the run starts.
RUN_ON_VLLM = (*_ON_VLLM, f"engine.vllm.launch={SCRIPT}")
CANARY = tuple(range(1, 40))
TOLERANCE = 0.002


@dataclass(frozen=True)
class Version:
    """A publication and the same values as a float32 model."""

    publication: Publication
    model: PreTrainedModel

    @property
    def path(self) -> Path:
        return Path(self.publication.uri)


def publish_versions(folder: Path, count: int) -> list[Version]:
    """Versions 0, 1, … of one architecture, each of random weights of its own."""
    versions: list[Version] = []
    for number in range(count):
        made = publish(folder / f"hf-{number}", seed=number, **SHAPE)
        publication = write_anchor(
            folder / "weights",
            version=number,
            lease=1,
            tensors=load_file(made.path / "model.safetensors").items(),
            assets_dir=folder / "hf-0",
            parent_uri=versions[-1].publication.uri if versions else None,
        )
        versions.append(Version(publication, made.model))
    return versions


def launch(model_dir: Path, log: Path, *flags: str) -> LocalServer:
    """Starts a server; whoever calls stops it."""
    server = LocalServer(
        SCRIPT,
        model_dir=model_dir,
        max_model_tokens=MAX_MODEL_TOKENS,
        compute_dtype="float32",
        flags=flags,
        threads=1,
        log=log,
        startup_timeout_s=480.0,
    )
    server.start_if_dead()
    return server


def engine_at(url: str, first: Version, **changes) -> VllmEngine:
    """A client that has not been connected."""
    settings = {"max_in_flight": 64, "request_timeout_s": 120.0, **changes}
    return VllmEngine(
        url,
        engine_id="vllm-0",
        max_model_tokens=MAX_MODEL_TOKENS,
        compute_dtype="float32",
        settings=VllmSettings(**settings),
        canary=Canary(first.path, CANARY, TOLERANCE),
    )


def run_at(url: str) -> tuple[str, ...]:
    """`--set` overrides of the tiny run: a server that is there already."""
    return (*_ON_VLLM, f"engine.vllm.urls=['{url}']")


async def update(engine: VllmEngine, version: Version, mode="wait"):
    publication = version.publication
    return await engine.update(publication.version, version.path, publication.root_hash, mode)


async def num_running(http: VllmHttp) -> int:
    """Requests that the server's scheduler has taken up."""
    for line in (await http._call("GET", "/metrics")).text.splitlines():
        if line.startswith("vllm:num_requests_running"):
            return round(float(line.rpartition(" ")[2]))
    raise AssertionError("the server reports no running requests")


async def update_in_flight(
    engine: VllmEngine,
    ask: Callable[[int], Awaitable[object]],
    new: Version,
    mode: str,
    count: int = 8,
):
    """Starts `ask(0 … count - 1)`, updates once all of them run, and awaits them; the attestation
    and what they returned. A busy server may say that they run when some have ended: all are asked
    again then."""
    for _ in range(5):
        tasks = [asyncio.ensure_future(ask(index)) for index in range(count)]
        if await _all_run(engine, tasks):
            attestation = await update(engine, new, mode)
            return attestation, await asyncio.gather(*tasks)
        await asyncio.gather(*tasks)
    raise AssertionError("each time a request ended before the server said that all of them ran")


async def _all_run(engine: VllmEngine, tasks: Sequence[asyncio.Future[object]]) -> bool:
    """Whether all run at once, before one ends."""
    running = 0
    while running < len(tasks):
        # Seldom, since a busy machine's server would do little else than print its metrics.
        await asyncio.sleep(0.05)
        running = await num_running(engine._http)
        if any(task.done() for task in tasks):
            return False
    return True


@torch.inference_mode()
def cached_logprobs(
    models: Sequence[PreTrainedModel], request: Request, output: Sequence[int]
) -> np.ndarray:
    """[len(output)] log-probabilities of given tokens, the i-th under models[i] over one cache; a
    run of the same model is one forward pass."""
    cache = DynamicCache(config=models[0].config)
    pending, rows, start = list(request.token_ids), [], 0
    for model, run in groupby(models, key=lambda each: each):
        end = start + len(list(run))
        fed = torch.tensor([[*pending, *output[start : end - 1]]])
        logits = model(input_ids=fed, cache=cache, use_cache=True).logits[0]
        rows.extend(logits[start - end :].numpy())
        pending, start = [output[end - 1]], end
    logprobs = (processed(row, request.sampling) for row in rows)
    return np.array([row[token] for row, token in zip(logprobs, output, strict=True)])


def largest_error(expected: np.ndarray, generation: Generation) -> float:
    return float(np.abs(expected - np.array(generation.logprobs)).max())
