"""Any published version as whole weights, whether it is an anchor or has to be rebuilt from one.

Rebuilt folders lie in the run's cache, under the name their version has in the store. They are
ordinary anchors, equal bit for bit to what an anchor of the version would hold, and may be removed
whenever no process of the run is alive.
"""

import fcntl
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from tasks.durable import explain_os_errors, fsync_dir, fsync_file, make_durable_dirs
from tasks.weights.anchors import copy_assets, fill_anchor, iter_anchor
from tasks.weights.folders import (
    MANIFEST,
    MODEL_FILE,
    REBUILT,
    load_publication,
    read_manifest,
    refused,
    write_folder,
)
from tasks.weights.patch import Patch, patched_tensors, roots_along
from tasks.weights.safetensors_stream import write_safetensors
from tasks.weights.store import RunStore


@dataclass(frozen=True)
class Chain:
    """How to come to a version: a whole folder, and the patches on it, oldest first."""

    base: Path
    patches: tuple[Patch, ...]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, bf16 tensor) pairs, verified, one in memory at a time; `ValueError` if damaged."""
        if not self.patches:
            return iter_anchor(self.base)
        return patched_tensors(self.base, self.patches)


def find_chain(store: RunStore, uri: str, *, use_rebuilt: bool = False) -> Chain:
    """The chain to the version at `uri`, relative to the store, from the nearest anchor.

    With `use_rebuilt` it may start at a folder that was rebuilt on this machine before.

    Raises:
        ValueError: a folder on the way is missing, interrupted or damaged.
    """
    patches: list[Patch] = []
    while True:
        folder = store.get(uri, MANIFEST)
        manifest = read_manifest(folder)
        if patches and manifest.get("version") != patches[-1].version - 1:
            raise refused(folder, f"it is not of version {patches[-1].version - 1}")
        if manifest.get("kind") == "anchor":
            return Chain(folder, tuple(reversed(patches)))
        rebuilt = store.cache / REBUILT / folder.name
        if use_rebuilt and _is_rebuilt(rebuilt, manifest):
            return Chain(rebuilt, tuple(reversed(patches)))
        patches.append(Patch.open(folder))
        uri = str(Path(uri).with_name(manifest["parent_folder"]))


@dataclass(frozen=True)
class Verified:
    """What a store holds as a version: the root hash that its values come to, or the fault that
    keeps them from being read. `patches` lie between it and its anchor, None where that is not
    known; `seconds` is its part of the pass."""

    uri: str
    patches: int | None
    root_hash: str | None
    fault: str | None
    seconds: float


def verify(store: RunStore, uris: Sequence[str]) -> Iterator[Verified]:
    """Reads versions again, every value hashed, in memory and a tensor at a time.

    Of versions that follow each other in `uris`, each a patch on the one before, the anchor is read
    once and every patch applied once.
    """
    todo = list(uris)
    while todo:
        started = time.monotonic()
        patches: int | None = None
        try:
            chain = find_chain(store, todo[0])
            patches = len(chain.patches)
            follow = tuple(_followers(store, todo))
            roots = list(roots_along(chain.base, (*chain.patches, *follow)))[patches:]
        except Exception as error:
            # Whatever damaged bytes make a reader say, they are not what was published.
            roots = [error]
        taken, todo = todo[: len(roots)], todo[len(roots) :]
        seconds = (time.monotonic() - started) / len(roots)
        for number, (uri, root) in enumerate(zip(taken, roots, strict=True)):
            known = None if patches is None else patches + number
            if isinstance(root, str):
                yield Verified(uri, known, root, None, seconds)
            else:
                fault = (str(root) or type(root).__name__).splitlines()[0]
                yield Verified(uri, known, None, fault, seconds)


def _followers(store: RunStore, uris: Sequence[str]) -> Iterator[Patch]:
    """The patches after the first of `uris`, as long as each is whole and on the one before."""
    for parent, uri in pairwise(uris):
        try:
            patch = Patch.open(store.get(uri, MANIFEST))
        except (ValueError, OSError, KeyError):
            return
        if patch.manifest.get("parent_folder") != Path(parent).name:
            return
        yield patch


def tensor_hashes(store: RunStore, uri: str) -> dict[str, str]:
    """The hash of each tensor as the manifest of the version at `uri` has it.

    Raises `ValueError` if the folder is missing, interrupted or damaged.
    """
    folder = store.get(uri, MANIFEST)
    manifest = read_manifest(folder)
    if manifest.get("kind") == "anchor":
        return {name: entry["hash"] for name, entry in manifest["tensors"].items()}
    return {entry["name"]: entry["hash"] for entry in Patch.open(folder).manifest["tensors"]}


def version_folder(store: RunStore, uri: str) -> Path:
    """The Hugging Face folder of the version at `uri`, on this machine.

    A patch is applied beside its parent and renamed into place once every hash is right: doing it
    again changes nothing, and whatever interrupts it leaves the parent and no folder of this name.
    """
    folder = store.get(uri, MANIFEST)
    manifest = read_manifest(folder)
    if manifest.get("kind") == "anchor":
        return folder
    target = store.cache / REBUILT / folder.name
    with _locked(target.parent):
        if not _is_rebuilt(target, manifest):
            _rebuild(find_chain(store, uri, use_rebuilt=True), target)
    return target


def export(store: RunStore, uri: str, to_dir: str | Path) -> Path:
    """Writes the version at `uri` as a plain Hugging Face folder, every value and file verified.

    Raises:
        ValueError: the target holds files already, or a stored file is not the published one.
    """
    target = Path(to_dir).expanduser().absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} is not an empty directory; pass --to with one that is new.")
    chain = find_chain(store, uri)
    with explain_os_errors(f"export {uri} to {target}"):
        make_durable_dirs(target)
        try:
            copy_assets(chain.base, target)
            write_safetensors(target / MODEL_FILE, chain.tensors())
        except BaseException:
            shutil.rmtree(target)
            raise
        for file in target.iterdir():
            fsync_file(file)
        fsync_dir(target)
    return target


def drop_rebuilt(store: RunStore, before_version: int) -> None:
    """Removes rebuilt folders of older versions; they can be rebuilt again."""
    folder = store.cache / REBUILT
    if not folder.is_dir():
        return
    with _locked(folder):
        for path in folder.iterdir():
            number = path.name.lstrip(".v").partition("-")[0]
            if path.is_dir() and int(number) < before_version:
                shutil.rmtree(path)


def _is_rebuilt(folder: Path, published: dict[str, Any]) -> bool:
    # A cache may know a run of the same name that the store has forgotten.
    return (folder / MANIFEST).is_file() and (
        load_publication(folder).root_hash == published.get("root_hash")
    )


def _rebuild(chain: Chain, target: Path) -> None:
    started = time.monotonic()
    newest = chain.patches[-1].manifest

    def fill(building: Path) -> dict[str, Any]:
        copy_assets(chain.base, building)
        return {
            **fill_anchor(building, chain.tensors()),
            "version": newest["version"],
            "parent": newest["parent"],
            "num_changed": newest["num_changed"],
            "rounded": False,
            "seconds": time.monotonic() - started,
        }

    write_folder(target, f"rebuild version {newest['version']} in {target.parent}", fill)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process of this machine at a time; the lock ends with whoever holds it."""
    make_durable_dirs(folder)
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
