"""One process as a group of one rank, and a tiny policy made from a fixed seed."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3Config

from trainers.policy import Policy


@pytest.fixture(scope="session")
def one_rank():
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory) -> Path:
    """A Hugging Face folder: Qwen3, 2 layers, hidden 16, 32 tokens, tied embeddings, bf16."""
    folder = tmp_path_factory.mktemp("policy")
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.5,
    )
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture
def make_policy(one_rank, policy_folder):
    def make(compute_dtype: torch.dtype = torch.float32) -> Policy:
        return Policy(policy_folder, compute_dtype, torch.device("cpu"))

    return make
