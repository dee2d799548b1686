"""Whether a vLLM server was started as Rollhouse needs it, from what `/server_info` says."""

from collections.abc import Mapping
from typing import Any


def unfit(info: Mapping[str, Any], *, compute_dtype: str, max_model_tokens: int) -> str | None:
    """What is wrong and the flag that mends it; None for a server that fits.

    `info` is the `vllm_config` of the response.
    """
    model, parallel = info["model_config"], info["parallel_config"]
    transfer = info["weight_transfer_config"] or {}
    for found, fits, flag in (
        (model["logprobs_mode"], "processed_logprobs", "--logprobs-mode processed_logprobs"),
        (model["generation_config"], "vllm", "--generation-config vllm"),
        (model["dtype"].removeprefix("torch."), compute_dtype, f"--dtype {compute_dtype}"),
        (
            transfer.get("backend"),
            "rollhouse",
            'VLLM_PLUGINS=rollhouse and --weight-transfer-config \'{"backend": "rollhouse"}\'',
        ),
        (
            parallel["worker_extension_cls"],
            "trainers.vllm_plugin.Holding",
            "--worker-extension-cls trainers.vllm_plugin.Holding",
        ),
        (
            # Of several replicas behind one server, only the first says what it holds.
            parallel["data_parallel_size"],
            1,
            "--data-parallel-size 1, with a server and a URL for each replica,",
        ),
    ):
        if found != fits:
            return f"runs with {found} where {fits} is needed; set {flag}"
    if model["max_model_len"] < max_model_tokens:
        return (
            f"takes {model['max_model_len']} tokens where engine.max_model_tokens = "
            f"{max_model_tokens}; set --max-model-len {max_model_tokens}"
        )
    return None
