"""Run by torchrun: loads a checkpoint on as many ranks as there are and writes it again.

reshard_worker.py POLICY CHECKPOINT OUT
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from rank_worker import SETTINGS

from trainers import checkpoint, ranks
from trainers.optimizer import MasterAdamW
from trainers.policy import Policy


def main() -> None:
    policy_folder, source, out = map(Path, sys.argv[1:])
    policy = Policy(policy_folder, torch.float32, ranks.start(num_threads=1))
    optimizer = MasterAdamW(policy, SETTINGS)
    batch = checkpoint.load(source, optimizer)
    checkpoint.save(out, optimizer, batch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
