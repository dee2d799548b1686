"""Supervised training under torchrun: it learns, it repeats, and it writes a folder that loads."""

import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from trainer_world import finish, torchrun, write_policy
from transformers import AutoModelForCausalLM


@pytest.fixture
def data(tmp_path):
    """x, x + 1, x + 2, x + 3 modulo 32, the last two to be learned."""
    path = tmp_path / "data.parquet"
    rows = [[(x + step) % 32 for step in range(4)] for x in range(32)]
    columns = {
        "token_ids": pa.array(rows, pa.list_(pa.int32())),
        "loss_mask": pa.array([[False, False, True, True]] * 32, pa.list_(pa.bool_())),
    }
    pq.write_table(pa.table(columns), path)
    return path


def _run(init, data, out, num_ranks=1, steps=100):
    return torchrun(
        num_ranks,
        *("trainers.supervised", "--init", init, "--data", data, "--out", out, "--steps", steps),
        *("--batch-sequences", 24, "--learning-rate", 2e-2, "--seed", 5, "--threads", 1),
    )


def test_it_learns_and_repeats(tmp_path, data):
    init = write_policy(tmp_path / "init")
    first, second = (_run(init, data, tmp_path / name) for name in ("one", "two"))
    log = finish(first)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", log)]
    assert len(losses) == 2
    assert losses[-1] < 0.1
    finish(second)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys() == load_file(init / "model.safetensors").keys()
    for name, value in one.items():
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, two[name]), name
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "one", dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[30, 31, 0]]), use_cache=False).logits[0]
    assert logits.argmax(-1).tolist()[1:] == [0, 1]


def test_two_ranks_write_the_same_folder_up_to_rounding(tmp_path, data):
    init = write_policy(tmp_path / "init")
    jobs = [_run(init, data, tmp_path / str(ranks), ranks, steps=3) for ranks in (1, 2)]
    for job in jobs:
        finish(job)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in "12")
    for name, value in one.items():
        difference = (value.float() - two[name].float()).norm() / value.float().norm()
        assert difference.item() < 1e-3, name


def test_bad_input_is_named(tmp_path, data):
    init = write_policy(tmp_path / "init")
    assert "give --out a folder that does not" in finish(_run(init, data, init), code=1)
    rows = {"token_ids": [[1, 2], [3]], "loss_mask": [[False, True], [True]]}
    pq.write_table(pa.table(rows), data)
    assert "row 1 needs a loss_mask" in finish(_run(init, data, tmp_path / "out"), code=1)
    assert not (tmp_path / "out").exists()
