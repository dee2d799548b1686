"""Anchors: weight versions kept whole, as ordinary Hugging Face folders with a manifest.

vLLM and transformers load an anchor as it is.
"""

import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tasks.durable import fsync_file
from tasks.weights.folders import (
    MANIFEST,
    MODEL_FILE,
    Publication,
    describe_file,
    file_hash,
    folder_name,
    load_publication,
    num_values,
    read_manifest,
    refused,
    same_or_refuse,
    write_folder,
)
from tasks.weights.hashing import hash_line, root_hash_of_stream, root_of_lines, tensor_hash
from tasks.weights.safetensors_stream import is_head_of, write_safetensors

ASSET_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")
"""Configuration and tokenizer files; code and pickled weights are never carried along."""


def write_anchor(
    store_dir: str | Path,
    *,
    version: int,
    lease: int,
    tensors: Iterable[tuple[str, torch.Tensor]],
    assets_dir: str | Path,
    parent_uri: str | None = None,
    rounded: bool = False,
) -> Publication:
    """Publishes (name, bf16 tensor) pairs as a version; durable on return.

    Doing it again with the same values returns the first publication. `assets_dir` is the folder
    whose configuration and tokenizer files are copied, normally version 0's; `parent_uri` is the
    parent's anchor, read only to count the values that changed; `rounded` is recorded, and true
    where the values were rounded to bf16 on the way here.

    Raises:
        ValueError: the version exists under this lease with other values.
        OSError: the store cannot be written; no folder of that name appears.
    """
    started = time.monotonic()
    store = Path(store_dir).absolute()
    target = store / folder_name(version, lease)
    if (target / MANIFEST).is_file():
        return same_or_refuse(target, root_hash_of_stream(tensors))

    def fill(building: Path) -> dict[str, Any]:
        for asset in asset_files(Path(assets_dir)):
            shutil.copyfile(asset, building / asset.name)
        return {
            **fill_anchor(building, tensors, parent_uri),
            "version": version,
            "parent": version - 1 if version > 0 else None,
            "rounded": rounded,
            "seconds": time.monotonic() - started,
        }

    write_folder(target, f"publish version {version} in {store}", fill)
    return load_publication(target)


def read_anchor(uri: str | Path) -> dict[str, torch.Tensor]:
    """The anchor's bf16 tensors by name, each verified against the manifest.

    Raises:
        ValueError: the folder is no complete anchor, or a tensor is missing, additional or not
            the one that was published.
    """
    return dict(iter_anchor(Path(uri)))


def iter_anchor(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, bf16 tensor) pairs as they lie in the file, one in memory at a time and each verified.

    Raises `ValueError` as `read_anchor` does, for some faults only behind the last tensor.
    """
    manifest = read_manifest(path)
    if manifest["kind"] != "anchor":
        raise refused(path, "it holds a patch and no whole weights")
    expected: dict[str, Any] = manifest["tensors"]
    seen = set()
    for name, tensor in iter_safetensors(path / MODEL_FILE):
        if name not in expected:
            raise refused(path, f"tensor {name} is not in its manifest")
        if list(tensor.shape) != expected[name]["shape"] or tensor.dtype != torch.bfloat16:
            raise refused(path, f"tensor {name} has another shape or dtype than was published")
        if tensor_hash(tensor) != expected[name]["hash"]:
            raise refused(path, f"tensor {name} does not have the hash that was published")
        seen.add(name)
        yield name, tensor
    for name in expected:
        if name not in seen:
            raise refused(path, f"tensor {name} is missing")
    check_files(path)
    lines = (hash_line(name, entry["shape"], entry["hash"]) for name, entry in expected.items())
    if root_of_lines(lines) != manifest["root_hash"]:
        raise refused(path, "its manifest does not add up to its root hash")


def iter_safetensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) pairs of a safetensors file, one tensor read at a time.

    Raises:
        ValueError: the file is missing, truncated or no safetensors file.
    """
    with open_weights(file) as opened:
        for name in opened.offset_keys():
            yield name, opened.get_tensor(name)


@contextmanager
def open_weights(file: Path) -> Iterator[Any]:  # safetensors does not export the type it opens
    """A safetensors file, opened; `ValueError` if it is missing, truncated or damaged."""
    if not file.is_file():
        raise refused(file, "the file is missing")
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except SafetensorError as error:
        raise refused(file, f"the file is truncated or damaged ({error})") from error


def check_files(anchor: Path) -> None:
    """Raises `ValueError` if a file of an anchor is not the one that was published.

    Of the weights only what precedes the tensors is read, since every tensor has a hash of its own.
    """
    manifest = read_manifest(anchor)
    shapes = {name: entry["shape"] for name, entry in manifest["tensors"].items()}
    for name, expected in manifest["files"].items():
        file = anchor / name
        if not file.is_file():
            raise refused(anchor, f"{name} is missing")
        whole = file.stat().st_size == expected["bytes"]
        if name == MODEL_FILE:
            whole = whole and is_head_of(file, shapes)
        else:
            whole = whole and file_hash(file) == expected["hash"]
        if not whole:
            raise refused(anchor, f"{name} is not the file that was published")


def copy_assets(anchor: Path, to_dir: Path) -> None:
    """Copies an anchor's configuration and tokenizer files, each verified.

    Raises `ValueError` if one is not the file that was published.
    """
    for name, expected in read_manifest(anchor)["files"].items():
        if name == MODEL_FILE:
            continue
        try:
            shutil.copyfile(anchor / name, to_dir / name)
        except FileNotFoundError as error:
            raise refused(anchor, f"{name} is missing") from error
        if file_hash(to_dir / name) != expected["hash"]:
            raise refused(anchor, f"{name} is not the file that was published")


def fill_anchor(
    building: Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    parent_uri: str | None = None,
) -> dict[str, Any]:
    """Writes the weights beside the assets that are there; what the manifest says about both."""
    entries: dict[str, Any] = {}
    num_changed = 0

    def record(
        parent: Any,  # safetensors does not export the type of its open file
    ) -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal num_changed
        for name, tensor in tensors:
            entries[name] = {
                "dtype": "bfloat16",
                "shape": list(tensor.shape),
                "hash": tensor_hash(tensor),
            }
            if parent is not None:
                # Compared as bits: a NaN equals itself, and -0 is a change from +0.
                before = parent.get_tensor(name).view(torch.int16)
                num_changed += int((before != tensor.cpu().view(torch.int16)).sum())
            yield name, tensor

    if parent_uri is None:
        write_safetensors(building / MODEL_FILE, record(None))
    else:
        with safe_open(Path(parent_uri) / MODEL_FILE, framework="pt") as parent:
            write_safetensors(building / MODEL_FILE, record(parent))
    files: dict[str, Any] = {}
    for file in sorted(building.iterdir()):
        fsync_file(file)
        files[file.name] = describe_file(file)
    lines = (hash_line(name, entry["shape"], entry["hash"]) for name, entry in entries.items())
    return {
        "kind": "anchor",
        "root_hash": root_of_lines(lines),
        "num_parameters": num_values(list(entries.values())),
        "num_changed": None if parent_uri is None else num_changed,
        "tensors": entries,
        "files": files,
    }


def asset_files(folder: Path) -> Iterator[Path]:
    """Configuration and tokenizer files of a Hugging Face folder, without any weights."""
    for file in folder.iterdir():
        if (
            file.is_file()
            and file.suffix in ASSET_SUFFIXES
            and file.name != MANIFEST
            and not file.name.endswith(".index.json")
        ):
            yield file
