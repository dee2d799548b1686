"""Any published version comes back bit for bit, or is refused in one sentence."""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from blake3 import blake3

from tasks.weights.anchors import read_anchor, write_anchor
from tasks.weights.folders import MANIFEST, MODEL_FILE, PATCH_FILE, REBUILT
from tasks.weights.hashing import root_hash, tensor_hash
from tasks.weights.patch import Held, Patch, patched_tensors
from tasks.weights.store import DiskStore
from tasks.weights.versions import drop_rebuilt, export, find_chain, verify, version_folder
from tests.weight_versions import Model, World, first_model, same_bits, trained

torch.set_num_threads(1)

SPECIAL = [
    *(0x0000, 0x8000),  # +0, -0
    *(0x0001, 0x8001, 0x007F, 0x807F),  # the smallest and largest denormals
    *(0x0080, 0x7F7F, 0xFF7F),  # the smallest normal number, the largest and its negative
    *(0x7F80, 0xFF80),  # infinities
    *(0x7F81, 0x7FC0, 0x7FFF, 0xFFC1, 0xFFFF),  # NaNs of both signs and several payloads
    *(0x3F80, 0xBF80),  # 1, -1
]
"""Bit patterns that arithmetic would not keep apart, or would change."""


def as_bf16(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.astype(np.uint16).view(np.int16)).view(torch.bfloat16)


def as_bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.int16).numpy().view(np.uint16).copy()


