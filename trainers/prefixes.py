"""Token sequences with common prefixes, as trees whose every token is stored once.

Sorted, sequences with a common prefix are neighbours, and a prefix tree is written in preorder by
writing of each sequence only what it does not share with the one before: its run. What one run
may read of another is a range of its first tokens, and the runs that may read the same range are
neighbours, so attention along the paths of the tree is a list of pairs of ranges.

Shapes: S = tokens of a sequence, T = tokens stored.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_END = b"\xff" * 4
"""Sorts after every token, so that a prefix comes after what continues it and adds no run."""


@dataclass(frozen=True)
class Span:
    """Tokens `start` to `stop` of a row, `stop` excluded."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)


@dataclass(frozen=True)
class TreeAttention:
    """Who reads whom in a row of T tokens: every token the tokens of its own run up to itself, and,
    for each pair (queries, keys), every query all of the keys. No pair of tokens is named twice."""

    runs: tuple[Span, ...]
    crossings: tuple[tuple[Span, Span], ...]

    @property
    def num_pairs(self) -> int:
        """Pairs of a token and one that it reads, itself included."""
        causal = sum(run.size * (run.size + 1) // 2 for run in self.runs)
        return causal + sum(queries.size * keys.size for queries, keys in self.crossings)


def prefix_order(sequences: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """The order of the tree, and what each sequence there shares with the one before.

    Args:
        sequences: [S] int64 each, ids below 2^32 - 1.

    Returns:
        Indices of `sequences`, and tokens of the common prefix, 0 for the first.
    """
    arrays = [ids.numpy() for ids in sequences]
    keys = [ids.astype(">u4").tobytes() + _END for ids in arrays]
    order = sorted(range(len(keys)), key=lambda index: (keys[index], index))
    shared = [0] + [_common(arrays[a], arrays[b]) for a, b in pairwise(order)]
    return order, shared[: len(order)]


def _common(one: np.ndarray, other: np.ndarray) -> int:
    size = min(len(one), len(other))
    differs = one[:size] != other[:size]
    return int(differs.argmax()) if differs.any() else size


class _Part(NamedTuple):
    """Sequences of one bin, and what they store beyond the prefix that they hang on."""

    places: list[int]
    stored: int


def split_tree(lengths: Sequence[int], shared: Sequence[int], budget: int) -> list[list[int]]:
    """Bins of sequences that store at most `budget` tokens each; a longer one has its own bin.

    A subtree that fits stays whole, and prefixes that two bins need are stored in both. From the
    leaves to the root, what hangs on one prefix is put into the fewest bins that first-fit
    decreasing finds for the room that the prefix leaves.

    Args:
        lengths, shared: of sequences in the order of `prefix_order`.

    Returns:
        Places in that order, ascending within a bin.
    """
    # Of the latest sequence, the prefixes that hold parts so far: their lengths, shortest first.
    open_prefixes: list[tuple[int, list[_Part]]] = [(0, [])]
    for place, (length, common) in enumerate(zip([*lengths, 0], [*shared, 0], strict=True)):
        while open_prefixes[-1][0] > common:
            depth, parts = open_prefixes.pop()
            if open_prefixes[-1][0] < common:
                open_prefixes.append((common, []))
            above, siblings = open_prefixes[-1]
            siblings += [
                _Part(part.places, part.stored + depth - above)
                for part in _joined(parts, budget - depth)
            ]
        if place == len(lengths):
            break
        if length > common:
            open_prefixes.append((length, []))
        open_prefixes[-1][1].append(_Part([place], 0))
    return [sorted(part.places) for part in _joined(open_prefixes[0][1], budget)]


def _joined(parts: list[_Part], room: int) -> list[_Part]:
    """Parts on one prefix in the fewest that first-fit decreasing finds."""
    return [
        _Part(
            [place for index in chosen for place in parts[index].places],
            sum(parts[index].stored for index in chosen),
        )
        for chosen in first_fit_decreasing([part.stored for part in parts], room)
    ]


def first_fit_decreasing(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Bins of indices whose sizes sum to at most `room`; a larger item has a bin of its own, and
    one of size 0 fits everywhere.

    Largest first, each into the first bin with room, ties by index: deterministic, and at most
    11/9 of the fewest bins plus one.
    """
    order = sorted(range(len(sizes)), key=lambda index: (-sizes[index], index))
    bins: list[list[int]] = []
    free: list[int] = []
    for index in order:
        size = sizes[index]
        for number, left in enumerate(free):
            if size == 0 or size <= left:
                bins[number].append(index)
                free[number] -= size
                break
        else:
            bins.append([index])
            free.append(room - size)
    return bins


def lay_out(lengths: Sequence[int], shared: Sequence[int]) -> tuple[list[Tensor], TreeAttention]:
    """The row of a tree: where the tokens of each sequence are, [S] each, and who reads whom.

    `lengths`, `shared`: of sequences in the order of `prefix_order`.
    """
    places: list[Tensor] = []
    runs: list[Span] = []
    readers: dict[Span, Span] = {}
    path: list[Span] = []
    start = 0
    for length, common in zip(lengths, shared, strict=True):
        path = _first(path, common)
        before = places[-1][:common] if places else torch.zeros(0, dtype=torch.int64)
        run = Span(start, start + length - common)
        start = run.stop
        places.append(torch.cat([before, torch.arange(run.start, run.stop)]))
        if run.start == run.stop:
            continue
        for keys in path:
            readers[keys] = Span(readers[keys].start if keys in readers else run.start, run.stop)
        runs.append(run)
        path.append(run)
    return places, TreeAttention(tuple(runs), tuple((q, k) for k, q in readers.items()))


def _first(path: list[Span], count: int) -> list[Span]:
    """The spans of a path's first `count` tokens."""
    kept = []
    for span in path:
        if count == 0:
            break
        stop = min(span.stop, span.start + count)
        count -= stop - span.start
        kept.append(Span(span.start, stop))
    return kept
