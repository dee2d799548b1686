"""Model FLOPs of an optimizer step, counted from parameter shapes and what is forwarded.

A matrix of n weights costs 2 n FLOPs a token, a query that attends to a key 4 x heads x head size
in a layer (two products of 2 FLOPs a value), and a backward pass twice its forward pass (Chowdhery
et al., PaLM, 2022, appendix B). Of a mixture of experts a token multiplies top_k of E. Counted is
what the loss needs: causal attention by its pairs, the head at positions that predict an action
token, no recomputation, no optimizer, neither norms nor activations.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from trainers.packing import Forwarded

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""What model configurations call the number of experts of a routed layer."""

PEAK_FLOPS = {
    "B200": (2.25e15, 75e12),
    "H200": (989.4e12, 66.9e12),
    "H100 PCIe": (756e12, 51.2e12),
    "H100": (989.4e12, 66.9e12),
    "A100": (312e12, 19.5e12),
    "L40S": (362e12, 91.6e12),
    "L4": (121e12, 30.3e12),
}
"""Dense peak FLOP/s in bfloat16 or float16 (tensor cores) and in float32 by a part of a GPU's name,
the first that fits; from the vendor's data sheets."""


def peak_flops(device_name: str, compute_dtype: str) -> float | None:
    """FLOP/s that a GPU reaches at most; None where no peak is known, as of any CPU."""
    for name, (of_16_bits, float32) in PEAK_FLOPS.items():
        if set(name.split()) <= set(device_name.replace("-", " ").split()):
            return float32 if compute_dtype == "float32" else of_16_bits
    return None


@dataclass(frozen=True)
class ModelCost:
    """Weights that each forwarded token is multiplied by, those of the head, and FLOPs of a query
    and a key over all layers."""

    weights: float
    head_weights: int
    flops_of_pair: int

    def forward_flops(self, forwarded: Forwarded) -> float:
        return (
            2 * self.weights * forwarded.num_tokens
            + 2 * self.head_weights * forwarded.num_positions
            + self.flops_of_pair * forwarded.num_pairs
        )

    def step_flops(self, forwarded: Forwarded) -> float:
        """Forward and backward."""
        return 3 * self.forward_flops(forwarded)


def model_cost(
    shapes: Mapping[str, Sequence[int]], embedding: str, head: str, config: PretrainedConfig
) -> ModelCost:
    """Of a transformers model. `shapes` are its parameters'; `embedding` and `head` name the one
    that tokens are looked up in and the one that makes logits, which may be the same."""
    sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    text = config.get_text_config()
    num_experts = next((getattr(text, name) for name in EXPERTS if hasattr(text, name)), None)
    weights = 0.0
    for name, shape in shapes.items():
        if name in (embedding, head) or len(shape) < 2 or name.endswith("bias"):
            continue
        share = 1.0
        if ".experts." in name:
            assert num_experts is not None, f"{name} belongs to experts that nothing counts"
            share = text.num_experts_per_tok / num_experts
        weights += share * sizes[name]
    heads = text.num_attention_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
    return ModelCost(weights, sizes[head], 4 * heads * head_size * text.num_hidden_layers)
