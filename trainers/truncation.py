"""The truncated distribution, for rollouts that were sampled from one.

With logits z over the temperature and the support S that min_p, top_k and top_p leave of them,
pi(a) = exp(z_a) / sum over b in S of exp(z_b) for a in S, and 0 elsewhere. The order is vLLM's
(0.32, `v1/sample`): temperature; min_p keeps the tokens of at least min_p times the largest
probability; top_k the k most probable of them; top_p the smallest most probable set whose mass,
renormalised over what is left, reaches top_p (nucleus sampling, Holtzman et al., 2020).

S moves with the weights in jumps and passes no gradient: d log pi(a) / d z_b is 1[a = b] - pi(b)
in S and 0 for a token that was cut.

Shapes: K = action tokens, V = vocabulary.
"""

# `tasks.engines.sampling` follows the same rules for the torch engine and is not shared: gate 2
# holds the engine's log-probabilities against the trainer's, and code that both ran would agree
# with itself also where it is wrong. A test holds the two to each other.

from dataclasses import dataclass

import torch
from torch import Tensor

_ROWS = 64
"""Rows sorted at once: order, masses and their sums take several times the memory of the logits."""


@dataclass(frozen=True)
class Truncation:
    """As each token was sampled, all [K]: `top_k` i64, 0 = off; `top_p` f32 in (0, 1], 1 = off;
    `min_p` f32 in [0, 1), 0 = off."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def __getitem__(self, index: Tensor | slice) -> "Truncation":
        return Truncation(self.top_k[index], self.top_p[index], self.min_p[index])

    @property
    def cuts(self) -> bool:
        """Whether any token was sampled from less than the whole distribution."""
        return bool(((self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)).any())


def truncate(logits: Tensor, target_ids: Tensor, truncation: Truncation) -> Tensor:
    """Logits whose softmax is the truncated, renormalised distribution.

    Args:
        logits: [K, V] float32, over the temperature.
        target_ids: [K] int64, the tokens that were sampled; each stays in its support.
        truncation: [K].

    Returns:
        [K, V] float32, the lowest finite number where a token was cut: its probability is exactly
        0, and -inf would make 0 log 0 in an entropy NaN. The very `logits` where nothing cuts.
    """
    if not truncation.cuts:
        return logits
    parameters = (truncation.top_k, truncation.top_p, truncation.min_p)
    with torch.no_grad():
        parts = (values.to(logits.device).split(_ROWS) for values in (logits, *parameters))
        support = torch.cat([_support(*part) for part in zip(*parts, strict=True)])
        # The engine drew it, so it was in the support there. Rounding can leave it just outside
        # here, and log 0 would then stand for a difference of one token's mass. A token that the
        # weights have since moved out of the support is kept by the same rule.
        support.scatter_(1, target_ids.to(logits.device)[:, None], True)
    return logits.masked_fill(~support, torch.finfo(logits.dtype).min)


def _support(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """[K, V] bool. Among equal logits the lower ids come first."""
    ordered, order = logits.sort(dim=1, descending=True, stable=True)
    kept = ordered >= ordered[:, :1] + min_p.log()[:, None]
    rank = torch.arange(logits.shape[1], device=logits.device)
    kept &= (rank < top_k[:, None]) | (top_k == 0)[:, None]
    masses = ordered.masked_fill_(~kept, -torch.inf).softmax(dim=1)
    # Rounded sums can reach 1 before the last token, so a top_p that is off is not compared.
    kept &= (masses.cumsum(dim=1) - masses < top_p[:, None]) | (top_p == 1)[:, None]
    return torch.empty_like(kept).scatter_(1, order, kept)
