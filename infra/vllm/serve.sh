#!/usr/bin/env bash
# What every vLLM server of Rollhouse needs, whatever it computes on. serve-cpu.sh and serve-gpu.sh
# call this with the flags of their device:
#
#     infra/vllm/serve.sh MODEL_DIR PORT MAX_MODEL_TOKENS DTYPE [more vLLM flags]
#
# A flag given again later wins. Knobs, all from the environment:
#
#     HOST         address to listen on; 127.0.0.1
#     VLLM_PYTHON  Python of the servers' environment; .venv-vllm/bin/python
set -euo pipefail
here=$(cd "$(dirname "$0")/../.." && pwd)
model_dir=$1 port=$2 max_model_tokens=$3 dtype=$4
shift 4
host=${HOST:-127.0.0.1} python=${VLLM_PYTHON:-$here/.venv-vllm/bin/python}
unset VLLM_PYTHON # no setting of vLLM's, which would say so

if [[ $host != 127.* && $host != localhost && $host != ::1 ]]; then
    # --api-key guards /inference alone, and Rollhouse sends none.
    echo "warning: whoever reaches $host:$port can stop this server and replace its weights;" \
        "let only the controller's machine reach it." >&2
fi

export VLLM_SERVER_DEV_MODE=1 # the routes that pause, update and ask the workers
export VLLM_PLUGINS=rollhouse
export VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1

# The distribution on the record: processed log-probabilities, no defaults from the model's folder.
exec "$python" -m vllm.entrypoints.openai.api_server \
    --model "$model_dir" --host "$host" --port "$port" \
    --dtype "$dtype" --max-model-len "$max_model_tokens" --max-num-seqs 256 \
    --enable-prefix-caching --enable-scale-out --skip-tokenizer-init \
    --logprobs-mode processed_logprobs --generation-config vllm \
    --weight-transfer-config '{"backend": "rollhouse"}' \
    --worker-extension-cls trainers.vllm_plugin.Holding \
    --enable-prompt-tokens-details --disable-uvicorn-access-log \
    "$@"
