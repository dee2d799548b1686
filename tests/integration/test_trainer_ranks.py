"""One, two and four ranks compute the same update, and read each other's checkpoints."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from trainer_world import ROOT, write_policy

from tasks.weights.checkpoints import read_masters
from tests.engine_models import publish

Kept = dict[str, torch.Tensor]


def _start(num_ranks: int, policy: Path, out: Path, *start: Path) -> subprocess.Popen[bytes]:
    out.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(num_ranks), str(Path(__file__).with_name("rank_worker.py"))]
    return subprocess.Popen(
        [*command, str(policy), str(out), *map(str, start)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )


def _work(policy: Path, root: Path, *asked: tuple[int, str, Path | None]) -> list[Kept]:
    """What (ranks, folder to write, checkpoint to start from) keep, worked side by side."""
    jobs = [
        _start(num_ranks, policy, root / out, *([] if start is None else [start]))
        for num_ranks, out, start in asked
    ]
    assert [job.wait() for job in jobs] == [0] * len(jobs)
    return [load_file(root / out / "kept.safetensors") for _, out, _ in asked]


@pytest.fixture(scope="module")
def worked(tmp_path_factory):
    root = tmp_path_factory.mktemp("ranks")
    policy = write_policy(root / "policy")
    return root, policy, *_work(policy, root, *[(n, f"ranks-{n}", None) for n in (1, 2, 4)])


def _largest_difference(one, two, prefix):
    names = [name for name in one if name.startswith(prefix)]
    assert names
    return max(((one[n] - two[n]).norm() / one[n].norm()).item() for n in names)


def test_gradients_agree(worked):
    _, _, one, *others = worked
    for other in others:
        assert one.keys() == other.keys()
        assert _largest_difference(one, other, "gradient.") <= 1e-5
        assert _largest_difference(one, other, "by_sequence.") <= 1e-5
        assert _largest_difference(one, other, "norm.") <= 1e-5
        assert _largest_difference(one, other, "old") <= 1e-6


def test_gradients_of_a_mixture_with_replayed_experts_agree(tmp_path):
    publish(tmp_path / "policy", "qwen3_moe", vocab_size=32, num_experts=6)
    one, two = _work(tmp_path / "policy", tmp_path, (1, "one", None), (2, "two", None))
    assert one.keys() == two.keys()
    for prefix in ("gradient.", "by_sequence.", "norm."):
        assert _largest_difference(one, two, prefix) <= 1e-5
    routers = [name for name in one if name.startswith("gradient.") and "mlp.gate" in name]
    assert len(routers) == 2 and all(one[name].norm() > 0 for name in routers)
    # Random experts: the router's own are among them by chance alone.
    assert 0 < one["routing/agreement"] < 0.5
    for name in (name for name in one if name.startswith("routing/")):
        assert torch.equal(one[name], two[name]), name


def test_parameters_agree_after_three_steps(worked):
    _, _, one, *others = worked
    for other in others:
        assert _largest_difference(one, other, "master.") <= 1e-4


def test_a_checkpoint_of_two_ranks_is_whole_for_readers_without_ranks(worked):
    root, _, _, two, _ = worked
    shards = list((root / "ranks-2" / "checkpoint").glob("*.safetensors"))
    assert len(shards) == 2
    masters = dict(read_masters(root / "ranks-2" / "checkpoint"))
    for name, master in masters.items():
        assert torch.equal(master, two[f"master.{name}"]), name


def test_checkpoints_reshard_in_both_directions(worked):
    root, policy, *_ = worked
    from_two = root / "ranks-2" / "checkpoint"
    one, two = _work(policy, root, (1, "one-from-two", from_two), (2, "two-from-two", from_two))
    assert _largest_difference(one, two, "gradient.") <= 1e-5
    assert _largest_difference(one, two, "master.") <= 1e-4
    from_one = root / "one-from-two" / "checkpoint"
    again, straight = _work(
        policy, root, (2, "two-from-one", from_one), (1, "one-from-one", from_one)
    )
    assert _largest_difference(again, straight, "exp_avg") <= 1e-3
    assert _largest_difference(again, straight, "master.") <= 1e-4
