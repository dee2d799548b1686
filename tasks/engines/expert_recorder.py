"""Which experts a transformers mixture chose, read where the choice is used.

A hook on the module that is given the choice (`tasks.weights.routed_layers`) sees it whatever the
router did before (softmax or sigmoid, groups, biases, ties); a recomputation from logits would have
to know. A dense model has no such module, gets no hook, and pays nothing.

Shapes: T tokens of a forward pass, row after row; L routed layers; K experts a token and layer.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tasks.weights.routed_layers import routed_modules


class ExpertRecorder:
    """Collects the choices of one forward pass after the other, from every attached model.

    Args:
        skeleton: a model of the configuration that all attached ones share; weights do not matter.

    Attributes:
        num_layers: L; 0 for a dense model.
        num_experts: experts of a routed layer; None for a dense model.
        top_k: K, where the configuration says it; None for a dense model.
    """

    def __init__(self, skeleton: PreTrainedModel) -> None:
        modules = list(routed_modules(skeleton).values())
        self.num_layers = len(modules)
        self.num_experts: int | None = max(
            (int(module.num_experts) for module in modules),  # pyright: ignore[reportArgumentType]
            default=None,
        )
        text_config = skeleton.config.get_text_config()
        self.top_k: int | None = (
            getattr(text_config, "num_experts_per_tok", None) if modules else None
        )
        self._dtype = np.uint8 if (self.num_experts or 0) <= 256 else np.uint16
        self._choices: dict[int, Tensor] = {}

    def attach(self, model: nn.Module) -> None:
        """Record the choices of this model too, from its next forward pass on."""
        if self.num_layers == 0:
            return
        for layer, module in enumerate(routed_modules(model).values()):

            def record(_: nn.Module, args: tuple[Any, ...], layer: int = layer) -> None:
                self._choices[layer] = args[1]

            module.register_forward_pre_hook(record)

    def take(self) -> np.ndarray | None:
        """[T, L, K] uint8 or uint16 of the forward pass that just ended; None if dense."""
        if self.num_layers == 0:
            return None
        assert len(self._choices) == self.num_layers, "each routed layer runs once in a pass"
        choices = torch.stack([self._choices[layer] for layer in range(self.num_layers)], dim=1)
        self._choices.clear()
        return choices.numpy().astype(self._dtype)
