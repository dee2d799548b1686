"""vLLM's routing payload: what is decoded, and every way it can be wrong."""

import base64
import io
import pickle

import numpy as np
import pytest

from tasks.engines.protocol import Routing
from tasks.engines.routing import decode_routed_experts


def payload(array: np.ndarray) -> str:
    """As vLLM sends it: `np.save`, then base64."""
    stream = io.BytesIO()
    np.save(stream, array)
    return base64.b64encode(stream.getvalue()).decode()


def header_of(shape: tuple[int, ...], descr: str, data: bytes = b"") -> str:
    stream = io.BytesIO()
    header = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, header)
    return base64.b64encode(stream.getvalue() + data).decode()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_a_full_payload_is_decoded_value_for_value(dtype):
    experts = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, (6, 3, 2)).astype(dtype)
    for stored in (experts, np.asfortranarray(experts)):
        routing = decode_routed_experts(payload(stored), 4, 3)
        assert routing.experts.dtype == dtype
        assert routing.experts.tolist() == experts.tolist()


def test_bytes_written_by_hand_are_read_row_by_row_in_little_endian():
    text = header_of((2, 1, 2), "<u2", bytes([1, 0, 2, 0, 0, 1, 255, 1]))
    assert decode_routed_experts(text, 2, 1).experts.tolist() == [[[1, 2]], [[256, 511]]]


def test_trailing_rows_may_be_missing_and_none_is_made_up():
    rows = np.ones((2, 1, 2), np.uint8)
    assert decode_routed_experts(payload(rows), 4, 3).experts.shape == (2, 1, 2)
    assert decode_routed_experts(payload(rows[:0]), 1, 0).experts.shape == (0, 1, 2)


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("unpickled",))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("not base64!", "is not base64 text"),
        ("", r"is not a \.npy array"),
        (base64.b64encode(pickle.dumps(Bomb())).decode(), r"is not a \.npy array"),
        (header_of((1,), "|O", pickle.dumps(Bomb())), "has element type object"),
        (payload(np.zeros((2, 1, 2), np.int64)), "has element type int64"),
        (payload(np.zeros((2, 1, 2), ">u2")), "has element type >u2"),
        (payload(np.zeros((2, 4), np.uint8)), r"shape \[2, 4\]; it must be \[rows, layers, top_k"),
        (payload(np.zeros((2, 0, 2), np.uint8)), r"shape \[2, 0, 2\]"),
        (payload(np.zeros((7, 1, 2), np.uint8)), "has 7 rows for 4 prompt and 3 output tokens"),
        (payload(np.zeros((2, 1, 2), np.uint8))[:-4], "holds 1; the response was cut short"),
        (header_of((2**40, 1, 1), "|u1", b"\0"), r"1099511627776 bytes, and holds 1"),
    ],
)
def test_anything_else_is_refused_with_its_reason(text, sentence):
    with pytest.raises(ValueError, match=sentence):
        decode_routed_experts(text, 4, 3)


def test_an_archive_of_arrays_is_no_array():
    stream = io.BytesIO()
    np.savez(stream, experts=np.zeros((2, 1, 2), np.uint8))
    with pytest.raises(ValueError, match=r"is not a \.npy array"):
        decode_routed_experts(base64.b64encode(stream.getvalue()).decode(), 4, 3)


def test_routing_takes_no_other_shape_or_type():
    with pytest.raises(ValueError, match="must be uint8"):
        Routing(np.zeros((1, 1, 1), np.int32))
    with pytest.raises(ValueError, match=r"\[rows, layers, top_k\]"):
        Routing(np.zeros((1, 1), np.uint8))
