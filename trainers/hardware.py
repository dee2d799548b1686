"""What a step was computed on and with, as its row says it."""

import platform
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist

CPU_THREADS = "CPU threads"


def hardware(device: torch.device) -> str:
    """Device kind and count over all ranks."""
    count = dist.get_world_size()
    if device.type == "cuda":
        return f"{count} x {torch.cuda.get_device_name(device)}"
    return f"{count * torch.get_num_threads()} {CPU_THREADS}"


def cpu_threads(hardware: str) -> int | None:
    """The threads of all ranks in what `hardware` returned; None if it was not a CPU."""
    number, _, kind = hardware.partition(" ")
    return int(number) if kind == CPU_THREADS else None


@cache
def processor() -> str:
    """Model name of this machine's processor, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return f"{value.strip()}, {platform.machine()}"
    return platform.machine()


@cache
def software() -> str:
    """Versions of what computes."""
    cuda = "" if torch.version.cuda is None else f", CUDA {torch.version.cuda}"
    return (
        f"Python {platform.python_version()}, torch {torch.__version__}{cuda}, "
        f"transformers {version('transformers')}"
    )
