"""Checkpoints: masters, moments, step and batch, in torch's distributed checkpoint format.

Every rank writes its shards as safetensors through DCP's Hugging Face storage, which keeps the
offsets of a shard in the file's header: nothing is pickled, any number of ranks can read it, and
`published_values` needs no process group. A checkpoint is a folder that appears whole: written
under a temporary name, fsynced, manifest last, renamed.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)

from tasks.durable import explain_os_errors, fsync_dir, fsync_file, make_durable_dirs
from trainers.optimizer import MasterAdamW

FORMAT = 1
MANIFEST = "manifest.json"
_SHARDING_INFO = "DCP_SHARDING_INFO"


def relative_path(batch: int, lease: int) -> str:
    """Where a checkpoint lies below the run's folder. The lease keeps zombies apart."""
    return f"checkpoints/b{batch:08d}-{lease:06d}"


def save(folder: Path, optimizer: MasterAdamW, batch: int) -> None:
    """Writes a checkpoint at `folder`; durable on return. Called by every rank.

    A folder already there is from an earlier try of the same batch under the same lease, which
    the ledger does not name, and is replaced.
    """
    temporary = folder.with_name(f".{folder.name}.tmp")
    if dist.get_rank() == 0:
        make_durable_dirs(folder.parent)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
    dist.barrier()
    writer = HuggingFaceStorageWriter(str(temporary), save_distributed=True)
    with explain_os_errors(f"write the checkpoint {folder}"):
        try:
            state_dict_saver.save(optimizer.sharded_state(), storage_writer=writer)
        except CheckpointException as error:
            # One rank's error, such as a full disk, reaches all ranks in a wrapper.
            raise next(iter(error.failures.values()))[0] from error
        if dist.get_rank() == 0:
            _complete(temporary, folder, optimizer, batch)
    dist.barrier()


def _complete(temporary: Path, folder: Path, optimizer: MasterAdamW, batch: int) -> None:
    """Makes the shards durable, adds the manifest, and puts the folder in its place."""
    manifest = {
        "format": FORMAT,
        "batch": batch,
        "step": optimizer.num_steps,
        "files": {path.name: path.stat().st_size for path in sorted(temporary.iterdir())},
        "parameters": {n: list(p.shape) for n, p in optimizer.policy.parameters.items()},
    }
    for path in temporary.iterdir():
        fsync_file(path)
    (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    fsync_file(temporary / MANIFEST)
    fsync_dir(temporary)
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(temporary, folder)
    fsync_dir(folder.parent)


def load(folder: Path, optimizer: MasterAdamW) -> int:
    """Fills masters, moments and step from a checkpoint written by any number of ranks.

    Publishes the masters and returns the batch that was trained last.

    Raises `ValueError` where the checkpoint is missing, incomplete or of another model.
    """
    manifest = _manifest(folder)
    optimizer.policy.check_names(manifest["parameters"], str(folder))
    for name, shape in manifest["parameters"].items():
        if list(optimizer.policy.parameters[name].shape) != shape:
            raise ValueError(f"{folder}: {name} has shape {shape}, not the model's; give its run.")
    state = optimizer.sharded_state()
    state_dict_loader.load(state, storage_reader=HuggingFaceStorageReader(str(folder)))
    optimizer.set_num_steps(manifest["step"])
    optimizer.publish()
    return manifest["batch"]


def read_masters(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, whole float32 master) pairs, sorted by name, one in memory at a time.

    Names are those of version 0's safetensors. Raises `ValueError` as `load` does.
    """
    manifest = _manifest(folder)
    with ExitStack() as stack:
        files = [
            stack.enter_context(safe_open(folder / name, framework="pt"))
            for name in sorted(manifest["files"])
        ]
        offsets = [json.loads(file.metadata()[_SHARDING_INFO]) for file in files]
        for name, shape in sorted(manifest["parameters"].items()):
            master = torch.empty(shape)
            num_values = 0
            for file, offset in zip(files, offsets, strict=True):
                if f"master.{name}" not in offset:
                    continue
                part = file.get_tensor(f"master.{name}")
                start = offset[f"master.{name}"]["saved_offsets"]
                region = tuple(
                    slice(first, first + size)
                    for first, size in zip(start, part.shape, strict=True)
                )
                master[region] = part
                num_values += part.numel()
            if num_values != master.numel():
                raise ValueError(
                    f"{folder}: {name} has {num_values} of its {master.numel()} values; resume "
                    "from an earlier checkpoint."
                )
            yield name, master


def published_values(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, bf16 tensor) pairs: the masters rounded to nearest even, as engines serve them."""
    for name, master in read_masters(folder):
        yield name, master.to(torch.bfloat16)


def _manifest(folder: Path) -> dict[str, Any]:
    if not (folder / MANIFEST).is_file():
        raise ValueError(
            f"{folder} is not a complete checkpoint: it has no {MANIFEST}; resume from the one "
            "that the ledger names, or restore it from a copy."
        )
    manifest = json.loads((folder / MANIFEST).read_text())
    if manifest["format"] > FORMAT:
        raise ValueError(
            f"{folder} has checkpoint format {manifest['format']} and this version reads {FORMAT}; "
            "update rollhouse."
        )
    for name, size in manifest["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            raise ValueError(
                f"{path} is missing or not {size} bytes long; restore the checkpoint from a copy, "
                "or resume from an earlier one."
            )
    return manifest
