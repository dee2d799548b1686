"""Which routing row counts for a token, when several requests of a trajectory forwarded it.

The rule: a position keeps the first row reported for it. That is the forward pass whose logits drew
the token after it, wherever that one was sampled. Every later request, of another turn or after an
abort, carries the position in its prompt, forwards it again or finds it cached, perhaps under newer
weights, and draws nothing from it. The last token of a request has no row yet; it gets one from the
next request, which draws the token after it.

So that the rule holds of every row, a request that sampled and left out a row it should have ends
the record: the rest is missing, not filled in from a pass that drew something else.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tasks.engines.protocol import Routing

Row = dict[str, Any]


class RoutedTokens:
    """The routing rows of one sequence, grown request by request; positions [0, num_rows)."""

    def __init__(self) -> None:
        self.num_rows = 0
        self._chunks: list[np.ndarray] = []
        self._whole = True

    def add(self, routing: Routing | None, num_prompt: int, num_output: int) -> None:
        """Take what a request reported whose prompt is the whole sequence so far.

        Raises:
            ValueError: other layers, top_k or element type than the request before.
        """
        if num_output == 0 or not self._whole:
            return
        if routing is not None:
            assert len(routing.experts) < num_prompt + num_output, "the last token has no row"
            # A copy: a view would keep every turn's rows of the whole prompt alive.
            new = routing.experts[self.num_rows :].copy()
            self._check(new)
            self._chunks.append(new)
            self.num_rows += len(new)
        self._whole = self.num_rows == num_prompt + num_output - 1

    def _check(self, new: np.ndarray) -> None:
        known = self._chunks[0] if self._chunks else new
        if (known.shape[1:], known.dtype) != (new.shape[1:], new.dtype):
            raise ValueError(
                f"an engine reported experts of [layers, top_k] {list(known.shape[1:])} and "
                f"{known.dtype}, and for the same rollout {list(new.shape[1:])} and {new.dtype}; "
                "serve one model in a run."
            )

    def rows(self, segments: Sequence[Row]) -> list[Row]:
        """Rows of the `routing` table: one for each of the sequence's segments that has any."""
        if self.num_rows == 0:
            return []
        experts = np.concatenate(self._chunks)
        little_endian = experts.astype(experts.dtype.newbyteorder("<"), copy=False)
        rows = []
        for segment in segments:
            start = segment["start_position"]
            part = little_endian[start : start + len(segment["token_ids"])]
            if len(part):
                rows.append(
                    {
                        "trajectory_id": segment["trajectory_id"],
                        "sequence_index": segment["sequence_index"],
                        "segment_index": segment["segment_index"],
                        "num_layers": part.shape[1],
                        "top_k": part.shape[2],
                        "dtype": experts.dtype.name,
                        "num_rows": len(part),
                        "experts": part.tobytes(),
                    }
                )
        return rows
