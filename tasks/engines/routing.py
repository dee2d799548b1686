"""vLLM's `routed_experts` into `Routing`: base64 text of one `.npy` array.

The array's header is read and judged before its data: whatever it claims, nothing is unpickled and
nothing is allocated beyond the bytes that came.
"""

import base64
import binascii
import io
import math

import numpy as np

from tasks.engines.protocol import Routing

_READ_HEADER = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def decode_routed_experts(payload: str, num_prompt: int, num_output: int) -> Routing:
    """The routing of one choice of `/inference/v1/generate`.

    vLLM sends [rows, layers, top_k]: a row for every position of prompt and output but the last
    sampled token, and a layer for every layer of the model. A layer without a router holds zeros.
    So does everything where nothing was captured: on a CPU, vLLM must run with `--enforce-eager`,
    since compiling traces the router's hook away.

    Args:
        payload: the field as it came; a choice without it has no routing.
        num_prompt, num_output: tokens of the request and of the choice.

    Raises:
        ValueError: not such an array, or more rows than tokens that can have been forwarded.
    """
    routing = Routing(_npy(payload))
    num_rows, most = len(routing.experts), num_prompt + num_output - 1
    if num_rows > most:
        raise ValueError(
            f"routed_experts has {num_rows} rows for {num_prompt} prompt and {num_output} "
            f"output tokens, of which {most} were forwarded; the rows belong to other tokens."
        )
    return routing


def _npy(payload: str) -> np.ndarray:
    """The array of a base64 text; read-only, over the decoded bytes."""
    try:
        raw = base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(
            f"routed_experts is not base64 text ({error}); is something between engine and "
            "controller rewriting responses?"
        ) from error
    stream = io.BytesIO(raw)
    try:
        version = np.lib.format.read_magic(stream)
        read_header = _READ_HEADER[version]
        shape, fortran_order, dtype = read_header(stream)
    except (ValueError, KeyError) as error:
        raise ValueError(
            "routed_experts is not a .npy array of format 1.0 or 2.0; use an engine that sends "
            "one, as vLLM 0.30 does."
        ) from error
    if dtype not in (np.uint8, np.uint16):
        raise ValueError(
            f"routed_experts has element type {dtype}; it must be uint8, or little-endian uint16 "
            "above 256 experts."
        )
    data = memoryview(raw)[stream.tell() :]
    num_bytes = math.prod(shape) * dtype.itemsize
    if len(data) != num_bytes:
        raise ValueError(
            f"routed_experts claims shape {list(shape)}, {num_bytes} bytes, and holds {len(data)}; "
            "the response was cut short."
        )
    return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran_order else "C")
