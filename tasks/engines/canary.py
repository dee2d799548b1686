"""The canary: log-probabilities of a fixed sequence, recomputed from a publication.

A hash shows which values an engine loaded, and not which it computes with: a packed copy that a
reload forgot passes every hash. So after each update the engine scores a fixed sequence, and the
controller scores it too, with transformers in float32 from the published folder. That costs one
load of the weights per version on the controller.
"""

import math
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from tasks.engines.loading import WeightLoader


class Canary:
    """A sequence and how to score it.

    Args:
        model_dir: folder with the model's config.json.
        token_ids: the sequence, two tokens or more.
        tolerance: largest |difference| of a log-probability, in nats, that is still rounding.
    """

    def __init__(self, model_dir: Path, token_ids: tuple[int, ...], tolerance: float) -> None:
        assert len(token_ids) >= 2, "the first token of a sequence has no log-probability"
        # Not the torch engine's own reader: that refuses what its cache cannot hold.
        self._loader = WeightLoader(AutoConfig.from_pretrained(model_dir), torch.float32)
        self._computing = threading.Lock()
        self._token_ids = token_ids
        self._recomputed: tuple[Path, list[float]] | None = None
        self.tolerance = tolerance

    @torch.inference_mode()
    def recompute(self, weights_dir: Path) -> list[float]:
        """Log-probability of each token but the first under a published version."""
        # All engines of a fleet ask for a version at once, and one load of it is enough.
        with self._computing:
            if self._recomputed is None or self._recomputed[0] != weights_dir:
                model, _ = self._loader.load(weights_dir)
                ids = torch.tensor([self._token_ids])
                logprobs = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
                values = logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()
                self._recomputed = (weights_dir, values)
            return self._recomputed[1]

    def payload(self) -> dict[str, Any]:
        """The body that asks vLLM for the prompt's log-probabilities; one token is sampled too."""
        sampling = {"temperature": 1.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
        return {"token_ids": list(self._token_ids), "sampling_params": sampling}

    def largest_difference(self, expected: list[float], body: Mapping[str, Any]) -> float:
        """Largest |engine - expected| in nats; infinite if a position is missing or not finite."""
        reported = (body["prompt_logprobs"] or [{}])[1:]
        if len(reported) != len(expected):
            return math.inf
        differences = [
            abs(position[str(token_id)]["logprob"] - value)
            for position, token_id, value in zip(
                reported, self._token_ids[1:], expected, strict=True
            )
        ]
        return max(d if math.isfinite(d) else math.inf for d in differences)
