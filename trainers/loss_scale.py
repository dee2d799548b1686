"""Dynamic loss scaling: what float16 needs to hold small gradients.

The smallest positive float16 is 2^-24, and gradients of a mean over many tokens are often below it.
So the backward pass begins at a power of two instead of 1, and the gradient, summed in float32, is
divided by it; neither rounds. A number beyond 65,504 on the way makes the gradient infinite or NaN.
The minibatch is then computed again at half the scale, as often as it takes: none is dropped, a
batch always takes all its optimizer steps, and each of them uses all its tokens.

The scale follows from the steps before alone, and is part of a checkpoint, so a resumed or replayed
batch has the same one.
"""

from dataclasses import dataclass

import torch

FIRST = 2.0**16
LARGEST = 2.0**24
"""Beyond it a loss over 2^24 tokens has a gradient of 1 at each of them."""
STEPS_TO_DOUBLE = 100
"""Where doubling was too much it costs one backward pass: at most one in this many."""


@dataclass
class LossScale:
    """`value`, which the backward pass begins at, and the finite steps since it last changed. Of
    other dtypes than float16 it stays 1."""

    dynamic: bool
    value: float = 1.0
    num_finite: int = 0

    @classmethod
    def of(cls, compute_dtype: torch.dtype) -> "LossScale":
        return cls(True, FIRST) if compute_dtype == torch.float16 else cls(False)

    def halve(self) -> bool:
        """After a gradient that is not finite; False where it was not for the scale."""
        if self.value == 1.0:
            return False
        self.value, self.num_finite = self.value / 2, 0
        return True

    def count(self) -> None:
        """After a step."""
        if not self.dynamic:
            return
        self.num_finite += 1
        if self.num_finite == STEPS_TO_DOUBLE:
            self.value, self.num_finite = min(2 * self.value, LARGEST), 0
