"""The message graph of a verifiers trace as sequences of segments.

Each node of `trace.nodes` holds one message and the tokens it adds; a path from a root to a leaf is
one sequence. `mask` marks the sampled tokens, and `logprobs` has one value for each of those. A
sampled node on several paths is an action in the first and context in the later ones.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from tasks.interchange.source import Place, checked_ids, checked_logprobs, take


def runs_of_mask(mask: Sequence[bool]) -> Iterator[tuple[int, int, bool]]:
    """(start, end, value) of each maximal run of equal values."""
    start = 0
    for value, run in groupby(mask, key=bool):
        end = start + len(list(run))
        yield start, end, value
        start = end


@dataclass(frozen=True)
class _Token:
    token_id: int
    sampled: bool = False
    logprob: float | None = None
    version: int | None = None


@dataclass
class MessageGraph:
    """`segments` is None where a sampled message lacks its token ids: the context of what follows
    would not be known either."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    num_turns: int = 0
    segments: list[dict[str, Any]] | None = None
    weight_version_min: int | None = None
    weight_version_max: int | None = None
    logprobs_mode: str | None = None

    @classmethod
    def take_from(
        cls, trace: dict[str, Any], policy: dict[str, int] | None, place: Place
    ) -> "MessageGraph":
        """Moves messages and tokens out of `trace["nodes"]`, and leaves the rest of each node.

        `policy` is the episode's span of versions: where it is one version, it is every token's.
        Raises `ValueError` for a graph that does not fit together.
        """
        nodes = trace.get("nodes")
        if not isinstance(nodes, list) or not all(isinstance(node, dict) for node in nodes):
            raise place.fault("a trace has no list of 'nodes'")
        version = None
        if policy is not None and policy["start"] == policy["end"]:
            version = policy["start"]
        sampled = [node.get("sampled") is True for node in nodes]
        messages = [take(node, "message", dict, place) for node in nodes]
        tokens = [_take_tokens(node, version, place) for node in nodes]
        graph = cls(messages=messages, num_turns=sum(sampled))
        if policy is not None:
            graph.weight_version_min, graph.weight_version_max = policy["start"], policy["end"]
        if any(sampled) and all(tokens[i] for i, was in enumerate(sampled) if was):
            paths = list(_paths([node.get("parent") for node in nodes], place))
            graph.segments = list(_segments(paths, tokens, sampled))
            graph._add_facts()
        return graph

    def _add_facts(self) -> None:
        assert self.segments is not None
        actions = [segment for segment in self.segments if segment["kind"] == "action"]
        versions = {segment["weight_version"] for segment in actions}
        if actions and None not in versions:
            self.weight_version_min, self.weight_version_max = min(versions), max(versions)
        known = [x for a in actions for x in a["rollout_logprobs"] or () if x is not None]
        # verifiers 0.4 rounds a record's log-probabilities; full precision never looks like this.
        if known and all(round(x, 4) == x for x in known) and any(known):
            self.logprobs_mode = "rounded to 4 decimals"


def _take_tokens(node: dict[str, Any], version: int | None, place: Place) -> list[_Token]:
    ids = checked_ids(node.pop("token_ids", None) or [], "token_ids", place)
    mask = node.pop("mask", None) or []
    if len(mask) != len(ids):
        raise place.fault(f"a node has {len(ids)} 'token_ids' and {len(mask)} values of 'mask'")
    num_sampled = sum(map(bool, mask))
    logprobs = node.pop("logprobs", None) or [None] * num_sampled
    logprobs = iter(checked_logprobs(logprobs, "logprobs", num_sampled, place))
    versions = iter(_versions(node, num_sampled, version))
    return [
        _Token(token_id, True, next(logprobs), next(versions)) if is_sampled else _Token(token_id)
        for token_id, is_sampled in zip(ids, mask, strict=True)
    ]


def _versions(node: dict[str, Any], length: int, version: int | None) -> list[int | None]:
    """Versions by sampled token: the engine's spans where their labels are numbers."""
    spans = node.get("weight_versions") or []
    if not spans or not all(str(span["version"]).isdecimal() for span in spans):
        return [version] * length
    node.pop("weight_versions")
    found: list[int | None] = [None] * length
    for span in spans:
        for index in range(span["start"], min(span["end"], length)):
            found[index] = int(span["version"])
    return found


def _paths(parents: list[int | None], place: Place) -> Iterator[list[int]]:
    """Node indices from root to leaf, for each leaf in order."""
    if any(p is not None and p not in range(i) for i, p in enumerate(parents)):
        raise place.fault("a node's 'parent' is not the index of an earlier node")
    inner = set(parents) - {None}
    for leaf in range(len(parents)):
        if leaf in inner:
            continue
        path: list[int] = []
        node: int | None = leaf
        while node is not None:
            path.append(node)
            node = parents[node]
        yield path[::-1]


def _segments(
    paths: list[list[int]], tokens: list[list[_Token]], sampled: list[bool]
) -> Iterator[dict[str, Any]]:
    """Segments of each path that samples something new. A turn is a sampled message."""
    turn_of = {node: turn for turn, node in enumerate(i for i, was in enumerate(sampled) if was)}
    taken: set[int] = set()
    sequence = 0
    for path in paths:
        new = {i for i in path if sampled[i]} - taken
        if not new:
            continue
        taken |= new
        yield from _rows(sequence, list(_pieces(path, tokens, turn_of, new)))
        sequence += 1


def _pieces(
    path: list[int], tokens: list[list[_Token]], turn_of: dict[int, int], new: set[int]
) -> Iterator[tuple[str, int, _Token]]:
    """(kind, turn, token) along a path. Context belongs to the turn it leads to; up to the first
    new action all of it is prompt, whichever earlier actions it holds."""
    turns = [turn_of[i] for i in path if i in turn_of]
    first = min(turn_of[i] for i in new)
    acted, passed = False, 0
    for node in path:
        turn = turns[min(passed, len(turns) - 1)]
        for token in tokens[node]:
            is_action = token.sampled and node in new
            acted |= is_action
            kind = "action" if is_action else "observation" if acted else "prompt"
            yield kind, turn if acted else first, token
        passed += node in turn_of


def _rows(sequence: int, pieces: list[tuple[str, int, _Token]]) -> Iterator[dict[str, Any]]:
    position = 0

    def place(piece: tuple[str, int, _Token]) -> tuple[str, int, int | None]:
        kind, turn, token = piece
        return kind, turn, token.version if kind == "action" else None

    for segment, ((kind, turn, version), run) in enumerate(groupby(pieces, key=place)):
        tokens = [token for _, _, token in run]
        logprobs = [token.logprob for token in tokens]
        yield {
            "sequence_index": sequence,
            "segment_index": segment,
            "start_position": position,
            "turn_index": turn,
            "kind": kind,
            "weight_version": version,
            "token_ids": [token.token_id for token in tokens],
            "rollout_logprobs": logprobs
            if kind == "action" and any(x is not None for x in logprobs)
            else None,
        }
        position += len(tokens)
