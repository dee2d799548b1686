"""What an update costs, against padded rows and against TRL's GRPO trainer: one line a target.

    make bench-trainer                                    # all
    python -m tests.benchmarks.trainer tool-heavy         # some shapes

Each side is a process with the same policy, minibatch and loss, in float32 on one thread, and all
its sequences go through the model at once. The sides take turns. A ratio is the median over the
rounds, with the bootstrap's 95 % interval of it; speed is in tokens a CPU second, and as the tokens
are the same, the ratio is that of the seconds. Ideal is tokens without sharing over tokens with it,
both without padding. A miss is printed, not an error.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import torch
from safetensors.torch import load_file
from transformers.utils import logging

from tests.benchmarks.lake.measure import Pairs, interval, verdict
from tests.benchmarks.trainer.shapes import SHAPES, Minibatch, Shape, write_policy
from trainers.packing import TrainingSequence, num_forwarded, pack

ROOT = Path(__file__).parents[3]
TRL_PYTHON = ROOT / ".venv-trl/bin/python"
NUM_ROUNDS = 8
MEMORY_TARGET = 0.7
GRADIENT_TARGET = 1e-5


class Worker:
    """A side in a process of its own, and what it measured of the minibatch that it holds."""

    def __init__(self, name: str, policy: Path):
        python = str(TRL_PYTHON) if name == "trl" else sys.executable
        self.name = name
        self.process = subprocess.Popen(
            [python, "-W", "ignore", "-m", "tests.benchmarks.trainer.worker", name, str(policy)],
            cwd=ROOT,
            env=os.environ
            | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def ask(self, *command: object) -> dict[str, float]:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(*command, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            sys.exit(f"The {self.name} side ended at {command[0]}; its error is above.")
        return json.loads(answer)


def measure(workers: list[Worker], path: Path) -> dict[str, list[dict[str, float]]]:
    """What each side measured in each round; every other round begins with the last."""
    found: dict[str, list[dict[str, float]]] = {worker.name: [] for worker in workers}
    for worker in workers:
        worker.ask("load", path)
    for number in range(NUM_ROUNDS):
        for worker in workers[:: -1 if number % 2 else 1]:
            found[worker.name].append(worker.ask("update"))
    return found


def largest_difference(one: Path, other: Path) -> float:
    """Of two files of gradients: the largest relative L2 difference of a tensor."""
    expected, found = load_file(other), load_file(one)
    assert expected.keys() == found.keys()
    return max(
        float((found[name] - value).norm() / value.norm()) for name, value in expected.items()
    )


def counted(minibatch: Minibatch) -> tuple[int, int, int]:
    """Tokens forwarded: without sharing, shared, and in padded rows."""
    pairs = zip(minibatch.ids, minibatch.masks, strict=True)
    sequences = [TrainingSequence(ids, mask) for ids, mask in pairs]
    lengths = [num_forwarded(sequence) for sequence in sequences]
    (row,) = pack(sequences, sum(lengths))
    return sum(lengths), row.num_tokens, max(lengths) * len(lengths)


def lines(name: str, shape: Shape, workers: list[Worker], folder: Path) -> Iterator[str]:
    minibatch = shape.make()
    path = folder / f"{name}.safetensors"
    minibatch.save(path)
    unshared, shared, padded = counted(minibatch)
    found = measure(workers, path)

    def of(side: str, field: str) -> list[float]:
        return [row[field] for row in found[side]]

    speeds = {
        other: Pairs(tuple(of("shared", "cpu_s")), tuple(of(other, "cpu_s"))).speedup()
        for other in ("padded", "trl")
    }
    low, high = interval(speeds["padded"])
    rate = unshared / float(torch.tensor(of("shared", "cpu_s")).median())
    yield (
        f"context: {name}: {unshared} tokens, {shared} shared, {padded} padded; ideal "
        f"{unshared / shared:.2f}, with padding {padded / shared:.2f}; "
        f"shared / padded speed [{low:.2f}, {high:.2f}], {rate:.0f} tokens a CPU second"
    )
    yield verdict(f"{name}: update speed / TRL", speeds["trl"], ">=", shape.target)
    peaks = zip(of("shared", "peak_bytes"), of("trl", "peak_bytes"), strict=True)
    memory = [ours / theirs for ours, theirs in peaks]
    megabytes = [max(of(side, "peak_bytes")) / 1e6 for side in ("shared", "padded", "trl")]
    context = "{:.0f} MB shared, {:.0f} padded, {:.0f} TRL".format(*megabytes)
    yield verdict(f"{name}: peak memory / TRL", memory, "<=", MEMORY_TARGET, context)
    for worker in workers:
        worker.ask("gradients", folder / worker.name)
    for other in ("padded", "trl"):
        difference = largest_difference(folder / "shared", folder / other)
        met = "OK" if difference <= GRADIENT_TARGET else "MISS"
        yield (
            f"{name}: gradient against {other}, relative L2 of the worst tensor: "
            f"{difference:.1e}, target <= {GRADIENT_TARGET:g} {met}"
        )


def main(names: list[str]) -> None:
    unknown = [name for name in names if name not in SHAPES]
    if unknown:
        sys.exit(f"There is no shape {', '.join(unknown)}; there are {', '.join(SHAPES)}.")
    if not TRL_PYTHON.is_file():
        sys.exit("TRL has no environment; run `make bench-trainer`, which makes .venv-trl first.")
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        policy = folder / "policy"
        logging.disable_progress_bar()
        write_policy(policy)
        with (
            Worker("shared", policy) as a,
            Worker("padded", policy) as b,
            Worker("trl", policy) as c,
        ):
            for name in names or SHAPES:
                for line in lines(name, SHAPES[name], [a, b, c], folder):
                    print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
