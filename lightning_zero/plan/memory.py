"""What one rank holds at rest after a training step, computed from the plan: on its device, and with offloading in host
memory and in files. Activations are not in it. What comes on top during a step: ``lightning_zero.plan.peak``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import TYPE_CHECKING

from lightning_zero.config import HostOffload, NvmeOffload, Tier
from lightning_zero.plan.flat import FlatLayout, align_up
from lightning_zero.plan.owners import deal_out

if TYPE_CHECKING:
    from lightning_zero.plan.plan import ZeroPlan

__all__ = [
    "FETCH_UNITS",
    "PAGE_NBYTES",
    "STAGING_BUFFERS",
    "DiskBytes",
    "HostBytes",
    "Memory",
    "expected_disk",
    "expected_host_memory",
    "expected_memory",
    "fetch_nbytes",
    "fullest_rank",
    "staging_nbytes",
    "whole_nbytes",
]

PAGE_NBYTES = 4_096
"""What regions of files are padded to: unbuffered reads and writes begin and end at multiples of it."""

FETCH_UNITS = 2
"""Units whose shards may be on their way from host memory or files, or have arrived, ahead of their gather."""

STAGING_BUFFERS = 2
"""Host buffers for each direction, where the host computes for what travels to or from an accelerator: gradients that
are added to others, and weights that are cast."""

CAST_NBYTES = 16 * 2**20
"""Bytes of weights that are cast at a time on their way to an accelerator."""


class _Categories:
    """What all tables of bytes can do."""

    @property
    def total(self) -> int:
        """The sum of all categories."""
        return sum(nbytes for _, nbytes in self.items())

    def items(self) -> tuple[tuple[str, int], ...]:
        """``(category, bytes)`` for each category, without the total."""
        return tuple((field.name, getattr(self, field.name)) for field in fields(self))  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Memory(_Categories):
    """Bytes on the device of one rank, by category.

    Attributes:
        parameters: full flat buffers in compute dtype, where parameters are replicated.
        weights: shards in compute dtype that units are gathered from, beside masters that rest elsewhere.
        masters: master shards; 0 where they are views of replicated parameters.
        gradients: accumulated gradients, full or sharded.
        optimizer: optimizer state of the rank's own elements.
        slots: for unsharded parameters; on an accelerator also for shards that are fetched from host memory ahead of
            their gather.
        gradient_slots: for gradients on their way to the reduce-scatter.
        transport: receive buffers of the reduce-scatter.
        raw_gradients: gradients in memory of autograd's own, before they are copied; 0 at rest.
        temporaries: what the optimizer's step computes with; 0 at rest.
    """

    parameters: int
    weights: int = 0
    masters: int
    gradients: int
    optimizer: int
    slots: int = 0
    gradient_slots: int = 0
    transport: int = 0
    raw_gradients: int = 0
    temporaries: int = 0


@dataclass(frozen=True, kw_only=True)
class HostBytes(_Categories):
    """Bytes that offloading keeps in host memory on one rank, by category. All 0 without it.

    Attributes:
        weights: shards in compute dtype that units are gathered from, beside masters of another dtype.
        masters: master shards.
        gradients: reduced gradient shards.
        optimizer: optimizer state of the rank's own elements.
        buffers: what bytes on their way go through: the pool for files, shards that are read ahead of their gather, and
            on an accelerator gradients that are added to others and weights that are cast.
    """

    weights: int
    masters: int
    gradients: int
    optimizer: int
    buffers: int


@dataclass(frozen=True, kw_only=True)
class DiskBytes(_Categories):
    """Bytes that offloading keeps in the files of one rank, by category, in whole pages. All 0 without it.

    Attributes:
        weights: shards in compute dtype that units are gathered from, beside masters of another dtype.
        masters: master shards.
        optimizer: optimizer state, of whole shards.
    """

    weights: int
    masters: int
    optimizer: int


def expected_memory(
    plan: ZeroPlan,
    *,
    rank: int,
    optimizer_tensors: int,
    training: bool,
    receive_buffer: bool,
    accelerator: bool = False,
    whole: bool = False,
) -> Memory:
    """Memory of ``rank`` at rest, on its device.

    Args:
        plan: the plan.
        rank: in the shard group. Ranks differ only in ``optimizer``: it counts real elements, not padding.
        optimizer_tensors: state tensors of a parameter's size: 2 for Adam, 1 for SGD with momentum, 0 for plain SGD.
        training: False: gradients, optimizer state and everything for reductions are absent.
        receive_buffer: whether the transport keeps a buffer as large as the largest bucket of each reduce dtype.
        accelerator: whether the device is not the host itself, so that copies between them go through buffers.
        whole: whether the optimizer needs whole parameters: their owner then keeps a copy of each, with its state.

    Raises:
        ValueError: if there is no such rank, or ``optimizer_tensors`` is negative.
    """
    layouts, trained = _looked_up(plan, rank, optimizer_tensors, training)
    stepped = [layout for layout in trained if plan.rest_of(layout).state is Tier.DEVICE]
    replicated = not plan.placement.shards_parameters
    return Memory(
        parameters=sum(layout.numel * layout.compute_dtype.itemsize for layout in layouts) if replicated else 0,
        weights=_weights(plan, layouts, Tier.DEVICE),
        masters=sum(
            _master_nbytes(layout)
            for layout in layouts
            if plan.rest_of(layout).master is Tier.DEVICE and not (replicated and layout.compute_dtype == layout.dtype)
        ),
        gradients=sum(_device_gradient_nbytes(plan, layout) for layout in trained),
        optimizer=(1 + optimizer_tensors) * whole_nbytes(plan, stepped, rank)
        if whole
        else optimizer_tensors * _owned(plan, trained, Tier.DEVICE, rank),
        slots=sum(slot.nbytes for slot in plan.slots)
        + (FETCH_UNITS * fetch_nbytes(plan) if accelerator and isinstance(plan.offload, HostOffload) else 0),
        gradient_slots=sum(slot.nbytes for slot in plan.gradient_slots) if training else 0,
        transport=_transport_nbytes(trained) if receive_buffer and plan.world_size > 1 else 0,
    )


def fullest_rank(plan: ZeroPlan, *, whole: bool) -> int:
    """The rank with most optimizer state, the first of equals. Everything else is the same on all ranks.

    Args:
        plan: the plan.
        whole: whether the optimizer needs whole parameters.
    """
    layouts = [layout for unit in plan.units for layout in unit.layouts if layout.trainable]
    held = [0] * plan.world_size
    if whole:
        for owner, nbytes in _owners(plan, layouts):
            held[owner] += nbytes
        return held.index(max(held))
    more = [0] * (plan.world_size + 1)  # than the rank before, by shards that one parameter fills
    for layout in layouts:
        shard, itemsize = layout.shard_numel, layout.dtype.itemsize
        for spec, offset in zip(layout.parameters, layout.offsets, strict=True):
            if not spec.numel:
                continue
            first, last = offset // shard, (offset + spec.numel - 1) // shard
            held[first] += itemsize * (min(offset + spec.numel, (first + 1) * shard) - offset)
            if last > first:
                held[last] += itemsize * (offset + spec.numel - last * shard)
                more[first + 1] += itemsize * shard
                more[last] -= itemsize * shard
    totals = [nbytes + filled for nbytes, filled in zip(held, accumulate(more), strict=False)]
    return totals.index(max(totals))


def whole_nbytes(plan: ZeroPlan, layouts: Sequence[FlatLayout], rank: int) -> int:
    """Bytes of the whole parameters that ``rank`` owns, for an optimizer that needs them."""
    return sum(nbytes for owner, nbytes in _owners(plan, layouts) if owner == rank)


def _owners(plan: ZeroPlan, layouts: Sequence[FlatLayout]) -> list[tuple[int, int]]:
    """Of each parameter the rank that owns it, and its bytes."""
    held = [(spec.numel, layout.dtype.itemsize) for layout in layouts for spec in layout.parameters]
    if not plan.placement.shards_parameters:
        held.reverse()  # buckets are in backward order, and a tie goes to the first parameter
    owners = deal_out([numel for numel, _ in held], plan.world_size)
    return [(owner, numel * itemsize) for (numel, itemsize), owner in zip(held, owners, strict=True)]


def fetch_nbytes(plan: ZeroPlan) -> int:
    """Bytes of the largest unit's shards that rest elsewhere than where they are gathered, each in whole pages."""
    if not plan.placement.shards_parameters:
        return 0
    sizes = []
    for unit in plan.units:
        rests = [(layout, plan.rest_of(layout)) for layout in unit.layouts]
        sizes.append(
            sum(
                align_up(layout.shard_numel * layout.compute_dtype.itemsize, PAGE_NBYTES)
                for layout, rest in rests
                if (rest.master if rest.weights is None else rest.weights) is not Tier.DEVICE
            )
        )
    return max(sizes, default=0)


