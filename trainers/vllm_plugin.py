"""Inside a vLLM server: pull published weights, verify them, and say what is held.

    VLLM_PLUGINS=rollhouse python -m vllm.entrypoints.openai.api_server \
        --weight-transfer-config '{"backend": "rollhouse"}' \
        --worker-extension-cls trainers.vllm_plugin.Holding ...

The controller sends where a publication lies and which root hash it must have; no weights travel
through the controller. A refusal does not raise: it is kept and `held_weights` reports it, so that
the engine goes on and can say what it holds. vLLM reloads layer by layer into the
tensors that its kernels read; on a CPU these are packed copies and the originals are empty, so
nothing read back from the model could be hashed. What is hashed is what was loaded, and the canary
that the controller runs afterwards shows that it is also what computes.
"""

# pyright: reportMissingImports=false
# vLLM lives in the servers' environment, where no other file of ours needs it.

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.logger import init_logger
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from tasks.weights.anchors import read_anchor
from tasks.weights.folders import load_publication
from tasks.weights.hashing import root_hash

BACKEND = "rollhouse"

logger = init_logger(__name__)


def register() -> None:
    """Entry point of the group `vllm.general_plugins`; vLLM calls it once in each process."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, PublicationReceiver)


@dataclass
class NoInit(WeightTransferInitInfo):
    """There is no channel to set up: weights are read from the store."""


@dataclass
class PublicationInfo(WeightTransferUpdateInfo):
    """Which publication to hold: its folder, its place in the run, and its root hash."""

    uri: str
    version: int
    parent: int | None
    root_hash: str


class PublicationReceiver(WeightTransferEngine[NoInit, PublicationInfo]):
    """Loads publications into one worker's model, or refuses them."""

    init_info_cls = NoInit
    update_info_cls = PublicationInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.root_hash: str | None = None
        """Of the values that were loaded last; None before the first and after a failed load."""
        self.refusal: str | None = None

    def init_transfer_engine(self, init_info: NoInit) -> None:
        return

    def start_weight_update(self) -> None:
        self.refusal = None

    def finish_weight_update(self) -> None:
        return

    def shutdown(self) -> None:
        return

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Without the base class's synchronisation of an accelerator, which a CPU has not."""
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except Exception as error:
            logger.exception("rollhouse: an update was refused")
            self.refusal = f"{type(error).__name__}: {error}"
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: PublicationInfo) -> None:
        """Verifies a publication on the side, then loads it.

        Raises:
            ValueError: it is not what was asked for; the weights held stay.
        """
        publication = load_publication(update_info.uri)
        asked = (update_info.version, update_info.parent)
        if (publication.version, publication.parent) != asked:
            raise ValueError(
                f"the manifest at {update_info.uri} is of version {publication.version} on parent "
                f"{publication.parent}, not of version {asked[0]} on parent {asked[1]}"
            )
        tensors = read_anchor(update_info.uri)
        held = root_hash(tensors)
        if held != update_info.root_hash:
            raise ValueError(f"{update_info.uri} hashes to {held}, not {update_info.root_hash}")
        # Whatever goes wrong from here leaves a model of neither version.
        self.root_hash = None
        initialize_layerwise_reload(self.model)
        self.model.load_weights(iter(tensors.items()))
        finalize_layerwise_reload(self.model, self.model_config)
        _repack_shared(self.model)
        self.root_hash = held


def _repack_shared(model: torch.nn.Module) -> None:
    """Packs the weights again that two modules share, on a CPU.

    vLLM 0.32's layerwise reload packs a shared weight for the embedding alone; a tied LM head would
    go on computing from its old packed copy, with every hash right and log-probabilities off by up
    to 0.56 nats.
    """
    for layer in model.modules():
        weight = getattr(layer, "weight", None)
        if hasattr(layer, "cpu_linear") and weight is not None and weight.numel() > 0:
            dispatch_cpu_unquantized_gemm(layer, remove_weight=False)


class Holding:
    """Extends vLLM's worker with the question of what it holds."""

    weight_transfer_engine: PublicationReceiver
    vllm_config: Any
    _weight_update_active: bool

    def end_interrupted_update(self) -> None:
        """Closes an update that was begun and never finished; the weights stay as they are."""
        self._weight_update_active = False

    def held_weights(self) -> dict[str, Any]:
        """`root_hash` of the loaded values (None: neither version), `refusal` of the last update
        or None, and the extents of the model; the layers counted are all that routing is reported
        for, with a router or without."""
        receiver, model = self.weight_transfer_engine, self.vllm_config.model_config
        return {
            "root_hash": receiver.root_hash,
            "refusal": receiver.refusal,
            "vocab_size": model.get_vocab_size(),
            "num_layers": model.get_total_num_hidden_layers(),
            "num_experts": model.get_num_experts(),
            "num_experts_per_token": model.get_num_experts_per_tok(),
        }
