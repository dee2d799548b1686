"""Model FLOPs against torch's own counter and against hand counts."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from trainers.flops import ModelCost, attended_pairs, model_cost, peak_flops
from trainers.steps import policy_cost

SHAPE = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
LENGTH = 12


def cost_of(model: PreTrainedModel) -> ModelCost:
    shapes = {name: p.shape for name, p in model.named_parameters()}
    head = "lm_head.weight" if "lm_head.weight" in shapes else "model.embed_tokens.weight"
    return model_cost(shapes, "model.embed_tokens.weight", head, model.config)


@pytest.mark.parametrize("tied", [True, False])
def test_dense_products_are_those_that_torch_counts(tied: bool):
    config = Qwen3Config(**SHAPE, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    tokens = torch.arange(LENGTH)[None]
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, use_cache=False).logits.sum().backward()
    cost = cost_of(model)
    # Eager attention multiplies the whole square, masked or not: 4 heads of size 8 in 3 layers.
    square = 3 * 3 * 4 * 4 * 8 * LENGTH**2
    pairs = 3 * 3 * 4 * 4 * 8 * LENGTH * (LENGTH + 1) // 2
    # No gradient goes to the token ids, but to all that multiplies: three times the forward pass.
    assert counter.get_total_flops() - square == cost.step_flops([LENGTH], LENGTH) - pairs


def test_of_experts_those_that_a_token_meets_are_counted():
    config = Qwen3MoeConfig(
        **SHAPE, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=8, mlp_only_layers=[0]
    )
    cost = cost_of(AutoModelForCausalLM.from_config(config))
    attention = 16 * 8 * (4 + 2 + 2) + 4 * 8 * 16
    dense, routed = 3 * 16 * 24, 16 * 6 + 2 * 3 * 16 * 8
    assert cost.weights == 3 * attention + dense + 2 * routed
    assert cost.head_weights == 40 * 16


def test_the_head_runs_where_there_is_a_loss():
    cost = ModelCost(
        weights=10, head_weights=7, flops_of_pair=5, flops_of_windowed_pair=3, window=2
    )
    # Two sequences of 3 and 1 tokens: 6 + 1 pairs, of a window of two keys 5 + 1.
    assert cost.forward_flops([3, 1], 2) == 2 * 10 * 4 + 2 * 7 * 2 + 5 * 7 + 3 * 6
    assert cost.step_flops([3, 1], 2) == 3 * 161


@pytest.mark.parametrize(
    ("length", "window"), [(0, 4), (1, 4), (4, 4), (9, 4), (9, 100), (9, 0), (9, 1)]
)
def test_pairs_by_enumeration(length: int, window: int):
    pairs = [(q, k) for q in range(length) for k in range(q + 1) if q - k < window]
    assert attended_pairs(length, window) == len(pairs)


def test_the_peak_is_that_of_a_known_gpu():
    assert peak_flops("NVIDIA H100 80GB HBM3", "bfloat16") == 989.4e12
    assert peak_flops("NVIDIA H100 PCIe", "bfloat16") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "float32") == 19.5e12
    assert peak_flops("NVIDIA L40S", "bfloat16") == 362e12
    assert peak_flops("NVIDIA GeForce RTX 9999", "bfloat16") is None


def test_a_sharded_policy_costs_what_its_model_does(make_policy):
    policy = make_policy()
    # Tied Qwen3 of hidden 16, 2 layers, 2 heads and 1 for keys, of size 8, inner size 24.
    attention = 16 * 8 * (2 + 1 + 1) + 2 * 8 * 16
    expected = ModelCost(2 * (attention + 3 * 16 * 24), 32 * 16, 4 * 2 * 8 * 2, 0, 0)
    assert policy_cost(policy) == expected
