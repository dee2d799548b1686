"""Gradients in each dtype: summed over ranks in float32, the same with activations recomputed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from trainer_world import ROOT, write_policy

WORKER = Path(__file__).with_name("precision_worker.py")
DTYPES = ("float32", "bfloat16", "float16")


@pytest.fixture(scope="module")
def worked(tmp_path_factory):
    """What one rank and two ranks keep."""
    root = tmp_path_factory.mktemp("precision")
    policy = write_policy(root / "policy")
    outs = [root / f"ranks-{count}" for count in (1, 2)]
    jobs = []
    for count, out in zip((1, 2), outs, strict=True):
        out.mkdir()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(count), str(WORKER), str(policy), str(out)]
        environment = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        jobs.append(subprocess.Popen(command, cwd=ROOT, env=os.environ | environment))
    assert [job.wait() for job in jobs] == [0, 0]
    return [load_file(out / "kept.safetensors") for out in outs]


def _gradient(kept, way: str) -> torch.Tensor:
    return torch.cat(
        [v.flatten() for n, v in sorted(kept.items()) if n.startswith(f"torch.{way}.")]
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_recomputed_activations_give_the_same_gradient(worked, dtype):
    for kept in worked:
        gradient = _gradient(kept, f"{dtype}.kept")
        assert gradient.any()
        assert torch.equal(_gradient(kept, f"{dtype}.recomputed"), gradient)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_summed_over_ranks_in_float32(worked, dtype):
    """Each of the two microbatches is a rank's, or both are one rank's, which adds them in float32:
    a sum of two numbers has no order, and any narrower one would round."""
    one, two = (_gradient(kept, f"{dtype}.kept") for kept in worked)
    assert one.dtype == torch.float32
    assert torch.equal(one, two)
    if dtype != "float32":
        assert not torch.equal(one, one.to(getattr(torch, dtype)).float())


# Ten times the rounding of one number, to 8 and to 11 significant bits.
@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 10 * 2**-8), ("float16", 10 * 2**-11)])
def test_a_narrow_gradient_is_near_that_of_float32(worked, dtype, bound):
    exact, narrow = (_gradient(worked[0], f"{name}.kept") for name in ("float32", dtype))
    difference = float((narrow - exact).norm() / exact.norm())
    assert bound / 100 < difference < bound


def test_ranks_agree_on_the_loss_scale(worked):
    one, two = worked
    assert 1 < one["scale"] < 2.0**24
    assert torch.equal(one["scale"], two["scale"])
    assert float(one["norm"]) == pytest.approx(float(two["norm"]), rel=1e-6)
    masters = [name for name in one if name.startswith("master.")]
    assert masters
    for name in masters:
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=1e-6)
