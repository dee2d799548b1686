"""The scripts in infra/vllm pass what vLLM's own parser takes, and it reads what they mean."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.vllm

REPOSITORY = Path(__file__).parents[2]
SCRIPTS = REPOSITORY / "infra" / "vllm"
VLLM_PYTHON = REPOSITORY / ".venv-vllm" / "bin" / "python"
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}

# Of each start: script, knobs, flags at the end.
STARTS: dict[str, tuple[str, dict[str, str], list[str]]] = {
    "cpu": ("serve-cpu.sh", {}, []),
    "cpu, flags": ("serve-cpu.sh", {"HOST": "0.0.0.0"}, ["--max-num-seqs", "16"]),
    "gpu": ("serve-gpu.sh", {}, []),
    "gpu, knobs": (
        "serve-gpu.sh",
        {
            "TP": "2",
            "GPU_MEMORY_UTILIZATION": "0.5",
            "ROUTED_EXPERTS": "1",
            "SLEEP_MODE": "1",
            "SPECULATIVE_CONFIG": json.dumps(NGRAM),
        },
        ["--max-num-seqs", "16"],
    ),
}

# Every variable that a script sets for vLLM, and what its parser makes of every list of arguments.
PARSE = """
import json, sys
import vllm.envs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

starts = json.load(sys.stdin)
parsed = {}
for name, (arguments, variables) in starts.items():
    unknown = set(variables) - vllm.envs.environment_variables.keys()
    assert not unknown, f"{name}: vLLM knows no {unknown}"
    parser = make_arg_parser(FlexibleArgumentParser(allow_abbrev=False))
    parsed[name] = vars(parser.parse_args(arguments))