def odd_model(version: int, trained_part: Model) -> Model:
    """Tensors that train, and others of which each is odd in its own way."""
    noise = np.random.default_rng(version).integers(0, 1 << 16, 40)
    signs = as_bf16(np.array([0x3F80, 0xBF80]).repeat(20) ^ (0x8000 if version % 2 else 0))
    tied = as_bf16(np.roll(SPECIAL, version // 3)).reshape(2, 9)
    return {
        **trained_part,
        "all.change": as_bf16(noise).reshape(5, 8),
        "empty": torch.zeros(0, 3).bfloat16(),
        "frozen": as_bf16(np.arange(64)),
        "one": as_bf16(np.array([SPECIAL[version % len(SPECIAL)]])),
        "signs": signs,
        "special": as_bf16(np.roll(SPECIAL, version)),
        "tied.embedding": tied,
        "tied.head": tied,
        "zeros": as_bf16(np.where(np.arange(30) % 7 == version % 7, 0x8000, 0)),
    }


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder of a file system without a disk, where thousands of fsyncs cost nothing."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def test_1000_consecutive_patches_come_to_the_same_bits_from_any_anchor(in_memory: Path):
    world, part = World(in_memory), first_model()
    world.publish(odd_model(0, part))
    for version in range(1, 1001):
        part = trained(part, version)
        world.publish(odd_model(version, part))
        drop_rebuilt(world.store, before_version=version - 1)
    models = world.models
    patches = [Patch.open(world.folder(version)) for version in range(1, 1001)]
    roots = [root_hash(model) for model in models]
    assert len(set(roots)) == 1001

    # Each version from versions long before it, compared bit by bit.
    for first in (0, 700):
        held = {name: Held(as_bits(t), tensor_hash(t)) for name, t in models[first].items()}
        for patch in patches[first:]:
            for name, tensor in models[patch.version].items():
                after = patch.apply(name, held[name])
                assert after is not None and (after.bits == as_bits(tensor)).all()
                held[name] = after

    # A store of the same patches with an anchor at each hundred: what readers do.
    store = DiskStore(in_memory / "anchored", in_memory / "cache2")
    weights = store.folder / "weights"
    weights.mkdir(parents=True)
    for version, model in enumerate(models):
        if version % 100:
            (weights / world.folder(version).name).symlink_to(world.folder(version))
        else:
            given = {"lease": 1, "tensors": model.items(), "assets_dir": world.assets}
            write_anchor(weights, version=version, **given)
    found = list(verify(store, [world.uri(version) for version in range(1001)]))
    assert [held.root_hash for held in found] == roots
    assert [held.patches for held in found] == [version % 100 for version in range(1001)]
    for version in range(7, 1001, 167):
        nearest = version // 100 * 100
        chain = find_chain(store, world.uri(version))
        assert chain.base == weights / world.folder(nearest).name
        assert same_bits(dict(chain.tensors()), models[version])
        earlier = [*patches[nearest - 100 : nearest], *chain.patches]
        if nearest:
            base = weights / world.folder(nearest - 100).name
            assert same_bits(dict(patched_tensors(base, earlier)), models[version])
    longest = find_chain(world.store, world.uri(1000))
    assert longest.base == world.folder(0) and len(longest.patches) == 1000
    assert same_bits(dict(longest.tensors()), models[1000])
    assert same_bits(read_anchor(world.rebuilt(1000)), models[1000])


@pytest.fixture
def world(tmp_path: Path) -> World:
    """An anchor and two patches."""
    world = World(tmp_path)
    for version in range(3):
        world.publish(odd_model(version, trained(first_model(), version)))
    return world


READERS = {
    "read": lambda world, uri, _: dict(find_chain(world.store, uri).tensors()),
    "rebuild": lambda world, uri, _: version_folder(world.store, uri),
    "export": lambda world, uri, out: export(world.store, uri, out),
}
SENTENCE = r"Refused weights at [^\n]*; publish the version again with [^\n]*from a backup\."


def test_200_random_corruptions_and_truncations_are_refused_by_every_reader(world: World):
    # A rebuilt parent would spare its reader the files it was made from.
    shutil.rmtree(world.store.cache)
    rng = np.random.default_rng(0)
    files = [world.folder(version) / MANIFEST for version in range(3)]
    files += [world.folder(version) / PATCH_FILE for version in (1, 2)]
    files += [world.folder(0) / MODEL_FILE, world.folder(0) / "config.json"]
    good = {file: file.read_bytes() for file in files}
    kinds = itertools.cycle(itertools.product(("flip", "truncate"), files))
    for (kind, file), _ in zip(kinds, range(200), strict=False):
        bad = bytearray(good[file])
        position = int(rng.integers(len(bad)))
        if kind == "flip":
            bad[position] ^= int(rng.integers(1, 256))
        else:
            del bad[position:]
        file.write_bytes(bad)
        for read in READERS.values():
            with pytest.raises(ValueError) as refusal:
                read(world, world.uri(2), world.assets.with_name("out"))
            assert re.fullmatch(SENTENCE, str(refusal.value))
        assert not world.assets.with_name("out").exists()
        assert not list((world.store.cache / REBUILT).glob("*v*"))
        (swept,) = verify(world.store, [world.uri(2)])
        assert swept.root_hash is None and re.fullmatch(SENTENCE, str(swept.fault))
        file.write_bytes(good[file])
    for read in READERS.values():
        read(world, world.uri(2), world.assets.with_name("out"))
    assert same_bits(read_anchor(world.rebuilt(2)), world.models[2])


@pytest.mark.parametrize("version", [0, 1])
def test_no_byte_of_a_manifest_may_differ(world: World, version: int):
    file = world.folder(version) / MANIFEST
    good = file.read_bytes()
    manifest = json.loads(good)
    seal = manifest.pop("manifest_hash")
    text = json.dumps(manifest, indent=1, sort_keys=True) + "\n"
    assert seal == blake3(text.encode()).hexdigest()
    rng = np.random.default_rng(0)
    for position in sorted(rng.choice(len(good), 400, replace=False)):
        # Among them "\n" as "\r", which reading as text would undo.
        file.write_bytes(good[:position] + bytes([good[position] ^ 7]) + good[position + 1 :])
        with pytest.raises(ValueError, match=r"^Refused weights at .* its manifest is"):
            find_chain(world.store, world.uri(1))


def test_no_byte_before_the_tensors_of_an_anchor_may_differ(world: World):
    file = world.folder(0) / MODEL_FILE
    good = file.read_bytes()
    chain = find_chain(world.store, world.uri(1))
    size = 8 + int.from_bytes(good[:8], "little")
    assert len(good) == size + 2 * sum(tensor.numel() for tensor in world.models[0].values())
    for position in range(size):
        file.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
        for read in (lambda: read_anchor(world.folder(0)), lambda: dict(chain.tensors())):
            with pytest.raises(ValueError, match=r"^Refused weights at"):
                read()


def test_nothing_is_published_on_a_parent_that_cannot_be_read(world: World):
    file = world.rebuilt(2) / MODEL_FILE
    good = file.read_bytes()
    for bad in (b"", good[:7], good[:-1], None):
        file.unlink() if bad is None else file.write_bytes(bad)
        with pytest.raises(ValueError, match=r"^Refused weights at .*; remove the folder"):
            world.publish(world.models[0])
        world.models.pop()
        assert not world.folder(3).exists()


def test_applying_twice_changes_nothing(world: World):
    first = {path: path.stat().st_mtime_ns for path in world.rebuilt(2).iterdir()}
    assert {path: path.stat().st_mtime_ns for path in world.rebuilt(2).iterdir()} == first
    patch = Patch.open(world.folder(2))
    refused = []
    for name, tensor in world.models[1].items():
        once = patch.apply(name, Held(as_bits(tensor), tensor_hash(tensor)))
        assert once is not None
        before = once.bits.copy()
        try:
            twice = patch.apply(name, once)
            assert twice is not None and twice.hash == once.hash
        except ValueError as error:
            assert "of its parent does not have the hash" in str(error)
            refused.append(name)
        assert (once.bits == before).all()
    changed = [
        name
        for name, tensor in world.models[1].items()
        if (as_bits(tensor) != as_bits(world.models[2][name])).any()
    ]
    assert refused == changed and not {"frozen", "empty"} & set(changed)


KILLED_WITHIN = """
import os, signal, sys
from pathlib import Path
from tasks.weights import safetensors_stream, versions
from tasks.weights.store import DiskStore

place, root = sys.argv[1], Path(sys.argv[2])
write, rename, names = safetensors_stream.tensor_bytes, os.rename, []

def within(tensor):
    names.append(tensor)
    if place == "values" and len(names) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return write(tensor)

def renamed(source, target):
    if place == "rename":
        os.kill(os.getpid(), signal.SIGKILL)
    rename(source, target)

safetensors_stream.tensor_bytes, os.rename = within, renamed
versions.version_folder(DiskStore(root / "store", root / "cache"), sys.argv[3])
"""


@pytest.mark.parametrize("place", ["values", "rename"])
def test_an_interrupted_apply_leaves_the_old_version(tmp_path: Path, place: str):
    world = World(tmp_path)
    world.publish(first_model())
    world.publish(trained(first_model(), 1))
    world.publish(trained(first_model(), 2))
    parent = {path: path.read_bytes() for path in world.rebuilt(1).iterdir()}
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_WITHIN, place, str(tmp_path), world.uri(2)],
        env=os.environ | {"PYTHONPATH": os.getcwd()},
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    cache = world.store.cache / REBUILT
    assert [path.name for path in cache.glob("v*")] == [world.folder(1).name]
    assert (cache / f".{world.folder(2).name}.building").is_dir()
    assert {path: path.read_bytes() for path in world.rebuilt(1).iterdir()} == parent
    assert same_bits(read_anchor(world.rebuilt(2)), world.models[2])
    assert [path.name for path in cache.glob(".v*")] == []
