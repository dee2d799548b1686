"""What gate 1 asks of each row of routing, read from the experts' bytes.

DuckDB has no view of a blob's elements, so numpy counts here.
"""

from collections.abc import Iterable

import numpy as np
import pyarrow as pa

ROUTING_KEY = ("trajectory_id", "sequence_index", "segment_index")

OPENING_TOKENS = 64
"""Tokens of a prompt that are compared over its group; a shift shows in any of them."""

_DTYPES = {"uint8": np.dtype("u1"), "uint16": np.dtype("<u2")}


def routing_facts(routing: pa.Table, trajectories: pa.Table) -> pa.Table:
    """The rows of `routing` without their experts, and facts of these.

    `num_bytes`, `item_bytes` (0 for an unknown `dtype`), and, NULL where `experts` cannot be read
    so: `largest_expert`; `num_blank`, the tokens whose experts are 0 in every layer; and
    `group_agreement`, for the first segment of a trajectory: the share of its experts that most of
    its group has at the same place, NULL where fewer than three rollouts can be compared.
    """
    facts: dict[str, list[int | None]] = {
        name: [] for name in ("num_bytes", "item_bytes", "largest_expert", "num_blank")
    }
    keys = routing.select([*ROUTING_KEY, "dtype", "num_layers", "top_k"]).to_pylist()
    groups = _groups(trajectories)
    openings: dict[tuple[object, ...], list[tuple[int, np.ndarray]]] = {}
    for index, (key, blob) in enumerate(zip(keys, routing.column("experts"), strict=True)):
        data = np.frombuffer(blob.as_buffer(), np.uint8)
        dtype = _DTYPES.get(key["dtype"])
        item_bytes = dtype.itemsize if dtype else 0
        row_bytes = item_bytes * key["num_layers"] * key["top_k"]
        largest, num_blank = None, None
        if dtype and len(data) and row_bytes > 0 and len(data) % row_bytes == 0:
            experts = data.view(dtype)
            largest = int(experts.max())
            num_blank = int((~data.reshape(-1, row_bytes).any(axis=1)).sum())
            if key["sequence_index"] == key["segment_index"] == 0:
                place = (groups.get(key["trajectory_id"]), row_bytes, len(data))
                opening = experts[: OPENING_TOKENS * row_bytes // item_bytes]
                openings.setdefault(place, []).append((index, opening))
        for name, value in zip(facts, (len(data), item_bytes, largest, num_blank), strict=True):
            facts[name].append(value)
    table = routing.select([*ROUTING_KEY, "num_layers", "top_k", "num_rows"])
    for name, values in facts.items():
        table = table.append_column(name, pa.array(values, pa.int64()))
    agreement = _agreement(len(keys), openings.values())
    return table.append_column("group_agreement", pa.array(agreement, pa.float64()))


def _groups(trajectories: pa.Table) -> dict[str, int]:
    columns = (trajectories.column(name).to_pylist() for name in ("trajectory_id", "group_id"))
    return dict(zip(*columns, strict=True))


def _agreement(
    num_rows: int, openings: Iterable[list[tuple[int, np.ndarray]]]
) -> list[float | None]:
    """Share of each opening's experts that are its group's commonest there."""
    shares: list[float | None] = [None] * num_rows
    for members in openings:
        if len(members) < 3:
            continue
        stacked = np.stack([experts for _, experts in members])
        # How many of the group have the same expert, for each member and place.
        votes = (stacked[:, None, :] == stacked[None, :, :]).sum(axis=1)
        agrees = (votes == votes.max(axis=0)).mean(axis=1)
        for (index, _), share in zip(members, agrees, strict=True):
            shares[index] = float(share)
    return shares
