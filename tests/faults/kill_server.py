"""Forks real runs from a process that has imported everything, and has them die at a given place.

    python -m tests.faults.kill_server

An order is a line of JSON on standard input, the answer a line on standard output. Each order is a
`rollhouse run` in a child of its own, through the command line's own entry point: nothing of the
run has happened before the fork, and no thread is alive that matters to it. What this spares is ten
seconds of imports a run. The trainer job is the real `trainers.job.main`, in a process forked
before the controller does anything, which `torchrun` would have launched: that launcher is all that
is left out, and tests of a killed trainer under it are elsewhere.

A death by `Call` is a SIGKILL that the process sends itself on entry to or return from a function:
nothing is cleaned up, flushed or told. A death by system call comes from an strace that attaches to
the process while the run waits for it, one at an S3 request from a proxy.
"""

import builtins
import ctypes
import importlib
import inspect
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

HEAVY = (
    *("flows.cli", "flows.run", "flows.display", "flows.prefect_cycle", "flows.summary"),
    *("great_expectations", "transformers", "duckdb", "boto3", "trainers.job", "tasks.train"),
    *("tasks.engines.torch_engine", "tasks.environments.reasoning_gym", "tasks.warm_start"),
    *("torch.distributed.checkpoint", "tasks.data_docs.pages"),
)

CALLS: dict[str, tuple[str, str, Callable[..., object]]] = {
    "fsync": ("os", "fsync", lambda fd: os.readlink(f"/proc/self/fd/{fd}")),
    "rename": ("os", "rename", lambda source, target: target),
    "create": ("deltalake.DeltaTable", "create", lambda uri, *_, **__: uri),
    "commit": (
        "deltalake.DeltaTable",
        "create_write_transaction",
        lambda table, *_, **__: table.table_uri.rstrip("/"),
    ),
    "row": ("tasks.lake.ledger.Ledger", "append", lambda ledger, kind, **_: kind),
    "step": ("trainers.optimizer.MasterAdamW", "step", lambda *_: ""),
    "update": ("tasks.engines.torch_engine.TorchEngine", "update", lambda *_, **__: ""),
    "generate": ("tasks.engines.torch_engine.TorchEngine", "generate", lambda *_, **__: ""),
}
"""Where a function is found, and what of its arguments `path` is matched against."""


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


class Countdown:
    """Counts what matches `path`; true at the n-th."""

    def __init__(self, path: str, nth: int) -> None:
        self.path, self.left = re.compile(path), nth

    def matches(self, path: object) -> bool:
        if not self.path.search(str(path)):
            return False
        self.left -= 1
        return self.left == 0


