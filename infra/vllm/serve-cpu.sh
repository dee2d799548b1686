#!/usr/bin/env bash
# One vLLM server on this machine's CPU, as Rollhouse needs it:
#
#     infra/vllm/serve-cpu.sh MODEL_DIR PORT MAX_MODEL_TOKENS DTYPE [more vLLM flags]
#
# `rollhouse run` calls it with these arguments when the run file says `engine.vllm.launch`.
# A flag given again at the end wins.
set -euo pipefail
here=$(cd "$(dirname "$0")/../.." && pwd)
model_dir=$1 port=$2 max_model_tokens=$3 dtype=$4
shift 4

export VLLM_SERVER_DEV_MODE=1 # the routes that pause, update and ask the workers
export VLLM_PLUGINS=rollhouse
export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1} # GiB
export VLLM_CPU_OMP_THREADS_BIND=${VLLM_CPU_OMP_THREADS_BIND:-nobind}
export OMP_WAIT_POLICY=PASSIVE # spinning barriers would take the trainer's cores
export VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1

# The distribution on the record: processed log-probabilities, no defaults from the model's folder.
# Chunked prefill is off because vLLM 0.32 on a CPU cannot take back a seeded draw, which a prompt
# computed in parts makes and discards ("CPU Generator does not use offset").
budget=$((max_model_tokens > 8192 ? max_model_tokens : 8192))
exec "$here/.venv-vllm/bin/python" -m vllm.entrypoints.openai.api_server \
    --model "$model_dir" --host 127.0.0.1 --port "$port" \
    --dtype "$dtype" --max-model-len "$max_model_tokens" \
    --no-enable-chunked-prefill --max-num-batched-tokens "$budget" --max-num-seqs 256 \
    --enable-scale-out --skip-tokenizer-init \
    --logprobs-mode processed_logprobs --generation-config vllm \
    --weight-transfer-config '{"backend": "rollhouse"}' \
    --worker-extension-cls trainers.vllm_plugin.Holding \
    --enable-prompt-tokens-details --disable-uvicorn-access-log \
    "$@"
