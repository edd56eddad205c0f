"""Who owns which whole parameter, and what travels when: numbers only. See [Note: owners] in ``whole.py``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from lightning_zero.plan.owners import deal_out

__all__ = ["ROUND_NBYTES", "Piece", "Round", "WholeEntry", "deal_out", "plan_rounds"]

ROUND_NBYTES = 64 * 2**20
"""Bytes that one all-to-all takes from, or gives to, one rank at most."""


@dataclass(frozen=True)
class WholeEntry:
    """One parameter, as all ranks together hold it.

    Args:
        name: for messages.
        shape: full shape.
        dtype: of the master, hence of the whole parameter and of its gradient.
        shard: 1-D, this rank's slice of the master. Read by ``load`` and written by ``publish``.
        ranges: for every rank the first element of the flattened parameter it holds, and how many; the same on all
            ranks.

    Raises:
        ValueError: if the ranges do not tile the parameter.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    shard: Tensor
    ranges: Sequence[tuple[int, int]]

    def __post_init__(self) -> None:
        end = 0
        for start, numel in sorted(part for part in self.ranges if part[1]):
            if start != end:
                break
            end += numel
        if end != self.numel:
            raise ValueError(
                f"The ranks' ranges of '{self.name}' do not tile its {self.numel} elements: {self.ranges}."
            )

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Piece:
    """A range of one flattened parameter that one rank holds."""

    entry: int
    start: int
    numel: int


@dataclass(frozen=True)
class Round:
    """One all-to-all, as one rank sees it.

    Attributes:
        entries: whose pieces travel, on any rank.
        held: per owner what this rank holds for it.
        owned: per holder what it holds for this rank.
    """

    entries: frozenset[int]
    held: tuple[tuple[Piece, ...], ...]
    owned: tuple[tuple[Piece, ...], ...]


def plan_rounds(entries: Sequence[WholeEntry], owners: Sequence[int], rank: int, limit: int) -> list[Round]:
    """Cut all parameters into pieces, and put pieces into rounds that take at most ``limit`` bytes of any rank.

    Owners take turns, so that a round keeps many of them busy.
    """
    if not entries:
        return []
    world_size = len(entries[0].ranges)
    queues: list[list[tuple[int, int, int]]] = [[] for _ in range(world_size)]
    for index, entry in enumerate(entries):
        size = max(1, limit // entry.dtype.itemsize)
        queues[owners[index]] += [(index, s, min(s + size, entry.numel)) for s in range(0, entry.numel, size)]
    rounds: list[Round] = []
    draft = _Draft(world_size)
    for index, start, stop in (piece for turn in zip_longest(*queues) for piece in turn if piece is not None):
        entry, owner = entries[index], owners[index]
        holders = []
        for holder, (first, numel) in enumerate(entry.ranges):
            begin, end = max(first, start), min(first + numel, stop)
            if begin < end:
                holders.append((holder, Piece(index, begin, end - begin)))
        loads = [(holder, piece.numel * entry.dtype.itemsize) for holder, piece in holders]
        if not draft.fits(owner, loads, limit):
            rounds.append(draft.finish())
            draft = _Draft(world_size)
        draft.add(rank, owner, holders, loads)
    return [*rounds, draft.finish()] if draft.entries else rounds


class _Draft:
    """A round that is being filled."""

    def __init__(self, world_size: int) -> None:
        self.entries: set[int] = set()
        self._sent = [0] * world_size
        self._received = [0] * world_size
        self._held: list[list[Piece]] = [[] for _ in range(world_size)]
        self._owned: list[list[Piece]] = [[] for _ in range(world_size)]

    def fits(self, owner: int, loads: Sequence[tuple[int, int]], limit: int) -> bool:
        if not self.entries:
            return True
        if self._received[owner] + sum(nbytes for _, nbytes in loads) > limit:
            return False
        return all(self._sent[holder] + nbytes <= limit for holder, nbytes in loads)

    def add(
        self, rank: int, owner: int, holders: Sequence[tuple[int, Piece]], loads: Sequence[tuple[int, int]]
    ) -> None:
        for (holder, piece), (_, nbytes) in zip(holders, loads, strict=True):
            self.entries.add(piece.entry)
            self._sent[holder] += nbytes
            self._received[owner] += nbytes
            if holder == rank:
                self._held[owner].append(piece)
            if owner == rank:
                self._owned[holder].append(piece)

    def finish(self) -> Round:
        return Round(frozenset(self.entries), tuple(map(tuple, self._held)), tuple(map(tuple, self._owned)))
