"""A published folder of safetensors into a model, strictly, and back into the tensors it holds.

transformers may fuse tensors on the way in (the experts of a mixture, for one) and split them on
the way out, so names and shapes are compared in the published layout, and the hash is taken over
what the loaded model gives back in that layout. Nothing is unpickled.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging as transformers_logging


def read_config(model_dir: Path) -> PreTrainedConfig:
    """The configuration of a causal LM with full attention in every layer.

    Raises:
        ValueError: no configuration, or a model whose logits depend on the batch around it.
    """
    if not (model_dir / "config.json").is_file():
        raise ValueError(
            f"{model_dir} holds no config.json; give the folder of a Hugging Face causal LM."
        )
    config = AutoConfig.from_pretrained(model_dir)
    text_config = config.get_text_config()
    layer_types, _ = get_layer_types_and_kwargs(text_config)
    unsupported = sorted(set(layer_types) - {"full_attention"})
    if unsupported:
        raise ValueError(
            f"{config.model_type} has {', '.join(unsupported)} layers, which the torch engine "
            "cannot cache; use a model with full attention in every layer, or the vllm engine."
        )
    rope_type = (getattr(text_config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope_type in ("dynamic", "longrope"):
        raise ValueError(
            f"rope_type {rope_type!r} lets the longest row of a batch change the others; "
            "use a static one (default, linear, yarn, llama3)."
        )
    return config


class WeightLoader:
    """Builds models of one configuration from published folders; `skeleton` is one on `meta`."""

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype) -> None:
        self._config = config
        self._dtype = dtype
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config)
        self.skeleton: PreTrainedModel = skeleton
        self._model_class: type[PreTrainedModel] = type(skeleton)
        self._shapes = {
            name: tuple(tensor.shape)
            for name, tensor in revert_weight_conversion(skeleton, skeleton.state_dict()).items()
        }
        self._tied = frozenset(skeleton.all_tied_weights_keys)

    def load(self, weights_dir: Path) -> tuple[PreTrainedModel, dict[str, Tensor]]:
        """A model in evaluation mode, and its tensors by published name as bf16.

        Raises:
            ValueError: a tensor is missing, extra, misshapen, or not a bf16 value.
        """
        published = read_safetensors(weights_dir)
        self._check_layout(weights_dir, published)
        transformers_logging.disable_progress_bar()
        model = self._model_class.from_pretrained(
            None,
            config=self._config,
            state_dict=dict(published),
            dtype=self._dtype,
            attn_implementation="sdpa",
        )
        held = revert_weight_conversion(model, model.state_dict())
        return model.eval(), {name: _as_bf16(name, held[name]) for name in published}

    def _check_layout(self, weights_dir: Path, published: dict[str, Tensor]) -> None:
        missing = sorted(self._shapes.keys() - published.keys() - self._tied)
        if missing:
            raise ValueError(
                f"{weights_dir} lacks {len(missing)} of the model's tensors, {missing[0]} first; "
                "publish the version again from its checkpoint."
            )
        extra = sorted(published.keys() - self._shapes.keys())
        if extra:
            raise ValueError(
                f"{weights_dir} holds {len(extra)} tensors the model does not have, {extra[0]} "
                "first; publish with the engine's own model configuration."
            )
        for name, tensor in published.items():
            if tuple(tensor.shape) != self._shapes[name]:
                raise ValueError(
                    f"{name} in {weights_dir} has shape {tuple(tensor.shape)}, the model needs "
                    f"{self._shapes[name]}; publish with the engine's own model configuration."
                )


def read_safetensors(weights_dir: Path) -> dict[str, Tensor]:
    """Every tensor of every `*.safetensors` file in a folder, by name."""
    files = sorted(weights_dir.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{weights_dir} holds no .safetensors file; give a published version.")
    tensors: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in load_file(file).items():
            if name in tensors:
                raise ValueError(
                    f"{name} stands in two files of {weights_dir}; remove the stale shard."
                )
            tensors[name] = tensor
    return tensors


def _as_bf16(name: str, held: Tensor) -> Tensor:
    """The held tensor as bf16; a rounding here would attest values that are not the served ones."""
    rounded = held.to(torch.bfloat16)
    if not torch.equal(rounded.to(held.dtype), held):
        raise ValueError(
            f"{name} holds values that bf16 cannot represent, or NaN; "
            "publish weights rounded to bf16."
        )
    return rounded
