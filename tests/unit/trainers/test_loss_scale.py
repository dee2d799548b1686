"""Float16 computes with a scaled loss: no gradient is lost, none is dropped, and a resumed job has
the same scale."""

import pytest
import torch
from safetensors.torch import load_file

from trainers import checkpoint
from trainers.loss_scale import STEPS_TO_DOUBLE, LossScale
from trainers.losses import ClipRange
from trainers.optimizer import AdamWSettings, MasterAdamW
from trainers.packing import TrainingSequence
from trainers.truncation import Truncation
from trainers.update import Objective, TokenData, accumulate_gradients, take_step

SETTINGS = AdamWSettings(0.9, 0.95, 1e-8, 0.0, max_gradient_norm=1.0)
SEQUENCES = [
    TrainingSequence(torch.arange(number, number + 12), torch.arange(12) >= 4)
    for number in range(4)
]
COUNT = 4 * 8
OBJECTIVE = Objective("ppo_clip", ClipRange(0.2, 0.2))
BUDGET = 30


def _data(size: float) -> TokenData:
    """Advantages of about `size`."""
    ones, zeros = torch.ones(COUNT), torch.zeros(COUNT)
    advantages = size * torch.linspace(-1, 1, COUNT).roll(5)
    ids = torch.arange(4).repeat_interleave(8)
    truncation = Truncation(zeros.long(), ones, zeros)
    return TokenData(ones * -3.5, advantages, ones, ids, ids, ones, truncation)


@pytest.fixture
def make(make_policy, policy_folder):
    def loaded(dtype: torch.dtype):
        policy = make_policy(dtype)
        optimizer = MasterAdamW(policy, SETTINGS)
        optimizer.load(load_file(policy_folder / "model.safetensors").items(), "policy")
        return policy, optimizer

    return loaded


def _gradient(make, dtype: torch.dtype, size: float, scale: float) -> torch.Tensor:
    """The unscaled gradient of all parameters, flat."""
    policy, _ = make(dtype)
    accumulate_gradients(policy, SEQUENCES, _data(size), OBJECTIVE, BUDGET, scale)
    return torch.cat([p.grad.to_local().flatten() / scale for p in policy.parameters.values()])


def _masters(optimizer: MasterAdamW) -> torch.Tensor:
    return torch.cat([master.detach().flatten().clone() for master in optimizer.masters.values()])


def test_a_scale_is_halved_down_to_1_and_doubles_after_finite_steps_in_a_row():
    scale = LossScale.of(torch.float16)
    assert scale.value == 65536
    assert scale.halve()
    assert scale.value == 32768
    for _ in range(STEPS_TO_DOUBLE - 1):
        scale.count()
    assert scale.halve(), "the count begins anew"
    for _ in range(STEPS_TO_DOUBLE - 1):
        scale.count()
    assert scale.value == 16384
    scale.count()
    assert scale.value == 32768
    assert [scale.halve() for _ in range(16)] == [True] * 15 + [False]
    assert scale.value == 1
    scale = LossScale(True, 2.0**24, STEPS_TO_DOUBLE - 1)
    scale.count()
    assert scale.value == 2.0**24


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_are_not_scaled(make, dtype):
    policy, optimizer = make(dtype)
    report, _ = take_step(policy, optimizer, SEQUENCES, _data(1.0), OBJECTIVE, BUDGET, 1e-3)
    assert report.loss_scale == optimizer.loss_scale.value == 1.0
    assert not optimizer.loss_scale.halve()


def test_small_gradients_survive_where_the_loss_is_scaled(make):
    """Of advantages of 5e-7 over 32 tokens the gradient of a logit is at most 1.6e-8, and float16
    rounds what is below 2^-25, 3.0e-8, to 0."""
    exact = _gradient(make, torch.float32, 5e-7, 1.0)
    scaled, unscaled = (_gradient(make, torch.float16, 5e-7, s) for s in (2.0**16, 1.0))
    assert not unscaled.any()
    assert (scaled - exact).norm() < 0.02 * exact.norm()