def expected_host_memory(
    plan: ZeroPlan, *, rank: int, optimizer_tensors: int, training: bool, accelerator: bool = False
) -> HostBytes:
    """What rests in the host memory of ``rank`` because it is offloaded. Arguments as for ``expected_memory``.

    Raises:
        ValueError: if there is no such rank, or ``optimizer_tensors`` is negative.
    """
    layouts, trained = _looked_up(plan, rank, optimizer_tensors, training)
    pool = int(plan.offload.buffer_mib * 2**20) if isinstance(plan.offload, NvmeOffload) else 0
    ahead = FETCH_UNITS * fetch_nbytes(plan) if isinstance(plan.offload, NvmeOffload) else 0
    return HostBytes(
        weights=_weights(plan, layouts, Tier.HOST),
        masters=sum(_master_nbytes(layout) for layout in layouts if plan.rest_of(layout).master is Tier.HOST),
        gradients=sum(_master_nbytes(layout) for layout in trained if plan.rest_of(layout).gradients is Tier.HOST),
        optimizer=optimizer_tensors * _owned(plan, trained, Tier.HOST, rank),
        buffers=pool + ahead + (_staging(plan) if accelerator and training else 0),
    )


def expected_disk(plan: ZeroPlan, *, rank: int, optimizer_tensors: int, training: bool) -> DiskBytes:
    """What rests in the files of ``rank``. Arguments as for ``expected_memory``.

    Raises:
        ValueError: if there is no such rank, or ``optimizer_tensors`` is negative.
    """
    layouts, trained = _looked_up(plan, rank, optimizer_tensors, training)
    return DiskBytes(
        weights=_weights(plan, layouts, Tier.DISK),
        masters=sum(
            align_up(_master_nbytes(layout), PAGE_NBYTES)
            for layout in layouts
            if plan.rest_of(layout).master is Tier.DISK
        ),
        optimizer=optimizer_tensors
        * sum(
            align_up(_master_nbytes(layout), PAGE_NBYTES)
            for layout in trained
            if plan.rest_of(layout).state is Tier.DISK and any(part.numel for part in layout.slices(rank))
        ),
    )


