"""Recompute rollout log-probabilities from published weights, with plain transformers.

    make recompute                             # over var/demo/lake
    make recompute LAKE=var/vllm-demo/lake

Nothing of Rollhouse computes here: each version's folder is loaded by `from_pretrained`, and each
trajectory that was sampled under that one version is run through it, one sequence at a time, in
FP32. Prints, for each version, the tokens compared and the largest |log pi - log mu|; exits 1 above
0.002. The whole distribution is computed, so a run that truncates shows up to -log of the mass it
keeps.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from flows.inspection import run_config
from tasks.lake.lake import Lake
from tasks.publish import version_dir

TOLERANCE = 0.002


def largest_error(lake: Lake, run_id: str, version: int, folder: Path) -> tuple[int, float]:
    """Action tokens of trajectories sampled under `version` alone, and the largest |log pi - log
    mu| over them."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = lake.read(
        "trajectories",
        run_id=run_id,
        columns=["trajectory_id", "sampling"],
        where="weight_version_min = ? AND weight_version_max = ?",
        params=[version, version],
    ).to_pylist()
    temperatures = {row["trajectory_id"]: row["sampling"]["temperature"] for row in rows}
    sequences: dict[str, tuple[list[int], list[float | None]]] = {}
    segments = lake.read(
        "segments",
        run_id=run_id,
        columns=["trajectory_id", "token_ids", "rollout_logprobs"],
        order_by="trajectory_id, segment_index",
    ).to_pylist()
    for segment in segments:
        if segment["trajectory_id"] in temperatures:
            ids, logprobs = sequences.setdefault(segment["trajectory_id"], ([], []))
            ids += segment["token_ids"]
            logprobs += segment["rollout_logprobs"] or [None] * len(segment["token_ids"])
    num_tokens, largest = 0, 0.0
    for name, (ids, logprobs) in sequences.items():
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0] / temperatures[name]
        recomputed = torch.log_softmax(logits, -1)
        for position, logprob in enumerate(logprobs):
            if logprob is not None:
                error = abs(float(recomputed[position - 1, ids[position]]) - logprob)
                num_tokens, largest = num_tokens + 1, max(largest, error)
    return num_tokens, largest


def main() -> None:
    transformers_logging.disable_progress_bar()
    lake = Lake.open(sys.argv[1])
    worst = 0.0
    for run_id in lake.run_ids():
        config = run_config(lake, run_id)
        for entry in lake.ledger(run_id).entries:
            if entry.kind == "version_published" and entry.version is not None:
                folder = version_dir(config, entry.details["uri"])
                num_tokens, largest = largest_error(lake, run_id, entry.version, folder)
                worst = max(worst, largest)
                print(
                    f"{run_id} version {entry.version}: {num_tokens} tokens, largest |log pi - "
                    f"log mu| {largest:.2e}",
                    flush=True,
                )
    print(f"largest of all: {worst:.2e}, allowed {TOLERANCE}")
    sys.exit(int(worst > TOLERANCE))


if __name__ == "__main__":
    main()
