"""Attention along the paths of a prefix tree, without a mask of all pairs.

A query's keys are its own run, causally, and whole ranges of the runs that it continues
(`trainers.prefixes`). Each pair of ranges is one call of a fused attention kernel, on slices and
without padding. Over keys in parts p, with outputs O_p and log-sum-exps L_p of the scores,

    L = log sum over p of exp(L_p),    O = sum over p of exp(L_p - L) O_p,

and the backward of a part is that of the kernel given O and L for O_p and L_p: it rebuilds the
probabilities as exp(s - L) and takes sum over j of P_j dP_j from dO . O (Dao et al., 2022,
"FlashAttention", appendix B), both of the whole row.

Shapes: T = tokens of a row, H = query heads, J = key and value heads, G = H / J, D = head size,
Q and K = queries and keys of one call.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedConfig

from trainers.prefixes import TreeAttention

NAME = "rollhouse_tree"
"""The attention implementation's name in transformers."""


class Kernel(NamedTuple):
    """A fused kernel over [J, G, Q, D] queries and [J, G, K, D] keys and values.

    `forward(query, key, value, causal, scale)` gives the output and the log-sum-exp [J, G, Q]
    float32; `backward(grad, query, key, value, out, log_sum, causal, scale)` the gradients
    of query, key and value. Causal calls have Q = K.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, scale=scale
    )


def _cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, causal, scale
):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, log_sum, 0.0, causal, scale=scale
    )


# The memory-efficient kernel serves every dtype and asks for no seeds, as dropout is 0.
def _cuda_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float):
    out, log_sum, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, causal, scale=scale
    )
    return out, log_sum[..., : q.shape[2]]


def _cuda_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, causal, scale
):
    # The kernel reads rows in blocks of 32; exp(s - inf) = 0 in those that are not there. Of its
    # two operators only this one can be called without a bias; it wants tokens before heads.
    rows = functional.pad(log_sum, (0, -log_sum.shape[-1] % 32), value=torch.inf)
    no_seed = torch.zeros((), dtype=torch.int64, device=q.device)
    grad, q, k, v, out = (tensor.transpose(1, 2) for tensor in (grad, q, k, v, out))
    from_top_left = 1 if causal else 0
    of_q, of_k, of_v, _ = torch.ops.aten._efficient_attention_backward(
        *(grad, q, k, v, None, out, None, None, q.shape[1], k.shape[1], rows),
        *(0.0, no_seed, no_seed, from_top_left, False),
        scale=scale,
    )
    return of_q.transpose(1, 2), of_k.transpose(1, 2), of_v.transpose(1, 2)


KERNELS = {
    "cpu": Kernel(_cpu_forward, _cpu_backward),
    "cuda": Kernel(_cuda_forward, _cuda_backward),
}


class _Attention(torch.autograd.Function):
    """Query [J, G, T, D], key and value [J, 1, T, D] to [J, G, T, D]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, tree):
        forward = KERNELS[query.device.type].forward
        groups = query.shape[1]
        keys, values = key.expand(-1, groups, -1, -1), value.expand(-1, groups, -1, -1)
        # Summed over parts in float32; tokens outermost, as the output projection reads them.
        out = _tokens_first(query, torch.float32)
        log_sum = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
        for run in tree.runs:
            part = (tensor[:, :, run.slice] for tensor in (query, keys, values))
            out[:, :, run.slice], log_sum[:, :, run.slice] = forward(*part, True, scale)
        for readers, read in tree.crossings:
            rows = readers.slice
            crossing = (query[:, :, rows], keys[:, :, read.slice], values[:, :, read.slice])
            part, part_sum = forward(*crossing, False, scale)
            both = torch.logaddexp(log_sum[:, :, rows], part_sum)
            out[:, :, rows] *= (log_sum[:, :, rows] - both).exp()[..., None]
            out[:, :, rows] += part * (part_sum - both).exp()[..., None]
            log_sum[:, :, rows] = both
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, log_sum)
        ctx.scale, ctx.tree = scale, tree
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        query, key, value, out, log_sum = ctx.saved_tensors
        (grad,) = grads
        backward = KERNELS[query.device.type].backward
        groups = query.shape[1]
        keys, values = key.expand(-1, groups, -1, -1), value.expand(-1, groups, -1, -1)
        of_query, of_key, of_value = (_tokens_first(t, t.dtype) for t in (query, key, value))
        pairs = [(run, run, True) for run in ctx.tree.runs]
        pairs += [(readers, read, False) for readers, read in ctx.tree.crossings]
        for readers, read, causal in pairs:
            rows, columns = readers.slice, read.slice
            parts = backward(
                *(grad[:, :, rows], query[:, :, rows], keys[:, :, columns], values[:, :, columns]),
                *(out[:, :, rows], log_sum[:, :, rows], causal, ctx.scale),
            )
            # The runs come first and cover every token once.
            for total, span, part in zip(
                (of_query, of_key, of_value), (rows, columns, columns), parts, strict=True
            ):
                part = part if total is of_query else part.sum(1, keepdim=True)
                if causal:
                    total[:, :, span] = part
                else:
                    total[:, :, span] += part
        return of_query, of_key, of_value, None, None


def _tokens_first(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Uninitialised, of the shape [J, G, T, D] of `like`, in the memory order T, J, G, D."""
    heads, groups, tokens, size = like.shape
    memory = torch.empty(tokens, heads, groups, size, dtype=dtype, device=like.device)
    return memory.permute(1, 2, 0, 3)


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree: TreeAttention,
    scaling: float,
    dropout: float = 0.0,
    position_ids: Tensor | None = None,
    use_cache: bool | None = None,
    **features: object,
) -> tuple[Tensor, None]:
    """Attention of one row as transformers calls it: query [1, H, T, D], key and value
    [1, J, T, D] to [1, T, H, D].

    Raises:
        ValueError: the layer asks for a feature that this attention does not have.
    """
    asked = sorted(k for k, v in features.items() if v is not None and v is not False)
    if asked or dropout or attention_mask is not None:
        raise ValueError(
            f"{type(module).__name__} wants {', '.join(asked) or 'dropout or a mask'} of its "
            "attention, which the trainer's cannot do; train a model with plain causal attention."
        )
    heads = key.shape[1]
    groups = query.shape[1] // heads
    out = _Attention.apply(
        query[0].unflatten(0, (heads, groups)), key[0][:, None], value[0][:, None], scaling, tree
    )
    return out.permute(2, 0, 1, 3).flatten(1, 2)[None], None


def check_attention(config: PreTrainedConfig, supported: bool) -> None:
    """Raises `ValueError` unless every layer has full attention that transformers lets one replace
    (`supported`)."""
    kinds = set(getattr(config, "layer_types", None) or []) - {"full_attention"}
    if getattr(config, "sliding_window", None) is not None:
        kinds.add("sliding_attention")
    if kinds or not supported:
        raise ValueError(
            f"{config.model_type} has {', '.join(sorted(kinds)) or 'attention of its own'}; the "
            "trainer computes shared prefixes once under full causal attention only, so choose a "
            "model whose layers all have it, such as Qwen3 or Llama."
        )


AttentionInterface.register(NAME, tree_attention)
