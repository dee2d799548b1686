"""The engines that a run file asks for."""

from collections.abc import Callable
from pathlib import Path

from flows.opening import OpenRun, published_dir
from schemas.config import RunConfig, VllmSection
from tasks.engines.canary import Canary
from tasks.engines.protocol import RolloutEngine
from tasks.engines.torch_engine import TorchEngine
from tasks.engines.vllm import VllmEngine, VllmSettings
from tasks.engines.vllm_launch import LocalServer
from tasks.weights.store import open_store

EngineFactory = Callable[[OpenRun], list[RolloutEngine]]


def build_engines(run: OpenRun) -> list[RolloutEngine]:
    """Engines of a run with a version 0; they have not been connected yet.

    Raises `ValueError` for a model that the torch engine cannot run or a launch script that does
    not exist.
    """
    model_dir, _ = published_dir(run, 0)
    engine = run.config.engine
    if engine.vllm is not None:
        return _vllm_engines(run, engine.vllm, model_dir)
    return [
        TorchEngine(
            model_dir,
            num_slots=engine.num_slots,
            max_model_tokens=engine.max_model_tokens,
            compute_dtype=engine.compute_dtype,
            num_threads=engine.threads,
            engine_id="torch-0",
        )
    ]


def _vllm_engines(run: OpenRun, vllm: VllmSection, model_dir: Path) -> list[RolloutEngine]:
    config = run.config
    settings = VllmSettings(
        max_in_flight=config.engine.num_slots,
        request_timeout_s=vllm.request_timeout_s,
        requests_per_s=vllm.requests_per_s,
        prefix_cache=vllm.prefix_cache,
        colocated=vllm.colocated,
    )
    canary = _canary(run, vllm.canary_tokens, model_dir)
    servers: list[LocalServer | None] = [None for _ in vllm.urls] or [
        _local_server(config, vllm, vllm.launch, model_dir, index)
        for index in range(vllm.num_servers)
        if vllm.launch is not None
    ]
    return [
        VllmEngine(
            vllm.urls[index] if server is None else server.url,
            engine_id=f"vllm-{index}",
            max_model_tokens=config.engine.max_model_tokens,
            compute_dtype=config.engine.compute_dtype,
            settings=settings,
            canary=canary,
            server=server,
        )
        for index, server in enumerate(servers)
    ]


def _local_server(
    config: RunConfig, vllm: VllmSection, script: str, model_dir: Path, index: int
) -> LocalServer:
    return LocalServer(
        Path(script),
        model_dir=model_dir,
        max_model_tokens=config.engine.max_model_tokens,
        compute_dtype=config.engine.compute_dtype,
        flags=("--max-num-seqs", str(config.engine.num_slots)),
        threads=config.engine.threads,
        log=open_store(config).folder / "logs" / f"vllm-{index}.log",
        startup_timeout_s=vllm.startup_timeout_s,
        index=index,
    )


def _canary(run: OpenRun, num_tokens: int, model_dir: Path) -> Canary | None:
    """Scores the first held-out prompts, one after the other, as a sequence of `num_tokens`."""
    if num_tokens == 0:
        return None
    engine = run.config.engine
    length = min(num_tokens, engine.max_model_tokens - 1)
    token_ids: list[int] = []
    for task in run.environment.heldout(run.config.evaluation.num_tasks):
        token_ids += run.renderer.prompt(task.messages)
        if len(token_ids) >= length:
            break
    return Canary(model_dir, tuple(token_ids[:length]), engine.logprob_tolerance)
