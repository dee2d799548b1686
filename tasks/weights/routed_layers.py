"""Where a transformers mixture of experts is given its choice.

transformers hands every mixture's choice to a module of its own, as the argument `top_k_index` of
the module that holds the expert weights.
"""

import inspect

from torch import nn


def routed_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that are given a choice of experts, by name, in layer order; none in a dense
    model."""
    return {
        name: module
        for name, module in model.named_modules()
        if "top_k_index" in inspect.signature(module.forward).parameters
        and hasattr(module, "num_experts")
    }