def staging_nbytes(plan: ZeroPlan) -> tuple[int, int]:
    """Size of a staging buffer for gradients from an accelerator, and of one for weights to it."""
    layouts = [layout for unit in plan.units for layout in unit.layouts if layout.trainable]
    moved = [layout for layout in layouts if plan.rest_of(layout).gradients is Tier.HOST]
    gradients = max((layout.shard_numel * layout.reduce_dtype.itemsize for layout in moved), default=0)
    cast = [
        layout.shard_numel * layout.compute_dtype.itemsize for layout in moved if layout.dtype != layout.compute_dtype
    ]
    return gradients, min(CAST_NBYTES, max(cast, default=0))


def _staging(plan: ZeroPlan) -> int:
    return STAGING_BUFFERS * sum(align_up(nbytes, PAGE_NBYTES) for nbytes in staging_nbytes(plan))


def _looked_up(
    plan: ZeroPlan, rank: int, optimizer_tensors: int, training: bool
) -> tuple[list[FlatLayout], list[FlatLayout]]:
    """All layouts, and those that are trained."""
    if not 0 <= rank < plan.world_size:
        raise ValueError(f"There is no rank {rank} in a shard group of {plan.world_size}.")
    if optimizer_tensors < 0:
        raise ValueError(f"optimizer_tensors must be 0 or more, got {optimizer_tensors}.")
    layouts = [layout for unit in plan.units for layout in unit.layouts]
    return layouts, [layout for layout in layouts if layout.trainable and training]


def _master_nbytes(layout: FlatLayout) -> int:
    return layout.shard_numel * layout.dtype.itemsize


def _weights(plan: ZeroPlan, layouts: Iterable[FlatLayout], tier: Tier) -> int:
    unit = PAGE_NBYTES if tier is Tier.DISK else 1
    return sum(
        align_up(layout.shard_numel * layout.compute_dtype.itemsize, unit)
        for layout in layouts
        if plan.rest_of(layout).weights is tier
    )


def _owned(plan: ZeroPlan, layouts: Iterable[FlatLayout], tier: Tier, rank: int) -> int:
    """Bytes of one state tensor for every element that the rank owns, of layouts whose state rests there."""
    return sum(
        layout.dtype.itemsize * sum(part.numel for part in layout.slices(rank))
        for layout in layouts
        if plan.rest_of(layout).state is tier
    )


def _device_gradient_nbytes(plan: ZeroPlan, layout: FlatLayout) -> int:
    shard = _master_nbytes(layout) if plan.rest_of(layout).gradients is Tier.DEVICE else 0
    if plan.placement.shards_gradients:
        return shard
    # The full local gradients; the averaged shard is a part of them unless the optimizer needs another dtype.
    full = layout.numel * layout.reduce_dtype.itemsize
    return full if layout.reduce_dtype == layout.dtype else full + shard


def _transport_nbytes(layouts: Iterable[FlatLayout]) -> int:
    largest: dict[object, int] = {}
    for layout in layouts:
        nbytes = layout.numel * layout.reduce_dtype.itemsize
        largest[layout.reduce_dtype] = max(largest.get(layout.reduce_dtype, 0), nbytes)
    return sum(largest.values())
