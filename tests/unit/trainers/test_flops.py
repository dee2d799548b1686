"""Model FLOPs against torch's own counter and against hand counts."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from trainers.flops import ModelCost, model_cost, peak_flops
from trainers.packing import Forwarded, TrainingSequence, forwarded, pack
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
    counted = cost.step_flops(Forwarded(LENGTH, LENGTH * (LENGTH + 1) // 2, LENGTH))
    assert counter.get_total_flops() - square == counted - pairs


def test_of_experts_those_that_a_token_meets_are_counted():
    config = Qwen3MoeConfig(
        **SHAPE, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=8, mlp_only_layers=[0]
    )
    cost = cost_of(AutoModelForCausalLM.from_config(config))
    attention = 16 * 8 * (4 + 2 + 2) + 4 * 8 * 16
    dense, routed = 3 * 16 * 24, 16 * 6 + 2 * 3 * 16 * 8
    assert cost.weights == 3 * attention + dense + 2 * routed
    assert cost.head_weights == 40 * 16


def test_a_shared_prefix_counts_once_and_the_head_where_there_is_a_loss():
    # A prompt of 3 tokens and two answers, of 2 tokens (one of them read) and of 1 (none read).
    prompt = [5, 6, 7]
    sequences = [
        TrainingSequence(torch.tensor([*prompt, 8, 9]), torch.tensor([False] * 3 + [True] * 2)),
        TrainingSequence(torch.tensor([*prompt, 4]), torch.tensor([False] * 3 + [True])),
    ]
    done = forwarded(pack(sequences, 100))
    # Pairs of the prompt 1 + 2 + 3, of the token after it 4; both answers begin at one position.
    assert done == Forwarded(num_tokens=4, num_pairs=10, num_positions=2)
    cost = ModelCost(weights=10, head_weights=7, flops_of_pair=5)
    assert cost.forward_flops(done) == 2 * 10 * 4 + 2 * 7 * 2 + 5 * 10
    assert cost.step_flops(done) == 3 * 158


def test_pairs_by_enumeration():
    rows = [[1, 2, 3, 4, 0], [1, 2, 3, 5, 5, 0], [1, 2, 6, 0], [1, 2, 3, 5, 7, 0], [9, 9, 0]]
    sequences = [
        TrainingSequence(torch.tensor(row), torch.arange(len(row)) == len(row) - 1) for row in rows
    ]
    paths = {tuple(row[:stop]) for row in rows for stop in range(1, len(row))}
    done = forwarded(pack(sequences, 100))
    assert (done.num_tokens, done.num_pairs) == (len(paths), sum(map(len, paths)))


def test_the_peak_is_that_of_a_known_gpu():
    assert peak_flops("NVIDIA H100 80GB HBM3", "bfloat16") == 989.4e12
    assert peak_flops("NVIDIA H100 PCIe", "bfloat16") == 756e12
    assert peak_flops("NVIDIA H100 PCIe", "float16") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "float32") == 19.5e12
    assert peak_flops("NVIDIA L40S", "bfloat16") == 362e12
    assert peak_flops("NVIDIA GeForce RTX 9999", "bfloat16") is None


def test_a_sharded_policy_costs_what_its_model_does(make_policy):
    policy = make_policy()
    # Tied Qwen3 of hidden 16, 2 layers, 2 heads and 1 for keys, of size 8, inner size 24.
    attention = 16 * 8 * (2 + 1 + 1) + 2 * 8 * 16
    expected = ModelCost(2 * (attention + 3 * 16 * 24), 32 * 16, 4 * 2 * 8 * 2)
    assert policy_cost(policy) == expected
