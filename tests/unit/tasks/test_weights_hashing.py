import struct

import pytest
import torch
from blake3 import blake3

from tasks.weights.hashing import root_hash, root_hash_of_stream, tensor_hash


def bf16(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bfloat16)


def test_tensor_hash_is_blake3_of_little_endian_bf16_bytes():
    # bf16 is the upper half of a float32: 1.0 = 3F80, -2.0 = C000.
    assert tensor_hash(bf16(1.0, -2.0)) == blake3(struct.pack("<HH", 0x3F80, 0xC000)).hexdigest()


def test_tensor_hash_ignores_strides_but_not_order():
    matrix = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    assert tensor_hash(matrix.T) == tensor_hash(matrix.T.contiguous())
    assert tensor_hash(matrix.T) != tensor_hash(matrix)


def test_negative_zero_has_another_hash():
    assert tensor_hash(bf16(0.0)) != tensor_hash(bf16(-0.0))


def test_scalar_and_empty_tensors_hash():
    assert tensor_hash(torch.tensor(1.0, dtype=torch.bfloat16)) == tensor_hash(bf16(1.0))
    assert tensor_hash(torch.zeros(0, 3, dtype=torch.bfloat16)) == blake3(b"").hexdigest()


def test_root_hash_is_over_sorted_lines():
    one, zero = blake3(b"\x80\x3f").hexdigest(), blake3(b"\x00\x00" * 2).hexdigest()
    text = f"a bfloat16 [1] {one}\nb bfloat16 [2,1] {zero}\n"
    tensors = {"b": torch.zeros(2, 1, dtype=torch.bfloat16), "a": bf16(1.0)}
    assert root_hash(tensors) == blake3(text.encode()).hexdigest()


def test_root_hash_depends_on_name_and_shape_but_not_on_order():
    tensors = {"a": bf16(1.0, 2.0), "b": bf16(3.0)}
    root = root_hash(tensors)
    assert root_hash_of_stream(reversed(tensors.items())) == root
    assert root_hash({"a": bf16(1.0, 2.0), "c": bf16(3.0)}) != root
    assert root_hash({"a": bf16(1.0, 2.0).reshape(2, 1), "b": bf16(3.0)}) != root
    assert root_hash({"a": bf16(1.0, 2.0)}) != root


def test_root_hash_refuses_masters_and_doubled_names():
    with pytest.raises(AssertionError, match="float32"):
        root_hash({"a": torch.zeros(1)})
    with pytest.raises(AssertionError, match="twice"):
        root_hash_of_stream([("a", bf16(1.0)), ("a", bf16(1.0))])
