"""One side of the comparison, in a process of its own.

    python -m tests.benchmarks.trainer.worker SIDE POLICY

Commands come as lines of standard input, and each is answered by one line of JSON:

    load MINIBATCH   takes a minibatch and updates once on its first sequence, so that what is
                     allocated once is there
    update           one optimizer step: {"cpu_s", "peak_bytes"}
    gradients PATH   the gradient of the minibatch's loss, as safetensors

`cpu_s` is of all threads. `peak_bytes` is the most resident memory over what was resident before
the step: weights, optimizer state and libraries apart. The learning rate is 0, so every step
computes the same.
"""

import ctypes
import gc
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.utils import logging

from tests.benchmarks.trainer.shapes import Minibatch

SIDES = {
    "shared": "SharedSide",
    "recomputed": "RecomputedSide",
    "padded": "PaddedSide",
    "trl": "TrlSide",
}


class Side(Protocol):
    """Built from a policy folder. `prepare` takes a minibatch as the side wants it."""

    def prepare(self, minibatch: Minibatch) -> None: ...

    def backward(self) -> None:
        """Leaves the gradient of the mean clipped surrogate over action tokens."""
        ...

    def step(self) -> None:
        """Clips the gradient, steps AdamW and clears the gradient."""
        ...

    def gradients(self) -> dict[str, Tensor]: ...


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def _update(side: Side) -> dict[str, float]:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _status("VmRSS")
    started = time.process_time()
    side.backward()
    side.step()
    cpu_s = time.process_time() - started
    return {"cpu_s": cpu_s, "peak_bytes": _status("VmHWM") - before}


def main(name: str, policy: Path) -> None:
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    answers = sys.stdout
    sys.stdout = sys.stderr  # libraries print too
    module = importlib.import_module(f"tests.benchmarks.trainer.{name}_side")
    side: Side = getattr(module, SIDES[name])(policy)
    for line in sys.stdin:
        command, *arguments = line.split()
        answer: dict[str, float] = {}
        if command == "load":
            side.prepare(Minibatch.load(Path(arguments[0]), 1))
            _update(side)
            side.prepare(Minibatch.load(Path(arguments[0])))
        elif command == "update":
            answer = _update(side)
        else:
            side.backward()
            save_file(side.gradients(), arguments[0])
            side.step()
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
