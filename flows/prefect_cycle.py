"""The cycle as a Prefect flow, its heavy steps as tasks.

Prefect shows and schedules; it is never asked for facts. Without `PREFECT_API_URL` it uses its
embedded API in this process, with its home beside the run, and no server. A task costs
milliseconds, so there is one a phase and batch, never one a trajectory.
"""

import os
from dataclasses import fields
from pathlib import Path

from flows.cycle import Cycle, Phases

PREFECT_HOME = Path("var/prefect")


def configure_prefect(home: Path = PREFECT_HOME) -> None:
    """Settings that must be in place before Prefect is imported; a user's own values win."""
    for name, value in {
        "PREFECT_HOME": str(home.absolute()),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_LOGGING_LEVEL": "WARNING",
        "PREFECT_LOGGING_TO_API_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }.items():
        os.environ.setdefault(name, value)
    Path(os.environ["PREFECT_HOME"]).mkdir(parents=True, exist_ok=True)


def phases_as_tasks() -> Phases:
    from prefect import task
    from prefect.cache_policies import NO_CACHE

    plain = Phases()
    return Phases(
        **{
            field.name: task(name=field.name, cache_policy=NO_CACHE, persist_result=False)(
                getattr(plain, field.name)
            )
            for field in fields(Phases)
        }
    )


async def run_as_flow(cycle: Cycle) -> None:
    """One cycle as one run of the flow `cycle`."""
    from prefect import flow

    cycle.phases = phases_as_tasks()

    @flow(name="cycle", flow_run_name="{run_id}-{number:06d}", persist_result=False)
    async def cycle_flow(run_id: str, number: int) -> None:
        await cycle.execute()

    await cycle_flow(cycle.run.run_id, cycle.run.cycle)