print(json.dumps(parsed, default=str))
"""


def start(
    folder: Path, script: str, knobs: dict[str, str], flags: list[str]
) -> subprocess.CompletedProcess[str]:
    """Runs a script up to what it would execute, whose arguments and environment are printed."""
    shim = folder / "python"
    shim.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        "print(json.dumps([sys.argv[1:], dict(os.environ)]))\n"
    )
    shim.chmod(0o755)
    return subprocess.run(
        [SCRIPTS / script, "models/some", "8123", "16384", "bfloat16", *flags],
        env={"PATH": os.environ["PATH"], "VLLM_PYTHON": str(shim), **knobs},
        capture_output=True,
        text=True,
    )


def executed(
    folder: Path, script: str, knobs: dict[str, str], flags: list[str]
) -> tuple[list[str], dict[str, str]]:
    done = start(folder, script, knobs, flags)
    assert done.returncode == 0, done.stderr
    arguments, environment = json.loads(done.stdout)
    return arguments, environment


@pytest.fixture(scope="module")
def parsed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What vLLM's parser makes of every start; one process, whose imports take a while."""
    assert VLLM_PYTHON.exists(), "There is no vLLM to ask; run `make vllm`."
    folder = tmp_path_factory.mktemp("launch")
    starts = {}
    for name, (script, knobs, flags) in STARTS.items():
        arguments, environment = executed(folder, script, knobs, flags)
        assert arguments[:2] == ["-m", "vllm.entrypoints.openai.api_server"]
        starts[name] = (arguments[2:], [v for v in environment if v.startswith("VLLM_")])
    done = subprocess.run(
        [VLLM_PYTHON, "-c", PARSE],
        input=json.dumps(starts),
        capture_output=True,
        text=True,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", STARTS)
def test_every_server_records_the_sampled_distribution_and_takes_our_weights(parsed, name: str):
    found = parsed[name]
    assert found["logprobs_mode"] == "processed_logprobs"
    assert found["generation_config"] == "vllm"
    assert found["weight_transfer_config"] == "WeightTransferConfig(backend='rollhouse')"
    assert found["worker_extension_cls"] == "trainers.vllm_plugin.Holding"
    assert found["enable_scale_out"] and found["enable_prompt_tokens_details"]
    assert found["skip_tokenizer_init"] and found["enable_prefix_caching"]
    assert (found["model"], found["port"]) == ("models/some", 8123)
    assert (found["max_model_len"], found["dtype"]) == (16384, "bfloat16")
    assert found["data_parallel_size"] == 1


def test_each_device_has_its_prefill(parsed):
    assert parsed["cpu"]["enable_chunked_prefill"] is False
    assert parsed["cpu"]["max_num_batched_tokens"] == 16384
    assert parsed["gpu"]["enable_chunked_prefill"] is True
    assert parsed["gpu"]["max_num_batched_tokens"] is None


def test_a_flag_at_the_end_wins(parsed):
    assert parsed["cpu"]["max_num_seqs"] == parsed["gpu"]["max_num_seqs"] == 256
    assert parsed["cpu, flags"]["max_num_seqs"] == parsed["gpu, knobs"]["max_num_seqs"] == 16


def test_knobs_arrive_and_are_off_by_default(parsed):
    plain, knobs = parsed["gpu"], parsed["gpu, knobs"]
    assert (plain["tensor_parallel_size"], knobs["tensor_parallel_size"]) == (1, 2)
    assert (plain["gpu_memory_utilization"], knobs["gpu_memory_utilization"]) == (0.9, 0.5)
    assert not plain["enable_return_routed_experts"] and knobs["enable_return_routed_experts"]
    assert not plain["enable_sleep_mode"] and knobs["enable_sleep_mode"]
    assert (plain["speculative_config"], knobs["speculative_config"]) == (None, NGRAM)
    assert knobs["per_request_spec_decode_metrics"] == "summary"


def test_whoever_listens_beyond_loopback_is_warned(parsed, tmp_path: Path):
    assert (parsed["cpu"]["host"], parsed["cpu, flags"]["host"]) == ("127.0.0.1", "0.0.0.0")
    assert start(tmp_path, *STARTS["cpu"]).stderr == ""
    assert "whoever reaches 0.0.0.0:8123" in start(tmp_path, *STARTS["cpu, flags"]).stderr


@pytest.mark.parametrize(
    ("knobs", "devices"),
    [
        ({}, None),
        ({"SERVER_INDEX": "0"}, "0"),
        ({"SERVER_INDEX": "3"}, "3"),
        ({"SERVER_INDEX": "1", "TP": "2"}, "2,3"),
        ({"SERVER_INDEX": "1", "TP": "2", "CUDA_VISIBLE_DEVICES": "7,6,5,4"}, "5,4"),
        ({"TP": "2", "CUDA_VISIBLE_DEVICES": "7,6"}, "7,6"),
    ],
)
def test_each_server_of_a_run_has_devices_of_its_own(
    tmp_path: Path, knobs: dict[str, str], devices: str | None
):
    _, environment = executed(tmp_path, "serve-gpu.sh", knobs, [])
    assert environment.get("CUDA_VISIBLE_DEVICES") == devices


@pytest.mark.parametrize(
    ("script", "knobs", "flags", "sentence"),
    [
        (
            "serve-gpu.sh",
            {"SERVER_INDEX": "1", "TP": "2", "CUDA_VISIBLE_DEVICES": "0,1,2"},
            [],
            "CUDA_VISIBLE_DEVICES=0,1,2 leaves no 2 device(s) for server 1",
        ),
        (
            "serve-gpu.sh",
            {"SPECULATIVE_CONFIG": '{"rejection_sample_method": "synthetic"}'},
            [],
            "synthetic acceptance draws from another distribution",
        ),
        (
            "serve-cpu.sh",
            {},
            ["--speculative-config", json.dumps(NGRAM)],
            "ignores the temperature",
        ),
        ("serve-cpu.sh", {}, ["--speculative_config.method=ngram"], "ignores the temperature"),
        ("serve-cpu.sh", {}, ["-sc.method", "ngram"], "ignores the temperature"),
    ],
)
def test_what_cannot_be_right_is_refused(
    tmp_path: Path, script: str, knobs: dict[str, str], flags: list[str], sentence: str
):
    done = start(tmp_path, script, knobs, flags)
    assert done.returncode == 2 and sentence in done.stderr and done.stdout == ""
