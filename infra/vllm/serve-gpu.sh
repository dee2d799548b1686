#!/usr/bin/env bash
# One vLLM server on CUDA devices; arguments and common knobs are those of serve.sh:
#
#     infra/vllm/serve-gpu.sh MODEL_DIR PORT MAX_MODEL_TOKENS DTYPE [more vLLM flags]
#
# `make vllm` makes an environment for a CPU. For CUDA, VLLM_PYTHON names the Python of one that has
# vllm==0.32.* and blake3, and this checkout (`pip install --no-deps --editable .`). Further knobs:
#
#     TP                      devices that one copy of the model is spread over; 1
#     GPU_MEMORY_UTILIZATION  share of each device's memory that the server takes; 0.9
#     ROUTED_EXPERTS          1: return the experts of every token; only for mixture-of-experts
#     SPECULATIVE_CONFIG      JSON for --speculative-config; none
#     SLEEP_MODE              1: can leave its memory to a trainer on the same devices, which
#                             engine.vllm.colocated = true needs
#
# Data parallel: one server for each replica, and as many engine.vllm.urls (or num_servers), never
# --data-parallel-size. Behind one API server of vLLM 0.32, /pause and the weight routes reach every
# replica, but /collective_rpc answers with the workers of the first alone (DPLBAsyncMPClient keeps
# one result), and the canary meets whichever replica is free: the others would sample unattested.
# A URL for each rank is no way out: vLLM refuses it for dense models, and the ranks of a
# mixture-of-experts model pause only all together, so no engine could be updated by itself.
#
# Speculative decoding, as vLLM 0.32's code has it: drafts are accepted by rejection sampling
# ("standard" and "block"), so that tokens follow the target's distribution. What is reported with
# processed_logprobs for an accepted draft, for the token that replaces a rejected one and for the
# one after the last draft is log p of the target after temperature and truncation: the recorded
# log mu, whatever the draft's probabilities were. "synthetic" accepts at made-up rates and is
# refused below; vLLM refuses min_p. A draft model keeps the weights it was started with: as the
# policy moves, fewer of its drafts are accepted, and nothing else changes. The probe asks for one
# token at a time and meets no draft; gate 2 checks what is reported for them.
set -euo pipefail
model_dir=$1 port=$2 max_model_tokens=$3 dtype=$4
shift 4
tp=${TP:-1}

# A run numbers the servers that it starts; each takes the next TP devices.
if [[ -n ${SERVER_INDEX:-} ]]; then
    first=$((SERVER_INDEX * tp))
    IFS=, read -ra devices <<<"${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((first + tp - 1)))}"
    if ((${#devices[@]} < first + tp)); then
        echo "CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES leaves no $tp device(s) for server" \
            "$SERVER_INDEX; name more, or lower engine.vllm.num_servers or TP." >&2
        exit 2
    fi
    CUDA_VISIBLE_DEVICES=$(IFS=,; echo "${devices[*]:first:tp}")
    export CUDA_VISIBLE_DEVICES
fi

flags=(
    --tensor-parallel-size "$tp" --enable-chunked-prefill
    --gpu-memory-utilization "${GPU_MEMORY_UTILIZATION:-0.9}"
)
if [[ ${ROUTED_EXPERTS:-0} == 1 ]]; then
    flags+=(--enable-return-routed-experts)
fi
if [[ ${SLEEP_MODE:-0} == 1 ]]; then
    flags+=(--enable-sleep-mode)
fi
if [[ -n ${SPECULATIVE_CONFIG:-} ]]; then
    if [[ $SPECULATIVE_CONFIG == *synthetic* ]]; then
        echo "SPECULATIVE_CONFIG: synthetic acceptance draws from another distribution than is" \
            "recorded; remove it." >&2
        exit 2
    fi
    # The second counts drafts for the record.
    flags+=(
        --speculative-config "$SPECULATIVE_CONFIG"
        --per-request-spec-decode-metrics summary
    )
fi

exec "$(dirname "$0")/serve.sh" "$model_dir" "$port" "$max_model_tokens" "$dtype" \
    "${flags[@]}" "$@"
