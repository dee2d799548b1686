"""A run file with only what must be given, changed in one place, and what is said of a bad one."""

import copy
import tomllib
from typing import Any

import pytest

from schemas.config import parse_run_config

MINIMAL: dict[str, Any] = tomllib.loads("""
[run]
run_id = "r"
seed = 1
lake = "lake"
store = "store"
num_cycles = 2
batches_per_cycle = 3
[policy]
path = "policy"
[environment]
name = "reasoning_gym"
[engine]
max_model_tokens = 64
[sampling]
max_tokens = 8
[batch]
trajectories = 32
group_size = 4
minibatches = 2
[trainer]
learning_rate = 1e-4
""")


def with_(path: str, value: Any) -> dict[str, Any]:
    data = copy.deepcopy(MINIMAL)
    *sections, key = path.split(".")
    section = data
    for name in sections:
        section = section.setdefault(name, {})
    section[key] = value
    return data


def message(data: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as caught:
        parse_run_config(data, "r.toml")
    return str(caught.value)
