"""What of a model need run only where a loss is: the head, and a dense last layer but keys, values.

After the last layer's attention nothing mixes positions any more. What its MLP, its query and its
output projection compute at a position that predicts no action token reaches no loss, so they run
at the others alone and leave zeros, which nobody reads, elsewhere. The head gives log-probabilities
in the place of logits (`trainers.token_logprobs`).

Shapes: T = tokens of a row, U = positions that predict action tokens, K = action tokens,
D = hidden size.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from tasks.weights.routed_layers import routed_modules
from trainers.token_logprobs import Targets, token_logprobs

POSITION_WISE = ("self_attn.q_proj", "self_attn.o_proj", "mlp")
"""Modules of a decoder layer that read one position at a time, by transformers' names. One that a
layer lacks is not spared, and nothing else changes."""


class LossPositions:
    """Attached to a model, it runs what the latest `want` names and no more."""

    def __init__(self, model: PreTrainedModel, last_layer: nn.Module):
        """Raises `ValueError` where the model's logits are not those of its LM head."""
        self._head = checked_head(model)
        self._head.forward = self._logprobs
        # A mixture's choices are compared with recorded ones at every position.
        spared = () if routed_modules(last_layer) else POSITION_WISE
        for name in spared:
            if (module := _descendant(last_layer, name)) is not None:
                module.forward = partial(self._run_there, module.forward)
        self._wanted: tuple[Tensor, Targets] | None = None

    def want(self, positions: Tensor, targets: Targets) -> None:
        """What the next forward pass is for. `positions` [U] i64, ascending, each once."""
        self._wanted = positions, targets

    def _run_there(self, forward: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        assert self._wanted is not None
        positions, _ = self._wanted
        found = forward(hidden.index_select(1, positions))
        everywhere = found.new_zeros(*hidden.shape[:2], found.shape[-1])
        return everywhere.index_copy_(1, positions, found)

    def _logprobs(self, input: Tensor) -> Tensor:
        """[1, U, D] to [K, 2] float32: log-probabilities and entropies."""
        assert self._wanted is not None
        _, targets = self._wanted
        found = token_logprobs(input[0], self._head.weight, self._head.bias, targets)
        return torch.stack(found, dim=-1)


def _descendant(module: nn.Module, path: str) -> nn.Module | None:
    found: nn.Module | None = module
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


@torch.no_grad()
def checked_head(model: PreTrainedModel) -> nn.Linear:
    """The LM head, after a look at what the model makes of its output.

    Raises:
        ValueError: logits are scaled, capped or otherwise changed after the head.
    """
    head, base = model.get_output_embeddings(), model.base_model
    if isinstance(head, nn.Linear):
        hidden = torch.linspace(-3, 3, 2 * head.in_features, device=head.weight.device)
        hidden = hidden.view(1, 2, -1).to(head.weight.dtype)
        base.forward = lambda *_, **__: MoeModelOutputWithPast(last_hidden_state=hidden)
        try:
            logits = model(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False).logits
        finally:
            del base.forward
        if torch.equal(logits, head(hidden)):
            return head
    raise ValueError(
        f"{model.config.model_type} changes its logits after its LM head, which the trainer would "
        "leave out; choose a model whose logits are those of a linear head, such as Qwen3 or Llama."
    )
