"""Checkpoints: masters, moments, step, loss scale, batch, in torch's distributed checkpoint format.

Every rank writes its shards as safetensors through DCP's Hugging Face storage, which keeps the
offsets of a shard in the file's header: nothing is pickled, any number of ranks can read it, and
`published_values` needs no process group. A checkpoint is a folder that appears whole: written
under a temporary name, fsynced, manifest last, renamed.
"""

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)

from tasks.durable import explain_os_errors, fsync_dir, fsync_file, make_durable_dirs
from tasks.weights.checkpoints import FORMAT, MANIFEST, changed, changed_files, read_manifest
from tasks.weights.folders import file_hash
from trainers.loss_scale import LossScale
from trainers.optimizer import MasterAdamW
from trainers.ranks import agreed


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
    files = sorted(temporary.iterdir())
    manifest = {
        "format": FORMAT,
        "batch": batch,
        "step": optimizer.num_steps,
        "loss_scale": asdict(optimizer.loss_scale),
        "files": {path.name: path.stat().st_size for path in files},
        "hashes": {path.name: file_hash(path) for path in files},
        "parameters": {n: list(p.shape) for n, p in optimizer.policy.parameters.items()},
        "parts": optimizer.policy.layout.parts,
    }
    for path in files:
        fsync_file(path)
    (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    fsync_file(temporary / MANIFEST)
    fsync_dir(temporary)
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(temporary, folder)
    fsync_dir(folder.parent)


def load(folder: Path, optimizer: MasterAdamW) -> int:
    """Fills masters, moments, step and loss scale from a checkpoint written by any number of ranks.

    Publishes the masters and returns the batch that was trained last.

    Raises `ValueError`, on every rank, where the checkpoint is missing, incomplete, changed or of
    another model.
    """
    manifest = read_manifest(folder)
    optimizer.policy.check_names(manifest["parameters"], str(folder))
    for name, shape in manifest["parameters"].items():
        if list(optimizer.policy.parameters[name].shape) != shape:
            raise ValueError(f"{folder}: {name} has shape {shape}, not the model's; give its run.")
    names = sorted(manifest["files"])
    wrong = agreed(lambda: tuple(names.index(name) for name in changed_files(folder, manifest)))
    if wrong:
        raise changed(folder / names[wrong[0]])
    state = optimizer.sharded_state()
    state_dict_loader.load(state, storage_reader=HuggingFaceStorageReader(str(folder)))
    optimizer.set_num_steps(manifest["step"])
    if optimizer.loss_scale.dynamic:
        optimizer.loss_scale = LossScale(**manifest["loss_scale"])
    optimizer.publish()
    return manifest["batch"]
