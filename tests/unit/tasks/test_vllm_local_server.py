"""A server's process: it ends with the controller, and its leftovers before it starts again."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.engines.protocol import EngineLost
from tasks.engines.vllm_launch import LocalServer

# Writes its own id and that of a child that would outlive it.
SERVER = """#!/bin/bash
sleep 300 &
echo $$ $! >> "$1/pids"
wait
"""
OWNER = """
import os, sys, time
from pathlib import Path
from tests.unit.tasks.test_vllm_local_server import local_server
local_server(Path(sys.argv[1])).start_if_dead()
time.sleep(300)
"""


def local_server(folder: Path) -> LocalServer:
    script = folder / "serve.sh"
    script.write_text(SERVER)
    script.chmod(0o755)
    return LocalServer(
        script,
        model_dir=folder,
        max_model_tokens=8,
        compute_dtype="float32",
        flags=(),
        threads=1,
        log=folder / "log",
        startup_timeout_s=1.0,
    )


def pids(folder: Path) -> list[int]:
    file = folder / "pids"
    return [int(pid) for pid in file.read_text().split()] if file.exists() else []


def alive(pid: int) -> bool:
    """Whether it runs; a zombie whom nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < until, "it never happened"
        time.sleep(0.02)


def test_it_is_told_to_end_when_its_controller_is_killed(tmp_path: Path):
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)])
    wait_until(lambda: len(pids(tmp_path)) == 2)
    leader, child = pids(tmp_path)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    wait_until(lambda: not alive(leader))
    os.kill(child, signal.SIGKILL)


def test_it_starts_again_without_what_it_left_behind(tmp_path: Path):
    server = local_server(tmp_path)
    server.start_if_dead()
    wait_until(lambda: len(pids(tmp_path)) == 2)
    server.start_if_dead()
    leader, child = pids(tmp_path)
    os.kill(leader, signal.SIGKILL)
    wait_until(lambda: not alive(leader))
    assert alive(child)
    server.start_if_dead()
    wait_until(lambda: len(pids(tmp_path)) == 4)
    assert not alive(child) and all(alive(pid) for pid in pids(tmp_path)[2:])
    server.stop()
    wait_until(lambda: not any(alive(pid) for pid in pids(tmp_path)))


def test_one_that_ends_or_hangs_before_it_answers_is_said_so(tmp_path: Path):
    async def unhealthy() -> bool:
        return False

    server = local_server(tmp_path)
    server.start_if_dead()
    with pytest.raises(EngineLost, match="has not answered for 1 s; read"):
        asyncio.run(server.ready(unhealthy))
    (tmp_path / "log").write_text("out of memory")
    os.killpg(server.pid, signal.SIGKILL)
    with pytest.raises(EngineLost, match=r"ended with code -9[\s\S]*out of memory"):
        asyncio.run(server.ready(unhealthy))
