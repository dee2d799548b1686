"""Sequences packed into microbatches of one row each, by token budget.

A row spends no token on padding and stores every prefix that its sequences share once: the prompt
of a group, the earlier turns that later contexts of a trajectory repeat. A token attends to the
tokens before it in its own sequences and to no others (`trainers.prefixes`), so its log-probability
is that of its sequence alone. The budget counts tokens of a row.

Where the experts of tokens are recorded, only what was routed alike is the same: a token that two
sequences share by its id is stored twice when its experts differ, and so is all behind it, since
neither sequence's policy ever read the other's.

Only what a loss needs is forwarded: a sequence ends before its last action token (which is
predicted, never read), and the LM head runs once at each position that predicts an action token,
however many sequences go on from there.

Shapes: S = tokens of a sequence, T = tokens of a microbatch, U = its positions that predict,
K = its action tokens, N = action tokens of all sequences handed to `pack`, in order. Of experts,
L = routed layers and X = those that a token takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from trainers.prefixes import Span, TreeAttention, lay_out, prefix_order, split_tree


@dataclass(frozen=True)
class TrainingSequence:
    """One training datum: `token_ids` [S] i64 and `action_mask` [S] bool, any number of turns.

    `experts` [S, L, X] i16 are those to be replayed, as `trainers.recorded_experts` has them; None
    where no token of a batch has any.
    """

    token_ids: Tensor
    action_mask: Tensor
    experts: Tensor | None = None

    def __post_init__(self):
        assert self.token_ids.shape == self.action_mask.shape
        assert self.experts is None or len(self.experts) == len(self.token_ids)
        assert not bool(self.action_mask[:1].any()), "an action token needs a token before it"


@dataclass(frozen=True)
class Microbatch:
    """One packed row.

    `input_ids`, `position_ids` [1, T]; `tree`, which tokens a token attends to; `logit_index` [U],
    positions whose logits predict action tokens, ascending. Of each action token: `logit_row` [K],
    the entry of `logit_index` that predicts it; `target_ids` [K], the token; `action_index` [K],
    its place among the N action tokens. `experts` [T, L, X] i16 to be replayed, and `readers` [T],
    the number of sequences that a token belongs to; both None without.
    """

    input_ids: Tensor
    position_ids: Tensor
    tree: TreeAttention
    logit_index: Tensor
    logit_row: Tensor
    target_ids: Tensor
    action_index: Tensor
    experts: Tensor | None = None
    readers: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[1]


def num_forwarded(sequence: TrainingSequence) -> int:
    """Tokens that must be read to predict every action token: all before the last action."""
    actions = sequence.action_mask.nonzero()
    return int(actions[-1]) if len(actions) else 0


@dataclass(frozen=True)
class Forwarded:
    """What packed rows compute: tokens, pairs of a query and a key that it reads, and positions
    that the LM head runs at."""

    num_tokens: int
    num_pairs: int
    num_positions: int


def forwarded(microbatches: Sequence[Microbatch]) -> Forwarded:
    return Forwarded(
        sum(microbatch.num_tokens for microbatch in microbatches),
        sum(microbatch.tree.num_pairs for microbatch in microbatches),
        sum(len(microbatch.logit_index) for microbatch in microbatches),
    )


@dataclass(frozen=True)
class _Member:
    """A sequence, its `read` tokens [S] that are forwarded, and the number of its first action."""

    sequence: TrainingSequence
    read: Tensor
    first_action: int


def _microbatch(members: list[_Member], shared: list[int]) -> Microbatch:
    """Members in the order of their prefixes, and what each shares with the one before."""
    places, tree = lay_out([len(member.read) for member in members], shared)
    total = tree.runs[-1].stop
    input_ids, position_ids, readers = torch.zeros(3, total, dtype=torch.int64)
    predicting, targets, action_index = [], [], []
    for member, place in zip(members, places, strict=True):
        input_ids[place] = member.read
        position_ids[place] = torch.arange(len(place))
        readers[place] += 1
        actions = member.sequence.action_mask.nonzero().flatten()
        predicting.append(place[actions - 1])
        targets.append(member.sequence.token_ids[actions])
        action_index.append(torch.arange(len(actions)) + member.first_action)
    logit_index, logit_row = torch.cat(predicting).unique(return_inverse=True)
    experts = _experts(members)
    if experts is not None:
        by_member, experts = experts, experts[0].new_zeros(total, *experts[0].shape[1:])
        for of_member, place in zip(by_member, places, strict=True):
            experts[place] = of_member
    return Microbatch(
        input_ids=input_ids[None],
        position_ids=position_ids[None],
        tree=tree,
        logit_index=logit_index,
        logit_row=logit_row,
        target_ids=torch.cat(targets),
        action_index=torch.cat(action_index),
        experts=experts,
        readers=None if experts is None else readers,
    )


def _experts(members: Sequence[_Member]) -> list[Tensor] | None:
    """Experts of the tokens that are read, [length, L, X] each."""
    found = [
        member.sequence.experts[: len(member.read)]
        for member in members
        if member.sequence.experts is not None
    ]
    assert len(found) in (0, len(members)), "all sequences of a batch have experts or none has"
    return found or None


def _identities(members: Sequence[_Member]) -> list[Tensor]:
    """Numbers [S] that are equal where tokens are: in their ids, and in their experts if known."""
    experts = _experts(members)
    if experts is None:
        return [member.read for member in members]
    numbers: dict[tuple[int, bytes], int] = {}
    identities = []
    for member, of_member in zip(members, experts, strict=True):
        tokens = zip(member.read.tolist(), of_member.flatten(1).numpy(), strict=True)
        keys = [(token, row.tobytes()) for token, row in tokens]
        identities.append(torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys]))
    return identities


def pack(sequences: Sequence[TrainingSequence], token_budget: int) -> list[Microbatch]:
    """Every action token of `sequences` in exactly one microbatch."""
    members, total = [], 0
    for sequence in sequences:
        if length := num_forwarded(sequence):
            members.append(_Member(sequence, sequence.token_ids[:length], total))
        total += int(sequence.action_mask.sum())
    order, shared = prefix_order(_identities(members))
    members = [members[index] for index in order]
    microbatches = []
    for places in split_tree([len(member.read) for member in members], shared, token_budget):
        # What two sequences share is the least that neighbours between them share.
        of_bin = [min(shared[a + 1 : b + 1]) for a, b in pairwise(places)]
        microbatches.append(_microbatch([members[place] for place in places], [0, *of_bin]))
    return microbatches


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
        tree=TreeAttention((Span(0, 1),), ()),
        logit_index=none,
        logit_row=none,
        target_ids=none,
        action_index=none,
    )
