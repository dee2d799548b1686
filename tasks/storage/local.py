"""Storage in a local directory: a file is on the disk, name and bytes, when a call returns."""

import os
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from tasks.durable import fsync_dir, fsync_file, make_durable_dirs
from tasks.storage.errors import explain_errors
from tasks.storage.protocol import StoredFile

T = TypeVar("T")


class LocalStorage:
    """A directory; see `tasks.storage.Storage`."""

    def __init__(self, root: Path):
        self.root = root
        self.uri = str(root)

    def child(self, name: str) -> "LocalStorage":
        return LocalStorage(self.root / name)

    def location(self, path: str) -> str:
        return str(self.root / path)

    def prepare(self) -> None:
        if self.root.exists() and not self.root.is_dir():
            raise ValueError(f"{self.root} is a file; give the path of a directory.")
        with explain_errors(f"make {self.uri}", self.uri):
            make_durable_dirs(self.root)

    def write(self, path: str, data: memoryview | bytes) -> None:
        target = self.root / path
        with explain_errors(f"write {target}", self.uri):
            make_durable_dirs(target.parent)
            try:
                with open(target, "xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
            except FileExistsError:
                raise
            except BaseException:
                target.unlink(missing_ok=True)
                raise
            fsync_dir(target.parent)

    def read(self, path: str) -> bytes:
        with explain_errors(f"read {self.root / path}", self.uri):
            return (self.root / path).read_bytes()

    def exists(self, path: str) -> bool:
        return (self.root / path).is_file()

    def walk(self, prefix: str = "") -> Iterator[StoredFile]:
        for folder, _, names in os.walk(self.root / prefix):
            for name in names:
                file = Path(folder, name)
                try:
                    status = file.stat()
                except FileNotFoundError:
                    continue
                yield StoredFile(
                    file.relative_to(self.root).as_posix(),
                    status.st_size,
                    datetime.fromtimestamp(status.st_mtime, UTC),
                )

    def delete(self, paths: Iterable[str]) -> None:
        folders = set()
        for path in paths:
            with explain_errors(f"delete {self.root / path}", self.uri):
                (self.root / path).unlink(missing_ok=True)
            folders.add((self.root / path).parent)
        for folder in folders:
            if folder.is_dir():
                fsync_dir(folder)

    def patiently(self, call: Callable[[], T]) -> T:
        return call()

    def flush(self, paths: Iterable[str]) -> None:
        folders = set()
        for path in paths:
            if os.path.exists(self.root / path):
                fsync_file(self.root / path)
                folders.add((self.root / path).parent)
        for folder in folders:
            fsync_dir(folder)

    def options(self) -> dict[str, str]:
        return {}
