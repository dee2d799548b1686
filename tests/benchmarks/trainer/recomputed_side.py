"""This project's update with the activations of each layer computed again in the backward pass."""

from tests.benchmarks.trainer.shared_side import SharedSide


class RecomputedSide(SharedSide):
    activation_checkpointing = True
