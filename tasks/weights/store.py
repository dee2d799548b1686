"""Where a run's weights, checkpoints and logs lie: a directory, or a bucket with a folder here.

Weights and checkpoints are folders that count once their manifest is there. On a disk they are
renamed into place whole. In a bucket the files go first and the manifest last, and whoever reads a
folder copies it into a cache on its own machine first.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from blake3 import blake3

from schemas.config import RunConfig
from tasks.durable import fsync_dir
from tasks.storage import LocalStorage, Storage, StoredFile, open_storage
from tasks.storage.s3 import S3Storage


class RunStore(Protocol):
    """The store of one run."""

    @property
    def folder(self) -> Path:
        """Where its files lie on this machine."""
        ...

    @property
    def cache(self) -> Path:
        """Where this machine keeps what it can make again."""
        ...

    def is_there(self) -> bool:
        """Whether anything is stored."""
        ...

    def holds(self, relative: str, manifest: str) -> bool:
        """Whether a folder is there with its manifest."""
        ...

    def begin(self, relative: str) -> None:
        """Says that a folder is about to be built under `folder`."""
        ...

    def put(self, relative: str, manifest: str) -> None:
        """Makes a folder that was built here readable from everywhere; durable on return."""
        ...

    def get(self, relative: str, manifest: str) -> Path:
        """A folder on this machine; one without its manifest is left for the reader to refuse."""
        ...

    def walk(self, relative: str) -> Iterator[StoredFile]:
        """Every stored file below a folder, in no promised order."""
        ...

    def remove(self, relative: str, manifest: str) -> None:
        """Deletes a folder, its manifest first, so that what is left never looks whole."""
        ...


@dataclass(frozen=True)
class DiskStore:
    folder: Path
    cache: Path

    def is_there(self) -> bool:
        return self.folder.is_dir()

    def holds(self, relative: str, manifest: str) -> bool:
        return (self.folder / relative / manifest).is_file()

    def begin(self, relative: str) -> None: ...

    def put(self, relative: str, manifest: str) -> None: ...

    def get(self, relative: str, manifest: str) -> Path:
        return self.folder / relative

    def walk(self, relative: str) -> Iterator[StoredFile]:
        return LocalStorage(self.folder).walk(relative)

    def remove(self, relative: str, manifest: str) -> None:
        # Another maintenance may be deleting the same folder.
        with suppress(FileNotFoundError):
            _delete(LocalStorage(self.folder), relative, manifest)
            (self.folder / relative).rmdir()
            fsync_dir((self.folder / relative).parent)


@dataclass(frozen=True)
class BucketStore:
    """`folder` is a cache: it may be removed whenever no process of the run is alive."""

    storage: S3Storage
    folder: Path

    @property
    def cache(self) -> Path:
        return self.folder

    def is_there(self) -> bool:
        return any(self.storage.walk())

    def holds(self, relative: str, manifest: str) -> bool:
        return self.storage.exists(f"{relative}/{manifest}")

    def begin(self, relative: str) -> None:
        # A cache may know a run of the same name that the bucket has forgotten.
        if not any(self.storage.walk(relative)):
            shutil.rmtree(self.folder / relative, ignore_errors=True)

    def put(self, relative: str, manifest: str) -> None:
        source = self.folder / relative
        names = sorted(path.name for path in source.iterdir() if path.name != manifest)
        for name in (*names, manifest):
            self.storage.upload(source / name, f"{relative}/{name}")

    def get(self, relative: str, manifest: str) -> Path:
        target = self.folder / relative
        if not self.holds(relative, manifest):
            shutil.rmtree(target, ignore_errors=True)
            return target
        published = self.storage.read(f"{relative}/{manifest}")
        if (target / manifest).is_file() and (target / manifest).read_bytes() == published:
            return target
        copying = target.with_name(f".{target.name}.{os.getpid()}.copying")
        shutil.rmtree(copying, ignore_errors=True)
        copying.mkdir(parents=True)
        for file in self.storage.walk(relative):
            self.storage.download(file.path, copying / Path(file.path).name)
        shutil.rmtree(target, ignore_errors=True)
        try:
            os.rename(copying, target)
        except OSError:
            # Another rank on this machine copied it at the same time.
            shutil.rmtree(copying)
            assert (target / manifest).is_file(), f"{target} cannot be replaced"
        return target

    def walk(self, relative: str) -> Iterator[StoredFile]:
        return self.storage.walk(relative)

    def remove(self, relative: str, manifest: str) -> None:
        _delete(self.storage, relative, manifest)
        shutil.rmtree(self.folder / relative, ignore_errors=True)


def _delete(storage: Storage, relative: str, manifest: str) -> None:
    storage.delete([f"{relative}/{manifest}"])
    storage.delete([file.path for file in storage.walk(relative)])


def open_store(config: RunConfig) -> RunStore:
    """The store that a run's configuration names.

    Raises:
        ValueError: `run.store` is neither a directory nor in S3, or there are no credentials.
    """
    storage = open_storage(config.run.store).child(config.run.run_id)
    key = blake3(storage.uri.encode()).hexdigest()[:16]
    cache = Path(config.run.cache).expanduser().absolute() / key / config.run.run_id
    if isinstance(storage, LocalStorage):
        return DiskStore(storage.root, cache)
    assert isinstance(storage, S3Storage)
    return BucketStore(storage, cache)


def elsewhere(config: RunConfig, *, store: str, cache: str) -> RunConfig:
    """The configuration of a run whose store is found, or whose cache is kept, somewhere else."""
    run = config.run.model_copy(update={"store": store, "cache": cache})
    return config.model_copy(update={"run": run})
