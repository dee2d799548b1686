"""The engines that a run file asks for."""

from collections.abc import Callable
from pathlib import Path

from schemas.config import RunConfig, VllmSection
from tasks.engines.canary import Canary
from tasks.engines.protocol import RolloutEngine
from tasks.engines.torch_engine import TorchEngine
from tasks.engines.vllm import VllmEngine, VllmSettings
from tasks.engines.vllm_launch import LocalServer
from tasks.environments import make_environment
from tasks.renderers import Renderer
from tasks.train import run_store

EngineFactory = Callable[[RunConfig, Path], list[RolloutEngine]]


def build_engines(config: RunConfig, model_dir: Path) -> list[RolloutEngine]:
    """Engines that have not been connected yet; `model_dir` holds version 0.

    Raises `ValueError` for a model that the torch engine cannot run or a launch script that does
    not exist.
    """
    engine = config.engine
    if engine.vllm is not None:
        return _vllm_engines(config, engine.vllm, model_dir)
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


def _vllm_engines(config: RunConfig, vllm: VllmSection, model_dir: Path) -> list[RolloutEngine]:
    settings = VllmSettings(
        max_in_flight=config.engine.num_slots,
        request_timeout_s=vllm.request_timeout_s,
        requests_per_s=vllm.requests_per_s,
        prefix_cache=vllm.prefix_cache,
        colocated=vllm.colocated,
    )
    canary = _canary(config, vllm.canary_tokens, model_dir)
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
        log=run_store(config) / "logs" / f"vllm-{index}.log",
        startup_timeout_s=vllm.startup_timeout_s,
        index=index,
    )


def _canary(config: RunConfig, num_tokens: int, model_dir: Path) -> Canary | None:
    """Scores the first held-out prompts, one after the other, as a sequence of `num_tokens`."""
    if num_tokens == 0:
        return None
    renderer = Renderer(model_dir)
    environment = make_environment(config.environment.name, config.environment.options)
    token_ids: list[int] = []
    for task in environment.heldout(config.evaluation.num_tasks):
        token_ids += renderer.prompt(task.messages)
    length = min(num_tokens, config.engine.max_model_tokens - 1)
    return Canary(model_dir, tuple(token_ids[:length]), config.engine.logprob_tolerance)
