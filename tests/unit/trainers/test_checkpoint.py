"""Checkpoints: training resumed from one goes on bit for bit; what is not whole is refused."""

import json
import struct
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from safetensors.torch import load_file

from tasks.weights.checkpoints import published_values, read_masters
from trainers import checkpoint
from trainers.optimizer import AdamWSettings, MasterAdamW
from trainers.packing import TrainingSequence, pack

SETTINGS = AdamWSettings(
    beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.0, max_gradient_norm=1.0
)
SEQUENCE = TrainingSequence(torch.arange(1, 13), torch.arange(12) >= 4)


def _step(policy, optimizer):
    (microbatch,) = pack([SEQUENCE], 64)
    (-policy.logprobs(microbatch, torch.ones(8))[0].sum()).backward()
    optimizer.step(1e-3)


@pytest.fixture
def trained(make_policy, policy_folder):
    policy = make_policy()
    optimizer = MasterAdamW(policy, SETTINGS)
    optimizer.load(load_file(policy_folder / "model.safetensors").items(), "anchor")
    for _ in range(2):
        _step(policy, optimizer)
    return policy, optimizer


def test_resumed_training_is_bit_identical(trained, make_policy, tmp_path):
    policy, optimizer = trained
    folder = tmp_path / checkpoint.relative_path(5, 17)
    assert folder.name == "b00000005-000017"
    checkpoint.save(folder, optimizer, batch=5)
    resumed_policy = make_policy()
    resumed = MasterAdamW(resumed_policy, SETTINGS)
    assert checkpoint.load(folder, resumed) == 5
    assert resumed.num_steps == 2
    for name, value in resumed_policy.local_values():
        assert torch.equal(value, dict(policy.local_values())[name])
    _step(policy, optimizer)
    _step(resumed_policy, resumed)
    for name, master in optimizer.masters.items():
        assert torch.equal(master, resumed.masters[name]), name


def test_masters_and_published_values_read_without_a_group(trained, tmp_path):
    _, optimizer = trained
    checkpoint.save(tmp_path / "c", optimizer, batch=1)
    masters = dict(read_masters(tmp_path / "c"))
    assert list(masters) == sorted(optimizer.masters)
    for name, master in optimizer.masters.items():
        assert torch.equal(masters[name], master.detach())
    for name, value in published_values(tmp_path / "c"):
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, optimizer.masters[name].detach().to(torch.bfloat16))


def test_rounding_is_to_nearest_even(trained, tmp_path):
    _, optimizer = trained
    # Halfway between 1 and 1 + 2^-7, and halfway between 1 + 2^-7 and 1 + 2^-6.
    halves = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8])
    with torch.no_grad():
        optimizer.masters["model.norm.weight"][:2] = halves
    checkpoint.save(tmp_path / "c", optimizer, batch=1)
    value = dict(published_values(tmp_path / "c"))["model.norm.weight"]
    assert value[:2].tolist() == [1.0, 1 + 2**-6]


def test_nothing_is_pickled_and_nothing_temporary_is_left(trained, tmp_path):
    _, optimizer = trained
    for _ in range(2):  # a second try under the same lease replaces the first
        checkpoint.save(tmp_path / "c", optimizer, batch=1)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    assert {path.suffix for path in (tmp_path / "c").iterdir()} == {".json", ".safetensors"}


def test_incomplete_checkpoints_are_refused(trained, make_policy, tmp_path):
    _, optimizer = trained
    folder = tmp_path / "c"
    with pytest.raises(ValueError, match=r"is not a complete checkpoint: it has no manifest\.json"):
        checkpoint.load(folder, optimizer)
    checkpoint.save(folder, optimizer, batch=1)
    shard = next(folder.glob("*.safetensors"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-4])
    with pytest.raises(ValueError, match="restore the checkpoint from a copy"):
        checkpoint.load(folder, optimizer)
    shard.unlink()
    with pytest.raises(ValueError, match="is missing or not"):
        list(read_masters(folder))
    shard.write_bytes(whole)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(ValueError, match="update rollhouse"):
        checkpoint.load(folder, optimizer)


def flip(shard: Path, tensor: str) -> None:
    """Changes one bit of the first value's first byte."""
    data = bytearray(shard.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    data[8 + length + json.loads(data[8 : 8 + length])[tensor]["data_offsets"][0]] ^= 1
    shard.write_bytes(data)


@pytest.mark.parametrize("kind", ["exp_avg", "exp_avg_sq", "master"])
def test_one_changed_bit_is_refused_before_anything_is_loaded(trained, tmp_path, kind):
    _, optimizer = trained
    folder = tmp_path / "c"
    checkpoint.save(folder, optimizer, batch=1)
    (shard,) = folder.glob("*.safetensors")
    hashes = json.loads((folder / "manifest.json").read_text())["hashes"]
    assert hashes == {shard.name: blake3(shard.read_bytes()).hexdigest()}
    before = {name: master.clone() for name, master in optimizer.masters.items()}
    flip(shard, f"{kind}.model.norm.weight")
    optimizer.set_num_steps(7)
    with pytest.raises(ValueError, match=r"does not have the hash that its manifest\.json gives"):
        checkpoint.load(folder, optimizer)
    assert optimizer.num_steps == 7
    for name, master in optimizer.masters.items():
        assert torch.equal(master, before[name])


def test_a_checkpoint_older_than_hashes_is_loaded(trained, make_policy, tmp_path):
    _, optimizer = trained
    folder = tmp_path / "c"
    checkpoint.save(folder, optimizer, batch=4)
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["hashes"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    resumed = MasterAdamW(make_policy(), SETTINGS)
    assert checkpoint.load(folder, resumed) == 4
    for name, master in optimizer.masters.items():
        assert torch.equal(master, resumed.masters[name])


def test_a_checkpoint_that_lacks_values_is_refused(trained, tmp_path):
    _, optimizer = trained
    folder = tmp_path / "c"
    checkpoint.save(folder, optimizer, batch=1)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["parameters"]["model.norm.weight"] = [17]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"model\.norm\.weight has 16 of its 17 values"):
        list(read_masters(folder))
    with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \[17\]"):
        checkpoint.load(folder, optimizer)


def test_another_models_checkpoint_is_refused(trained, tmp_path):
    _, optimizer = trained
    folder = tmp_path / "c"
    checkpoint.save(folder, optimizer, batch=1)
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["parameters"]["model.norm.weight"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="lacks 1 tensors"):
        checkpoint.load(folder, optimizer)
