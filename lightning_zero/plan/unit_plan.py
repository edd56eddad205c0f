"""One unit of a plan: its flat buffers and the slots they use."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_zero.plan.flat import FlatLayout, ParameterSpec
from lightning_zero.plan.slots import pack

__all__ = ["UnitPlan"]


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
    def slot_offsets(self) -> tuple[int, ...]:
        """Byte offset of each of ``layouts`` in the unit's slot."""
        return pack((layout.numel, layout.compute_dtype) for layout in self.layouts)[0]

    @property
    def slot_nbytes(self) -> int:
        """Bytes that the unsharded parameters take in compute dtype."""
        return pack((layout.numel, layout.compute_dtype) for layout in self.layouts)[1]

    @property
    def gradient_slot_offsets(self) -> tuple[int, ...]:
        """Byte offset of each of ``trainable_layouts`` in the unit's gradient slot."""
        return pack((layout.numel, layout.reduce_dtype) for layout in self.trainable_layouts)[0]

    @property
    def gradient_slot_nbytes(self) -> int:
        """Bytes that the unit's gradients take in reduce dtype."""
        return pack((layout.numel, layout.reduce_dtype) for layout in self.trainable_layouts)[1]
