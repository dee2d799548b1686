"""What a lake or a weight store asks of the place it lives in."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class StoredFile:
    """`path` is relative to the storage it was listed from; `modified` is UTC."""

    path: str
    size_bytes: int
    modified: datetime


class Storage(Protocol):
    """A root under which files are written whole, listed and deleted; safe to use from threads.

    Every method raises `StorageError`, an `OSError`, when the disk or the server refuses.
    """

    uri: str
    """An absolute path, or `s3://bucket/prefix`; no slash at its end."""

    def child(self, name: str) -> "Storage":
        """The storage one folder further down."""
        ...

    def location(self, path: str) -> str:
        """What a reader opens: an absolute path or an `s3://` address."""
        ...

    def prepare(self) -> None:
        """Makes the directory, durable on return, or sees that the bucket is there."""
        ...

    def write(self, path: str, data: memoryview | bytes) -> None:
        """Writes a file whole or not at all; durable on return."""
        ...

    def read(self, path: str) -> bytes: ...

    def exists(self, path: str) -> bool: ...

    def walk(self, prefix: str = "") -> Iterator[StoredFile]:
        """Every file below a folder, at any depth, in no promised order."""
        ...

    def delete(self, paths: Iterable[str]) -> None:
        """Removes files; one that is gone already is no error."""
        ...

    def patiently(self, call: Callable[[], T]) -> T:
        """Calls another library that works on this storage, and again for a minute while the
        server is out. The methods here do that by themselves."""
        ...

    def flush(self, paths: Iterable[str]) -> None:
        """Waits until files that another library wrote, and their folders, are on the disk."""
        ...

    def options(self) -> dict[str, str]:
        """What delta-rs needs to reach the same place: empty for a disk, else addresses and the
        credentials of this moment."""
        ...