class Torn:
    """A file being written, whose writer dies once half of its first bytes are there."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def __enter__(self) -> "Torn":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, data: Any) -> NoReturn:
        self.file.write(data[: len(data) // 2])
        self.file.flush()
        die()


def plan_death(call: str, path: str, moment: str, nth: int) -> None:
    """Makes this process die before, after or (`open` only) within its n-th matching call."""
    countdown = Countdown(path, nth)
    if call == "open":
        really_open = io.open

        def opened(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            result = really_open(file, mode, *args, **options)
            return Torn(result) if set(mode) & set("wx") and countdown.matches(file) else result

        builtins.open = io.open = opened  # type: ignore[assignment]
        return
    place, name, path_of = CALLS[call]
    module, _, owner_name = place.rpartition(".")
    owner: Any = (
        getattr(importlib.import_module(module), owner_name)
        if module
        else importlib.import_module(place)
    )
    original = getattr(owner, name)

    def around(*args: Any, **options: Any) -> bool:
        now = countdown.matches(path_of(*args, **options))
        if now and moment == "before":
            die()
        return now

    @wraps(original)
    def call_through(*args: Any, **options: Any) -> Any:
        now = around(*args, **options)
        result = original(*args, **options)
        if now:
            die()
        return result

    @wraps(original)
    async def await_through(*args: Any, **options: Any) -> Any:
        now = around(*args, **options)
        result = await original(*args, **options)
        if now:
            die()
        return result

    patch = await_through if inspect.iscoroutinefunction(original) else call_through
    is_method = inspect.isclass(owner) and "self" in inspect.signature(original).parameters
    setattr(owner, name, patch if is_method or not inspect.isclass(owner) else staticmethod(patch))


class ForkedTrainer:
    """Stands where the `Popen` of torchrun does: one trainer rank, forked before it is needed.

    It waits on its standard input for the arguments of its job, and ends if that ends first.
    """

    def __init__(self, order: dict[str, Any]) -> None:
        reading, writing = os.pipe()
        self.ended = Path(order["root"]) / "trainer-ended"
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.close(writing)
            os.dup2(reading, 0)
            os.close(reading)
            _exit_with(lambda: _train(order))
        os.close(reading)
        self.stdin = io.FileIO(writing, "wb")

    def launch(self, module: str, arguments: dict[str, object], **options: Any) -> "ForkedTrainer":
        assert module == "trainers.job" and options["ranks"] == 1
        assert "log" not in vars(self), "a run of one cycle launches one trainer job"
        self.log = Path(options["log"])
        self.log.parent.mkdir(parents=True, exist_ok=True)
        argv = [str(part) for option in arguments.items() for part in option]
        self.stdin.write(json.dumps([str(self.log), argv]).encode() + b"\n")
        return self

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        del timeout
        code = self._reap(0)
        assert code is not None
        return code

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def _reap(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
                self.ended.write_text(str(self.returncode))
        return self.returncode


def _train(order: dict[str, Any]) -> None:
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return
        line += byte
    log, argv = json.loads(line)
    _redirect(log)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    os.environ.update({name: str(value) for name, value in ranks.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    sys.argv = ["trainers.job", *argv]
    _plan(order, "trainer")
    importlib.import_module("trainers.job").main()


def _control(order: dict[str, Any]) -> None:
    os.environ.update(order["environment"])
    _redirect(order["log"])
    trainer = ForkedTrainer(order)
    pids = {"controller": os.getpid(), "trainer": trainer.pid}
    writing = Path(order["root"]) / "pids.writing"
    writing.write_text(json.dumps(pids))
    writing.rename(writing.with_name("pids.json"))
    if order["traced"]:
        _wait_for_tracer(pids[order["traced"]])
    importlib.import_module("tasks.train").torchrun = trainer.launch  # type: ignore[attr-defined]
    os.chdir(order["root"])
    sys.argv = ["rollhouse", *order["arguments"]]
    _plan(order, "controller")
    importlib.import_module("flows.cli").main()


def _wait_for_tracer(pid: int) -> None:
    while "TracerPid:\t0\n" in Path(f"/proc/{pid}/status").read_text():
        time.sleep(0.01)


def _plan(order: dict[str, Any], process: str) -> None:
    death = order["death"]
    if death and death["process"] == process:
        plan_death(*(death[name] for name in ("call", "path", "moment", "nth")))


def _redirect(log: str) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)


def _exit_with(work: Callable[[], None]) -> NoReturn:
    """Runs `work` and ends this process as an interpreter would have, without its clean-up."""
    code = 0
    try:
        work()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _carry_out(order: dict[str, Any]) -> int:
    """Forks the run and returns the controller's exit code once none of its processes is left."""
    child = os.fork()
    if child == 0:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        _exit_with(lambda: _control(order))
    code: int | None = None
    while True:
        try:
            pid, status = os.wait()
        except ChildProcessError:
            assert code is not None
            return code
        if pid == child:
            code = os.waitstatus_to_exitcode(status)


def main() -> None:
    # Trainers whose controller was killed become this process's children.
    pr_set_child_subreaper = 36
    assert ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0) == 0
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for module in HEAVY:
        importlib.import_module(module)
    print("ready", file=answers, flush=True)
    for line in iter(sys.stdin.readline, ""):
        print(_carry_out(json.loads(line)), file=answers, flush=True)


class RunServer:
    """A server and the way to give it orders."""

    def __init__(self, log: Path) -> None:
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.kill_server"],
                env=os.environ | one_thread | {"OMP_WAIT_POLICY": "PASSIVE"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def run(self, **order: Any) -> int:
        """The exit code of a run, negative for a signal."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        while (answer := self.process.stdout.readline()) == "ready\n":
            pass
        assert answer, "the run server is gone"
        return int(answer)

    def stop(self) -> None:
        # Closes both pipes, at whose end the server ends, and waits for that.
        with self.process:
            pass


if __name__ == "__main__":
    main()
