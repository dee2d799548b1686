"""Where a lake or a weight store lives: a local directory or an S3 bucket, behind one interface.

`open_storage(uri)` picks the kind. Paths are relative, with `/` between their parts.
"""

from pathlib import Path

from tasks.storage.errors import StorageError, explain_errors
from tasks.storage.local import LocalStorage
from tasks.storage.protocol import Storage, StoredFile

__all__ = [
    "LocalStorage",
    "Storage",
    "StorageError",
    "StoredFile",
    "explain_errors",
    "open_storage",
]


def open_storage(uri: str | Path) -> Storage:
    """The storage at a path or an `s3://bucket/prefix`; nothing is read or made yet.

    Raises:
        ValueError: another scheme, a path with one of % ? # * [ ], an address without a
            bucket, or no credentials for S3.
    """
    text = str(uri)
    if found := set(text) & set("%?#*[]"):
        # For delta-rs, parts of a URL that put the tables somewhere else; for DuckDB, a pattern.
        raise ValueError(f"Cannot open {text}: choose a path without {' '.join(sorted(found))}.")
    if text.startswith("s3://"):
        from tasks.storage.s3 import S3Storage

        return S3Storage.open(text)
    if "://" in text:
        raise ValueError(f"Cannot open {text}: give the path of a directory or s3://bucket/prefix.")
    return LocalStorage(Path(text).expanduser().absolute())