def test_an_overflow_is_computed_again_at_half_the_scale(make):
    policy, optimizer = make(torch.float16)
    optimizer.loss_scale.value = 2.0**24
    report, norm = take_step(policy, optimizer, SEQUENCES, _data(100.0), OBJECTIVE, BUDGET, 1e-3)
    found = optimizer.loss_scale.value
    assert 1 < found < 2.0**24
    assert report.loss_scale == found
    assert (optimizer.num_steps, optimizer.loss_scale.num_finite) == (1, 1)
    assert all(parameter.grad is None for parameter in policy.parameters.values())
    policy, straight = make(torch.float16)
    straight.loss_scale.value = found
    expected = take_step(policy, straight, SEQUENCES, _data(100.0), OBJECTIVE, BUDGET, 1e-3)
    assert (report, norm) == expected
    assert torch.equal(_masters(optimizer), _masters(straight))


@pytest.mark.parametrize("scale", [2.0**8, 2.0**12])
def test_a_step_is_that_of_the_unscaled_gradient(make, scale):
    """AdamW's first moment after one step is 1 - beta1 = 0.1 of the clipped gradient."""
    exact = _gradient(make, torch.float32, 10.0, 1.0)
    assert exact.norm() > SETTINGS.max_gradient_norm, "the clip must have something to do"
    policy, optimizer = make(torch.float16)
    optimizer.loss_scale.value = scale
    _, norm = take_step(policy, optimizer, SEQUENCES, _data(10.0), OBJECTIVE, BUDGET, 1e-3)
    assert norm == pytest.approx(exact.norm().item(), rel=0.02)
    moments = [optimizer.adamw.state[m]["exp_avg"].flatten() for m in optimizer.masters.values()]
    difference = torch.cat(moments) - 0.1 * exact / exact.norm()
    assert difference.norm() < 0.1 * 0.02


@pytest.mark.parametrize(("size", "what"), [(torch.nan, "the loss is nan"), (1e9, "the gradient")])
def test_what_no_scale_mends_is_refused(make, size, what):
    policy, optimizer = make(torch.float16)
    before = _masters(optimizer)
    with pytest.raises(ValueError, match=f'optimizer step 1: {what}.*compute_dtype = "bfloat16"'):
        take_step(policy, optimizer, SEQUENCES, _data(size), OBJECTIVE, BUDGET, 1e-3)
    assert optimizer.num_steps == 0
    assert torch.equal(_masters(optimizer), before)


def test_weights_beyond_float16_are_refused(make):
    policy, _ = make(torch.float16)
    values = dict(policy.local_values())
    name = "model.norm.weight"
    values[name][3] = -65280.0  # the largest bf16 below float16's end
    policy.set_local_values(values.items())
    assert policy.parameters[name].to_local()[3] == -65280
    values[name][3] = -65536.0
    with pytest.raises(ValueError, match=rf"{name} holds -65536\.0, and float16 ends at 65504"):
        policy.set_local_values(values.items())
    wide, _ = make(torch.bfloat16)
    wide.set_local_values(values.items())


def test_a_resumed_job_has_the_scale_of_the_checkpoint(make, tmp_path):
    policy, optimizer = make(torch.float16)
    optimizer.loss_scale = LossScale(True, 512.0, 98)
    take_step(policy, optimizer, SEQUENCES, _data(1.0), OBJECTIVE, BUDGET, 1e-3)
    checkpoint.save(tmp_path / "c", optimizer, batch=1)
    resumed_policy, resumed = make(torch.float16)
    checkpoint.load(tmp_path / "c", resumed)
    assert resumed.loss_scale == LossScale(True, 512.0, 99)
    for each in ((policy, optimizer), (resumed_policy, resumed)):
        take_step(*each, SEQUENCES, _data(1.0), OBJECTIVE, BUDGET, 1e-3)
    assert resumed.loss_scale == optimizer.loss_scale == LossScale(True, 1024.0, 0)
    assert torch.equal(_masters(resumed), _masters(optimizer))
