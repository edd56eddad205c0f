"""One unit of a plan, and the slots: reusable byte buffers, and which unit uses which.

A slot is a direct-mapped cache line: a unit always uses the same slot, so the views that autograd saved in forward are
valid again once the unit is gathered again in backward. Units that compute at the same time (a unit and those nested in
it) must never share a slot, hence pools by depth; units of very different size should not, hence pools by size class.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from lightning_zero.config import Placement
from lightning_zero.plan.layout import ALIGNMENT, DtypeRules, FlatLayout, ParameterSpec, align_up
from lightning_zero.plan.units import UnitSpec

__all__ = ["SlotPlan", "UnitPlan", "assign_pooled_slots", "assign_ring_slots", "lay_out", "pack"]

GRADIENT_BUCKET_SLOTS = 2
"""Slots of the ring that sharded gradients of replicated parameters go through: one fills while the other is
reduced."""


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


@dataclass(frozen=True, kw_only=True)
class UnitPlan:
    """Parameters that are gathered and reduced together.

    Attributes:
        index: its place in the plan's units.
        name: the module's path ("" for the root); "bucket 0", ... for a gradient bucket.
        module: the path of the module whose call gathers the unit; None for a bucket.
        depth: how many units may be computing around it; 0 for the root and for buckets.
        ancestors: indices of those units, the root included, ascending.
        layouts: one flat buffer per (dtype, compute dtype, trainable); exactly one for a bucket, none for an empty
            root.
        slot: that its unsharded parameters use; None for a bucket.
        gradient_slot: that its gradients use until they are reduced; None without trainable parameters, and where
            gradients are replicated.
    """

    index: int
    name: str
    module: str | None
    depth: int
    ancestors: tuple[int, ...]
    layouts: tuple[FlatLayout, ...]
    slot: int | None
    gradient_slot: int | None

    @property
    def parameters(self) -> tuple[ParameterSpec, ...]:
        """Of all layouts, in layout order."""
        return tuple(spec for layout in self.layouts for spec in layout.parameters)

    @property
    def trainable_layouts(self) -> tuple[FlatLayout, ...]:
        """The layouts that have gradients."""
        return tuple(layout for layout in self.layouts if layout.trainable)

    @property
    def numel(self) -> int:
        """Real elements, without gaps and padding."""
        return sum(layout.parameter_numel for layout in self.layouts)

    @property
    def trainable_numel(self) -> int:
        """Real elements of trainable parameters."""
        return sum(layout.parameter_numel for layout in self.trainable_layouts)

    @property
    def slot_nbytes(self) -> int:
        """Bytes that the unsharded parameters take in compute dtype."""
        return pack((layout.numel, layout.compute_dtype) for layout in self.layouts)[1]

    @property
    def gradient_slot_nbytes(self) -> int:
        """Bytes that the unit's gradients take in reduce dtype."""
        return pack((layout.numel, layout.reduce_dtype) for layout in self.trainable_layouts)[1]


def lay_out(
    specs: Sequence[UnitSpec], placement: Placement, group_size: int, dtypes: DtypeRules, prefetch: int
) -> tuple[tuple[UnitPlan, ...], tuple[SlotPlan, ...], tuple[SlotPlan, ...]]:
    """Flat buffers and slots for units, or for buckets where parameters are replicated.

    Returns:
        The units, their slots, and the slots of their gradients.
    """
    index_of = {spec.name: index for index, spec in enumerate(specs)}
    units = [
        UnitPlan(
            index=index,
            name=spec.name,
            module=spec.name if placement.shards_parameters else None,
            depth=spec.depth,
            ancestors=tuple(index_of[name] for name in spec.ancestors),
            layouts=_layouts(spec.parameters, group_size, dtypes),
            slot=None,
            gradient_slot=None,
        )
        for index, spec in enumerate(specs)
    ]
    gradients = [(unit.gradient_slot_nbytes or None) if placement.shards_gradients else None for unit in units]
    if placement.shards_parameters:
        depths = [unit.depth for unit in units]
        assigned, slots = assign_pooled_slots(depths, [unit.slot_nbytes for unit in units], prefetch + 1)
        gradient_assigned, gradient_slots = assign_pooled_slots(depths, gradients, prefetch + 1)
    else:
        assigned, slots = (None,) * len(units), ()
        gradient_assigned, gradient_slots = assign_ring_slots(gradients, GRADIENT_BUCKET_SLOTS)
    settled = (
        replace(unit, slot=slot, gradient_slot=gradient_slot)
        for unit, slot, gradient_slot in zip(units, assigned, gradient_assigned, strict=True)
    )
    return tuple(settled), slots, gradient_slots


def _layouts(parameters: Sequence[ParameterSpec], group_size: int, dtypes: DtypeRules) -> tuple[FlatLayout, ...]:
    """One flat buffer per group of dtypes, in order of the group's first parameter."""
    groups: dict[tuple[torch.dtype, torch.dtype, bool], list[ParameterSpec]] = {}
    for spec in parameters:
        groups.setdefault(dtypes.group(spec), []).append(spec)
    return tuple(
        FlatLayout.build(
            group, group_size, compute_dtype=dtypes.compute(group[0]), reduce_dtype=dtypes.reduce(group[0])
        )
        for group in groups.values()
    )


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
