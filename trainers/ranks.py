"""The processes of one trainer job: start, agreement between them, and when to die.

Rank 0 decides and tells the others in one small broadcast; nothing else about the control flow is
shared, so all ranks always run the same collectives in the same order.
"""

import logging
import os
import select
import sys
import threading
from collections.abc import Callable
from typing import TypeVar, cast

import torch
import torch.distributed as dist

T = TypeVar("T")

CONTROLLER_GONE = 3
"""Exit code when standard input ends or the launcher is gone."""


def start(num_threads: int) -> torch.device:
    """Joins the process group that `torchrun` describes and returns this rank's device.

    `num_threads` are shared by all ranks. CPU tensors travel over gloo in either case, so control
    messages need no GPU.
    """
    cuda = torch.cuda.is_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    torch.set_num_threads(max(1, num_threads // dist.get_world_size()))
    logging.basicConfig(
        level=logging.INFO if dist.get_rank() == 0 else logging.WARNING,
        stream=sys.stderr,
        format=f"%(asctime)s trainer rank {dist.get_rank()} %(levelname)s %(message)s",
    )
    if not cuda:
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def die_with_controller() -> None:
    """Ends this process when standard input ends or the launcher dies, whatever it is doing.

    A trainer that outlives its controller would hold devices and write checkpoints nobody names.
    """
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            readable, _, _ = select.select([0], [], [], 1.0)
            if readable and not os.read(0, 4096):
                break
        os._exit(CONTROLLER_GONE)

    threading.Thread(target=watch, name="die-with-controller", daemon=True).start()


def together(work: Callable[[], T]) -> T:
    """What `work` returns on this rank, once it is done on all.

    Raises what it raises; where it fails on other ranks alone, `RuntimeError`. So no rank goes on
    to collectives that another one never joins.
    """
    failure: Exception | None = None
    result: T | None = None
    try:
        result = work()
    except Exception as error:
        failure = error
    num_failed = torch.tensor(int(failure is not None))
    dist.all_reduce(num_failed)
    if failure is not None:
        raise failure
    if num_failed:
        raise RuntimeError("another rank could not do its part; its error is in the same log")
    return cast("T", result)


def agreed(values: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
    """What `values` returns on rank 0, on every rank; it is called on rank 0 alone."""
    count = torch.zeros(1, dtype=torch.int64)
    told = torch.zeros(0, dtype=torch.int64)
    if dist.get_rank() == 0:
        told = torch.tensor(values(), dtype=torch.int64)
        count[0] = len(told)
    dist.broadcast(count, 0)
    told = told if dist.get_rank() == 0 else torch.zeros(int(count), dtype=torch.int64)
    dist.broadcast(told, 0)
    return tuple(told.tolist())
