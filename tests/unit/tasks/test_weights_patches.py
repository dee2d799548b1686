"""Patches on disk: written, verified, applied beside the parent, and refused."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3
from safetensors.torch import load_file

from tasks.weights.anchors import read_anchor, write_anchor
from tasks.weights.folders import (
    MANIFEST,
    MODEL_FILE,
    PATCH_FILE,
    REBUILT,
    load_publication,
    manifest_text,
    sealed,
)
from tasks.weights.hashing import root_hash, root_hash_of_stream
from tasks.weights.patch import Patch, patched_tensors, write_patch
from tasks.weights.versions import drop_rebuilt, export, find_chain, verify
from tests.weight_versions import World, first_model, same_bits, trained

torch.set_num_threads(1)


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(tmp_path)
    world.publish(first_model())
    world.publish(trained(first_model(), 1))
    return world


def test_a_rebuilt_version_is_the_folder_that_an_anchor_would_be(world: World, tmp_path: Path):
    publication = load_publication(world.folder(1))
    assert (publication.version, publication.parent, publication.kind) == (1, 0, "patch")
    assert publication.root_hash == root_hash(world.models[1])
    changed = [
        int((a.view(torch.int16) != b.view(torch.int16)).sum())
        for a, b in zip(*(model.values() for model in world.models), strict=True)
    ]
    assert publication.num_changed == sum(changed) > 0
    assert publication.num_parameters == 31 * 17 + 17 + 1
    assert publication.bytes == (world.folder(1) / PATCH_FILE).stat().st_size
    assert sorted(path.name for path in world.folder(1).iterdir()) == [PATCH_FILE, MANIFEST]

    rebuilt = world.rebuilt(1)
    anchor = write_anchor(
        tmp_path / "whole",
        version=1,
        lease=1,
        tensors=world.models[1].items(),
        assets_dir=world.assets,
    )
    for name in ("config.json", MODEL_FILE):
        assert (rebuilt / name).read_bytes() == (Path(anchor.uri) / name).read_bytes()
    assert same_bits(read_anchor(rebuilt), world.models[1])
    as_anchor = load_publication(rebuilt)
    assert (as_anchor.kind, as_anchor.version, as_anchor.parent) == ("anchor", 1, 0)


def test_the_data_of_a_patch_is_a_function_of_two_versions(world: World, tmp_path: Path):
    again = write_patch(
        tmp_path / "again",
        version=1,
        lease=9,
        tensors=world.models[1].items(),
        parent_dir=world.folder(0),
    )
    assert (Path(again.uri) / PATCH_FILE).read_bytes() == (
        world.folder(1) / PATCH_FILE
    ).read_bytes()


def test_publishing_again_returns_the_first_and_never_changes_it(world: World):
    given = {"version": 1, "lease": 1, "parent_dir": world.folder(0)}
    before = (world.folder(1) / MANIFEST).read_bytes()
    again = write_patch(world.folder(0).parent, tensors=world.models[1].items(), **given)
    assert again == load_publication(world.folder(1))
    with pytest.raises(ValueError, match="exists with other values"):
        write_patch(world.folder(0).parent, tensors=world.models[0].items(), **given)
    assert (world.folder(1) / MANIFEST).read_bytes() == before


def test_special_values_and_tensors_that_come_go_and_change_shape(world: World):
    every = torch.from_numpy(np.arange(1 << 16, dtype=np.uint16).view(np.int16))
    world.publish({"every": every.view(torch.bfloat16), "norm": torch.ones(4, 2).bfloat16()})
    world.publish({"every": every.flip(0).view(torch.bfloat16), "norm": torch.zeros(8).bfloat16()})
    world.publish({**world.models[1], "empty": torch.zeros(0, 3).bfloat16()})
    for version in range(5):
        assert same_bits(read_anchor(world.rebuilt(version)), world.models[version])
        chain = find_chain(world.store, world.uri(version))
        assert root_hash_of_stream(chain.tensors()) == root_hash(world.models[version])


def test_a_version_equal_to_its_parent_has_an_empty_patch(world: World):
    publication = world.publish(world.models[1])
    assert (publication.bytes, publication.num_changed) == (0, 0)
    assert same_bits(read_anchor(world.rebuilt(2)), world.models[1])


def test_a_patch_on_another_parent_is_refused(world: World, tmp_path: Path):
    (tmp_path / "other").mkdir()
    other = World(tmp_path / "other")
    other.publish(trained(first_model(), 5))
    patch = Patch.open(world.folder(1))
    with pytest.raises(ValueError, match=r"^Refused to apply the patch at .*restore the parent"):
        list(patched_tensors(other.folder(0), [patch]))
    # The patch's own result is a wrong parent too, so that nothing is applied twice in place.
    with pytest.raises(ValueError, match="was made on version 0 with root hash"):
        list(patched_tensors(world.rebuilt(1), [patch]))
    # A parent with the right manifest and other values.
    shutil.copy(other.folder(0) / MODEL_FILE, world.folder(0) / MODEL_FILE)
    shutil.rmtree(world.store.cache)
    with pytest.raises(ValueError, match=r"tensor \S+ of its parent does not have the hash"):
        world.rebuilt(1)
    assert not (world.store.cache / REBUILT / world.folder(1).name).exists()


def test_a_damaged_parent_is_not_published_on(world: World):
    file = world.rebuilt(1) / MODEL_FILE
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(
        ValueError, match=r"tensor scale .*; remove the folder, which is made again"
    ):
        world.publish(trained(world.models[1], 2))
    assert not world.folder(2).exists()


def test_a_newer_format_says_so(world: World):
    path = world.folder(1) / MANIFEST
    path.write_text(manifest_text(sealed({**json.loads(path.read_text()), "format": 2})))
    with pytest.raises(ValueError, match=r"has patch format 2 .* update rollhouse"):
        world.rebuilt(1)


def test_the_nearest_anchor_is_where_a_chain_begins(world: World):
    world.publish(trained(world.models[1], 2), anchor=True)
    world.publish(trained(world.models[2], 3))
    chain = find_chain(world.store, world.uri(3))
    assert chain.base == world.folder(2) and len(chain.patches) == 1
    shutil.rmtree(world.folder(1))
    assert same_bits(dict(chain.tensors()), world.models[3])
    assert world.rebuilt(2) == world.folder(2)


def test_a_chain_with_a_hole_is_refused(world: World):
    world.publish(trained(world.models[1], 2))
    shutil.rmtree(world.folder(1))
    with pytest.raises(ValueError, match=r"v00000001-000001: it has no manifest"):
        find_chain(world.store, world.uri(2))


def test_a_sweep_verifies_every_version_in_one_pass(world: World, monkeypatch: pytest.MonkeyPatch):
    for seed in (2, 3):
        world.publish(trained(world.models[-1], seed))
    world.publish(trained(world.models[-1], 4), anchor=True)
    world.publish(trained(world.models[-1], 5))
    applied = []
    apply = Patch.apply

    def counted(patch: Patch, *arguments: Any) -> Any:
        applied.append(patch.version)
        return apply(patch, *arguments)

    monkeypatch.setattr(Patch, "apply", counted)
    uris = [world.uri(version) for version in range(6)]
    found = list(verify(world.store, uris))
    assert [held.root_hash for held in found] == [root_hash(model) for model in world.models]
    assert [(held.uri, held.patches) for held in found] == list(
        zip(uris, [0, 1, 2, 3, 0, 1], strict=True)
    )
    assert sorted(applied) == sorted([1, 2, 3, 5] * 3), "each patch once for each of 3 tensors"
    (alone,) = verify(world.store, uris[2:3])
    assert (alone.patches, alone.root_hash) == (2, found[2].root_hash)
    # In another order each stands for itself.
    assert [held.root_hash for held in verify(world.store, uris[2:0:-1])] == [
        found[2].root_hash,
        found[1].root_hash,
    ]


@pytest.mark.parametrize("damage", ["data", "payload", "anchor"])
def test_a_sweep_says_what_is_damaged_and_goes_on(world: World, damage: str):
    for seed in (2, 3):
        world.publish(trained(world.models[-1], seed))
    world.publish(trained(world.models[-1], 4), anchor=True)
    file = world.folder(2) / PATCH_FILE
    fault, first = "model.patch is not the file that was published", 2
    if damage == "anchor":
        file, fault, first = world.folder(0) / MODEL_FILE, "does not have the hash", 0
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    if damage == "payload":
        # As if a publisher had written and sealed what does not come to the version.
        manifest = json.loads((world.folder(2) / MANIFEST).read_text())
        manifest["files"][PATCH_FILE]["hash"] = blake3(data).hexdigest()
        (world.folder(2) / MANIFEST).write_text(manifest_text(sealed(manifest)))
        fault = "cannot be decoded|does not come to the hash"
    found = list(verify(world.store, [world.uri(version) for version in range(5)]))
    assert [held.fault is None for held in found] == [v < first or v == 4 for v in range(5)]
    assert all(re.search(fault, str(held.fault)) for held in found[first:4])


def test_old_rebuilt_folders_are_dropped_and_made_again(world: World):
    for seed in (2, 3):
        world.publish(trained(world.models[-1], seed))
        world.rebuilt(len(world.models) - 1)
    (world.store.cache / REBUILT / ".v00000002-000001.building").mkdir()
    drop_rebuilt(world.store, before_version=3)
    folder = world.store.cache / REBUILT
    assert [path.name for path in folder.iterdir() if path.is_dir()] == ["v00000003-000001"]
    assert same_bits(read_anchor(world.rebuilt(2)), world.models[2])


def test_a_cache_of_a_forgotten_run_is_not_believed(world: World, tmp_path: Path):
    world.rebuilt(1)
    shutil.rmtree(world.store.folder)
    shutil.rmtree(world.assets)
    again = World(tmp_path)
    again.publish(trained(first_model(), 8))
    again.publish(trained(first_model(), 9))
    assert same_bits(read_anchor(again.rebuilt(1)), again.models[1])


def test_export_writes_a_patched_version_whole_or_nothing(world: World, tmp_path: Path):
    out = export(world.store, world.uri(1), tmp_path / "out")
    assert sorted(path.name for path in out.iterdir()) == ["config.json", MODEL_FILE]
    assert same_bits(load_file(out / MODEL_FILE), world.models[1])
    assert not world.store.cache.joinpath(REBUILT, world.folder(1).name).exists()
    (world.folder(0) / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"config\.json is not the file that was published"):
        export(world.store, world.uri(1), tmp_path / "damaged")
    assert not (tmp_path / "damaged").exists()
