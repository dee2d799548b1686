"""Log-probabilities and entropies of tokens from hidden states, a few rows of logits at a time.

With logits z = W h + c of one position, over its temperature and truncated as it was sampled,
p = softmax(z), the token a and the entropy H = -sum over j of p_j log p_j,

    d log p_a / d z_j = 1[j = a] - p_j,    d H / d z_j = -p_j (log p_j + H).

Logits are made again in the backward pass, so that neither pass ever holds those of all positions,
in any precision: of a vocabulary of 150,000 they would be the largest tensor of a step.

Shapes: K = action tokens, U = positions that predict them, D = hidden size, V = vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trainers.truncation import Truncation, truncate

CHUNK_BYTES = 2**27
"""Of float32 logits held at once; a handful of tensors of this size live at the same time."""


@dataclass(frozen=True)
class Targets:
    """Action tokens as they were sampled, all [K]: `rows` i64, the position in [0, U) that predicts
    each; `ids` i64; `temperatures` f32; `truncation`, None of the whole distribution."""

    rows: Tensor
    ids: Tensor
    temperatures: Tensor
    truncation: Truncation | None

    def chunks(self, vocabulary: int) -> list["Targets"]:
        count = max(1, CHUNK_BYTES // (4 * vocabulary))
        parts = [slice(start, start + count) for start in range(0, len(self.ids), count)]
        return [self[part] for part in parts]

    def __getitem__(self, part: slice) -> "Targets":
        truncation = None if self.truncation is None else self.truncation[part]
        return Targets(self.rows[part], self.ids[part], self.temperatures[part], truncation)


def token_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target, and entropy of the distribution it was drawn from, in nats.

    Args:
        hidden: [U, D], what the head reads; its dtype is that in which logits are computed.
        weight, bias: [V, D] and [V] of the head.

    Returns:
        Both [K] float32. Gradients reach hidden, weight and bias, summed in float32.
    """
    return _TokenLogprobs.apply(hidden, weight, bias, targets)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets):
        logprobs, entropies = [], []
        for chunk in targets.chunks(len(weight)):
            log_softmax = _log_softmax(hidden.index_select(0, chunk.rows), weight, bias, chunk)
            logprobs.append(log_softmax.gather(1, chunk.ids[:, None])[:, 0])
            entropies.append(_entropy(log_softmax))
        ctx.save_for_backward(hidden, weight, bias)
        ctx.targets = targets
        # Most losses read no entropy; its gradient is then None and costs nothing.
        ctx.set_materialize_grads(False)
        nothing = hidden.new_zeros(0, dtype=torch.float32)
        return torch.cat(logprobs or [nothing]), torch.cat(entropies or [nothing])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None):
        hidden, weight, bias = ctx.saved_tensors
        of_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        of_weight = torch.zeros_like(weight, dtype=torch.float32)
        of_bias = torch.zeros(len(weight), device=weight.device)
        start = 0
        for chunk in ctx.targets.chunks(len(weight)):
            stop = start + len(chunk.ids)
            of_logprob, of_entropy = (None if g is None else g[start:stop, None] for g in grads)
            start = stop
            read = hidden.index_select(0, chunk.rows)
            log_softmax = _log_softmax(read, weight, bias, chunk)
            probabilities = log_softmax.exp()
            of_logits = torch.zeros_like(probabilities)
            if of_entropy is not None:
                # Times p before all else: where a token was cut, log p is the lowest finite number.
                log_softmax += _entropy(log_softmax)[:, None]
                of_logits -= log_softmax.mul_(probabilities).mul_(of_entropy)
            if of_logprob is not None:
                of_logits -= probabilities.mul_(of_logprob)
                of_logits.scatter_add_(1, chunk.ids[:, None], of_logprob)
            of_logits = of_logits.div_(chunk.temperatures[:, None]).to(hidden.dtype)
            of_hidden.index_add_(0, chunk.rows, (of_logits @ weight).float())
            if hidden.dtype == torch.float32:
                of_weight.addmm_(of_logits.T, read)
            else:
                of_weight += of_logits.T @ read
            of_bias += of_logits.sum(0)
        return (
            of_hidden.to(hidden.dtype),
            of_weight.to(weight.dtype),
            None if bias is None else of_bias.to(bias.dtype),
            None,
        )


def _log_softmax(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets) -> Tensor:
    """[k, D] to [k, V] float32."""
    logits = functional.linear(hidden, weight, bias).float()
    logits /= targets.temperatures[:, None]
    if targets.truncation is not None:
        logits = truncate(logits, targets.ids, targets.truncation)
    return logits.log_softmax(1)


def _entropy(log_softmax: Tensor) -> Tensor:
    return -(log_softmax.exp() * log_softmax).sum(1)
