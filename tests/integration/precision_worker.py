"""Run by torchrun: gradients of one minibatch of two microbatches, in each dtype, with and without
activation checkpointing, and a float16 step that must be tried again.

    precision_worker.py POLICY OUT
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from rank_worker import SETTINGS, data
from safetensors.torch import load_file, save_file

from trainers import ranks
from trainers.losses import ClipRange
from trainers.optimizer import MasterAdamW
from trainers.packing import pack
from trainers.policy import Policy
from trainers.truncation import Truncation
from trainers.update import Objective, TokenData, accumulate_gradients, take_step

TOKEN_BUDGET = 150
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OBJECTIVE = Objective("ppo_clip", ClipRange(0.2, 0.2), entropy_coefficient=0.1)


def main() -> None:
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    device = ranks.start(num_threads=1)
    sequences, advantages, weights = data()
    assert len(pack(sequences, TOKEN_BUDGET)) == 2
    ones, zeros = torch.ones_like(advantages), torch.zeros_like(advantages)
    ids = torch.repeat_interleave(torch.tensor([int(s.action_mask.sum()) for s in sequences]))
    truncation = Truncation(zeros.long(), ones, zeros)
    tokens = TokenData(ones * -3.5, advantages, weights, ids, ids // 3, ones, truncation)
    kept = {}
    for dtype in DTYPES:
        for recomputed in (False, True):
            policy = Policy(folder, dtype, device, activation_checkpointing=recomputed)
            optimizer = MasterAdamW(policy, SETTINGS)
            optimizer.load(load_file(folder / "model.safetensors").items(), "policy")
            scale = optimizer.loss_scale.value
            accumulate_gradients(policy, sequences, tokens, OBJECTIVE, TOKEN_BUDGET, scale)
            way = "recomputed" if recomputed else "kept"
            for name, parameter in policy.parameters.items():
                gradient = parameter.grad.full_tensor() / scale
                kept[f"{dtype}.{way}.{name}"] = gradient
                parameter.grad = None
    # A scale at which the gradient overflows on one rank or on all.
    optimizer.loss_scale.value = 2.0**24
    report, norm = take_step(
        policy, optimizer, sequences, tokens, OBJECTIVE, TOKEN_BUDGET, learning_rate=1e-3
    )
    kept["scale"] = torch.tensor(report.loss_scale)
    kept["norm"] = torch.tensor(norm)
    for name, value in optimizer.sharded_state().items():
        kept[name] = value.full_tensor().clone()
    if dist.get_rank() == 0:
        save_file(kept, out / "kept.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
