"""Tiny random models and an independent recomputation, shared by the engine tests.

The recomputation is a plain transformers forward pass without a cache, and numpy in float64.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tasks.engines.protocol import Generation, Request, Sampling
from tasks.engines.torch_engine import TorchEngine
from tasks.weights.hashing import root_hash

VOCAB = 61
PLAIN = Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_tokens=8, seed=0)

_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    # Large enough that next-token distributions are far from flat.
    "initializer_range": 0.25,
}
_CONFIGS = {
    "qwen3": partial(Qwen3Config, tie_word_embeddings=True),
    "llama": partial(LlamaConfig, tie_word_embeddings=False),
    "qwen3_moe": partial(
        Qwen3MoeConfig, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
    ),
}


@dataclass(frozen=True)
class Published:
    """A folder of bf16 weights, its root hash, and the same values as a float32 model."""

    path: Path
    root_hash: str
    model: PreTrainedModel


def publish(path: Path, kind: str = "qwen3", seed: int = 0, **changes) -> Published:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    config = _CONFIGS[kind](**{**_SHAPE, **changes})
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(path)
    # Loaded again, since the cast above also rounded the rotary frequencies.
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return Published(path, root_hash(load_file(path / "model.safetensors")), model)


def make_engine(published: Published, num_slots: int = 4, **changes) -> TorchEngine:
    arguments = {"max_model_tokens": 64, "num_threads": 1, "engine_id": "torch-0", **changes}
    return TorchEngine(published.path, num_slots=num_slots, **arguments)


async def attached(
    published: Published, version: int = 0, num_slots: int = 4, **changes
) -> TorchEngine:
    engine = make_engine(published, num_slots, **changes)
    attestation = await engine.update(version, published.path, published.root_hash, "wait")
    assert attestation.ok, attestation.reason
    return engine


def prompts(count: int, seed: int = 0, longest: int = 12) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(seed)
    return [
        tuple(rng.integers(0, VOCAB, rng.integers(1, longest + 1)).tolist()) for _ in range(count)
    ]


async def generate_all(engine: TorchEngine, requests: Sequence[Request]) -> list[Generation]:
    return await asyncio.gather(*(engine.generate(request) for request in requests))


async def turn_loop(num_iterations: int) -> None:
    """Let the engine make some steps: one takes about nine iterations of the loop."""
    for _ in range(num_iterations):
        await asyncio.sleep(0)


def processed(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """[V] logits → [V] log-probabilities by truncating probabilities one rule after the other."""
    scaled = logits.astype(np.float64) / sampling.temperature
    probs = np.exp(scaled - scaled.max())
    probs[probs < sampling.min_p * probs.max()] = 0.0
    if sampling.top_k:
        probs[np.argsort(-probs, kind="stable")[sampling.top_k :]] = 0.0
    probs /= probs.sum()
    if sampling.top_p < 1:
        order = np.argsort(-probs, kind="stable")
        num_kept = int(np.searchsorted(np.cumsum(probs[order]), sampling.top_p)) + 1
        probs[order[num_kept:]] = 0.0
        probs /= probs.sum()
    with np.errstate(divide="ignore"):
        return np.log(probs)


@torch.inference_mode()
def recomputed_logprobs(
    model: PreTrainedModel, request: Request, output: Sequence[int]
) -> np.ndarray:
    """[len(output)] log-probabilities from one forward pass over prompt and output."""
    token_ids = torch.tensor([[*request.token_ids, *output]])
    logits = model(input_ids=token_ids, use_cache=False).logits[0].numpy()
    first = len(request.token_ids) - 1
    rows = [processed(row, request.sampling) for row in logits[first : first + len(output)]]
    return np.array([row[token] for row, token in zip(rows, output, strict=True)])


def chosen_experts(router_logits: Sequence[torch.Tensor], top_k: int) -> np.ndarray:
    """Router logits, [T, E] a layer → the top_k experts [T, L, top_k], best first."""
    layers = [np.argsort(-logits.numpy(), axis=-1, kind="stable") for logits in router_logits]
    return np.stack(layers, axis=1)[..., :top_k]


@torch.inference_mode()
def recomputed_experts(model: PreTrainedModel, token_ids: Sequence[int]) -> np.ndarray:
    """[T, L, top_k] experts of a mixture, from one forward pass without a cache."""
    output = model(input_ids=torch.tensor([token_ids]), use_cache=False, output_router_logits=True)
    return chosen_experts(output.router_logits, model.config.num_experts_per_tok)


@torch.inference_mode()
def replay(
    models: Sequence[PreTrainedModel], request: Request
) -> tuple[tuple[int, ...], np.ndarray]:
    """Sample len(models) tokens, the i-th under models[i], over one cache; tokens and logprobs."""
    sampling, first = request.sampling, len(request.token_ids)
    philox = np.random.Generator(np.random.Philox(key=sampling.seed))
    uniforms = philox.random(first + len(models))[first:]
    cache = DynamicCache(config=models[0].config)
    tokens, logprobs, pending = [], [], list(request.token_ids)
    for model, uniform in zip(models, uniforms, strict=True):
        logits = model(input_ids=torch.tensor([pending]), cache=cache, use_cache=True).logits
        row = processed(logits[0, -1].numpy(), sampling)
        cdf = np.cumsum(np.exp(row))
        token = int(np.searchsorted(cdf, uniform * cdf[-1], side="right"))
        tokens.append(token)
        logprobs.append(row[token])
        pending = [token]
    return tuple(tokens), np.array(logprobs)
