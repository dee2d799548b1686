"""The code of a patch: which bf16 values changed, and by how many units in the last place.

Both are functions of bits alone. The 65,536 patterns of bf16 are put on one line of integers in the
order of the values they mean: -NaN, -inf … -0, +0 … inf, NaN. A change is the distance on that line
from the old pattern to the new one, modulo 65,536, so every pattern can become every other one.
Optimizer steps are small against the weights, so most distances are 1 or -1 and cost a fraction of
a whole new value.

The positions of the changes are stored as gaps: how many unchanged values lie before each. A
distance is stored as a sign bit and a bit that says whether it is more than one, and if so two less
than its size. Gaps and sizes are little-endian base-128 varints, laid out in planes: the first byte
of every varint, then the second byte of those that have one, and so on. A plane of bytes or bits is
one Zstandard frame, behind its length in four little-endian bytes. An entropy coder does better on
a plane than on mixed bytes, and NumPy decodes it without a loop over elements.

Coding is deterministic: the same two tensors make the same bytes with the same Zstandard.
"""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Bits = NDArray[np.uint16]
"""bf16 values as their bit patterns, flat."""

BLOCK = 1 << 17
"""Values taken at a time: a block, and what is derived from it, stays in a core's cache."""

LEVEL = 1
"""Of Zstandard: planes are noise to a match finder, and its entropy stage is the same above."""

_LENGTH = struct.Struct("<I")


Sink = Callable[[memoryview], object]
"""Takes the bytes of a tensor part by part, in order; a hasher's `update`, mostly."""


@dataclass(frozen=True)
class Changes:
    """What turns one tensor into another of its size."""

    num_changed: int
    payload: bytes
    """Planes of gaps, signs, whether more than one, and sizes; empty without a change."""


def ordered(bits: Bits) -> Bits:
    """Places of bit patterns on the line: -0 is at 32,767 and +0 at 32,768."""
    return bits ^ (_sign_mask(bits) | np.uint16(0x8000))


def unordered(places: Bits) -> Bits:
    """Bit patterns at places on the line; the inverse of `ordered`."""
    return places ^ (~_sign_mask(places) | np.uint16(0x8000))


def encode(
    before: Bits, after: Bits, *, of_before: Sink | None = None, of_after: Sink | None = None
) -> Changes:
    """The changes from `before` to `after`, which have the same size.

    The sinks get the bytes of each while they are in the cache.
    """
    assert before.shape == after.shape, "changes are between tensors of one size"
    gaps, distances = _compare(before, after, of_before, of_after)
    if len(gaps) == 0:
        return Changes(0, b"")
    planes = [*_to_planes(gaps), *_distance_planes(distances)]
    return Changes(len(gaps), b"".join(map(_pack, planes)))


