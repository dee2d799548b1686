"""Sequences packed into microbatches of one row each, by token budget.

Packing spends no token on padding and needs no attention across sequences: an explicit
block-diagonal causal mask [T, T] says so for any attention backend. Its cost is T^2 booleans and
masked-out attention products, so a budget far above the sequence length wastes both; the matrix
products do not care.

Only what a loss needs is forwarded: a sequence ends before its last action token (which is
predicted, never read), and the LM head runs at the positions that predict an action token.

Shapes: S = tokens of a sequence, T = tokens of a microbatch, K = action tokens of a microbatch,
N = action tokens of all sequences handed to `pack`, in order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TrainingSequence:
    """One training datum: `token_ids` [S] i64 and `action_mask` [S] bool, any number of turns."""

    token_ids: Tensor
    action_mask: Tensor

    def __post_init__(self):
        assert self.token_ids.shape == self.action_mask.shape
        assert not bool(self.action_mask[:1].any()), "an action token needs a token before it"


@dataclass(frozen=True)
class Microbatch:
    """One packed row.

    `input_ids`, `position_ids` [1, T]; `block_ids` [T], which sequence a token belongs to;
    `logit_index` [K], positions whose logits predict an action token; `target_ids` [K], that
    token; `action_index` [K], its place among the N action tokens.
    """

    input_ids: Tensor
    position_ids: Tensor
    block_ids: Tensor
    logit_index: Tensor
    target_ids: Tensor
    action_index: Tensor

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[1]

    def attention_mask(self) -> Tensor:
        """[1, 1, T, T] bool, True where a query (row) may attend to a key (column)."""
        same = self.block_ids[:, None] == self.block_ids[None, :]
        return same.tril()[None, None]


def num_forwarded(sequence: TrainingSequence) -> int:
    """Tokens that must be read to predict every action token: all before the last action."""
    actions = sequence.action_mask.nonzero()
    return int(actions[-1]) if len(actions) else 0


def first_fit_decreasing(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Bins of indices whose lengths sum to at most `budget`; a longer item has a bin of its own.

    Longest first, each into the first bin with room, ties by index: deterministic, and at most
    11/9 of the fewest bins plus one.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    bins: list[list[int]] = []
    room: list[int] = []
    for index in order:
        length = lengths[index]
        for number, free in enumerate(room):
            if length <= free:
                bins[number].append(index)
                room[number] -= length
                break
        else:
            bins.append([index])
            room.append(budget - length)
    return bins


def _microbatch(members: list[tuple[TrainingSequence, int, int]]) -> Microbatch:
    """`members`: (sequence, tokens to forward, number of its first action token)."""
    inputs, positions, blocks, logit_index, targets, action_index = [], [], [], [], [], []
    start = 0
    for block, (sequence, length, first_action) in enumerate(members):
        actions = sequence.action_mask.nonzero().flatten()
        inputs.append(sequence.token_ids[:length])
        positions.append(torch.arange(length))
        blocks.append(torch.full((length,), block))
        logit_index.append(actions - 1 + start)
        targets.append(sequence.token_ids[actions])
        action_index.append(torch.arange(len(actions)) + first_action)
        start += length
    return Microbatch(
        input_ids=torch.cat(inputs)[None],
        position_ids=torch.cat(positions)[None],
        block_ids=torch.cat(blocks),
        logit_index=torch.cat(logit_index),
        target_ids=torch.cat(targets),
        action_index=torch.cat(action_index),
    )


def pack(sequences: Sequence[TrainingSequence], token_budget: int) -> list[Microbatch]:
    """Every action token of `sequences` in exactly one microbatch."""
    first_action, total = [], 0
    for sequence in sequences:
        first_action.append(total)
        total += int(sequence.action_mask.sum())
    lengths = [num_forwarded(sequence) for sequence in sequences]
    members = [
        member for member in zip(sequences, lengths, first_action, strict=True) if member[1] > 0
    ]
    bins = first_fit_decreasing([length for _, length, _ in members], token_budget)
    return [_microbatch([members[index] for index in chosen]) for chosen in bins]


def assign(microbatches: Sequence[Microbatch], num_ranks: int) -> list[list[Microbatch | None]]:
    """One list a rank, all of one length, so that every rank takes part in every collective.

    Longest first, dealt out in turn. None stands for a microbatch without loss.
    """
    order = sorted(range(len(microbatches)), key=lambda i: (-microbatches[i].num_tokens, i))
    rounds = -(-len(order) // num_ranks)
    slots: list[Microbatch | None] = [microbatches[index] for index in order]
    slots += [None] * (rounds * num_ranks - len(order))
    return [slots[rank::num_ranks] for rank in range(num_ranks)]


def empty_microbatch() -> Microbatch:
    """One token and no loss: what a rank forwards when it has nothing to do."""
    zero = torch.zeros(1, 1, dtype=torch.int64)
    none = torch.zeros(0, dtype=torch.int64)
    return Microbatch(
        input_ids=zero,
        position_ids=zero,
        block_ids=zero[0],
        logit_index=none,
        target_ids=none,
        action_index=none,
    )
