"""The policy shows published values only, and the optimizer is AdamW over its masters."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from trainers.optimizer import AdamWSettings, MasterAdamW
from trainers.packing import TrainingSequence, pack
from trainers.policy import Policy

SETTINGS = AdamWSettings(
    beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1, max_gradient_norm=0.5
)
SEQUENCE = TrainingSequence(torch.arange(1, 13), torch.arange(12) >= 4)


def _loaded(policy, folder):
    optimizer = MasterAdamW(policy, SETTINGS)
    values = load_file(folder / "model.safetensors")
    optimizer.load(values.items(), str(folder))
    return optimizer, values


def _backward(policy):
    (microbatch,) = pack([SEQUENCE], 64)
    logprobs = policy.logprobs(microbatch, torch.ones(8))[0]
    (-logprobs.sum()).backward()


def test_parameters_are_the_safetensors_names_and_values(make_policy, policy_folder):
    policy = make_policy()
    _, values = _loaded(policy, policy_folder)
    assert "lm_head.weight" not in policy.parameters
    shown = dict(policy.local_values())
    assert shown.keys() == values.keys()
    for name, value in values.items():
        assert torch.equal(shown[name], value)


def test_steps_equal_torch_adamw_over_masters_with_rounded_forward(make_policy, policy_folder):
    policy = make_policy()
    optimizer, values = _loaded(policy, policy_folder)
    masters = {name: value.float().requires_grad_() for name, value in values.items()}
    matrices = [m for m in masters.values() if m.ndim >= 2]
    vectors = [m for m in masters.values() if m.ndim < 2]
    reference = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=3e-3,
        betas=(0.9, 0.95),
        foreach=False,
    )
    for _ in range(3):
        _backward(policy)
        gradients = {n: p.grad.to_local().clone() for n, p in policy.parameters.items()}
        norm = torch.sqrt(sum(g.double().square().sum() for g in gradients.values()))
        assert norm > 0.5, "the clip must have something to do"
        for name, master in masters.items():
            master.grad = (gradients[name] * (0.5 / norm)).float()
        reference.step()
        assert optimizer.step(3e-3) == pytest.approx(norm.item(), rel=1e-6)
        for name, shown in policy.local_values():
            assert torch.equal(policy.parameters[name].to_local(), shown.float()), "not bf16"
            rounded = optimizer.masters[name].detach().to(torch.bfloat16)
            assert torch.equal(shown, rounded)
            torch.testing.assert_close(
                optimizer.masters[name].detach(), masters[name].detach(), rtol=1e-5, atol=1e-7
            )
    moved = [not torch.equal(shown, values[name]) for name, shown in policy.local_values()]
    assert any(moved)
    assert optimizer.num_steps == 3


def test_small_updates_accumulate_below_bf16_resolution(make_policy, policy_folder):
    policy = make_policy()
    optimizer, values = _loaded(policy, policy_folder)
    # 1e-5 is far below half a unit in the last place of a bf16 value just under 1 (2^-9).
    name = "model.norm.weight"
    assert values[name].float().min() == 1.0
    for parameter in policy.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    policy.parameters[name].grad.to_local().fill_(1e-3)
    optimizer.step(1e-5)
    assert torch.equal(policy.parameters[name].to_local().detach(), values[name].float())
    assert optimizer.masters[name].detach()[0].item() == pytest.approx(1 - 1e-5, abs=1e-7)


def test_bfloat16_computes_with_the_same_values(make_policy, policy_folder):
    (microbatch,) = pack([SEQUENCE], 64)
    results = {}
    for dtype in (torch.float32, torch.bfloat16):
        policy = make_policy(dtype)
        _loaded(policy, policy_folder)
        logprobs = policy.logprobs(microbatch, torch.ones(8))[0]
        logprobs.sum().backward()
        gradient = policy.parameters["model.norm.weight"].grad
        assert gradient.dtype == torch.float32
        results[dtype] = logprobs.detach()
    assert results[torch.bfloat16].dtype == torch.float32
    difference = (results[torch.bfloat16] - results[torch.float32]).abs().max().item()
    assert 0 < difference < 0.3


def test_values_set_after_a_forward_without_backward_are_used(make_policy, policy_folder):
    policy = make_policy()
    optimizer, values = _loaded(policy, policy_folder)
    (microbatch,) = pack([SEQUENCE], 64)
    with torch.no_grad():
        before = policy.logprobs(microbatch, torch.ones(8))[0]
        policy.set_local_values((name, value * 0.5) for name, value in values.items())
        halved = policy.logprobs(microbatch, torch.ones(8))[0]
        optimizer.publish()
        after = policy.logprobs(microbatch, torch.ones(8))[0]
    assert (halved - before).abs().max() > 0.01
    assert torch.equal(before, after)


def test_a_gradient_that_is_not_finite_is_refused(make_policy, policy_folder):
    policy = make_policy()
    optimizer, values = _loaded(policy, policy_folder)
    for parameter in policy.parameters.values():
        parameter.grad = torch.full_like(parameter, torch.nan)
    with pytest.raises(ValueError, match="optimizer step 1: the gradient norm is nan"):
        optimizer.step(1e-3)
    assert optimizer.num_steps == 0
    for name, master in optimizer.masters.items():
        assert torch.equal(master.detach(), values[name].float())


def test_weights_of_another_model_are_refused(make_policy, policy_folder, tmp_path):
    policy = make_policy()
    values = load_file(policy_folder / "model.safetensors")
    missing = {name: value for name, value in values.items() if name != "model.norm.weight"}
    with pytest.raises(ValueError, match=r"lacks 1 tensors .* model\.norm\.weight"):
        MasterAdamW(policy, SETTINGS).load(missing.items(), "weights")
    with pytest.raises(ValueError, match=r"unknown 1 tensors .* extra"):
        MasterAdamW(policy, SETTINGS).load([*values.items(), ("extra", torch.ones(1))], "weights")
    misshapen = {**values, "model.norm.weight": torch.ones(3)}
    with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \[3\]"):
        MasterAdamW(policy, SETTINGS).load(misshapen.items(), "weights")
    with pytest.raises(ValueError, match=r"has no config\.json"):
        Policy(tmp_path, torch.float32, torch.device("cpu"))


def test_untied_heads_are_parameters_of_their_own(one_rank, policy_folder, tmp_path):
    folder = tmp_path / "untied"
    shutil.copytree(policy_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    values = load_file(policy_folder / "model.safetensors")
    values["lm_head.weight"] = values["model.embed_tokens.weight"] * 2
    save_file(values, folder / "model.safetensors")
    policy = Policy(folder, torch.float32, torch.device("cpu"))
    _loaded(policy, folder)
    shown = dict(policy.local_values())
    assert torch.equal(shown["lm_head.weight"], values["lm_head.weight"])
