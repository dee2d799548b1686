"""The policy a trainer computes with: a transformers model under FSDP2 whose parameters always hold
published values.

FP32 masters live in the optimizer and only accumulate (`trainers.optimizer`). What every forward
pass reads is their rounding to bf16, the very values that engines serve, so that old
log-probabilities differ from rollout ones by arithmetic alone and never by rounding of weights.
Computing in float32 keeps those rounded values in float32 parameters; computing in bfloat16 casts
them, exactly, in FSDP2's mixed precision, with gradients reduced in float32.

Computing in float16 casts them too, and its range is smaller. A value beyond 65,504 is refused. Of
magnitudes from 2^-17 on the cast is exact; smaller ones are rounded to multiples of 2^-24, by at
most 2^-25, which shows in old log-probabilities as other rounding does.

Shapes: K = action tokens of a microbatch.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tasks.weights.routed_layers import routed_modules
from trainers import ranks, tree_attention
from trainers.loss_positions import LossPositions
from trainers.packing import Microbatch
from trainers.published_layout import PublishedLayout
from trainers.recorded_experts import RoutedLayers
from trainers.routing_replay import RoutingReplay
from trainers.token_logprobs import Targets
from trainers.truncation import Truncation


def build_model(folder: Path, device: torch.device) -> PreTrainedModel:
    """The architecture of a Hugging Face folder, in float32, weights not loaded.

    Raises:
        ValueError: no model folder, or a model whose attention prefixes cannot share.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json; give a Hugging Face model folder.")
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with device:
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=tree_attention.NAME, dtype=torch.float32
        )
    tree_attention.check_attention(model.config, model._supports_attention_backend)
    return model.eval()


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """In the order of the forward pass."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def recompute_layers(model: PreTrainedModel) -> None:
    """Keeps only the input of each decoder layer for the backward pass, which runs the layer again
    (Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost").

    Parameters keep their names. Whatever a layer reads besides its arguments must be as it was
    until then, so a backward pass comes before the next forward pass.
    """
    for layer in decoder_layers(model):
        layer.forward = partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
        )


def shard(model: PreTrainedModel, compute_dtype: torch.dtype, device: torch.device) -> None:
    """Applies FSDP2 to each decoder layer, then to the root, over all ranks.

    Gradients are summed over ranks and not averaged: losses are already divided by the loss tokens
    of the whole minibatch.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy()
    if compute_dtype != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for module in [*decoder_layers(model), model]:
        sharded = fully_shard(module, mesh=mesh, mp_policy=policy)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


class Policy:
    """A sharded causal LM. Parameters are addressed by the model's names, tied ones once; `layout`
    relates them to published tensors.

    `routing` makes a mixture of experts take recorded ones; None for a dense model, and where
    `routing_replay` was not asked for.
    """

    def __init__(
        self,
        folder: Path,
        compute_dtype: torch.dtype,
        device: torch.device,
        *,
        routing_replay: bool = False,
        activation_checkpointing: bool = False,
    ):
        self.model = build_model(folder, device)
        self.layout = PublishedLayout(self.model)
        self.routing: RoutingReplay | None = None
        if routing_replay and routed_modules(self.model):
            self.routing = RoutingReplay(self.model, device)
        self._loss_positions = LossPositions(self.model, decoder_layers(self.model)[-1])
        if activation_checkpointing:
            recompute_layers(self.model)
        shard(self.model, compute_dtype, device)
        self.compute_dtype = compute_dtype
        self.device = device
        self.parameters: dict[str, DTensor] = cast(
            "dict[str, DTensor]", dict(self.model.named_parameters())
        )

    @property
    def routed_layers(self) -> RoutedLayers | None:
        """The mixtures whose recorded experts are replayed; None for none."""
        return None if self.routing is None else self.routing.layers

    def check_names(self, names: Iterable[str], source: str) -> None:
        """Raises `ValueError` unless `names` are the parameters of this architecture."""
        given, expected = set(names), set(self.parameters)
        for difference, what in ((expected - given, "lacks"), (given - expected, "has unknown")):
            if difference:
                raise ValueError(
                    f"{source} {what} {len(difference)} tensors of the model, the first of them "
                    f"{min(difference)}; its config.json and weights must belong together."
                )

    def local(self, name: str, values: Tensor) -> Tensor:
        """This rank's part of the whole tensor `values` for parameter `name`."""
        parameter = self.parameters[name]
        if values.shape != parameter.shape:
            raise ValueError(
                f"{name} has shape {list(values.shape)} and the model wants "
                f"{list(parameter.shape)}; its config.json and weights must belong together."
            )
        return distribute_tensor(
            values.to(self.device), parameter.device_mesh, parameter.placements, src_data_rank=None
        ).to_local()

    @torch.no_grad()
    def set_local_values(self, values: Iterable[tuple[str, Tensor]]) -> None:
        """Writes this rank's parts, rounded to bf16, into the parameters. Every rank calls it.

        Raises `ValueError` where float16, computed in, cannot hold one.
        """
        # A forward pass without a backward leaves the root unsharded, and the next one would then
        # read the values from before.
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        for name, value in values:
            self.parameters[name].to_local().copy_(value.to(torch.bfloat16))
        if self.compute_dtype == torch.float16:
            ranks.together(self._check_range)

    def _check_range(self) -> None:
        largest = torch.finfo(torch.float16).max
        for name, parameter in self.parameters.items():
            beyond = parameter.to_local().abs() > largest
            if beyond.any():
                raise ValueError(
                    f"{name} holds {float(parameter.to_local()[beyond][0])}, and float16 ends at "
                    f'{largest:.0f}; begin another run with trainer.compute_dtype = "bfloat16".'
                )

    def local_values(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's parts of what the parameters hold, as bf16 copies."""
        for name, parameter in self.parameters.items():
            yield name, parameter.to_local().detach().to(torch.bfloat16)

    def logprobs(
        self, microbatch: Microbatch, temperatures: Tensor, truncation: Truncation | None = None
    ) -> tuple[Tensor, Tensor]:
        """Of each action token its log-probability as it was sampled, and the entropy of the
        distribution it was drawn from in nats; both [K] float32.

        `temperatures`, `truncation` [K]: those the tokens were sampled at; None is the whole
        distribution.
        """
        if self.routing is not None:
            self.routing.use(microbatch)
        on_device = {
            name: getattr(microbatch, name).to(self.device)
            for name in ("input_ids", "position_ids", "logit_index", "logit_row", "target_ids")
        }
        positions = on_device["logit_index"]
        targets = Targets(
            on_device["logit_row"],
            on_device["target_ids"],
            temperatures.to(self.device),
            truncation,
        )
        self._loss_positions.want(positions, targets)
        output = self.model(
            input_ids=on_device["input_ids"],
            position_ids=on_device["position_ids"],
            tree=microbatch.tree,
            logits_to_keep=positions,
            use_cache=False,
        )
        logprobs, entropies = output.logits.unbind(-1)
        return logprobs, entropies
