"""Writes a safetensors file from a stream of tensors, one held in memory at a time.

The format's header comes first but is only known when the last tensor has passed, so the data goes
to a sibling file and is copied behind the header: written twice, in exchange for never holding a
model. Format: 8 bytes of header length, JSON header, raw little-endian data.
"""

import json
import shutil
import struct
from collections.abc import Iterable
from pathlib import Path

import torch

from tasks.weights.hashing import tensor_bytes


def write_safetensors(path: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Writes (name, bf16 tensor) pairs in the order they come."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data_path = path.with_suffix(".data")
    offset = 0
    with open(data_path, "xb") as data:
        for name, tensor in tensors:
            assert tensor.dtype == torch.bfloat16, f"{name} is {tensor.dtype}"
            assert name not in header, f"{name} occurs twice"
            raw = tensor_bytes(tensor)
            data.write(raw)
            header[name] = {
                "dtype": "BF16",
                "shape": list(tensor.shape),
                "data_offsets": [offset, offset + len(raw)],
            }
            offset += len(raw)
    text = json.dumps(header, separators=(",", ":")).encode()
    # Padded so that the data starts at a multiple of 8 bytes, as readers that map it expect.
    text += b" " * (-len(text) % 8)
    with open(data_path, "rb") as data, open(path, "xb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        shutil.copyfileobj(data, file, 1 << 20)
    data_path.unlink()
