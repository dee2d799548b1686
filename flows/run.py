"""Execute a run: open or resume it, attach an engine, and take it cycle by cycle to a number."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from flows.cycle import Cycle
from flows.opening import OpenRun, Report, attach, find_run, published_dir, take_run
from schemas.config import RunConfig
from tasks.engines.protocol import RolloutEngine
from tasks.engines.torch_engine import TorchEngine

EngineFactory = Callable[[RunConfig, Path], RolloutEngine]
CycleRunner = Callable[[Cycle], Awaitable[None]]


def build_engine(config: RunConfig, model_dir: Path) -> RolloutEngine:
    """The engine that the run file asks for; `model_dir` holds the policy's configuration."""
    return TorchEngine(
        model_dir,
        num_slots=config.engine.num_slots,
        max_model_tokens=config.engine.max_model_tokens,
        compute_dtype=config.engine.compute_dtype,
        num_threads=config.engine.threads,
        engine_id="torch-0",
    )


async def run_plain(cycle: Cycle) -> None:
    """A cycle without Prefect."""
    await cycle.execute()


def num_closed_cycles(run: OpenRun) -> int:
    return sum(entry.kind == "cycle_closed" for entry in run.ledger.entries)


async def execute_run(
    config: RunConfig,
    source: str,
    *,
    until_cycle: int | None = None,
    take_over: bool = False,
    run_cycle: CycleRunner = run_plain,
    make_engine: EngineFactory = build_engine,
    report: Report = lambda event: None,
) -> OpenRun:
    """Runs cycles up to the absolute number `until_cycle` (default: the run file's).

    Idempotent: after a crash it goes on from the ledger, after success it does nothing. `source`
    names the run file in messages. Raises `ValueError` for bad input, and what `Cycle.execute`
    raises.
    """
    last = config.run.num_cycles if until_cycle is None else until_cycle
    if not 0 < last <= config.run.num_cycles:
        raise ValueError(
            f"--until-cycle {last}: {source} has {config.run.num_cycles} cycles; give a number "
            f"from 1 to that, or raise run.num_cycles."
        )
    run = find_run(config, source, report)
    if num_closed_cycles(run) >= last:
        return run
    take_run(run, take_over=take_over)
    run.cycle = num_closed_cycles(run)
    engine = make_engine(config, published_dir(run, 0)[0])
    try:
        context = await attach(run, engine)
        while run.cycle < last:
            report({"event": "cycle", "cycle": run.cycle, "of": last})
            await run_cycle(Cycle(run, context, report=report))
            run.cycle += 1
    finally:
        await engine.close()
    return run


def execute_run_sync(config: RunConfig, source: str, **options: Any) -> OpenRun:
    return asyncio.run(execute_run(config, source, **options))
