"""The experts that an engine recorded, beside the tokens that a trainer forwards.

Shapes: S = tokens of all segments, L = routed layers of the model, K = experts a token and layer.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

MISSING = -1
"""Stands in every place of a position without a recorded row, which is no expert."""

_KEY = ("trajectory_id", "sequence_index", "segment_index")
_DTYPES = {"uint8": np.dtype("u1"), "uint16": np.dtype("<u2")}


@dataclass(frozen=True)
class RoutedLayers:
    """The model's mixtures: `places` [L] among its `num_layers` layers, `num_experts` of the
    smallest one, `top_k` experts a token."""

    places: tuple[int, ...]
    num_layers: int
    num_experts: int
    top_k: int

    def chosen(self, experts: np.ndarray) -> np.ndarray:
        """[rows, recorded layers, K] to [rows, L, K]: engines report the routed layers, or all.

        Raises:
            ValueError: neither, or another K.
        """
        _, num_layers, top_k = experts.shape
        if top_k == self.top_k and num_layers == len(self.places):
            return experts
        if top_k == self.top_k and num_layers == self.num_layers:
            return experts[:, self.places]
        raise ValueError(
            f"routing of {num_layers} layers with {top_k} experts a token, and the trainer's model "
            f"has {len(self.places)} routed of {self.num_layers} layers and takes {self.top_k}"
        )


def recorded_experts(routing: pa.Table, segments: pa.Table, layers: RoutedLayers) -> Tensor:
    """Experts of every token of `segments` in row order, ascending, [S, L, K] int16.

    Ascending, because an engine that computed the same tokens twice may name the same experts in
    another order, which is no other routing.

    Raises:
        ValueError: what is wrong with a row, as half a sentence.
    """
    assert layers.num_experts <= np.iinfo(np.int16).max
    lengths = segments.column("token_ids").combine_chunks().value_lengths().to_numpy()
    ends = np.cumsum(lengths)
    columns = (segments.column(name).to_pylist() for name in _KEY)
    segment_of = {key: row for row, key in enumerate(zip(*columns, strict=True))}
    shape = (int(ends[-1]), len(layers.places), layers.top_k)
    experts = np.full(shape, MISSING, np.int16)
    details = routing.select([*_KEY, "num_layers", "top_k", "dtype", "num_rows"]).to_pylist()
    for row, blob in zip(details, routing.column("experts"), strict=True):
        segment = segment_of.get(tuple(row[name] for name in _KEY))
        num_rows, dtype = row["num_rows"], _DTYPES.get(row["dtype"])
        if segment is None or num_rows > lengths[segment]:
            raise ValueError(f"routing of tokens that trajectory {row['trajectory_id']} has not")
        values = num_rows * row["num_layers"] * row["top_k"]
        data = blob.as_buffer()
        if dtype is None or len(data) != values * dtype.itemsize:
            raise ValueError(f"routing of trajectory {row['trajectory_id']} that cannot be read")
        given = np.frombuffer(data, dtype).reshape(num_rows, row["num_layers"], row["top_k"])
        chosen = layers.chosen(given)
        if chosen.max(initial=0) >= layers.num_experts:
            raise ValueError(
                f"routing of trajectory {row['trajectory_id']} to expert {chosen.max()} of "
                f"{layers.num_experts}"
            )
        start = ends[segment] - lengths[segment]
        experts[start : start + num_rows] = np.sort(chosen, axis=-1)
    return torch.from_numpy(experts)
