"""A job stopped after each batch and started again from its checkpoint ends with the bits of one
that never was: masters, both moments, step and published values."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from trainer_world import ROOT, World, finish, write_policy

pytestmark = pytest.mark.slow

NUM_BATCHES = 2
WARMUP_STEPS = 3
RATES = [1e-2 / 3, 2e-2 / 3, 1e-2, 1e-2]
"""Of two steps a batch: the job that starts again is in the middle of the warmup."""


def _train(world: World, *, restart: bool) -> list[dict]:
    """All steps rows of batches trained by one job, or by a job each."""
    batches = [world.record(range(4 * b, 4 * b + 4)) for b in range(NUM_BATCHES)]
    rows, job = [], None
    for batch, ids in enumerate(batches, start=1):
        job = job or world.start(until_batch=batch if restart else NUM_BATCHES)
        admission = world.admit(batch, ids)
        scores = world.wait_for(job, "scores", f"admission = {admission}")
        world.accept(batch, admission, scores)
        steps = world.wait_for(job, "steps", f"batch = {batch}")
        world.trained(batch, steps)
        rows += steps.to_pylist()
        if restart or batch == NUM_BATCHES:
            finish(job)
            job = None
    return rows


def _bits(checkpoint: Path) -> list[tuple[Any, bytes]]:
    """The header and the bytes of each shard: masters and both moments. Safetensors writes what is
    equal in its header in any order."""
    found = []
    for path in sorted(checkpoint.glob("*.safetensors")):
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        offsets = json.loads(header["__metadata__"].pop("DCP_SHARDING_INFO"))
        found.append(((path.name, header, offsets), data[8 + length :]))
    return found


@pytest.fixture(scope="module", params=[1, 2])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """(ranks, (the uninterrupted run and its steps), (the interrupted one and its))."""
    found = []
    for restart in (False, True):
        root = tmp_path_factory.mktemp("world")
        world = World.create(root, ranks=request.param, warmup_steps=WARMUP_STEPS)
        found.append((world, _train(world, restart=restart)))
    return request.param, *found


def test_a_job_for_each_batch_ends_with_the_bits_of_one_job(trained):
    ranks, (world, one), (interrupted, many) = trained
    assert [row["step"] for row in one] == [row["step"] for row in many] == [1, 2, 3, 4]
    assert [row["learning_rate"] for row in many] == pytest.approx(RATES, rel=1e-12)
    for name in ("learning_rate", "loss", "gradient_norm", "root_hash", "checkpoint"):
        assert [row[name] for row in one] == [row[name] for row in many], name
    assert len({row["root_hash"] for row in one}) == 1 + NUM_BATCHES, "each batch moved weights"
    for row in one[1::2]:
        bits = _bits(world.store / row["checkpoint"])
        assert bits == _bits(interrupted.store / row["checkpoint"]) and len(bits) == ranks


def _reshard(policy: Path, source: Path, target: Path, ranks: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    worker = Path(__file__).with_name("reshard_worker.py")
    command += ["--nproc-per-node", str(ranks), *map(str, (worker, policy, source, target))]
    environment = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=os.environ | environment, check=True)


def test_resharding_and_back_keeps_every_bit(trained, tmp_path: Path):
    ranks, (world, steps), _ = trained
    source = world.store / steps[-1]["checkpoint"]
    policy, others = write_policy(tmp_path / "policy"), 3 - ranks
    _reshard(policy, source, tmp_path / "other", ranks=others)
    assert len(_bits(tmp_path / "other")) == others
    _reshard(policy, tmp_path / "other", tmp_path / "back", ranks=ranks)
    assert _bits(tmp_path / "back") == _bits(source)
