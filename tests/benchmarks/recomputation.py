"""What `trainer.activation_checkpointing` saves and costs: one line a depth of the model.

    make bench-recomputation

The prompt-heavy minibatch of `tests.benchmarks.trainer` in one row, in float32 on one thread, by
two processes in turn. Peak memory is over what was resident before the step, gradients included.
The ratios are medians over the rounds, with the bootstrap's 95 % interval of time's; gradients are
compared bit for bit.
"""

import statistics
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers.utils import logging

from tests.benchmarks.lake.measure import Pairs, interval
from tests.benchmarks.trainer.__main__ import Worker, measure
from tests.benchmarks.trainer.shapes import SHAPES, write_policy

DEPTHS = (4, 8, 16)
SIDES = ("shared", "recomputed")


def line(num_layers: int, folder: Path) -> str:
    policy, minibatch = folder / f"policy-{num_layers}", folder / "minibatch.safetensors"
    write_policy(policy, num_layers)
    SHAPES["prompt-heavy"].make().save(minibatch)
    with Worker(SIDES[0], policy) as kept, Worker(SIDES[1], policy) as recomputed:
        found = measure([kept, recomputed], minibatch)
        for worker in (kept, recomputed):
            worker.ask("gradients", folder / worker.name)
    one, other = (load_file(folder / side) for side in SIDES)
    assert one.keys() == other.keys()
    equal = all(torch.equal(gradient, other[name]) for name, gradient in one.items())
    peaks = [statistics.median(row["peak_bytes"] for row in found[side]) for side in SIDES]
    of_gradients = sum(4 * gradient.numel() for gradient in one.values())
    seconds = Pairs(*(tuple(row["cpu_s"] for row in found[side]) for side in reversed(SIDES)))
    slowdown = seconds.slowdown()
    low, high = interval(slowdown)
    return (
        f"{num_layers} layers: peak {peaks[0] / 1e6:.0f} MB kept, {peaks[1] / 1e6:.0f} MB "
        f"recomputed, {of_gradients / 1e6:.0f} MB of both are gradients: "
        f"ratio {peaks[1] / peaks[0]:.2f}; "
        f"time {statistics.median(slowdown):.2f} [{low:.2f}, {high:.2f}]; "
        f"gradients {'equal' if equal else 'DIFFER'}"
    )


def main() -> None:
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        for num_layers in DEPTHS:
            print(line(num_layers, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
