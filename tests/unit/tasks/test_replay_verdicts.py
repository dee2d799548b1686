"""What a replay is called: on CPUs every bit counts, elsewhere the distance does."""

from pathlib import Path

import pytest

from schemas.config import RunConfig
from tasks.replay_verdicts import judged_rows
from tests.tiny_run import TinyRun

ROWS = [{"step": 1, "batch": 1, "minibatch": 1}, {"step": 2, "batch": 1, "minibatch": 2}]


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return TinyRun(tmp_path, tmp_path, ("engine.logprob_tolerance=0.01",)).config


def difference(quantity: str, largest: float) -> dict:
    return {
        "quantity": quantity,
        "num_differing": 3,
        "num_values": 8,
        "largest": largest,
        "where": "here",
    }


def place(hardware: str) -> dict:
    return {"hardware": hardware, "processor": "some", "software": "torch 9"}


def outcome(*first: dict, distance: float = 0.0, hardware: str = "1 x NVIDIA H200") -> dict:
    tensor = {
        "tensor": "norm",
        "num_differing": 1,
        "num_values": 4,
        "largest": 0.25,
        "relative_l2": 0.125,
        "square": distance**2,
    }
    return {
        "fault": None,
        "origin": "version 0",
        "steps": [
            {"step": 1, "minibatch": 1, "differences": list(first)},
            {"step": 2, "minibatch": 2, "differences": []},
        ],
        "tensors": [tensor] if distance else [],
        "num_tensors": 5,
        "distance": distance,
        "update": 2.0,
        "root_hash": "b",
        "recorded_root_hash": "b" if not distance else "a",
        "recorded_on": place("1 x NVIDIA H200") | {"software": None},
        "replayed_on": place(hardware),
    }


def verdicts(found: dict, config: RunConfig, tolerance: float = 0.1) -> list[str]:
    return [row["verdict"] for row in judged_rows(ROWS, found, config, tolerance)]


def test_on_a_gpu_distance_is_judged_and_equality_never_claimed(config: RunConfig):
    assert verdicts(outcome(), config) == ["near", "near"]
    # 0.2 of an update of 2 is a share of 0.1.
    assert verdicts(outcome(distance=0.2), config) == ["near", "near"]
    assert verdicts(outcome(distance=0.21), config) == ["near", "far"]
    assert verdicts(outcome(distance=0.21), config, tolerance=0.2) == ["near", "near"]
    _, last = judged_rows(ROWS, outcome(distance=0.2), config, 0.1)
    assert last["found"] == (
        "1 of 5 tensors of version 1 differ: norm is the first, in 1 of 4 values, by at most 0.25, "
        "relative L2 distance 0.125; all together by 0.1 of the batch's update"
    )


def test_on_a_gpu_recorded_inputs_must_still_agree(config: RunConfig):
    assert verdicts(outcome(difference("old_logprobs", 0.01)), config) == ["near", "near"]
    assert verdicts(outcome(difference("old_logprobs", 0.02)), config) == ["far", "near"]
    assert verdicts(outcome(difference("gradient_norm", 9.0)), config) == ["near", "near"]
    assert verdicts(outcome(difference("reward_mean", 1e-9)), config) == ["far", "near"]


def test_a_replay_on_a_cpu_of_a_run_on_a_gpu_is_judged_by_distance(config: RunConfig):
    first, last = judged_rows(ROWS, outcome(hardware="2 CPU threads"), config, 0.1)
    assert (first["verdict"], last["verdict"]) == ("near", "near")
    assert first["elsewhere"] == "recorded on 1 x NVIDIA H200, replayed on 2 CPU threads"


def test_on_cpus_every_bit_counts(config: RunConfig):
    on_cpu = {name: place("2 CPU threads") for name in ("recorded_on", "replayed_on")}
    assert verdicts(outcome() | on_cpu, config) == ["equal", "equal"]
    tiny = outcome(difference("old_logprobs", 1e-9)) | on_cpu
    assert verdicts(tiny, config) == ["differs", "equal"]
    assert verdicts(outcome(distance=1e-9) | on_cpu, config) == ["equal", "differs"]
    other_ledger = outcome() | on_cpu | {"recorded_root_hash": "c"}
    assert verdicts(other_ledger, config) == ["equal", "differs"]
    faulty = outcome() | on_cpu | {"fault": "the manifest is damaged"}
    *_, last = judged_rows(ROWS, faulty, config, 0.1)
    assert last["found"] == "version 1 cannot be compared: the manifest is damaged"
