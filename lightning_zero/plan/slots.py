"""Slots: reusable byte buffers, and which unit uses which.

A slot is a direct-mapped cache line: a unit always uses the same slot, so the views that autograd saved in forward are
valid again once the unit is gathered again in backward. Units that compute at the same time (a unit and those nested in
it) must never share a slot, hence pools by depth; units of very different size should not, hence pools by size class.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from lightning_zero.plan.flat import ALIGNMENT, align_up


@dataclass(frozen=True)
class SlotPlan:
    """One slot.

    Attributes:
        index: its place in the plan's slots.
        nbytes: of its buffer: the largest of the units assigned to it.
    """

    index: int
    nbytes: int


def pack(parts: Iterable[tuple[int, torch.dtype]]) -> tuple[tuple[int, ...], int]:
    """Place flat buffers, given as (elements, dtype), one after the other in a byte buffer.

    Returns:
        The byte offset of each, a multiple of ``ALIGNMENT`` elements of its own dtype, and the bytes needed for all.
    """
    offsets = []
    end = 0
    for numel, dtype in parts:
        start = align_up(end, ALIGNMENT * dtype.itemsize)
        offsets.append(start)
        end = start + numel * dtype.itemsize
    return tuple(offsets), end


def assign_pooled_slots(
    depths: Sequence[int], nbytes: Sequence[int | None], pool_slots: int
) -> tuple[tuple[int | None, ...], tuple[SlotPlan, ...]]:
    """Slots for units of a module tree, whose parameters are sharded.

    Units are pooled by (depth, ceil(log2(bytes))); a pool of n units gets ``min(pool_slots, n)`` slots, and its i-th
    unit uses the (i modulo that)-th. The root (depth 0) has a slot of its own.

    Args:
        depths: of each unit.
        nbytes: that each unit needs; None: the unit needs no slot.
        pool_slots: most slots of a pool.

    Returns:
        The slot index of each unit and the slots, numbered in order of first use.
    """
    pools: dict[tuple[int, int], list[int]] = {}
    for unit, (depth, size) in enumerate(zip(depths, nbytes, strict=True)):
        if size is not None:
            pools.setdefault((depth, max(size - 1, 0).bit_length()), []).append(unit)
    lines: list[list[int]] = []
    for pool in pools.values():
        count = min(pool_slots, len(pool))
        lines.extend(pool[first::count] for first in range(count))
    return _number(lines, nbytes)


def assign_ring_slots(
    nbytes: Sequence[int | None], ring_slots: int
) -> tuple[tuple[int | None, ...], tuple[SlotPlan, ...]]:
    """Slots for gradient buckets: one ring, the i-th bucket uses the (i modulo ``ring_slots``)-th slot."""
    users = [unit for unit, size in enumerate(nbytes) if size is not None]
    return _number([users[first::ring_slots] for first in range(min(ring_slots, len(users)))], nbytes)


def _number(
    lines: Sequence[Sequence[int]], nbytes: Sequence[int | None]
) -> tuple[tuple[int | None, ...], tuple[SlotPlan, ...]]:
    assigned: list[int | None] = [None] * len(nbytes)
    slots = []
    for index, units in enumerate(sorted(lines, key=lambda line: line[0])):
        for unit in units:
            assigned[unit] = index
        slots.append(SlotPlan(index, max(nbytes[unit] or 0 for unit in units)))
    return tuple(assigned), tuple(slots)
