"""A mixture of experts that can already add: a dense policy whose MLP became several.

At first every expert is the dense MLP, and weights over the chosen ones sum to 1, so the mixture
computes what the dense policy did. Then the experts are moved apart, so that a choice matters.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig

from tasks.weights.anchors import asset_files
from tasks.weights.folders import MODEL_FILE

NUM_EXPERTS, TOP_K = 32, 2


def write_mixture(folder: Path, dense: Path, apart: float = 0.3) -> Path:
    """A Hugging Face folder with the tokenizer of the Qwen3 folder `dense`; `apart` is the share of
    an expert's weights that is its own."""
    folder.mkdir()
    for asset in asset_files(dense):
        (folder / asset.name).write_bytes(asset.read_bytes())
    of_dense = json.loads((dense / "config.json").read_text())
    of_dense = {k: v for k, v in of_dense.items() if k not in ("model_type", "architectures")}
    Qwen3MoeConfig(
        **of_dense,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=TOP_K,
        moe_intermediate_size=of_dense["intermediate_size"],
        norm_topk_prob=True,
        architectures=["Qwen3MoeForCausalLM"],
    ).save_pretrained(folder)
    generator = torch.Generator().manual_seed(9)
    values = {}
    for name, value in load_file(dense / MODEL_FILE).items():
        if ".mlp." not in name:
            values[name] = value
            continue
        before, after = name.split(".mlp.")
        if after.startswith("gate_proj"):
            router = torch.randn(NUM_EXPERTS, value.shape[1], generator=generator)
            values[f"{before}.mlp.gate.weight"] = router.bfloat16()
        for expert in range(NUM_EXPERTS):
            noise = torch.randn(value.shape, generator=generator) * value.float().std()
            own = value.float() + apart * noise
            values[f"{before}.mlp.experts.{expert}.{after}"] = own.bfloat16()
    save_file(values, folder / MODEL_FILE, metadata={"format": "pt"})
    return folder
