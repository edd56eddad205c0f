"""Which rank owns which whole parameter, and what travels when, for optimizers that are not elementwise: numbers only.

See [Note: owners] in ``optim/whole.py``.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Protocol

import torch

__all__ = ["ROUND_NBYTES", "Piece", "Round", "deal_out", "plan_rounds"]

ROUND_NBYTES = 64 * 2**20
"""Bytes that one all-to-all takes from, or gives to, one rank at most."""


class Owned(Protocol):
    """A parameter: its elements, their dtype, and for every rank the first element that it holds and how many."""

    @property
    def numel(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def ranges(self) -> Sequence[tuple[int, int]]: ...


def deal_out(sizes: Sequence[int], world_size: int) -> list[int]:
    """The owner of each size: the largest first, each to the rank with the least so far; ties: first, lowest."""
    owners = [0] * len(sizes)
    loads = [(0, rank) for rank in range(world_size)]
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        load, rank = heapq.heappop(loads)
        owners[index] = rank
        heapq.heappush(loads, (load + sizes[index], rank))
    return owners


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


def plan_rounds(entries: Sequence[Owned], owners: Sequence[int], rank: int, limit: int) -> list[Round]:
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
