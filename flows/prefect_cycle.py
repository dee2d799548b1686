"""The cycle as a Prefect flow, its heavy steps as tasks.

Prefect shows and schedules; it is never asked for facts. Without `PREFECT_API_URL` the run brings
its own API, with its database under var/, and needs no server. A task costs milliseconds, so there
is one a phase and batch, never one a trajectory.
"""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from flows.commits import Phases
from flows.cycle import Cycle

P = TypeVar("P", bound=Any)

PREFECT_HOME = Path("var/prefect")
STARTUP_TIMEOUT_S = 120.0
"""The first start makes the database, which takes a while on a busy machine."""


@contextmanager
def prefect_api() -> Iterator[None]:
    """Settings and an API for Prefect, to be entered before it is imported; a user's own
    environment wins.

    Raises `RuntimeError` if the API does not start.
    """
    for name, value in {
        "PREFECT_HOME": str(PREFECT_HOME.absolute()),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_LOGGING_LEVEL": "WARNING",
        "PREFECT_LOGGING_TO_API_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }.items():
        os.environ.setdefault(name, value)
    Path(os.environ["PREFECT_HOME"]).mkdir(parents=True, exist_ok=True)
    if "PREFECT_API_URL" in os.environ:
        yield
        return
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.prefect_api", str(listening.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=[listening.fileno()],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
    with process:
        os.environ["PREFECT_API_URL"] = f"http://127.0.0.1:{port}/api"
        try:
            _await_health(process)
            yield
        finally:
            del os.environ["PREFECT_API_URL"]


def _await_health(process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + STARTUP_TIMEOUT_S
    while time.monotonic() < until and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{os.environ['PREFECT_API_URL']}/health", timeout=60):
                return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(
        f"Prefect's embedded API did not start in {STARTUP_TIMEOUT_S:.0f} s; set PREFECT_API_URL "
        "to a server, or pass --no-prefect."
    )


def phases_as_tasks(plain: P) -> P:
    """The same phases, each of whose functions is a Prefect task."""
    from prefect import task
    from prefect.cache_policies import NO_CACHE

    return replace(
        plain,
        **{
            field.name: task(name=field.name, cache_policy=NO_CACHE, persist_result=False)(
                getattr(plain, field.name)
            )
            for field in fields(plain)
        },
    )


async def run_as_flow(cycle: Cycle) -> None:
    """One cycle as one run of the flow `cycle`."""
    from prefect import flow

    cycle.phases = phases_as_tasks(Phases())

    @flow(name="cycle", flow_run_name="{run_id}-{number:06d}", persist_result=False)
    async def cycle_flow(run_id: str, number: int) -> None:
        await cycle.execute()

    await cycle_flow(cycle.run.run_id, cycle.run.cycle)
