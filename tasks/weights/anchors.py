"""Anchors: weight versions kept whole, as ordinary Hugging Face folders with a manifest.

vLLM and transformers load an anchor as it is. The manifest is written last and the folder renamed
into place, so a folder without one was interrupted and is never read; the lease in the folder's
name keeps a controller that lost its lease from touching what its successor publishes.
"""

import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open

from tasks.durable import explain_os_errors, fsync_dir, fsync_file, make_durable_dirs
from tasks.weights.hashing import hash_line, root_hash_of_stream, root_of_lines, tensor_hash
from tasks.weights.safetensors_stream import write_safetensors

MANIFEST = "rollhouse-manifest.json"
MODEL_FILE = "model.safetensors"
ASSET_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")
"""Configuration and tokenizer files; code and pickled weights are never carried along."""


@dataclass(frozen=True)
class Publication:
    """One published weight version.

    `uri` is the absolute path of its folder, `bytes` the size of its weights as stored;
    `num_changed` counts the bf16 values that differ from the parent's, None without one to compare.
    """

    version: int
    parent: int | None
    kind: str
    uri: str
    bytes: int
    num_changed: int | None
    num_parameters: int
    root_hash: str
    seconds: float


def anchor_name(version: int, lease: int) -> str:
    """Name of a version's folder; the lease keeps zombies apart."""
    return f"v{version:08d}-{lease:06d}"


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
    target = store / anchor_name(version, lease)
    if (target / MANIFEST).is_file():
        return _same_or_refuse(target, root_hash_of_stream(tensors))
    building = store / f".{target.name}.building"
    with explain_os_errors(f"publish version {version} in {store}"):
        make_durable_dirs(store)
        for remains in (building, target):
            if remains.exists():
                shutil.rmtree(remains)
        building.mkdir()
        try:
            manifest = _build(building, tensors, Path(assets_dir), parent_uri)
            manifest |= {
                "version": version,
                "parent": version - 1 if version > 0 else None,
                "kind": "anchor",
                "rounded": rounded,
                "seconds": time.monotonic() - started,
            }
            _write_manifest(building, manifest)
            os.rename(building, target)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise
        fsync_dir(store)
    return load_publication(target)


def load_publication(uri: str | Path) -> Publication:
    """What the manifest of an anchor says; nothing is verified.

    Raises:
        ValueError: the folder has no manifest, because it was interrupted or is not an anchor.
    """
    path = Path(uri).absolute()
    manifest = _manifest(path)
    return Publication(
        version=manifest["version"],
        parent=manifest["parent"],
        kind=manifest["kind"],
        uri=str(path),
        bytes=manifest["files"][MODEL_FILE]["bytes"],
        num_changed=manifest["num_changed"],
        num_parameters=manifest["num_parameters"],
        root_hash=manifest["root_hash"],
        seconds=manifest["seconds"],
    )


def read_anchor(uri: str | Path) -> dict[str, torch.Tensor]:
    """The anchor's bf16 tensors by name, each verified against the manifest.

    Raises:
        ValueError: the folder is no complete anchor, or a tensor is missing, additional or not
            the one that was published.
    """
    path = Path(uri)
    manifest = _manifest(path)
    expected: dict[str, Any] = manifest["tensors"]
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in iter_safetensors(path / MODEL_FILE):
        if name not in expected:
            raise _refused(path, f"tensor {name} is not in its manifest")
        if list(tensor.shape) != expected[name]["shape"] or tensor.dtype != torch.bfloat16:
            raise _refused(path, f"tensor {name} has another shape or dtype than was published")
        if tensor_hash(tensor) != expected[name]["hash"]:
            raise _refused(path, f"tensor {name} does not have the hash that was published")
        tensors[name] = tensor
    for name in expected:
        if name not in tensors:
            raise _refused(path, f"tensor {name} is missing")
    lines = (hash_line(name, entry["shape"], entry["hash"]) for name, entry in expected.items())
    if root_of_lines(lines) != manifest["root_hash"]:
        raise _refused(path, "its manifest does not add up to its root hash")
    return tensors


def iter_safetensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) pairs of a safetensors file, one tensor read at a time.

    Raises:
        ValueError: the file is missing, truncated or no safetensors file.
    """
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - the handle is no mapping
                yield name, opened.get_tensor(name)
    except FileNotFoundError as error:
        raise _refused(file, "the file is missing") from error
    except SafetensorError as error:
        raise _refused(file, f"the file is truncated or damaged ({error})") from error


def export(publication: Publication, to_dir: str | Path) -> Path:
    """Copies a publication as a plain Hugging Face folder, every file verified.

    Raises:
        ValueError: the target holds files already, or a stored file is not the published one.
    """
    source, target = Path(publication.uri), Path(to_dir).expanduser().absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} is not an empty directory; pass --to with one that is new.")
    files: dict[str, Any] = _manifest(source)["files"]
    with explain_os_errors(f"export version {publication.version} to {target}"):
        make_durable_dirs(target)
        for name, expected in files.items():
            shutil.copyfile(source / name, target / name)
            if _file_hash(target / name) != expected["hash"]:
                shutil.rmtree(target)
                raise _refused(source, f"{name} is not the file that was published")
            fsync_file(target / name)
        fsync_dir(target)
    return target


def _build(
    building: Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    assets_dir: Path,
    parent_uri: str | None,
) -> dict[str, Any]:
    """Writes all files but the manifest; what the manifest says about them."""
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
    for asset in sorted(asset_files(assets_dir)):
        shutil.copyfile(asset, building / asset.name)
    files: dict[str, Any] = {}
    for file in sorted(building.iterdir()):
        fsync_file(file)
        files[file.name] = {"bytes": file.stat().st_size, "hash": _file_hash(file)}
    lines = (hash_line(name, entry["shape"], entry["hash"]) for name, entry in entries.items())
    return {
        "root_hash": root_of_lines(lines),
        "num_parameters": sum(_size(entry["shape"]) for entry in entries.values()),
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


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    path = folder / MANIFEST
    path.write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
    fsync_file(path)
    fsync_dir(folder)


def _manifest(path: Path) -> dict[str, Any]:
    try:
        return json.loads((path / MANIFEST).read_text())
    except FileNotFoundError as error:
        raise _refused(path, "it has no manifest, so it was interrupted or is no anchor") from error
    except ValueError as error:
        raise _refused(path, "its manifest is damaged") from error


def _same_or_refuse(target: Path, root: str) -> Publication:
    publication = load_publication(target)
    if publication.root_hash != root:
        raise ValueError(
            f"Refused to publish version {publication.version} at {target}: it exists with other "
            f"values (root hash {publication.root_hash}, not {root}); a version is never changed, "
            "so resume the run from its last ledger row."
        )
    return publication


def _refused(path: Path, why: str) -> ValueError:
    return ValueError(
        f"Refused weights at {path}: {why}; publish the version again with `rollhouse run "
        "RUN.toml`, or restore the folder from a backup."
    )


def _file_hash(path: Path) -> str:
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()


def _size(shape: list[int]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size
