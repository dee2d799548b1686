"""vLLM's routed experts, decoded, against plain transformers on the same weights.

`make test-routing` runs it. The server has an environment of its own, since the last vLLM that
returns routed experts on a CPU is not the release that serves rollouts.
"""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

from tasks.engines.routing import decode_routed_experts

pytestmark = pytest.mark.routing

PYTHON = Path(__file__).parents[2] / ".venv-vllm-routing" / "bin" / "python"
VOCAB, LAYERS, DENSE_LAYER, EXPERTS, TOP_K = 97, 4, 1, 8, 2
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}
START_S = 300


@dataclass(frozen=True)
class Served:
    url: str
    model: PreTrainedModel


def write_mixture(folder: Path) -> PreTrainedModel:
    """A Qwen3-MoE of bf16 values with one dense layer; heads of 32, the least vLLM's CPU attention
    takes. Returns the same values in float32."""
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=LAYERS,
        mlp_only_layers=[DENSE_LAYER],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        max_position_embeddings=256,
        # Large enough that router logits lie far apart against float32 rounding.
        initializer_range=0.2,
        architectures=["Qwen3MoeForCausalLM"],
    )
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    if not PYTHON.exists():
        pytest.fail(f"{PYTHON} does not exist; `make test-routing` installs it.")
    folder, port = tmp_path_factory.mktemp("mixture"), free_port()
    model, log = write_mixture(folder), folder.parent / "server.log"
    command = [
        str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder),
        "--host", "127.0.0.1", "--port", str(port), "--enable-scale-out",
        "--enable-return-routed-experts", "--logprobs-mode", "processed_logprobs",
        "--generation-config", "vllm", "--skip-tokenizer-init", "--dtype", "float32",
        "--max-model-len", "256", "--max-num-seqs", "8",
        # Compiled on a CPU, the router's hook is traced away and every expert comes back as 0.
        "--enforce-eager",
    ]  # fmt: skip
    with log.open("w") as output:
        server = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | ENVIRONMENT,
            start_new_session=True,
        )
        try:
            wait_until_healthy(server, f"http://127.0.0.1:{port}", log)
            yield Served(f"http://127.0.0.1:{port}", model)
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(timeout=60)


def wait_until_healthy(server: subprocess.Popen, url: str, log: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if server.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"vLLM did not start; its log ends:\n{log.read_text()[-4000:]}")


def generate(served: Served, prompt: list[int], max_tokens: int, seed: int) -> dict:
    """The one choice that `/inference/v1/generate` returns."""
    body = {
        "token_ids": prompt,
        "sampling_params": {
            "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": seed,
            "max_tokens": max_tokens, "ignore_eos": True, "detokenize": False,
        },
    }  # fmt: skip
    request = urllib.request.Request(
        f"{served.url}/inference/v1/generate",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.load(response)["choices"][0]
    except urllib.error.HTTPError as error:
        pytest.fail(f"vLLM answered {error.code}: {error.read().decode()[:2000]}")


@torch.inference_mode()
def recomputed(model: PreTrainedModel, token_ids: list[int]) -> np.ndarray:
    """[T, routed layers, top_k] from the router logits of one forward pass without a cache."""
    output = model(input_ids=torch.tensor([token_ids]), use_cache=False, output_router_logits=True)
    layers = [
        np.argsort(-logits.numpy(), axis=-1, kind="stable") for logits in output.router_logits
    ]
    return np.stack(layers, axis=1)[..., :TOP_K]


def test_decoded_experts_equal_a_transformers_recomputation(served: Served):
    rng = np.random.default_rng(0)
    shared = rng.integers(0, VOCAB, 40).tolist()
    jobs = [
        ([*shared[:length], *rng.integers(0, VOCAB, extra).tolist()], max_tokens, seed)
        for seed, (length, extra, max_tokens) in enumerate(
            [(0, 1, 20), (40, 0, 30), (40, 5, 1), (40, 20, 25), (0, 90, 40), (16, 3, 2)] * 4
        )
    ]
    with ThreadPoolExecutor(8) as pool:
        choices = list(pool.map(lambda job: generate(served, *job), jobs))
    # A second turn: its prompt begins with what the first one left in the cache.
    again = [
        ([*prompt, *choice["token_ids"], 5, 6], 10, 100 + seed)
        for (prompt, _, seed), choice in zip(jobs, choices, strict=True)
    ]
    with ThreadPoolExecutor(8) as pool:
        choices += list(pool.map(lambda job: generate(served, *job), again))

    routed = [layer for layer in range(LAYERS) if layer != DENSE_LAYER]
    num_rows = num_equal = 0
    for (prompt, max_tokens, _), choice in zip([*jobs, *again], choices, strict=True):
        output = choice["token_ids"]
        assert len(output) == max_tokens
        experts = decode_routed_experts(choice["routed_experts"], len(prompt), len(output)).experts
        assert experts.shape == (len(prompt) + len(output) - 1, LAYERS, TOP_K)
        assert experts.dtype == np.uint8
        assert not experts[:, DENSE_LAYER].any()
        expected = recomputed(served.model, [*prompt, *output][:-1])
        num_rows += len(expected)
        num_equal += int((experts[:, routed] == expected).all((1, 2)).sum())
    print(f"{num_equal} of {num_rows} rows have the experts of the recomputation")
    assert num_equal == num_rows
