"""Patches: weight versions kept as what changed since their parent.

A patch is a folder with one data file and a manifest. The manifest holds the root hash of the
parent and of the result, and for each tensor the BLAKE3 of its values before and after, so that a
patch is only ever applied to the values it was made from and its result is never taken on trust.
The manifest ends in a hash of itself. What the data file holds is said in
`tasks.weights.patch_coding`: the tensors' payloads, in the manifest's order, nothing between them.
"""

import mmap
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3

from tasks.durable import fsync_file
from tasks.weights.anchors import check_files, iter_anchor, open_weights
from tasks.weights.folders import (
    MANIFEST,
    MODEL_FILE,
    PATCH_FILE,
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
from tasks.weights.hashing import (
    hash_line,
    root_hash_of_stream,
    root_of_lines,
    tensor_bytes,
)
from tasks.weights.patch_coding import Bits, Changes, apply, encode

FORMAT = 1


def write_patch(
    store_dir: str | Path,
    *,
    version: int,
    lease: int,
    tensors: Iterable[tuple[str, torch.Tensor]],
    parent_dir: str | Path,
) -> Publication:
    """Publishes (name, bf16 tensor) pairs as a patch on version - 1; durable on return.

    `parent_dir` is the parent's whole folder: an anchor, or one rebuilt under the name that the
    parent was published by. One tensor of each is in memory at a time. The data file is a function
    of the two versions alone; doing it again returns the first publication.

    Raises:
        ValueError: the version exists under this lease with other values, or the parent's folder
            does not hold what its manifest says.
        OSError: the store cannot be written; no folder of that name appears.
    """
    started = time.monotonic()
    store, parent = Path(store_dir).absolute(), Path(parent_dir).absolute()
    target = store / folder_name(version, lease)
    if (target / MANIFEST).is_file():
        return same_or_refuse(target, root_hash_of_stream(tensors))

    def fill(building: Path) -> dict[str, Any]:
        before = read_manifest(parent)
        entries = _write_data(building / PATCH_FILE, tensors, parent, before["tensors"])
        return {
            "format": FORMAT,
            "kind": "patch",
            "version": version,
            "parent": version - 1,
            "parent_folder": parent.name,
            "parent_root_hash": before["root_hash"],
            "root_hash": _root_of(entries),
            "num_parameters": num_values(entries),
            "num_changed": sum(entry["num_changed"] for entry in entries),
            "tensors": entries,
            "files": {PATCH_FILE: describe_file(building / PATCH_FILE)},
            "seconds": time.monotonic() - started,
        }

    write_folder(target, f"publish version {version} in {store}", fill)
    return load_publication(target)


def _write_data(
    file: Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    parent: Path,
    expected: dict[str, Any],
) -> list[dict[str, Any]]:
    """Writes every tensor's payload; what the manifest says about each."""
    entries = []
    with open_weights(parent / MODEL_FILE) as opened, open(file, "xb") as data:
        for name, tensor in tensors:
            shape, parent_hash = list(tensor.shape), None
            before = np.zeros(tensor.numel(), np.uint16)
            if name in expected and expected[name]["shape"] == shape:
                parent_hash = expected[name]["hash"]
                before = _bits(opened.get_tensor(name))
            of_before, of_after = blake3(), blake3()
            changes = encode(
                before, _bits(tensor), of_before=of_before.update, of_after=of_after.update
            )
            if parent_hash not in (None, of_before.hexdigest()):
                raise refused(parent, f"tensor {name} does not have the hash it should have")
            data.write(changes.payload)
            entries.append(
                {
                    "name": name,
                    "dtype": "bfloat16",
                    "shape": shape,
                    "parent_hash": parent_hash,
                    "hash": of_after.hexdigest(),
                    "num_changed": changes.num_changed,
                    "bytes": len(changes.payload),
                }
            )
    fsync_file(file)
    return entries


@dataclass(frozen=True)
class Held:
    """A tensor of a version, flat, and its hash, None where it is not known yet; `stored` bits are
    those of a file, which are never written to."""

    bits: Bits
    hash: str | None
    stored: bool = False


@dataclass(frozen=True)
class Patch:
    """A patch whose files are the ones that were published."""

    folder: Path
    manifest: dict[str, Any]

    @classmethod
    def open(cls, folder: Path) -> "Patch":
        """Raises `ValueError` if a file is missing, torn or changed, or of a newer format."""
        manifest = read_manifest(folder)
        if manifest["format"] > FORMAT:
            raise ValueError(
                f"{folder} has patch format {manifest['format']} and this version reads {FORMAT}; "
                "update rollhouse."
            )
        data = folder / PATCH_FILE
        if not data.is_file():
            raise refused(folder, f"{PATCH_FILE} is missing")
        if file_hash(data) != manifest["files"][PATCH_FILE]["hash"]:
            raise refused(folder, f"{PATCH_FILE} is not the file that was published")
        return cls(folder, manifest)

    @property
    def version(self) -> int:
        return self.manifest["version"]

    def refuse_another_parent(self, place: Path, root: str) -> None:
        """Raises `ValueError` unless it was made on the version with this root hash, at `place`."""
        if self.manifest["parent_root_hash"] != root:
            raise ValueError(
                f"Refused to apply the patch at {self.folder} to {place}: it was made on version "
                f"{self.version - 1} with root hash {self.manifest['parent_root_hash']}, and "
                f"that folder holds {root}; restore the parent's folder from a backup."
            )

    @cached_property
    def _entries(self) -> dict[str, tuple[dict[str, Any], int]]:
        """What the manifest says of each tensor, and where its payload begins."""
        entries, offset = {}, 0
        for entry in self.manifest["tensors"]:
            entries[entry["name"]] = entry, offset
            offset += entry["bytes"]
        return entries

    @property
    def shapes(self) -> dict[str, list[int]]:
        """The shape of each tensor of this version."""
        return {name: entry["shape"] for name, (entry, _) in self._entries.items()}

    def apply(self, name: str, held: Held | None) -> Held | None:
        """A tensor of this version, made from the parent's: in place, or beside it where the parent
        is `stored`.

        None stands for a tensor that a version does not have. Raises `ValueError` if the parent's
        or the result's hash is another.
        """
        if name not in self._entries:
            return None
        entry, offset = self._entries[name]
        if entry["parent_hash"] is None:
            held = Held(np.zeros(num_values([entry]), np.uint16), None, stored=False)
        elif held is None or held.hash not in (None, entry["parent_hash"]):
            raise self._wrong_parent(name)
        elif entry["hash"] == held.hash and not held.stored:
            return held
        after = np.empty_like(held.bits) if held.stored else held.bits
        unknown = held.stored and held.hash is None
        of_before, of_after = blake3(), blake3()
        changes = Changes(entry["num_changed"], self._data[offset : offset + entry["bytes"]])
        try:
            apply(
                held.bits,
                changes,
                after,
                of_before=of_before.update if unknown else None,
                of_after=of_after.update,
            )
        except ValueError as error:
            raise refused(self.folder, f"tensor {name} cannot be decoded: {error}") from error
        if unknown and of_before.hexdigest() != entry["parent_hash"]:
            raise self._wrong_parent(name)
        if (result := of_after.hexdigest()) != entry["hash"]:
            raise refused(self.folder, f"tensor {name} does not come to the hash it should have")
        return Held(after, result)

    def _wrong_parent(self, name: str) -> ValueError:
        return refused(
            self.folder, f"tensor {name} of its parent does not have the hash it should have"
        )

    @cached_property
    def _data(self) -> mmap.mmap | bytes:
        file = self.folder / PATCH_FILE
        if file.stat().st_size == 0:
            return b""
        with open(file, "rb") as opened:
            return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)


