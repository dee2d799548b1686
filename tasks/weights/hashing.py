"""Names for weights: one BLAKE3 hash a tensor, and one root hash a model.

The hash of a tensor covers its raw little-endian bytes and nothing else, so that trainer, store and
engine agree on a value without agreeing on a library. The root hash covers names, dtypes, shapes
and hashes, so a renamed, reshaped, missing or additional tensor changes it too. Tensors are hashed
as the bf16 values that engines serve; FP32 masters have no root hash.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence

import torch
from blake3 import blake3

assert sys.byteorder == "little", "hashes are defined over little-endian bytes"


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The raw bytes of a tensor in row-major order; a view where the tensor allows it."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def tensor_hash(tensor: torch.Tensor) -> str:
    """BLAKE3 of the tensor's raw bytes, 64 hex digits; shape and dtype do not enter."""
    return blake3(tensor_bytes(tensor), max_threads=blake3.AUTO).hexdigest()


def hash_line(name: str, shape: Sequence[int], digest: str) -> str:
    """One line of the root hash: name, dtype, shape and hash of a bf16 tensor."""
    return f"{name} bfloat16 [{','.join(map(str, shape))}] {digest}"


def root_of_lines(lines: Iterable[str]) -> str:
    """BLAKE3 over the sorted lines of `hash_line`, each ended by a newline."""
    return blake3("".join(f"{line}\n" for line in sorted(lines)).encode()).hexdigest()


def root_hash_of_stream(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """The root hash of (name, bf16 tensor) pairs in any order, one tensor held at a time."""
    lines: dict[str, str] = {}
    for name, tensor in tensors:
        assert tensor.dtype == torch.bfloat16, f"{name} is {tensor.dtype}; hashes are of bf16"
        assert name not in lines, f"{name} occurs twice"
        lines[name] = hash_line(name, tensor.shape, tensor_hash(tensor))
    return root_of_lines(lines.values())


def root_hash(tensors: Mapping[str, torch.Tensor]) -> str:
    """The root hash of a model's tensors, all bf16; independent of the mapping's order."""
    return root_hash_of_stream(tensors.items())
