"""Folders of the store that appear whole or not at all, each with a manifest that says what it is.

The manifest is written last and the folder renamed into place, so a folder without one was
interrupted and is never read; the lease in the folder's name keeps a controller that lost its lease
from touching what its successor publishes.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from tasks.durable import explain_os_errors, fsync_dir, fsync_file, make_durable_dirs

MANIFEST = "rollhouse-manifest.json"
MODEL_FILE = "model.safetensors"
PATCH_FILE = "model.patch"
REBUILT = "rebuilt-weights"
"""Folder of a cache whose versions were made from an anchor and patches."""

_UNSEALED = {
    *("kind", "version", "parent", "root_hash", "rounded", "tensors", "files"),
    *("num_parameters", "num_changed", "seconds"),
}
"""Keys of an anchor's manifest in stores whose anchors were not sealed yet."""


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


def folder_name(version: int, lease: int) -> str:
    """Name of a version's folder; the lease keeps zombies apart."""
    return f"v{version:08d}-{lease:06d}"


def write_folder(target: Path, action: str, fill: Callable[[Path], dict[str, Any]]) -> None:
    """Makes a folder; durable on return.

    `fill` writes the files into the folder it is given, beside `target`, and returns the manifest,
    which is sealed here.
    `action` completes "Cannot ..." where the disk refuses. Whatever goes wrong, `target` does not
    appear.
    """
    building = target.with_name(f".{target.name}.building")
    with explain_os_errors(action):
        make_durable_dirs(target.parent)
        for remains in (building, target):
            if remains.exists():
                shutil.rmtree(remains)
        building.mkdir()
        try:
            manifest = building / MANIFEST
            manifest.write_text(manifest_text(sealed(fill(building))))
            fsync_file(manifest)
            fsync_dir(building)
            os.rename(building, target)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise
        fsync_dir(target.parent)


def manifest_text(manifest: dict[str, Any]) -> str:
    return json.dumps(manifest, indent=1, sort_keys=True) + "\n"


def sealed(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest with the hash of all that it says otherwise."""
    rest = {key: value for key, value in manifest.items() if key != "manifest_hash"}
    return {**rest, "manifest_hash": blake3(manifest_text(rest).encode()).hexdigest()}


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder, as it was published; the files beside it are not looked at.

    Raises:
        ValueError: there is none, because the folder was interrupted or is no version, or it is
            damaged.
    """
    try:
        data = (folder / MANIFEST).read_bytes()
        manifest = json.loads(data)
    except FileNotFoundError as error:
        raise refused(
            folder, "it has no manifest, so it was interrupted or is no version"
        ) from error
    except ValueError as error:
        raise refused(folder, "its manifest is damaged") from error
    if not isinstance(manifest, dict):
        raise refused(folder, "its manifest is damaged")
    if manifest.keys() != _UNSEALED and not _is_sealed(data):
        raise refused(folder, "its manifest is not the one that was published")
    return manifest


def _is_sealed(data: bytes) -> bool:
    """Whether no byte of a manifest differs from `manifest_text` of what `sealed` made."""
    head, key, tail = data.partition(b'\n "manifest_hash": "')
    seal, end, rest = tail[:64], tail[64:67], tail[67:]
    digest = blake3(head + b"\n" + rest).hexdigest()
    return bool(key) and end == b'",\n' and seal == digest.encode()


def load_publication(uri: str | Path) -> Publication:
    """What the manifest of a version says, as `read_manifest` reads it."""
    path = Path(uri).absolute()
    manifest = read_manifest(path)
    stored = MODEL_FILE if manifest["kind"] == "anchor" else PATCH_FILE
    return Publication(
        version=manifest["version"],
        parent=manifest["parent"],
        kind=manifest["kind"],
        uri=str(path),
        bytes=manifest["files"][stored]["bytes"],
        num_changed=manifest["num_changed"],
        num_parameters=manifest["num_parameters"],
        root_hash=manifest["root_hash"],
        seconds=manifest["seconds"],
    )


def same_or_refuse(target: Path, root: str) -> Publication:
    """The publication at `target`. Raises `ValueError` if its root hash is not `root`."""
    publication = load_publication(target)
    if publication.root_hash != root:
        raise ValueError(
            f"Refused to publish version {publication.version} at {target}: it exists with other "
            f"values (root hash {publication.root_hash}, not {root}); a version is never changed, "
            "so resume the run from its last ledger row."
        )
    return publication


def describe_file(path: Path) -> dict[str, Any]:
    """What a manifest says of a file."""
    return {"bytes": path.stat().st_size, "hash": file_hash(path)}


def file_hash(path: Path) -> str:
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()


def num_values(entries: Sequence[dict[str, Any]]) -> int:
    """Values in all tensors of a manifest."""
    return sum(math.prod(entry["shape"]) for entry in entries)


def refused(path: Path, why: str) -> ValueError:
    fix = "publish the version again with `rollhouse run RUN.toml`, or restore it from a backup"
    if REBUILT in path.parts:
        fix = "remove the folder, which is made again from the store"
    return ValueError(f"Refused weights at {path}: {why}; {fix}.")
