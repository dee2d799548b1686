"""Read a trainer's checkpoint without a process group: what publication needs of it.

A checkpoint is a folder of safetensors shards and a manifest that was written last. Each file's
header says where its shards lie in the whole tensors, so any number of ranks may have written it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from tasks.weights.folders import file_hash

FORMAT = 1
MANIFEST = "manifest.json"
_SHARDING_INFO = "DCP_SHARDING_INFO"


class Part(NamedTuple):
    """A published tensor that is rows `start` to `stop` of a parameter, all dimensions of which but
    the last are flattened into rows, or values of a vector."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a complete checkpoint.

    Raises `ValueError` where it is missing, incomplete or of a newer format.
    """
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


def changed_files(folder: Path, manifest: dict[str, Any]) -> list[str]:
    """Files that have not the BLAKE3 hash that the manifest gives, sorted; each is read once.

    None in a checkpoint that was written before manifests had hashes.
    """
    hashes = manifest.get("hashes", {})
    return [name for name, digest in sorted(hashes.items()) if file_hash(folder / name) != digest]


def changed(path: Path) -> ValueError:
    """What is said of a file that `changed_files` names."""
    return ValueError(
        f"{path} does not have the hash that its {MANIFEST} gives, so it was changed after it was "
        "written; restore it from a backup, or, where it is run.cache's copy of a file in S3, "
        "remove its folder, which is copied again."
    )


def read_masters(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, whole float32 master) pairs, sorted by name, one in memory at a time.

    Names are those of the trainer's parameters. Raises `ValueError` where the checkpoint is
    missing or incomplete.
    """
    manifest = read_manifest(folder)
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
    """(name, bf16 tensor) pairs: the masters rounded to nearest even, as engines serve them.

    Names are those of version 0's safetensors.
    """
    # Checkpoints written before there were mixtures in parts have none.
    given = read_manifest(folder).get("parts", {})
    parts = {name: [Part(*part) for part in listed] for name, listed in given.items()}
    for name, master in read_masters(folder):
        yield from published_parts(name, master.to(torch.bfloat16), parts)


def published_parts(
    name: str, value: Tensor, parts: Mapping[str, Sequence[Part]]
) -> Iterator[tuple[str, Tensor]]:
    """The published tensors that a whole parameter is cut into: itself, where it has no parts."""
    if name not in parts:
        yield name, value
        return
    rows = value.reshape(-1, value.shape[-1]) if value.ndim > 1 else value
    for part in parts[name]:
        yield part.name, rows[part.start : part.stop].reshape(part.shape)
