"""What one rank holds at rest after a training step, computed from the plan. Activations are not in it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from lightning_zero.plan.flat import FlatLayout

if TYPE_CHECKING:
    from lightning_zero.plan.plan import ZeroPlan


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one rank, by category.

    Attributes:
        parameters: full flat buffers in compute dtype, where parameters are replicated.
        masters: master shards; 0 where they are views of replicated parameters.
        gradients: accumulated gradients, full or sharded.
        optimizer: optimizer state of the rank's own elements.
        slots: for unsharded parameters.
        gradient_slots: for gradients on their way to the reduce-scatter.
        transport: receive buffers of the reduce-scatter.
    """

    parameters: int
    masters: int
    gradients: int
    optimizer: int
    slots: int
    gradient_slots: int
    transport: int

    @property
    def total(self) -> int:
        """The sum of all categories."""
        return sum(nbytes for _, nbytes in self.items())

    def items(self) -> tuple[tuple[str, int], ...]:
        """``(category, bytes)`` for each category, without the total."""
        return tuple((field.name, getattr(self, field.name)) for field in fields(self))


def expected_memory(
    plan: ZeroPlan, *, rank: int, optimizer_tensors: int, training: bool, receive_buffer: bool
) -> Memory:
    """Memory of ``rank`` at rest.

    Args:
        plan: the plan.
        rank: in the shard group. Ranks differ only in ``optimizer``: it counts real elements, not padding.
        optimizer_tensors: state tensors of a parameter's size: 2 for Adam, 1 for SGD with momentum, 0 for plain SGD.
        training: False: gradients, optimizer state and everything for reductions are absent.
        receive_buffer: whether the transport keeps a buffer as large as the largest bucket of each reduce dtype.

    Raises:
        ValueError: if there is no such rank, or ``optimizer_tensors`` is negative.
    """
    if not 0 <= rank < plan.world_size:
        raise ValueError(f"There is no rank {rank} in a shard group of {plan.world_size}.")
    if optimizer_tensors < 0:
        raise ValueError(f"optimizer_tensors must be 0 or more, got {optimizer_tensors}.")
    layouts = [layout for unit in plan.units for layout in unit.layouts]
    trainable = [layout for layout in layouts if layout.trainable] if training else []
    replicated = not plan.placement.shards_parameters
    return Memory(
        parameters=sum(layout.numel * layout.compute_dtype.itemsize for layout in layouts) if replicated else 0,
        masters=sum(
            layout.shard_numel * layout.dtype.itemsize
            for layout in layouts
            if not (replicated and layout.compute_dtype == layout.dtype)
        ),
        gradients=sum(_gradient_nbytes(layout, plan.placement.shards_gradients) for layout in trainable),
        optimizer=optimizer_tensors * sum(_owned_nbytes(layout, rank) for layout in trainable),
        slots=sum(slot.nbytes for slot in plan.slots),
        gradient_slots=sum(slot.nbytes for slot in plan.gradient_slots) if training else 0,
        transport=_transport_nbytes(trainable) if receive_buffer and plan.world_size > 1 else 0,
    )


def _gradient_nbytes(layout: FlatLayout, sharded: bool) -> int:
    shard = layout.shard_numel * layout.dtype.itemsize
    if sharded:
        return shard
    # The full local gradients; the averaged shard is a part of them unless the optimizer needs another dtype.
    full = layout.numel * layout.reduce_dtype.itemsize
    return full if layout.reduce_dtype == layout.dtype else full + shard


def _owned_nbytes(layout: FlatLayout, rank: int) -> int:
    return layout.dtype.itemsize * sum(part.numel for part in layout.slices(rank))


def _transport_nbytes(layouts: Iterable[FlatLayout]) -> int:
    largest: dict[object, int] = {}
    for layout in layouts:
        nbytes = layout.numel * layout.reduce_dtype.itemsize
        largest[layout.reduce_dtype] = max(largest.get(layout.reduce_dtype, 0), nbytes)
    return sum(largest.values())