def patched_tensors(base: Path, patches: Sequence[Patch]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, bf16 tensor) pairs of the last patch's version, one in memory at a time.

    `base` is the whole folder that the first patch was made on, each other patch follows the one
    before it. Every tensor is hashed before the first patch and after each.

    Raises:
        ValueError: a patch does not belong on what comes before it, or a hash is another.
    """
    place, root = base, read_manifest(base)["root_hash"]
    for patch in patches:
        patch.refuse_another_parent(place, root)
        place, root = patch.folder, patch.manifest["root_hash"]
    check_files(base)
    with open_weights(base / MODEL_FILE) as opened:
        names = set(opened.keys())
        for entry in patches[-1].manifest["tensors"]:
            name = entry["name"]
            held: Held | None = None
            if name in names:
                held = Held(_bits(opened.get_tensor(name)), None, stored=True)
            for patch in patches:
                held = patch.apply(name, held)
            assert held is not None, "the last patch has every tensor of its manifest"
            yield name, _tensor(held.bits, entry["shape"])


def roots_along(base: Path, patches: Sequence[Patch]) -> Iterator[str | ValueError]:
    """The root hash of the anchor at `base`, then after each patch; from the first patch on that
    cannot be applied, the reason. One pass, in which each tensor in turn takes every patch.

    Raises `ValueError` if the anchor is damaged.
    """
    lines: list[list[str]] = [[] for _ in (base, *patches)]
    shapes = [patch.shapes for patch in patches]
    sound, fault = 0, None
    manifest = read_manifest(base)
    hashes = {name: entry["hash"] for name, entry in manifest["tensors"].items()}
    place, root = base, manifest["root_hash"]
    try:
        for patch in patches:
            patch.refuse_another_parent(place, root)
            place, root, sound = patch.folder, patch.manifest["root_hash"], sound + 1
    except ValueError as error:
        fault = error

    def follow(name: str, held: Held | None) -> None:
        nonlocal sound, fault
        for number in range(sound):
            try:
                held = patches[number].apply(name, held)
            except ValueError as error:
                sound, fault = number, error
                return
            if held is not None:
                assert held.hash is not None, "what a patch made was hashed"
                lines[number + 1].append(hash_line(name, shapes[number][name], held.hash))

    known = set()
    for name, tensor in iter_anchor(base):
        known.add(name)
        lines[0].append(hash_line(name, tensor.shape, hashes[name]))
        follow(name, Held(_bits(tensor), hashes[name], stored=True))
    for name in dict.fromkeys(name for of_patch in shapes for name in of_patch):
        if name not in known:
            follow(name, None)
    for number in range(len(lines)):
        yield root_of_lines(lines[number]) if number <= sound or fault is None else fault


def _bits(tensor: torch.Tensor) -> Bits:
    assert tensor.dtype == torch.bfloat16, f"{tensor.dtype} is not published"
    return np.frombuffer(tensor_bytes(tensor), np.uint16)


def _tensor(bits: Bits, shape: Sequence[int]) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).reshape(tuple(shape))


def _root_of(entries: Sequence[dict[str, Any]]) -> str:
    return root_of_lines(hash_line(e["name"], e["shape"], e["hash"]) for e in entries)
