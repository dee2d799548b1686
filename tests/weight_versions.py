"""A small store in which weight versions are published one after another."""

from pathlib import Path

import torch

from tasks.weights.anchors import write_anchor
from tasks.weights.patch import write_patch
from tasks.weights.store import DiskStore
from tasks.weights.versions import version_folder

Model = dict[str, torch.Tensor]


def first_model() -> Model:
    torch.manual_seed(0)
    return {
        "layer.weight": (torch.randn(31, 17) * 0.02).to(torch.bfloat16),
        "norm": torch.ones(17, dtype=torch.bfloat16),
        "scale": torch.tensor(-0.0, dtype=torch.bfloat16),
    }


def trained(model: Model, seed: int, learning_rate: float = 2e-5) -> Model:
    """Another model, most of whose values are the same."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (t.float() + learning_rate * torch.randn(t.shape, generator=generator)).bfloat16()
        for name, t in model.items()
    }


class World:
    """A store in which versions are published one after another."""

    def __init__(self, root: Path):
        self.store = DiskStore(root / "store", root / "cache")
        self.assets = root / "assets"
        self.assets.mkdir()
        (self.assets / "config.json").write_text('{"model_type": "llama"}')
        self.models: list[Model] = []

    def uri(self, version: int) -> str:
        return f"weights/v{version:08d}-000001"

    def folder(self, version: int) -> Path:
        return self.store.folder / self.uri(version)

    def publish(self, model: Model, *, anchor: bool = False):
        version = len(self.models)
        self.models.append(model)
        given = {"version": version, "lease": 1, "tensors": model.items()}
        if anchor or version == 0:
            return write_anchor(self.folder(0).parent, assets_dir=self.assets, **given)
        parent = version_folder(self.store, self.uri(version - 1))
        return write_patch(self.folder(0).parent, parent_dir=parent, **given)

    def rebuilt(self, version: int) -> Path:
        return version_folder(self.store, self.uri(version))


def same_bits(one: Model, other: Model) -> bool:
    return one.keys() == other.keys() and all(
        one[name].view(torch.int16).equal(other[name].view(torch.int16)) for name in one
    )
