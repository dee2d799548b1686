"""Attention in parts against attention under a mask of all pairs, and what it refuses."""

import pytest
import torch
from torch.nn import functional
from transformers import BloomConfig, Qwen3Config

from trainers.policy import build_model
from trainers.prefixes import Span, TreeAttention
from trainers.tree_attention import tree_attention

# 0 1 2 3 4 5 | 6 7 after 0 1 2 3 | 8 after 6 | 9 10 after 0 1 | 11 by itself
TREE = TreeAttention(
    runs=(Span(0, 6), Span(6, 8), Span(8, 9), Span(9, 11), Span(11, 12)),
    crossings=((Span(6, 9), Span(0, 4)), (Span(8, 9), Span(6, 7)), (Span(9, 11), Span(0, 2))),
)
PATHS = [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 6, 7], [0, 1, 2, 3, 6, 8], [0, 1, 9, 10], [11]]


def _inputs(heads, dtype):
    """Query of four heads, key and value of `heads`, and the gradient of the output."""
    generator = torch.Generator().manual_seed(2)
    shapes = [(1, 4, 12, 8), (1, heads, 12, 8), (1, heads, 12, 8), (1, 12, 4, 8)]
    drawn = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [tensor.requires_grad_() for tensor in drawn[:3]], drawn[3]


def _masked(query, key, value):
    """The same by one mask [12, 12], written from the paths."""
    mask = torch.zeros(12, 12, dtype=torch.bool)
    for path in PATHS:
        for end, place in enumerate(path):
            mask[place, path[: end + 1]] = True
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = (query @ key.transpose(2, 3) * 0.3).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_output_and_gradients_are_those_of_a_mask(heads, dtype, tolerance):
    inputs, grad = _inputs(heads, dtype)
    out, _ = tree_attention(torch.nn.Identity(), *inputs, None, tree=TREE, scaling=0.3)
    assert out.dtype == dtype
    found = [out.detach(), *torch.autograd.grad(out, inputs, grad)]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected_out = _masked(*exact)
    expected = [expected_out.detach(), *torch.autograd.grad(expected_out, exact, grad.double())]
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() / other.norm() <= tolerance


def test_a_plain_row_is_plain_causal_attention():
    inputs, _ = _inputs(4, torch.float32)
    row = TreeAttention((Span(0, 12),), ())
    out, _ = tree_attention(torch.nn.Identity(), *inputs, None, tree=row, scaling=0.3)
    plain = functional.scaled_dot_product_attention(*inputs, is_causal=True, scale=0.3)
    assert torch.equal(out, plain.transpose(1, 2))


@pytest.mark.parametrize("feature", [{"softcap": 30.0}, {"sliding_window": 4}, {"dropout": 0.1}])
def test_a_layer_that_wants_more_is_refused(feature):
    inputs, _ = _inputs(4, torch.float32)
    with pytest.raises(ValueError, match=r"Identity wants .*train a model with plain causal"):
        tree_attention(torch.nn.Identity(), *inputs, None, tree=TREE, scaling=0.3, **feature)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (
            Qwen3Config(
                vocab_size=8,
                hidden_size=8,
                intermediate_size=8,
                num_hidden_layers=2,
                num_attention_heads=1,
                num_key_value_heads=1,
                use_sliding_window=True,
                sliding_window=4,
                max_window_layers=1,
            ),
            "qwen3 has sliding_attention",
        ),
        (
            BloomConfig(vocab_size=8, hidden_size=8, n_layer=1, n_head=1),
            "bloom has attention of its own",
        ),
    ],
    ids=["sliding", "own"],
)
def test_a_model_without_full_attention_is_refused(config, what, tmp_path):
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"{what}; the trainer .*choose a model"):
        build_model(tmp_path, torch.device("cpu"))
