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
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint16]
"""bf16 values as their bit patterns, flat."""

BLOCK = 1 << 17
"""Values compared at a time: what is derived from a block stays in a core's cache."""

LEVEL = 1
"""Of Zstandard: planes are noise to a match finder, and its entropy stage is the same above."""

_LENGTH = struct.Struct("<I")


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


def encode(before: Bits, after: Bits) -> Changes:
    """The changes from `before` to `after`, which have the same size."""
    assert before.shape == after.shape, "changes are between tensors of one size"
    gaps, distances = _compare(before, after)
    if len(gaps) == 0:
        return Changes(0, b"")
    planes = [*_to_planes(gaps), *_distance_planes(distances)]
    return Changes(len(gaps), b"".join(map(_pack, planes)))


def apply(bits: Bits, changes: Changes) -> None:
    """Turns `bits` into the tensor that the changes lead to, in place.

    Raises:
        ValueError: the payload is not what `encode` makes of so many changes in such a tensor;
            `bits` may then be half changed.
    """
    if changes.num_changed == 0 and not changes.payload:
        return
    if not 0 < changes.num_changed <= len(bits):
        raise ValueError(f"{changes.num_changed} changes do not fit {len(bits)} values")
    num_changed = changes.num_changed
    gaps, offset = _from_planes(changes.payload, 0, num_changed, _gap_dtype(len(bits)))
    distances, offset = _read_distances(changes, offset)
    if offset != len(changes.payload):
        raise ValueError("it is longer than its planes")
    position = -1
    for start in range(0, len(gaps), BLOCK):
        # A sum of BLOCK gaps below 2^40 cannot wrap around to a place inside the tensor.
        block = gaps[start : start + BLOCK].astype(np.int64)
        if block.min() < 0 or block.max() >= len(bits):
            raise ValueError("a gap is longer than the tensor")
        block += 1
        block[0] += position
        positions = np.cumsum(block, out=block)
        position = int(positions[-1])
        if position >= len(bits):
            raise ValueError("a change lies outside the tensor")
        places = ordered(bits[positions])
        places += distances[start : start + BLOCK]
        bits[positions] = unordered(places)


def _sign_mask(bits: Bits) -> Bits:
    """All ones where the highest bit is set."""
    return (bits.view(np.int16) >> np.int16(15)).view(np.uint16)


def _distance_planes(distances: Bits) -> list[NDArray[np.uint8]]:
    """Signs, whether each is more than one, and two less than the sizes of those."""
    signs = _sign_mask(distances)
    sizes = (distances ^ signs) - signs
    large = sizes > 1
    rest = sizes[large] - np.uint16(2)
    return [np.packbits(signs.view(np.int16) < 0), np.packbits(large), *_to_planes(rest)]


def _read_distances(changes: Changes, offset: int) -> tuple[Bits, int]:
    """The inverse of `_distance_planes` from the payload's `offset`, and where they end."""
    num_changed, payload = changes.num_changed, changes.payload
    num_bytes = -(-num_changed // 8)
    packed, offset = _unpack(payload, offset, num_bytes)
    negative = np.unpackbits(packed, count=num_changed)
    packed, offset = _unpack(payload, offset, num_bytes)
    sizes = np.unpackbits(packed, count=num_changed).astype(np.uint16)
    large = np.flatnonzero(sizes)
    sizes += np.uint16(1)
    if len(large):
        rest, offset = _from_planes(payload, offset, len(large), np.uint16)
        sizes[large] += rest
    signs = np.uint16(0) - negative
    return (sizes ^ signs) - signs, offset


def _gap_dtype(size: int) -> Any:
    return np.uint32 if size < 1 << 32 else np.uint64


def _compare(before: Bits, after: Bits) -> tuple[NDArray[Any], Bits]:
    """The gap before each value that differs, and the distance it went."""
    dtype = _gap_dtype(len(before))
    gaps, distances = [np.empty(0, dtype)], [np.empty(0, np.uint16)]
    # One buffer for all blocks, since fresh memory costs more than the comparison.
    flags = np.zeros(BLOCK, np.bool_)
    last = -1
    for start in range(0, len(before), BLOCK):
        old, new = before[start : start + BLOCK], after[start : start + BLOCK]
        np.not_equal(old, new, out=flags[: len(old)])
        flags[len(old) :] = False
        found = _true_positions(flags)
        if len(found) == 0:
            continue
        distances.append(ordered(new[found]) - ordered(old[found]))
        gaps.append((np.diff(found, prepend=last - start) - 1).astype(dtype))
        last = start + int(found[-1])
    return np.concatenate(gaps), np.concatenate(distances)


def _true_positions(flags: NDArray[np.bool_]) -> NDArray[np.int64]:
    """`np.flatnonzero` for a multiple of eight flags of which few are set: it looks at eight at
    once, then only into those eights that have one."""
    eights = flags.view(np.uint64)
    some = np.flatnonzero(eights != 0)
    within = np.flatnonzero(eights[some].view(np.bool_))
    return (some[within >> 3] << 3) | (within & 7)


def _to_planes(values: NDArray[Any]) -> list[NDArray[np.uint8]]:
    """Varints of unsigned values, byte by byte: plane i holds byte i of those that have one."""
    planes = []
    while len(values):
        goes_on = values > 0x7F
        planes.append((values & 0x7F).astype(np.uint8) | (goes_on.view(np.uint8) << 7))
        values = values[goes_on] >> 7
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
