"""Execute a run: open or resume it, attach an engine, and take it cycle by cycle to a number."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from flows.attachment import attach, keep_attached
from flows.cycle import Cycle
from flows.engines import EngineFactory, build_engines
from flows.opening import OpenRun, Report, find_run, holding_lease, take_run
from schemas.config import RunConfig
from tasks.engines.fleet import Fleet
from tasks.rollout import RolloutContext

CycleRunner = Callable[[Cycle], Awaitable[None]]


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
    make_engines: EngineFactory = build_engines,
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
    report({"event": "attaching", "engine": config.engine.model_dump(mode="json")})
    vllm = config.engine.vllm
    fleet = Fleet(
        make_engines(run),
        patience_s=0.0 if vllm is None else vllm.startup_timeout_s,
    )
    try:
        context = await holding_lease(run, attach(run, fleet))
        await _unless(
            _cycles(run, context, last, run_cycle, report), keep_attached(run, context, report)
        )
    finally:
        await fleet.close()
    return run


async def _cycles(
    run: OpenRun, context: RolloutContext, last: int, run_cycle: CycleRunner, report: Report
) -> None:
    while run.cycle < last:
        report({"event": "cycle", "cycle": run.cycle, "of": last})
        await run_cycle(Cycle(run, context, report=report))
        run.cycle += 1


async def _unless(work: Coroutine[Any, Any, None], watch: Coroutine[Any, Any, None]) -> None:
    """Awaits `work` beside `watch`, which only ends by an error; that then ends both."""
    tasks = [asyncio.create_task(work), asyncio.create_task(watch)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


def execute_run_sync(config: RunConfig, source: str, **options: Any) -> OpenRun:
    return asyncio.run(execute_run(config, source, **options))
