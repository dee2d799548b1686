"""Routing replay: a mixture of experts computes with the experts that the engine really used.

Only the choice is replaced. A router of transformers scores all experts, takes the best by one
`topk`, and makes weights of their scores. While a mixture runs, that call answers with the recorded
experts and the scores at them. All before and after it is the router's own code (softmax or
sigmoid, biases, groups, normalisation, scaling), so gate probabilities are those of the live router
at the recorded experts, and gradients reach it through them. A position without a recorded row
keeps the choice of the router.

Shapes: T = tokens of a microbatch, L = routed layers, K = experts a token and layer, E = experts of
a layer.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from tasks.weights.routed_layers import routed_modules
from trainers.packing import Microbatch, TrainingSequence, num_forwarded
from trainers.prefixes import Span, TreeAttention
from trainers.recorded_experts import MISSING, RoutedLayers

_TOPK = (torch.topk, Tensor.topk)


class _Choice(TorchFunctionMode):
    """Replaces the choice of one mixture among `num_experts` by `recorded` [T, K] int64.

    `own` [T, K] is what the router chose itself, of the last of `num_choices`.
    """

    def __init__(self, recorded: Tensor, num_experts: int):
        super().__init__()
        self.recorded = recorded
        self.scored = (len(recorded), num_experts)
        self.num_choices = 0
        self.own = recorded

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if (
            func not in _TOPK
            or args[0].shape != self.scored
            or result.indices.shape != self.recorded.shape
        ):
            return result
        self.num_choices += 1
        self.own = result.indices
        chosen = torch.where(self.recorded == MISSING, self.own, self.recorded)
        return torch.return_types.topk((args[0].gather(-1, chosen), chosen))


class RoutingReplay:
    """Makes the mixtures of one model take recorded experts, from its next forward pass on.

    Args:
        model: not yet sharded; its values do not matter.

    Raises:
        ValueError: a router whose choice cannot be replaced, or not without changing more.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device):
        experts = routed_modules(model)
        assert experts, "a dense model has no routing"
        self._device = device
        self._recorded: Tensor | None = None
        self._readers = torch.zeros(0, device=device)
        self._own: list[Tensor] = [self._readers] * len(experts)
        self._name = type(model).__name__
        blocks = {name.rpartition(".")[0]: module for name, module in experts.items()}
        if len(blocks) != len(experts):
            raise self._refusal("one of its modules holds several mixtures")
        before = _given(model, experts, device)
        for layer, (name, module) in enumerate(blocks.items()):
            block = model.get_submodule(name)
            block.forward = self._replaying(layer, block.forward, int(str(module.num_experts)))
        self.layers = RoutedLayers(
            tuple(_first_number(name) for name in experts),
            model.config.get_text_config().num_hidden_layers,
            min(int(str(module.num_experts)) for module in experts.values()),
            before[0][0].shape[-1],
        )
        self._check(model, experts, before)

    def use(self, microbatch: Microbatch) -> None:
        """The next forward pass, and any repetition of it, takes the microbatch's experts."""
        self._recorded = None
        if microbatch.experts is not None:
            assert microbatch.readers is not None
            self._recorded = microbatch.experts.to(self._device)
            self._readers = microbatch.readers.to(self._device)

    def no_agreement(self) -> Tensor:
        """Zeros to add `agreeing` to."""
        return torch.zeros(2, len(self._own), dtype=torch.int64, device=self._device)

    def agreeing(self) -> Tensor:
        """Of the last forward pass, [2, L] int64: positions whose recorded experts are just those
        that the router would have taken, and recorded experts that it would have taken. A position
        counts for each sequence that reads it."""
        counts = self.no_agreement()
        if self._recorded is None:
            return counts
        for layer, own in enumerate(self._own):
            recorded = self._recorded[:, layer]
            found = (recorded[:, :, None] == own[:, None, :]).any(-1)
            counts[0, layer] = (found.all(-1) * self._readers).sum()
            counts[1, layer] = (found.sum(-1) * self._readers).sum()
        return counts

    def metrics(self, counts: Tensor, sequences: Sequence[TrainingSequence]) -> dict[str, float]:
        """Metrics of `sequences`, whose `agreeing` add up to `counts`, by their names."""
        total = sum(num_forwarded(sequence) for sequence in sequences)
        replayed = sum(
            int((sequence.experts[: num_forwarded(sequence), 0, 0] != MISSING).sum())
            for sequence in sequences
            if sequence.experts is not None
        )
        found = {
            "routing/num_replayed": float(replayed),
            "routing/num_not_replayed": float(total - replayed),
        }
        if replayed == 0:
            return found
        same, experts = (counts.double() / replayed).cpu()
        found["routing/agreement"] = float(same.mean())
        found["routing/overlap"] = float(experts.mean()) / self.layers.top_k
        for place, share in zip(self.layers.places, same.tolist(), strict=True):
            found[f"routing/agreement_layer_{place:03d}"] = share
        return found

    def _replaying(self, layer: int, forward: Callable[..., Any], num_experts: int):
        @functools.wraps(forward)
        def replaying(*args: Any, **kwargs: Any) -> Any:
            if self._recorded is None:
                return forward(*args, **kwargs)
            choice = _Choice(self._recorded[:, layer].long(), num_experts)
            with choice:
                output = forward(*args, **kwargs)
            if choice.num_choices != 1:
                raise self._refusal(
                    f"a layer takes its experts by {choice.num_choices} calls of topk over their "
                    "scores, and not by one"
                )
            self._own[layer] = choice.own
            return output

        return replaying

    def _check(
        self,
        model: PreTrainedModel,
        experts: dict[str, nn.Module],
        before: list[tuple[Tensor, Tensor]],
    ) -> None:
        """Replays the router's own experts in the opposite order: each must get its own weight."""
        if any(index.shape[-1] != self.layers.top_k for index, _ in before):
            raise self._refusal("its layers take different numbers of experts")
        self._recorded = torch.stack([index.flip(-1) for index, _ in before], dim=1)
        after = _given(model, experts, self._device)
        for (index, weights), (replayed, live) in zip(before, after, strict=True):
            if not torch.equal(replayed, index.flip(-1)):
                raise self._refusal("its experts are given another choice than its scores' largest")
            if not torch.allclose(live, weights.flip(-1), rtol=1e-3, atol=1e-5):
                raise self._refusal("the weight of an expert depends on its rank")
        self._recorded = None

    def _refusal(self, reason: str) -> ValueError:
        return ValueError(
            f"the routing of {self._name} cannot be replayed: {reason}; set "
            "trainer.routing_replay = false to train with the trainer's own choice of experts."
        )


@torch.no_grad()
def _given(
    model: PreTrainedModel, experts: dict[str, nn.Module], device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """Choice and weights, [T, K] each, that every mixture is given for three tokens."""
    given: dict[str, tuple[Tensor, Tensor]] = {}
    ids = torch.arange(3, device=device)[None]
    with _watched(experts, given):
        model(
            input_ids=ids,
            position_ids=ids,
            tree=TreeAttention((Span(0, 3),), ()),
            logits_to_keep=1,
            use_cache=False,
        )
    return [given[name] for name in experts]


@contextmanager
def _watched(
    experts: dict[str, nn.Module], given: dict[str, tuple[Tensor, Tensor]]
) -> Iterator[None]:
    handles = []
    for name, module in experts.items():

        def watch(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            values = inspect.signature(module.forward).bind(*args, **kwargs).arguments
            given[name] = values["top_k_index"], values["top_k_weights"]

        handles.append(module.register_forward_pre_hook(watch, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _first_number(name: str) -> int:
    """3 of `model.layers.3.mlp.experts`."""
    return next(int(part) for part in name.split(".") if part.isdigit())
