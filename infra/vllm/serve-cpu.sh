#!/usr/bin/env bash
# One vLLM server on this machine's CPU; arguments and common knobs are those of serve.sh:
#
#     infra/vllm/serve-cpu.sh MODEL_DIR PORT MAX_MODEL_TOKENS DTYPE [more vLLM flags]
#
# `rollhouse run` calls it with these arguments when the run file says `engine.vllm.launch`.
set -euo pipefail
model_dir=$1 port=$2 max_model_tokens=$3 dtype=$4
shift 4

# vLLM 0.32 on a CPU writes the temperatures of drafts into a copy that it throws away
# (_expand_kernel_impl), and then draws at, and reports, whatever the memory held.
for flag in "$@"; do
    case $flag in
        --spec[-_]* | --speculative[-_]* | -sc | -sc[.=]*)
            echo "$flag: speculative decoding on a CPU ignores the temperature in vLLM 0.32;" \
                "remove it." >&2
            exit 2
            ;;
    esac
done

export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1} # GiB
export VLLM_CPU_OMP_THREADS_BIND=${VLLM_CPU_OMP_THREADS_BIND:-nobind}
export OMP_WAIT_POLICY=PASSIVE # spinning barriers would take the trainer's cores

# Chunked prefill is off because vLLM 0.32 on a CPU cannot take back a seeded draw, which a prompt
# computed in parts makes and discards ("CPU Generator does not use offset").
budget=$((max_model_tokens > 8192 ? max_model_tokens : 8192))
exec "$(dirname "$0")/serve.sh" "$model_dir" "$port" "$max_model_tokens" "$dtype" \
    --no-enable-chunked-prefill --max-num-batched-tokens "$budget" \
    "$@"
