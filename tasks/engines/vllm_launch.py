"""A vLLM server that this process starts on its own machine, and that ends with it."""

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from tasks.engines.protocol import EngineLost
from tasks.train import log_end

_POLL_S = 0.5
_STOP_TIMEOUT_S = 20.0


class LocalServer:
    """A launch script's process group on a free loopback port.

    Args:
        script: called with model folder, port, longest sequence, dtype and `flags`.
        threads: of its computation (OMP_NUM_THREADS).
        log: file that its output is appended to.
        index: its number among the servers of the run (SERVER_INDEX), which picks its devices.

    Raises `ValueError` if there is no such script.
    """

    def __init__(
        self,
        script: Path,
        *,
        model_dir: Path,
        max_model_tokens: int,
        compute_dtype: str,
        flags: Sequence[str],
        threads: int,
        log: Path,
        startup_timeout_s: float,
        index: int = 0,
    ) -> None:
        if not os.access(script, os.X_OK):
            raise ValueError(
                f"engine.vllm.launch: {script} is not an executable file; "
                "infra/vllm/serve-cpu.sh and infra/vllm/serve-gpu.sh are two to start from."
            )
        self.port = _free_port()
        # The kernel ends the server with us: a killed controller leaves none behind.
        self._command = [
            *("setpriv", "--pdeathsig", "TERM"),
            *(str(script.absolute()), str(model_dir), str(self.port)),
            *(str(max_model_tokens), compute_dtype, *flags),
        ]
        # HOST, because some shells and compilers' set-ups export a name of that kind.
        self._environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "HOST": "127.0.0.1",
            "SERVER_INDEX": str(index),
        }
        self._log = log
        self._startup_timeout_s = startup_timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server has not been started"
        return self._process.pid

    def start_if_dead(self) -> None:
        """Starts the server's process unless it is alive; it then takes a while to answer."""
        if self._process is not None and self._process.poll() is None:
            return
        # The leader may have left workers that hold the device.
        self.stop()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )

    async def ready(self, healthy: Callable[[], Awaitable[bool]]) -> None:
        """Returns once `healthy()`; raises `EngineLost` if the process ends or takes too long."""
        assert self._process is not None
        until_s = time.monotonic() + self._startup_timeout_s
        while True:
            if (code := self._process.poll()) is not None:
                raise EngineLost(
                    f"The vLLM server ended with code {code} before it answered; the end of "
                    f"{self._log}:\n{log_end(self._log)}"
                )
            if await healthy():
                return
            if time.monotonic() > until_s:
                raise EngineLost(
                    f"The vLLM server has not answered for {self._startup_timeout_s:g} s; read "
                    f"{self._log}, or raise engine.vllm.startup_timeout_s."
                )
            await asyncio.sleep(_POLL_S)

    def stop(self) -> None:
        """Ends the process group, gently first."""
        if self._process is None:
            return
        for sent in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, sent)
                self._process.wait(_STOP_TIMEOUT_S)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
        self._process = None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
