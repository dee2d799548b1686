"""From logits to a drawn token and its log-probability, as pure functions.

The order of operations is vLLM's: temperature, min_p, top_k, top_p, then renormalise. The
log-probability that goes on record is the one of this last distribution. A draw is the inverse of
its cumulative distribution in float64 at one uniform number, which depends on the request's seed
and the token's position alone: the rest of the batch can change a token only through rounding of
the logits.

Measured on a random model of 0.8 M parameters, the same requests in other batches (512 rows
against 7, shuffled): in float32 none of 3,000 requests (48,000 tokens) differ, although 58 % of
the log-probabilities are not bit-equal (largest difference 3e-6); in bfloat16 (512 rows against
16) 10 of 400 requests differ.

Shapes: B rows, V vocabulary.
"""

import numpy as np
import torch
from torch import Tensor


def uniforms(seed: int, start: int, count: int) -> list[float]:
    """Uniform numbers in [0, 1) for the sequence positions start, …, start + count - 1.

    Philox is counter-based, so the number at a position never depends on where drawing began: a
    request resubmitted with its partial output as prompt goes on with the numbers it would have
    had.
    """
    generator = np.random.Generator(np.random.Philox(key=seed))
    return generator.random(start + count)[start:].tolist()


def processed_logprobs(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Log-probabilities of the distribution to sample from.

    Args:
        logits: [B, V], any floating dtype.
        temperature: [B] float32, above 0.
        top_k: [B] int64, 0 = off.
        top_p: [B] float32 in (0, 1], 1 = off.
        min_p: [B] float32 in [0, 1], 0 = off.

    Returns:
        [B, V] float32; -inf where a token was truncated away. top_k keeps exactly k tokens, and
        among equal logits the lower ids. top_p keeps the smallest most probable set that reaches
        it.
    """
    scaled = logits.float() / temperature[:, None]
    if bool((min_p > 0).any()):
        floor = scaled.amax(dim=1, keepdim=True) + min_p.log()[:, None]
        scaled = scaled.masked_fill(scaled < floor, -torch.inf)
    sort_rows = ((top_k > 0) | (top_p < 1)).nonzero()[:, 0]
    if len(sort_rows):
        scaled[sort_rows] = _truncate(scaled[sort_rows], top_k[sort_rows], top_p[sort_rows])
    return scaled.log_softmax(dim=1)


def _truncate(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """[B, V] logits with those outside top_k, then outside top_p, set to -inf."""
    vocab_size = scaled.shape[1]
    ordered, order = scaled.sort(dim=1, descending=True, stable=True)
    limit = torch.where(top_k > 0, top_k, vocab_size)
    ordered.masked_fill_(torch.arange(vocab_size) >= limit[:, None], -torch.inf)
    probs = ordered.softmax(dim=1)
    mass_before = probs.cumsum(dim=1) - probs
    # Rounded sums can pass 1 before the tail is reached, so 1.0 must not be compared.
    ceiling = torch.where(top_p < 1, top_p, torch.inf)
    ordered.masked_fill_(mass_before >= ceiling[:, None], -torch.inf)
    return torch.empty_like(scaled).scatter_(1, order, ordered)


def draw(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """Token ids [B] drawn by inverse CDF.

    Args:
        logprobs: [B, V], -inf for impossible tokens.
        uniform: [B] float64 in [0, 1).

    Returns:
        [B] int64; never a token of probability 0, whatever the rounding of the sums.
    """
    cdf = logprobs.double().exp().cumsum(dim=1)
    total = cdf[:, -1:].contiguous()
    # The first entry above the target has grown there, so its probability is positive. If rounding
    # puts the target on the total itself, the first entry that reaches the total is the last such
    # token.
    index = torch.searchsorted(cdf, uniform[:, None] * total, right=True)
    last = torch.searchsorted(cdf, total)
    return torch.minimum(index, last)[:, 0]
