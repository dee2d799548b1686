"""A policy small enough to train in a test."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3Config


def write_policy(folder: Path) -> Path:
    """A Hugging Face folder: Qwen3, 2 layers, hidden 16, 32 tokens, tied embeddings, bf16."""
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
