"""What every source format shares: files, places to name in messages, and one rollout as read.

A source module reads records one at a time and says what it knows of each. What a record does not
say is left out here and NULL in the lake; what no column holds is kept as JSON.
"""

import json
import math
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

MAX_TOKEN_ID = 2**31 - 1


class Place(NamedTuple):
    """Where a record lies: `unit` is line or row, `number` counts from 1."""

    file: str
    unit: str
    number: int

    def fault(self, what: str) -> ValueError:
        return ValueError(
            f"{self.file} {self.unit} {self.number}: {what}. Correct it at its source or remove "
            f"the {self.unit}, then import again; nothing was imported."
        )


@dataclass(frozen=True)
class SourceRollout:
    """One rollout of another framework.

    `group` is equal for rollouts of one group of the import. `columns` are columns of
    `trajectories` that the record knows. `segments` are rows of `segments` without their
    trajectory_id, None where token ids are unknown. `details` is all else.
    """

    group: Hashable
    columns: Mapping[str, Any]
    segments: Sequence[Mapping[str, Any]] | None
    details: Mapping[str, Any]


@dataclass(frozen=True)
class Options:
    """What a user says that no file does.

    `split` is train or heldout. `rewards` are weights by name, for a source that records reward
    functions apart and not their sum.
    """

    split: str = "train"
    rewards: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Source:
    """A file format. `find` lists the files of a folder in order, with (file, reason) of those left
    out; `read` yields the rollouts of a file from a byte offset (0 but for JSON lines)."""

    find: Callable[[Path], tuple[list[Path], list[tuple[Path, str]]]]
    read: Callable[[Path, Options, "Span"], Iterator[SourceRollout]]
    grows: bool
    """Whether its files are appended to, so that one may be imported again for its end."""


@dataclass
class Span:
    """The bytes of a file to read, from line `first_line`; `num_nonfinite` counts up the numbers
    that were NaN or infinite and were read as missing."""

    start: int
    end: int
    first_line: int = 1
    num_nonfinite: int = 0

    def finite(self, value: float | None) -> float | None:
        if value is None or math.isfinite(value):
            return value
        self.num_nonfinite += 1
        return None


def read_json_lines(file: Path, span: Span) -> Iterator[tuple[Place, dict[str, Any]]]:
    """The JSON objects of a span of a file, one a line; NaN and infinities become None.

    Raises `ValueError` for a line that is none.
    """

    def missing(_: str) -> None:
        span.num_nonfinite += 1

    with open(file, "rb") as lines:
        lines.seek(span.start)
        left = span.end - span.start
        number = span.first_line
        while left > 0 and (line := lines.readline(left)):
            left -= len(line)
            place = Place(str(file), "line", number)
            number += 1
            if not line.strip():
                continue
            try:
                record = json.loads(line, parse_constant=missing)
            except ValueError as error:
                raise place.fault(f"not JSON ({error})") from None
            if not isinstance(record, dict):
                raise place.fault("not a JSON object")
            yield place, record


NUMBER = (int, float)


def take(record: dict[str, Any], name: str, types: type | tuple[type, ...], place: Place) -> Any:
    """Removes a field that must be there and returns it; None where it is null.

    Raises `ValueError` if it is absent or of another type.
    """
    if name not in record:
        known = ", ".join(record) or "none"
        raise place.fault(f"no field {name!r} (it has {known})")
    value = record.pop(name)
    # bool is an int to Python, and never a number, a count or a token here.
    if value is not None and (not isinstance(value, types) or isinstance(value, bool)):
        raise place.fault(f"field {name!r} is {json.dumps(value)[:60]}, of the wrong type")
    return value


def checked_ids(ids: Any, name: str, place: Place) -> list[int]:
    """Token ids as they are; raises `ValueError` if one is no id."""
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i <= MAX_TOKEN_ID for i in ids):
        raise place.fault(f"{name!r} is not a list of token ids")
    return ids


def checked_logprobs(values: Any, name: str, length: int, place: Place) -> list[float | None]:
    """`length` numbers or nulls; raises `ValueError` if they are not."""
    fits = isinstance(values, list) and all(v is None or type(v) in NUMBER for v in values)
    if not fits or len(values) != length:
        raise place.fault(f"{name!r} is not a list of {length} numbers, one a sampled token")
    return values


def by_number(file: Path) -> tuple[tuple[bool, str | int], ...]:
    """Sorts paths with numbers in them as people count: step_2 before step_10."""
    return tuple(
        (part.isdigit(), int(part) if part.isdigit() else part)
        for part in re.split(r"(\d+)", str(file))
    )


def field_names(details: Mapping[str, Any], prefix: str = "", depth: int = 3) -> Iterator[str]:
    """Dotted names of the fields in a record, lists of objects included, down to `depth`."""
    for name, value in details.items():
        inner = value if isinstance(value, list) else [value]
        objects = [item for item in inner if isinstance(item, dict) and item]
        if objects and depth > 1:
            for item in objects:
                yield from field_names(item, f"{prefix}{name}.", depth - 1)
        else:
            yield f"{prefix}{name}"