def apply(
    before: Bits,
    changes: Changes,
    after: Bits,
    *,
    of_before: Sink | None = None,
    of_after: Sink | None = None,
) -> None:
    """Writes into `after` what the changes make of `before`, a tensor of the same size; both may be
    one array, and then there is no `of_before`.

    The sinks get the bytes of each while they are in the cache.

    Raises:
        ValueError: the payload is not what `encode` makes of so many changes in such a tensor;
            `after` may then be half changed.
    """
    assert after is not before or of_before is None, "parts of `before` are gone when it is asked"
    num_changed, size = changes.num_changed, len(before)
    if (num_changed or changes.payload) and not 0 < num_changed <= size:
        raise ValueError(f"{num_changed} changes do not fit {size} values")
    done = 0

    def take_over(stop: int) -> None:
        if after is not before:
            _give(before[done:stop], of_before)
            after[done:stop] = before[done:stop]

    if num_changed:
        # As many changes at a time as lie in a block of values.
        step = max(1024, BLOCK * num_changed // size)
        gaps, offset = _from_planes(changes.payload, 0, num_changed, _gap_dtype(size))
        distances, offset = _read_distances(changes, offset)
        if offset != len(changes.payload):
            raise ValueError("it is longer than its planes")
        for start, positions in _positions(gaps, size, step):
            stop = int(positions[-1]) + 1
            take_over(stop)
            places = ordered(after.take(positions, mode="clip"))
            places += distances[start : start + step]
            after[positions] = unordered(places)
            _give(after[done:stop], of_after)
            done = stop
    take_over(size)
    _give(after[done:], of_after)


def _give(part: Bits, sink: Sink | None) -> None:
    if sink is not None:
        sink(part.view(np.uint8).data)


def _positions(gaps: NDArray[Any], size: int, step: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Where the changes lie, `step` at a time behind the number of the first; `ValueError` if one
    is outside of a tensor of `size` values."""
    position = -1
    for start in range(0, len(gaps), step):
        block = gaps[start : start + step]
        # A sum of BLOCK gaps below 2^40 cannot wrap around to a place inside the tensor.
        if block.max() >= size:
            raise ValueError("a gap is longer than the tensor")
        positions = block.astype(np.int64)
        positions += 1
        positions[0] += position
        # NumPy's takes six times as long.
        summed = torch.from_numpy(positions)
        torch.cumsum(summed, 0, out=summed)
        position = int(positions[-1])
        if position >= size:
            raise ValueError("a change lies outside the tensor")
        yield start, positions


def _sign_mask(bits: Bits) -> Bits:
    """All ones where the highest bit is set."""
    return (bits.view(np.int16) >> np.int16(15)).view(np.uint16)


def _distance_planes(distances: Bits) -> list[NDArray[np.uint8]]:
    """Signs, whether each is more than one, and two less than the sizes of those."""
    signed = distances.view(np.int16)
    # The size of -32,768 is itself, which without a sign is 32,768.
    sizes = np.abs(signed).view(np.uint16)
    large = sizes > 1
    rest = sizes.take(np.flatnonzero(large)) - np.uint16(2)
    return [np.packbits(signed < 0), np.packbits(large), *_to_planes(rest)]


def _read_distances(changes: Changes, offset: int) -> tuple[Bits, int]:
    """The inverse of `_distance_planes` from the payload's `offset`, and where they end."""
    num_changed, payload = changes.num_changed, changes.payload
    num_bytes = -(-num_changed // 8)
    packed, offset = _unpack(payload, offset, num_bytes)
    negative = np.unpackbits(packed, count=num_changed)
    packed, offset = _unpack(payload, offset, num_bytes)
    more_than_one = np.unpackbits(packed, count=num_changed)
    large = np.flatnonzero(more_than_one.view(np.bool_))
    sizes = more_than_one.astype(np.uint16)
    sizes += np.uint16(1)
    if len(large):
        rest, offset = _from_planes(payload, offset, len(large), np.uint16)
        sizes[large] += rest
    signs = np.uint16(0) - negative
    sizes ^= signs
    sizes -= signs
    return sizes, offset


def _gap_dtype(size: int) -> Any:
    return np.uint32 if size < 1 << 32 else np.uint64


def _compare(
    before: Bits, after: Bits, of_before: Sink | None = None, of_after: Sink | None = None
) -> tuple[NDArray[Any], Bits]:
    """The gap before each value that differs, and the distance it went."""
    dtype = _gap_dtype(len(before))
    gaps, distances = [np.empty(0, dtype)], [np.empty(0, np.uint16)]
    # Buffers for all blocks, since fresh memory costs more than what is done with it.
    width = min(BLOCK, -(-len(before) // 8) * 8)
    flags, pairs = np.zeros(width, np.bool_), np.empty((2, width), np.uint16)
    last = -1
    for start in range(0, len(before), BLOCK):
        old, new = before[start : start + BLOCK], after[start : start + BLOCK]
        _give(old, of_before)
        _give(new, of_after)
        np.not_equal(old, new, out=flags[: len(old)])
        flags[len(old) :] = False
        found = _true_positions(flags)
        if (count := len(found)) == 0:
            continue
        places = pairs[:, :count]
        old.take(found, out=places[0], mode="clip")
        new.take(found, out=places[1], mode="clip")
        places = ordered(places)
        distances.append(places[1] - places[0])
        steps = np.empty(count, np.int64)
        np.subtract(found[1:], found[:-1], out=steps[1:])
        steps[0] = found[0] + (start - last)
        gaps.append((steps - 1).astype(dtype))
        last = start + int(found[-1])
    return np.concatenate(gaps), np.concatenate(distances)


def _true_positions(flags: NDArray[np.bool_]) -> NDArray[np.int64]:
    """`np.flatnonzero` for a multiple of eight flags of which few are set: it looks at eight at
    once, then only into those eights that have one."""
    eights = flags.view(np.uint64)
    some = np.flatnonzero(eights != 0)
    within = np.flatnonzero(eights.take(some, mode="clip").view(np.bool_))
    positions = some.take(within >> 3, mode="clip")
    positions <<= 3
    within &= 7
    positions |= within
    return positions


def _to_planes(values: NDArray[Any]) -> list[NDArray[np.uint8]]:
    """Varints of unsigned values, byte by byte: plane i holds byte i of those that have one."""
    planes = []
    while len(values):
        goes_on = values > 0x7F
        plane = values.astype(np.uint8)
        plane &= np.uint8(0x7F)
        plane |= goes_on.view(np.uint8) * np.uint8(0x80)
        planes.append(plane)
        values = values.take(np.flatnonzero(goes_on)) >> 7
    return planes


def _from_planes(payload: bytes, offset: int, size: int, dtype: Any) -> tuple[NDArray[Any], int]:
    """`size` values from the planes at `offset` of the payload, and where they end.

    Raises `ValueError` if the planes are no varints of that type.
    """
    plane, offset = _unpack(payload, offset, size)
    values = (plane & 0x7F).astype(dtype)
    places = np.flatnonzero(plane > 0x7F)
    shift = 7
    while len(places):
        if shift >= 8 * values.itemsize:
            raise ValueError("a number is longer than any can be")
        plane, offset = _unpack(payload, offset, len(places))
        values[places] |= (plane & 0x7F).astype(dtype) << dtype(shift)
        places = places[plane > 0x7F]
        shift += 7
    return values, offset


def _codec() -> Any:
    # pyarrow takes a tenth of a second to load, and those who read anchors alone need none of it.
    import pyarrow as pa

    return pa.Codec("zstd", compression_level=LEVEL)


def _pack(plane: NDArray[np.uint8]) -> bytes:
    frame = _codec().compress(plane, asbytes=True)
    return _LENGTH.pack(len(frame)) + frame


def _unpack(payload: bytes, offset: int, size: int) -> tuple[NDArray[np.uint8], int]:
    """The plane of `size` bytes at `offset`, and where it ends."""
    start = offset + _LENGTH.size
    if start > len(payload):
        raise ValueError("it is truncated")
    stop = start + _LENGTH.unpack_from(payload, offset)[0]
    if stop > len(payload):
        raise ValueError("it is truncated")
    try:
        plane = _codec().decompress(memoryview(payload)[start:stop], decompressed_size=size)
    except OSError as error:
        raise ValueError("a plane is no Zstandard frame of its size") from error
    return np.frombuffer(plane, np.uint8), stop
