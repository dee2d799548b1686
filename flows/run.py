"""Execute a run: open or resume it, attach an engine, and take it cycle by cycle to a number."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from flows.attachment import attach, keep_attached
from flows.cycle import Cycle
from flows.decisions import carry_out_decisions, require_decisions
from flows.engines import EngineFactory, build_engines
from flows.opening import OpenRun, Report, find_run, holding_lease, take_run
from flows.refusals import BatchRefused
from schemas.config import RunConfig
from tasks.data_docs.pages import write_data_docs
from tasks.engines.fleet import Fleet
from tasks.rollout import RolloutContext
from tasks.weights.store import open_store

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
    names the run file in messages. Raises `ValueError` for bad input, `BatchRefused` while a
    refusal waits for a person, and what `Cycle.execute` raises.
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
    require_decisions(run)
    take_run(run, take_over=take_over)
    run.cycle = num_closed_cycles(run)
    try:
        carry_out_decisions(run)
    except BatchRefused:
        _show_judgements(run, report, refused=True)
        raise
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
        try:
            await run_cycle(Cycle(run, context, report=report))
        except BatchRefused:
            _show_judgements(run, report, refused=True)
            raise
        _show_judgements(run, report)
        run.cycle += 1


def _show_judgements(run: OpenRun, report: Report, *, refused: bool = False) -> None:
    """Writes the pages of this cycle, and of earlier ones that have none."""
    folder = open_store(run.config).folder / "data_docs"
    index = write_data_docs(run.lake, run.run_id, folder, cycles=[run.cycle])
    report({"event": "data_docs", "path": str(index), "refused": refused})


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
