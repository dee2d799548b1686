import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tasks.weights.anchors import read_anchor, write_anchor
from tasks.weights.folders import (
    MANIFEST,
    MODEL_FILE,
    load_publication,
    manifest_text,
    sealed,
)
from tasks.weights.hashing import root_hash
from tasks.weights.importing import import_anchor
from tasks.weights.store import DiskStore
from tasks.weights.versions import export

torch.set_num_threads(1)

TENSORS = {
    "layer.weight": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4) / 7,
    "bias": torch.tensor([1.0, -0.0, float("inf")], dtype=torch.bfloat16),
    "scale": torch.tensor(2.5, dtype=torch.bfloat16),
}


@pytest.fixture
def assets(tmp_path: Path) -> Path:
    folder = tmp_path / "assets"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "model.safetensors").write_bytes(b"other weights")
    (folder / "model.safetensors.index.json").write_text("{}")
    (folder / "modeling.py").write_text("raise SystemExit")
    return folder


def publish(tmp_path: Path, assets: Path, version: int = 1, tensors=TENSORS, **options):
    return write_anchor(
        tmp_path / "store",
        version=version,
        lease=7,
        tensors=iter(tensors.items()),
        assets_dir=assets,
        **options,
    )


def test_anchor_is_a_plain_safetensors_folder(tmp_path: Path, assets: Path):
    publication = publish(tmp_path, assets)
    folder = Path(publication.uri)
    assert folder == tmp_path / "store" / "v00000001-000007"
    assert sorted(file.name for file in folder.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        MANIFEST,
        "tokenizer.json",
    ]
    loaded = load_file(folder / MODEL_FILE)
    assert loaded.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype == torch.bfloat16
        assert loaded[name].view(torch.int16).equal(tensor.view(torch.int16))
    with safe_open(folder / MODEL_FILE, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_publication_counts(tmp_path: Path, assets: Path):
    publication = publish(tmp_path, assets)
    assert (publication.version, publication.parent, publication.kind) == (1, 0, "anchor")
    assert publication.num_parameters == 12 + 3 + 1
    assert publication.num_changed is None
    assert publication.root_hash == root_hash(TENSORS)
    assert publication.bytes == (Path(publication.uri) / MODEL_FILE).stat().st_size
    assert load_publication(publication.uri) == publication


def test_num_changed_counts_bits(tmp_path: Path, assets: Path):
    parent = publish(tmp_path, assets)
    changed = {name: tensor.clone() for name, tensor in TENSORS.items()}
    changed["layer.weight"][0, :2] += 1
    changed["bias"][1] = 0.0  # was -0.0
    child = publish(tmp_path, assets, version=2, tensors=changed, parent_uri=parent.uri)
    assert child.num_changed == 3


def test_read_back_is_bit_identical(tmp_path: Path, assets: Path):
    tensors = read_anchor(publish(tmp_path, assets).uri)
    assert root_hash(tensors) == root_hash(TENSORS)


def test_publishing_again_returns_the_first(tmp_path: Path, assets: Path):
    first = publish(tmp_path, assets)
    changed_at = (Path(first.uri) / MODEL_FILE).stat().st_mtime_ns
    assert publish(tmp_path, assets) == first
    assert (Path(first.uri) / MODEL_FILE).stat().st_mtime_ns == changed_at


def test_a_version_never_changes(tmp_path: Path, assets: Path):
    publish(tmp_path, assets)
    other = {**TENSORS, "scale": torch.tensor(3.0, dtype=torch.bfloat16)}
    with pytest.raises(ValueError, match="exists with other values"):
        publish(tmp_path, assets, tensors=other)


def test_every_flipped_byte_of_data_is_refused(tmp_path: Path, assets: Path):
    publication = publish(tmp_path, assets)
    file = Path(publication.uri) / MODEL_FILE
    good = file.read_bytes()
    data_size = 2 * publication.num_parameters
    for position in range(len(good) - data_size, len(good)):
        bad = bytearray(good)
        bad[position] ^= 1
        file.write_bytes(bad)
        with pytest.raises(ValueError, match=r"Refused weights .* tensor .* hash"):
            read_anchor(publication.uri)


def test_every_truncation_is_refused(tmp_path: Path, assets: Path):
    publication = publish(tmp_path, assets)
    file = Path(publication.uri) / MODEL_FILE
    good = file.read_bytes()
    for size in range(len(good)):
        file.write_bytes(good[:size])
        with pytest.raises(ValueError, match=r"Refused weights .* truncated or damaged"):
            read_anchor(publication.uri)


def test_missing_additional_and_reshaped_tensors_are_refused(tmp_path: Path, assets: Path):
    publication = publish(tmp_path, assets)
    file = Path(publication.uri) / MODEL_FILE
    save_file({name: t for name, t in TENSORS.items() if name != "bias"}, file)
    with pytest.raises(ValueError, match="tensor bias is missing"):
        read_anchor(publication.uri)
    save_file({**TENSORS, "more": torch.zeros(1)}, file)
    with pytest.raises(ValueError, match="tensor more is not in its manifest"):
        read_anchor(publication.uri)
    save_file({**TENSORS, "layer.weight": TENSORS["layer.weight"].reshape(4, 3)}, file)
    with pytest.raises(ValueError, match=r"tensor layer\.weight has another shape"):
        read_anchor(publication.uri)


def test_manifest_must_add_up(tmp_path: Path, assets: Path):
    publication = publish(tmp_path, assets)
    path = Path(publication.uri) / MANIFEST
    manifest = {**json.loads(path.read_text()), "root_hash": "0" * 64}
    path.write_text(manifest_text(manifest))
    with pytest.raises(ValueError, match="not the one that was published"):
        read_anchor(publication.uri)
    path.write_text(manifest_text(sealed(manifest)))
    with pytest.raises(ValueError, match="does not add up"):
        read_anchor(publication.uri)
    path.write_text(path.read_text()[:-10])
    with pytest.raises(ValueError, match="manifest is damaged"):
        read_anchor(publication.uri)


def test_an_anchor_from_before_manifests_were_sealed_is_read(tmp_path: Path, assets: Path):
    publication = publish(tmp_path, assets)
    path = Path(publication.uri) / MANIFEST
    manifest = json.loads(path.read_text())
    del manifest["manifest_hash"]
    path.write_text(manifest_text(manifest))
    assert root_hash(read_anchor(publication.uri)) == root_hash(TENSORS)
    assert load_publication(publication.uri) == publication
    # A seal is not taken off by damaging its name.
    path.write_text(manifest_text({**manifest, "manifest_hasi": "0" * 64}))
    with pytest.raises(ValueError, match="not the one that was published"):
        read_anchor(publication.uri)


def test_folder_without_manifest_is_never_read_and_is_replaced(tmp_path: Path, assets: Path):
    publication = publish(tmp_path, assets)
    os.unlink(Path(publication.uri) / MANIFEST)
    with pytest.raises(ValueError, match="no manifest"):
        read_anchor(publication.uri)
    assert publish(tmp_path, assets).root_hash == publication.root_hash
    assert read_anchor(publication.uri).keys() == TENSORS.keys()


def test_failed_publication_leaves_no_folder(tmp_path: Path, assets: Path):
    def interrupted():
        yield "bias", TENSORS["bias"]
        raise RuntimeError("trainer died")

    with pytest.raises(RuntimeError, match="trainer died"):
        write_anchor(
            tmp_path / "store", version=1, lease=7, tensors=interrupted(), assets_dir=assets
        )
    assert list((tmp_path / "store").iterdir()) == []


def store_of(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path / "store", tmp_path / "cache")


def uri_of(publication) -> str:
    return Path(publication.uri).name


def test_export_copies_without_manifest(tmp_path: Path, assets: Path):
    publication = publish(tmp_path, assets)
    target = export(store_of(tmp_path), uri_of(publication), tmp_path / "out")
    assert sorted(file.name for file in target.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (target / MODEL_FILE).read_bytes() == (Path(publication.uri) / MODEL_FILE).read_bytes()


def test_export_refuses_used_directory_and_damaged_source(tmp_path: Path, assets: Path):
    publication = publish(tmp_path, assets)
    with pytest.raises(ValueError, match="not an empty directory"):
        export(store_of(tmp_path), uri_of(publication), assets)
    (Path(publication.uri) / "tokenizer.json").write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not the file that was published"):
        export(store_of(tmp_path), uri_of(publication), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    folder = tmp_path / "checkpoint"
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def manifest_of(uri: str) -> dict:
    return json.loads((Path(uri) / MANIFEST).read_text())


def test_import_takes_bf16_values_as_they_are(tmp_path: Path, checkpoint: Path):
    publication = import_anchor(checkpoint, tmp_path / "store", lease=1)
    assert (publication.version, publication.parent) == (0, None)
    assert publication.root_hash == root_hash(load_file(checkpoint / MODEL_FILE))
    assert manifest_of(publication.uri)["rounded"] is False
    model = AutoModelForCausalLM.from_pretrained(publication.uri, local_files_only=True)
    assert model.dtype == torch.bfloat16
    assert import_anchor(checkpoint, tmp_path / "store", lease=1) == publication


def test_import_rounds_wider_floats_and_says_so(tmp_path: Path, checkpoint: Path):
    tensors = {name: t.float() for name, t in load_file(checkpoint / MODEL_FILE).items()}
    save_file(tensors, checkpoint / MODEL_FILE, {"format": "pt"})
    exact = import_anchor(checkpoint, tmp_path / "exact", lease=1)
    assert manifest_of(exact.uri)["rounded"] is False
    # Halfway between 1 and the next bf16 value, 1 + 2^-7: even is 1.
    tensors["model.norm.weight"][0] = 1 + 2**-8
    save_file(tensors, checkpoint / MODEL_FILE, {"format": "pt"})
    rounded = import_anchor(checkpoint, tmp_path / "rounded", lease=1)
    assert manifest_of(rounded.uri)["rounded"] is True
    assert read_anchor(rounded.uri)["model.norm.weight"][0] == 1.0
    assert json.loads((Path(rounded.uri) / "config.json").read_text())["dtype"] == "bfloat16"


def test_import_reads_shards(tmp_path: Path, checkpoint: Path):
    whole = import_anchor(checkpoint, tmp_path / "whole", lease=1)
    model = LlamaForCausalLM.from_pretrained(checkpoint)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="1KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    sharded = import_anchor(tmp_path / "sharded", tmp_path / "store", lease=1)
    assert sharded.root_hash == whole.root_hash
    next((tmp_path / "sharded").glob("*.safetensors")).unlink()
    with pytest.raises(ValueError, match=r"lacks model-.*download"):
        import_anchor(tmp_path / "sharded", tmp_path / "again", lease=1)


def test_import_refuses_missing_unexpected_and_reshaped_tensors(tmp_path: Path, checkpoint: Path):
    tensors = load_file(checkpoint / MODEL_FILE)
    norm = tensors.pop("model.norm.weight")
    save_file(tensors, checkpoint / MODEL_FILE, {"format": "pt"})
    with pytest.raises(ValueError, match=r"missing tensors \['model.norm.weight'\]"):
        import_anchor(checkpoint, tmp_path / "store", lease=1)
    tensors |= {"model.norm.weight": norm, "surplus": norm.clone()}
    save_file(tensors, checkpoint / MODEL_FILE, {"format": "pt"})
    with pytest.raises(ValueError, match=r"unexpected tensors \['surplus'\]"):
        import_anchor(checkpoint, tmp_path / "store", lease=1)
    tensors = {**tensors, "model.norm.weight": torch.ones(9, dtype=torch.bfloat16)}
    del tensors["surplus"]
    save_file(tensors, checkpoint / MODEL_FILE, {"format": "pt"})
    with pytest.raises(ValueError, match=r"does not fit its config\.json"):
        import_anchor(checkpoint, tmp_path / "store", lease=1)
    assert not (tmp_path / "store").exists()


def test_import_refuses_truncated_pickled_and_empty_folders(tmp_path: Path, checkpoint: Path):
    file = checkpoint / MODEL_FILE
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="truncated or damaged"):
        import_anchor(checkpoint, tmp_path / "store", lease=1)
    file.rename(checkpoint / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"only pickled weights \(pytorch_model\.bin\)"):
        import_anchor(checkpoint, tmp_path / "store", lease=1)
    (checkpoint / "pytorch_model.bin").unlink()
    with pytest.raises(ValueError, match=r"has no model\.safetensors"):
        import_anchor(checkpoint, tmp_path / "store", lease=1)
    with pytest.raises(ValueError, match=r"no config\.json"):
        import_anchor(tmp_path / "nowhere", tmp_path / "store", lease=1)


def test_import_refuses_quantized_weights(tmp_path: Path, checkpoint: Path):
    tensors = load_file(checkpoint / MODEL_FILE)
    tensors["model.norm.weight"] = torch.ones(8, dtype=torch.int8)
    save_file(tensors, checkpoint / MODEL_FILE, {"format": "pt"})
    with pytest.raises(ValueError, match="quantized"):
        import_anchor(checkpoint, tmp_path / "store", lease=1)
