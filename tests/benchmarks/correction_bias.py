"""What each correction costs, exactly: bias, variance and error of the policy gradient.

    make correction-bias

A language model of four tokens and six positions is small enough to write down all its 4,096
sequences. pi_old has a table of logits for every position and previous token; mu has the same
logits plus the mismatch times Student-t noise with three degrees of freedom, whose heavy tails are
those of an engine that is mostly right. The reward is the share of positions that hold the wanted
token. Losses and corrections are the trainer's own (`trainers.losses`, `trainers.corrections`); the
sum over all sequences replaces sampling, so nothing below has an error but rounding.

With g the estimate of the gradient from one sequence, all over the norm of the true gradient:
bias = |E g - true|, deviation = sqrt(E |g - E g|^2), the root of the variance, and the error of a
batch of n sequences is sqrt(bias^2 + deviation^2 / n). An estimate of 0 has error 1.
"""

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from schemas.objective import DEFAULT_W_CAP
from trainers.corrections import NO_LIMITS, MaskLimits, corrected
from trainers.losses import LOSSES, UNCLIPPED

VOCABULARY, LENGTH = 4, 6
NUM_SEQUENCES = VOCABULARY**LENGTH
BATCH = 256
MISMATCHES = (0.0, 0.1, 0.3, 0.6, 1.0)
SEED = 20

ESTIMATORS: dict[str, tuple[str, str, MaskLimits]] = {
    "none": ("none", "none", NO_LIMITS),
    "token_is": ("token_is", "none", NO_LIMITS),
    "token_tis": ("token_tis", "none", NO_LIMITS),
    "sequence_is": ("sequence_is", "none", NO_LIMITS),
    "sequence_tis": ("sequence_tis", "none", NO_LIMITS),
    "token_is, token mask": ("token_is", "token", MaskLimits(0.5, 2.0)),
    "sequence_is, sequence mask": ("sequence_is", "sequence", MaskLimits(0.5, 2.0)),
    "token_tis, geometric mask": ("token_tis", "geometric", MaskLimits(0.8, 1.25)),
}
"""Correction, mask and the mask's limits. w_cap is the default."""


@dataclass(frozen=True)
class Row:
    """One estimator at one mismatch, in units of the true gradient's norm; `error` is that of a
    batch of `BATCH` sequences."""

    mismatch: float
    estimator: str
    bias: float
    deviation: float
    error: float


@dataclass(frozen=True)
class Toy:
    """All sequences and what is the same for every estimator.

    `tokens`, `states` [4096, 6]: each token, and the row of the table that it was drawn from;
    `logits`, `noise` [30, 4]; `rewards` [4096].
    """

    tokens: Tensor
    states: Tensor
    logits: Tensor
    noise: Tensor
    rewards: Tensor

    @classmethod
    def make(cls, seed: int = SEED) -> "Toy":
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=LENGTH)))
        # Previous token plus one, 0 at the start.
        previous = torch.cat(
            [torch.zeros(len(tokens), 1, dtype=torch.int64), tokens[:, :-1] + 1], 1
        )
        states = previous + torch.arange(LENGTH) * (VOCABULARY + 1)
        shape = (LENGTH * (VOCABULARY + 1), VOCABULARY)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, dtype=torch.float64)

        logits = normal(*shape)
        # A standard normal over the root of a chi-square with three degrees, over three.
        noise = normal(*shape) / (normal(*shape, 3).square().sum(-1) / 3).sqrt()
        wanted = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
        rewards = (tokens == wanted).double().mean(1)
        return cls(tokens, states, logits, noise, rewards)

    def logprobs(self, logits: Tensor) -> Tensor:
        """Of every token of every sequence, [4096, 6]."""
        return logits.log_softmax(-1)[self.states, self.tokens]


def true_gradient(toy: Toy) -> Tensor:
    """d/d logits of the expected reward under pi_old, from its definition: [30, 4]."""
    logits = toy.logits.clone().requires_grad_()
    value = (toy.logprobs(logits).sum(1).exp() * toy.rewards).sum()
    return torch.autograd.grad(value, logits)[0]


def gradients(toy: Toy, mismatch: float, estimator: str, loss: str) -> tuple[Tensor, Tensor]:
    """Each sequence's probability under mu, [4096], and its estimate of the gradient, [4096, 120].

    The baseline is the expected reward, so that the advantage does not depend on the sample.
    """
    correction, mask, limits = ESTIMATORS[estimator]
    behaviour = toy.logprobs(toy.logits + mismatch * toy.noise)
    old = toy.logprobs(toy.logits)
    ids = torch.arange(NUM_SEQUENCES).repeat_interleave(LENGTH)
    weights, _ = corrected(
        (old - behaviour).flatten(),
        ids,
        weight=correction,
        w_cap=DEFAULT_W_CAP,
        mask=mask,
        limits=limits,
    )
    baseline = (old.sum(1).exp() * toy.rewards).sum()
    advantages = (toy.rewards - baseline).repeat_interleave(LENGTH)
    logprobs = old.flatten().requires_grad_()
    values, _ = LOSSES[loss](logprobs, old.flatten().detach(), advantages, ids, UNCLIPPED)
    (coefficients,) = torch.autograd.grad((weights * values).sum(), logprobs)
    # d log softmax(z)_a / dz = onehot(a) - softmax(z), in the token's own row of the table.
    scores = torch.eye(VOCABULARY, dtype=torch.float64)[toy.tokens]
    scores = scores - toy.logits.softmax(-1)[toy.states]
    terms = coefficients.view(NUM_SEQUENCES, LENGTH, 1) * scores
    estimates = torch.zeros(NUM_SEQUENCES, *toy.logits.shape, dtype=torch.float64)
    index = toy.states[:, :, None].expand_as(terms)
    return behaviour.sum(1).exp(), estimates.scatter_add_(1, index, terms).flatten(1)


def measure(toy: Toy, mismatch: float, estimator: str, loss: str = "reinforce") -> Row:
    truth = true_gradient(toy).flatten()
    probabilities, estimates = gradients(toy, mismatch, estimator, loss)
    mean = probabilities @ estimates
    variance = float(probabilities @ (estimates - mean).square().sum(1))
    norm = float(truth.norm())
    bias = float((mean - truth).norm())
    error = math.sqrt(bias**2 + variance / BATCH)
    return Row(mismatch, estimator, bias / norm, math.sqrt(variance) / norm, error / norm)


def table(toy: Toy) -> list[Row]:
    return [measure(toy, mismatch, name) for mismatch in MISMATCHES for name in ESTIMATORS]


def markdown(rows: list[Row]) -> str:
    """One table: estimators down, mismatches across, each with bias, deviation and error."""
    header = ["correction", *(f"mismatch {mismatch:g}" for mismatch in MISMATCHES)]
    lines = [header, ["---"] * len(header)]
    for name in ESTIMATORS:
        cells = []
        for row in rows:
            if row.estimator == name:
                best = min(r.error for r in rows if r.mismatch == row.mismatch)
                error = f"{row.error:.3g}"
                cells.append(
                    f"{0.0 if row.bias < 1e-10 else row.bias:.3g} / {row.deviation:.3g} / "
                    + (f"**{error}**" if row.error == best else error)
                )
        lines.append([name, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    print(markdown(table(Toy.make())))


if __name__ == "__main__":
    main()
