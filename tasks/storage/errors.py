"""What disks and object stores say when they refuse, as one kind of error."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

ADVICE = {
    "disk": "Free disk space or make the directory writable",
    "s3": "Check the endpoint, the credentials and the bucket's policy",
}

TREE = re.compile(r"\x1b\[\d*m|↳")
"""What delta-rs draws before a cause of a cause."""

RESUME = "then run the same command again: it continues from what was committed."


class StorageError(OSError):
    """A disk or an object store refused; the message says what could not be done and the fix."""

    def __str__(self) -> str:
        return self.strerror or ""


@contextmanager
def explain_errors(action: str, uri: str, *also: type[Exception]) -> Iterator[None]:
    """Turns an `OSError`, or one of the kinds in `also`, into a `StorageError`.

    `action` completes "Cannot ..."; `uri` says whether a disk or S3 refused. The innermost
    message is kept: nested contexts do not wrap each other's.
    """
    try:
        yield
    except StorageError:
        raise
    except (OSError, *also) as error:
        number, detail = _cause(error)
        kind = "s3" if uri.startswith("s3://") else "disk"
        message = f"Cannot {action}: {detail}. {ADVICE[kind]}, {RESUME}"
        raise StorageError(number, message) from error


def _cause(error: Exception) -> tuple[int, str]:
    """The system's error number and the shortest true description.

    delta-rs reports a general error with a tree of causes, a line each, of which the innermost
    says what happened; that of a full or read-only disk ends in "(os error N)".
    """
    if isinstance(error, OSError) and error.errno:
        return error.errno, os.strerror(error.errno)
    text = str(error)
    if number := re.search(r"os error (\d+)", text):
        return int(number[1]), os.strerror(int(number[1]))
    lines = [TREE.sub("", line).strip() for line in text.strip().splitlines()]
    causes = dict.fromkeys((lines[0], lines[-1]) if lines else (type(error).__name__,))
    return errno.EIO, ": ".join(causes).rstrip(".")[:300]
