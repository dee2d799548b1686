"""Writes a safetensors file from a stream of tensors, one held in memory at a time.

The format's header comes first but is only known when the last tensor has passed, so the data goes
to a sibling file and is copied behind the header: written twice, in exchange for never holding a
model. Format: 8 bytes of header length, JSON header, raw little-endian data.
"""

import json
import math
import shutil
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from tasks.weights.hashing import tensor_bytes


def write_safetensors(path: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Writes (name, bf16 tensor) pairs in the order they come."""
    shapes: dict[str, Sequence[int]] = {}
    data_path = path.with_suffix(".data")
    with open(data_path, "xb") as data:
        for name, tensor in tensors:
            assert tensor.dtype == torch.bfloat16, f"{name} is {tensor.dtype}"
            assert name not in shapes, f"{name} occurs twice"
            data.write(tensor_bytes(tensor))
            shapes[name] = list(tensor.shape)
    with open(data_path, "rb") as data, open(path, "xb") as file:
        file.write(_head(shapes))
        shutil.copyfileobj(data, file, 1 << 20)
    data_path.unlink()


def is_head_of(path: Path, shapes: Mapping[str, Sequence[int]]) -> bool:
    """Whether a safetensors file begins as `write_safetensors` begins one of bf16 tensors with
    these shapes, in whatever order; every byte before the data is compared."""
    with open(path, "rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        if size > path.stat().st_size:
            return False
        text = file.read(size)
    try:
        header = json.loads(text)
    except ValueError:
        return False
    if not isinstance(header, dict) or header.keys() != {"__metadata__", *shapes}:
        return False
    in_order = {name: shapes[name] for name in header if name != "__metadata__"}
    return struct.pack("<Q", size) + text == _head(in_order)


def _head(shapes: Mapping[str, Sequence[int]]) -> bytes:
    """What comes before the data of tensors with these shapes, in that order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {
            "dtype": "BF16",
            "shape": shape,
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    # Padded so that the data starts at a multiple of 8 bytes, as readers that map it expect.
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
