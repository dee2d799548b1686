"""Supervised training under the trainer's own packing, sharding and optimizer.

    python -m torch.distributed.run --standalone --nproc-per-node 1 -m trainers.supervised \\
        --init DIR --data FILE.parquet --out DIR --steps 500 --batch-sequences 128 \\
        --learning-rate 2e-3 --seed 0 --threads 2

`--data` has the columns `token_ids` list<int32> and `loss_mask` list<bool>. `--out` becomes a
Hugging Face folder with bf16 weights and the configuration and tokenizer of `--init`; it appears
whole or not at all.
"""

import argparse
import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch import Tensor

from tasks.durable import fsync_dir, fsync_file
from tasks.weights.anchors import asset_files, iter_safetensors
from tasks.weights.folders import MODEL_FILE
from tasks.weights.safetensors_stream import write_safetensors
from trainers import ranks
from trainers.losses import cross_entropy
from trainers.optimizer import AdamWSettings, MasterAdamW
from trainers.packing import TrainingSequence, assign, empty_microbatch, pack
from trainers.policy import Policy
from trainers.reductions import reduce_loss

log = logging.getLogger(__name__)

TOKEN_BUDGET = 512
WARMUP_SHARE = 0.05
DECAY_SHARE = 0.3
LOG_EVERY_STEPS = 50
SETTINGS = AdamWSettings(
    beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.0, max_gradient_norm=1.0
)


def read_sequences(path: Path) -> list[TrainingSequence]:
    """Sequences of a Parquet file. Raises `ValueError` where a mask does not fit its tokens."""
    table = pq.read_table(path, columns=["token_ids", "loss_mask"])
    sequences = []
    for row, (ids, mask) in enumerate(
        zip(table["token_ids"].to_pylist(), table["loss_mask"].to_pylist(), strict=True)
    ):
        if len(ids) != len(mask) or mask[:1] == [True] or not any(mask):
            raise ValueError(
                f"{path}: row {row} needs a loss_mask as long as its {len(ids)} token_ids, False "
                "first and True somewhere."
            )
        sequences.append(TrainingSequence(torch.tensor(ids), torch.tensor(mask)))
    if not sequences:
        raise ValueError(f"{path} has no rows; give at least one sequence.")
    return sequences


def learning_rate(step: int, num_steps: int, peak: float) -> float:
    """Of step 1 to num_steps: a linear rise, a plateau, and a linear fall to zero after the last.

    Small models learn arithmetic in one leap at a high rate, and a rate that falls from the start
    can miss it.
    """
    rise = max(1, round(WARMUP_SHARE * num_steps))
    fall = max(1, round(DECAY_SHARE * num_steps))
    return peak * min(1.0, step / rise, (num_steps + 1 - step) / (fall + 1))


def draw_batches(num_sequences: int, size: int, seed: int) -> Iterator[np.ndarray]:
    """Indices of one batch after another: each epoch in a new order, batches across its ends."""
    generator = np.random.default_rng(seed)
    waiting = np.zeros(0, dtype=np.int64)
    while True:
        while len(waiting) < size:
            waiting = np.concatenate([waiting, generator.permutation(num_sequences)])
        yield waiting[:size]
        waiting = waiting[size:]


def accumulate_cross_entropy(policy: Policy, sequences: Sequence[TrainingSequence]) -> Tensor:
    """Leaves the gradient in the parameters; the loss over all ranks, a scalar."""
    num_loss_tokens = sum(int(sequence.action_mask.sum()) for sequence in sequences)
    total = torch.zeros((), device=policy.device)
    for microbatch in assign(pack(sequences, TOKEN_BUDGET), dist.get_world_size())[dist.get_rank()]:
        microbatch = microbatch or empty_microbatch()
        ones = torch.ones(len(microbatch.action_index))
        logprobs, _ = policy.logprobs(microbatch, ones)
        objective = cross_entropy(logprobs)
        weights = ones.to(policy.device)
        loss = reduce_loss(objective, weights, weights, num_loss_tokens)
        loss.backward()
        total += loss.detach()
    dist.all_reduce(total)
    return total


def write_folder(out: Path, init: Path, policy: Policy) -> None:
    """A Hugging Face folder of the policy's values; every rank calls it, rank 0 writes."""
    partial = out.with_name(f".{out.name}.partial")
    tensors = policy.layout.published(
        (name, parameter.full_tensor().detach().to(torch.bfloat16).cpu())
        for name, parameter in sorted(policy.parameters.items())
    )
    if dist.get_rank() > 0:
        for _ in tensors:
            pass
        return
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write_safetensors(partial / MODEL_FILE, tensors)
    for asset in asset_files(init):
        shutil.copyfile(asset, partial / asset.name)
    for file in partial.iterdir():
        fsync_file(file)
    fsync_dir(partial)
    os.rename(partial, out)
    fsync_dir(out.parent)


def train(arguments: argparse.Namespace) -> None:
    device = ranks.start(arguments.threads)
    if arguments.out.exists():
        raise ValueError(f"{arguments.out} exists; give --out a folder that does not.")
    sequences = read_sequences(arguments.data)
    policy = Policy(arguments.init, torch.float32, device)
    optimizer = MasterAdamW(policy, SETTINGS)
    optimizer.load(iter_safetensors(arguments.init / MODEL_FILE), str(arguments.init))
    batches = draw_batches(len(sequences), arguments.batch_sequences, arguments.seed)
    started = time.monotonic()
    for step in range(1, arguments.steps + 1):
        loss = accumulate_cross_entropy(policy, [sequences[i] for i in next(batches)])
        rate = learning_rate(step, arguments.steps, arguments.learning_rate)
        norm = optimizer.step(rate)
        if step % LOG_EVERY_STEPS == 0 or step == arguments.steps:
            log.info(
                "step %d of %d: loss %.4f, gradient norm %.3f, learning rate %.2e, %.1f s",
                *(step, arguments.steps, float(loss), norm, rate, time.monotonic() - started),
            )
    write_folder(arguments.out, arguments.init, policy)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="trainers.supervised", description=__doc__)
    for name in ("init", "data", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("steps", "batch-sequences", "seed", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    return parser.parse_args(argv)


def main() -> None:
    arguments = parse()
    try:
        train(arguments)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
