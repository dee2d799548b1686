"""What must reach the disk, and when: the few calls that make files and directories durable.

Neither pyarrow, safetensors nor delta-rs ever calls fsync, so a power cut could keep a name and
lose the bytes behind it. The price is one fsync a file and one a directory.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def fsync_file(path: str | Path) -> None:
    """Waits until a file's bytes, or a directory's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


fsync_dir = fsync_file
"""The same call, named for what it is used on."""


def make_durable_dirs(path: Path) -> None:
    """Creates a directory and its missing parents, each entry on the disk on return."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)
        fsync_dir(directory.parent)


@contextmanager
def explain_os_errors(action: str) -> Iterator[None]:
    """Says what could not be written and what to do; the error number stays the system's."""
    try:
        yield
    except OSError as error:
        detail = os.strerror(error.errno) if error.errno else str(error)
        message = (
            f"Cannot {action}: {detail}. Free disk space or make the directory writable, then run "
            "the same command again: it continues from what was committed."
        )
        raise OSError(error.errno or errno.EIO, message) from error
