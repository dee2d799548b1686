"""One process as a group of one rank, and a tiny policy made from a fixed seed."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.tiny_policy import write_policy
from trainers.policy import Policy


@pytest.fixture(scope="session")
def one_rank():
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def make_policy(one_rank, policy_folder):
    def make(compute_dtype: torch.dtype = torch.float32) -> Policy:
        # Its values are those of a fresh model, whichever tests ran before.
        torch.manual_seed(0)
        return Policy(policy_folder, compute_dtype, torch.device("cpu"))

    return make
