"""A small run whose batches leave checkpoints in a store: folders with a manifest, of no model."""

import json
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from schemas.config import RunConfig
from tasks.lake import Lake, take_lease
from tasks.weights.checkpoints import MANIFEST, read_manifest
from tasks.weights.store import RunStore, open_store
from tests.small_run import RUN, SmallRun
from tests.tiny_run import TinyRun

SHARDS = {"shard-1.safetensors": b"masters" * 9, "shard-2.safetensors": b"moments" * 7}


def config_at(root: Path, place: str | None = None) -> RunConfig:
    """Lake and store lie in `root`, or at the S3 address `place`."""
    return TinyRun(root, root, (f"run.run_id={RUN}",), place).config


@dataclass
class StoredRun:
    run: SmallRun
    config: RunConfig

    @classmethod
    def create(cls, root: Path, place: str | None = None) -> "StoredRun":
        config = config_at(root, place)
        ledger = Lake.create(config.run.lake).ledger(RUN)
        ledger.append("run_created", lease=0, details={"config": config.model_dump(mode="json")})
        run = SmallRun(Lake.open(config.run.lake), take_lease(ledger))
        run.commit("version_published", version=0)
        run.commit("cycle_opened")
        return cls(run, config)

    @property
    def store(self) -> RunStore:
        return open_store(self.config)

    def path(self, batch: int, lease: int | None = None) -> str:
        return f"checkpoints/b{batch:08d}-{self.run.lease if lease is None else lease:06d}"

    def save(self, path: str) -> None:
        folder = self.store.folder / path
        folder.mkdir(parents=True)
        for name, data in SHARDS.items():
            (folder / name).write_bytes(data)
        manifest = {
            "format": 1,
            "files": {name: len(data) for name, data in SHARDS.items()},
            "hashes": {name: blake3(data).hexdigest() for name, data in SHARDS.items()},
        }
        (folder / MANIFEST).write_text(json.dumps(manifest))
        self.store.put(path, MANIFEST)

    def train(self, *batches: int, publish: bool = True) -> None:
        for batch in batches:
            rollouts = self.run.record(batch)
            admission = self.run.admit(batch, rollouts)
            self.save(self.path(batch))
            self.run.train(batch, admission, rollouts, checkpoint=self.path(batch))
            if publish:
                self.run.publish(batch)

    def stored(self) -> dict[str, set[str]]:
        """Files of each folder among the checkpoints."""
        found: dict[str, set[str]] = {}
        for file in self.store.walk("checkpoints"):
            folder, _, name = file.path.rpartition("/")
            found.setdefault(folder, set()).add(name)
        return found

    def whole(self) -> set[int]:
        """Batches whose checkpoints a reader takes; one that looks whole and is not fails."""
        batches = set()
        for folder, files in self.stored().items():
            if MANIFEST in files:
                read_manifest(self.store.get(folder, MANIFEST))
                assert files == {MANIFEST, *SHARDS}
                batches.add(int(Path(folder).name[1:9]))
        return batches
