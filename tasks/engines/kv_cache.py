"""A key-value cache of slots behind transformers' Cache interface.

Each layer preallocates `[slots, kv_heads, capacity, head_dim]` (zero pages cost nothing until
written). Running requests always sit in the first slots, so that a decoding step reads a plain view
of the active rows and used columns: no gather, and no cost for empty capacity. The price is one row
copy whenever a request ends in the middle. Zeros rather than uninitialised memory, because a masked
column still takes part in a product with weight 0, and 0 times NaN is NaN.

Shapes: N active rows, M rows in prefill, H key-value heads, D head dimension, P padded prompt
length.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass
class _Window:
    """What the forward pass in progress writes and reads; shared by all layers.

    With `lengths` None the pass is a prefill of rows [first_row, first_row + M). Otherwise it
    decodes rows [0, N): one token each, written at `lengths` [N] int64, attending to the first
    `num_columns` columns.
    """

    first_row: int = 0
    rows: Tensor | None = None
    lengths: Tensor | None = None
    num_columns: int = 0


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer."""

    def __init__(self, num_slots: int, capacity: int, window: _Window) -> None:
        super().__init__()
        self.num_slots = num_slots
        self.capacity = capacity
        self.window = window

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        def allocate(like: Tensor) -> Tensor:
            _, num_heads, _, head_dim = like.shape
            return like.new_zeros((self.num_slots, num_heads, self.capacity, head_dim))

        self.keys, self.values = allocate(key_states), allocate(value_states)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new states; return what the new queries attend to.

        Prefill: [M, H, P, D] in, the same out, since a prompt attends only to itself. Decode:
        [N, H, 1, D] in, views [N, H, num_columns, D] out.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        window = self.window
        if window.lengths is None:
            end_row = window.first_row + key_states.shape[0]
            length = key_states.shape[2]
            self.keys[window.first_row : end_row, :, :length] = key_states
            self.values[window.first_row : end_row, :, :length] = value_states
            return key_states, value_states
        self.keys[window.rows, :, window.lengths] = key_states[:, :, 0]
        self.values[window.rows, :, window.lengths] = value_states[:, :, 0]
        num_rows = key_states.shape[0]
        return (
            self.keys[:num_rows, :, : window.num_columns],
            self.values[:num_rows, :, : window.num_columns],
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Only a prefill asks: decoding brings its own mask."""
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0 if self.window.lengths is None else self.window.num_columns - 1

    def get_max_length(self) -> int:
        return self.capacity


class SlotCache(Cache):
    """All layers, and the window that the next forward pass works in."""

    def __init__(self, num_layers: int, num_slots: int, capacity: int) -> None:
        self.window = _Window()
        super().__init__(
            layers=[SlotLayer(num_slots, capacity, self.window) for _ in range(num_layers)]
        )

    def begin_prefill(self, first_row: int) -> None:
        """The next pass fills rows from `first_row` on, starting at column 0."""
        self.window.first_row = first_row
        self.window.lengths = None

    def begin_decode(self, lengths: Tensor) -> Tensor:
        """The next pass adds one token to each of the first N rows.

        Args:
            lengths: [N] int64, tokens each row holds already.

        Returns:
            [N, num_columns] bool, True where a row may attend (its own new token included).
        """
        num_rows, num_columns = len(lengths), int(lengths.max()) + 1
        self.window.rows = torch.arange(num_rows)
        self.window.lengths = lengths
        self.window.num_columns = num_columns
        return torch.arange(num_columns) <= lengths[:, None]

    def copy_rows(self, source: list[int], target: list[int], num_columns: int) -> None:
        """Copy the first `num_columns` columns of rows `source` over rows `target`."""
        for layer in self.layers:
            assert isinstance(layer, SlotLayer)
            for states in (layer.keys, layer.values):
                assert states is not None
                states[target, :, :num_columns] = states[source, :, :num_columns]
