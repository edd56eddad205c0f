"""The plan: every decision about who holds what, made once, before the first tensor is allocated.

[Note: slots]

A slot is a reusable byte buffer, like a direct-mapped cache line: a unit always uses the same slot, so the views that
autograd saved in forward are valid again once the unit is gathered again in backward. Units that compute at the same
time (a unit and those nested in it) must never share a slot, hence no slot is shared between depths. Units that follow
one another should not, so that one can be gathered while the other computes; those further apart do, whatever their
sizes: embedding and head of a language model have one slot, and in between blocks use it too.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import nn

from lightning_zero.config import (
    Offload,
    OffloadLike,
    Placement,
    Residence,
    Tier,
    UnitsLike,
    check_whole,
    validate_bucket_mib,
    validate_offload,
    validate_prefetch,
    validate_units,
)
from lightning_zero.errors import some
from lightning_zero.plan.buckets import BufferSpec, limit_bucket, make_buckets, sent_buffers
from lightning_zero.plan.layout import (
    ALIGNMENT,
    PAGE_NBYTES,
    DtypeRules,
    FlatLayout,
    ParameterSpec,
    Rest,
    align_up,
    rest_of,
)
from lightning_zero.plan.tree import ModuleTree, refuse_modules
from lightning_zero.plan.units import UnitSpec, find_named, find_units, names_inside

__all__ = [
    "MIXED_DTYPES",
    "TRUE_DTYPES",
    "FETCH_UNITS",
    "KEPT_NBYTES",
    "STAGING_BUFFERS",
    "Plan",
    "SlotPlan",
    "UnitPlan",
    "assign_slots",
    "pack",
]

TRUE_DTYPES = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}
"""What everything is in, by the names of Lightning's precisions; in ``32-true`` it stays as it is."""

MIXED_DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""What modules compute in, with masters in ``float32``."""

FETCH_UNITS = 2
"""Units whose shards may be on their way from host memory or files, or have arrived, ahead of their gather."""

STAGING_BUFFERS = 2
"""Host buffers for each direction, where the host computes for what travels to or from an accelerator: gradients that
are added to others, and weights that are cast."""

KEPT_NBYTES = 256 * 2**10
"""A buffer of fewer bytes stays on a CPU from step to step: the views of it are worth more than its memory."""

CAST_NBYTES = 16 * 2**20
"""Bytes of weights that are cast at a time on their way to an accelerator."""

AnyPlan = TypeVar("AnyPlan", bound="Plan")


@dataclass(frozen=True)
class SlotPlan:
    """One slot: its place in the plan's slots, and its bytes, those of the largest unit assigned to it."""

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
    """Parameters that are gathered and reduced together."""

    index: int  # its place in the plan's units
    name: str  # the module's path ("" for the root); "bucket 0", ... for a gradient bucket.
    module: str | None  # the path of the module whose call gathers the unit; None for a bucket
    depth: int  # how many units may be computing around it; 0 for the root and for buckets
    ancestors: tuple[int, ...]  # indices of those units, the root included, ascending
    # One flat buffer per (dtype, compute dtype, trainable); exactly one for a bucket, none for an empty root.
    layouts: tuple[FlatLayout, ...]
    slot: int | None = None  # that its unsharded parameters use; None for a bucket
    # That its gradients use until they are reduced; None without trainable parameters, and where gradients are
    # replicated.
    gradient_slot: int | None = None

    @property
    def parameters(self) -> tuple[ParameterSpec, ...]:
        """Of all layouts, in layout order."""
        return tuple(spec for layout in self.layouts for spec in layout.parameters)

    @property
    def trainable_layouts(self) -> tuple[FlatLayout, ...]:
        """The layouts that have gradients."""
        return tuple(layout for layout in self.layouts if layout.trainable)

    @property
    def slot_nbytes(self) -> int:
        """Bytes that the unsharded parameters take in compute dtype."""
        return pack((layout.numel, layout.compute_dtype) for layout in self.layouts)[1]

    @property
    def gradient_slot_nbytes(self) -> int:
        """Bytes that the unit's gradients take in reduce dtype."""
        return pack((layout.numel, layout.reduce_dtype) for layout in self.trainable_layouts)[1]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Who holds what, in what order it moves, and how many bytes that takes. Numbers only; equal on all ranks.

    Attributes:
        placement: what is replicated and what is sharded between uses.
        world_size: of all ranks, which are one shard group or, with ``placement.span``, several that hold the same.
        units: sharded parameters: the root first, then units in registration order. Replicated parameters: gradient
            buckets in backward order, frozen ones last.
        slots: for unsharded parameters; none where parameters are replicated.
        gradient_slots: for gradients on their way to the reduce-scatter; none where gradients are replicated.
        prefetch: units gathered ahead of the one computing.
        root: index of the root unit; None where parameters are replicated.
        offload: what rests on the host or in files; None: everything rests on the device. Its path and the sizes of its
            buffers may differ between ranks, and are the only part of a plan that may.
        buffers: of the module, as rank 0 sends them to the others before every step; none where it does not. Not part
            of the fingerprint: they may change in the middle of a run, and are compared whenever they are sent.

    Raises:
        ValueError: if the parts do not prove each other.
    """

    placement: Placement
    world_size: int
    units: tuple[UnitPlan, ...]
    slots: tuple[SlotPlan, ...]
    gradient_slots: tuple[SlotPlan, ...]
    prefetch: int
    root: int | None
    offload: Offload | None = None
    buffers: tuple[BufferSpec, ...] = ()

    def __post_init__(self) -> None:
        validate_offload(self.offload, self.placement)
        if self.world_size % self.group_size:
            raise ValueError(f"{self.world_size} ranks cannot be split into shard groups of {self.group_size}.")
        if self.root != (0 if self.placement.shards_parameters else None):
            raise ValueError("A plan has a root unit, its first, exactly where parameters are sharded.")
        for index, unit in enumerate(self.units):
            self._prove_unit(index, unit)
        if twice := [name for name, count in Counter(spec.name for spec in self.parameters).items() if count > 1]:
            raise ValueError(f"Units hold parameters that the plan already has: {some(twice)}.")
        for slots in (self.slots, self.gradient_slots):
            if [slot.index for slot in slots] != list(range(len(slots))):
                raise ValueError("Slots must be numbered in order.")

    def _prove_unit(self, index: int, unit: UnitPlan) -> None:
        if unit.index != index:
            raise ValueError(f"Unit '{unit.name}' says index {unit.index} but is number {index} of the plan.")
        if any(layout.world_size != self.group_size for layout in unit.layouts):
            raise ValueError(f"Unit '{unit.name}' has a layout for another world size than {self.group_size}.")
        if any(not 0 <= ancestor < len(self.units) or ancestor == index for ancestor in unit.ancestors):
            raise ValueError(f"Unit '{unit.name}' has ancestors {unit.ancestors} that are no other units of the plan.")
        gathered = self.placement.shards_parameters
        if (unit.module is not None) != gathered or (unit.slot is not None) != gathered:
            raise ValueError(f"Unit '{unit.name}' needs a module and a slot exactly where parameters are sharded.")
        reduced = self.placement.shards_gradients and bool(unit.trainable_layouts)
        if (unit.gradient_slot is not None) != reduced:
            raise ValueError(f"Unit '{unit.name}' needs a gradient slot exactly where it has gradients to shard.")
        if len(unit.layouts) != 1 and not gathered:
            raise ValueError(f"Bucket '{unit.name}' must have exactly one layout, has {len(unit.layouts)}.")
        for kind, slots, slot, nbytes in (
            ("slot", self.slots, unit.slot, unit.slot_nbytes),
            ("gradient slot", self.gradient_slots, unit.gradient_slot, unit.gradient_slot_nbytes),
        ):
            if slot is not None and not (0 <= slot < len(slots) and nbytes <= slots[slot].nbytes):
                raise ValueError(f"Unit '{unit.name}' does not fit into {kind} {slot}: it needs {nbytes} bytes.")
        for above in unit.ancestors if unit.slot is not None else ():
            if self.units[above].slot == unit.slot:
                raise ValueError(
                    f"Unit '{unit.name}' shares slot {unit.slot} with '{self.units[above].name}' around it."
                )

    @property
    def group_size(self) -> int:
        """Ranks that share each flat buffer: the shard group."""
        return self.placement.span or self.world_size

    @property
    def parameters(self) -> tuple[ParameterSpec, ...]:
        """Of all units, in plan order."""
        return tuple(spec for unit in self.units for spec in unit.parameters)

    @property
    def numel(self) -> int:
        """Real elements of all units, without gaps and padding."""
        return sum(layout.parameter_numel for layout in self.layouts)

    @property
    def trainable_numel(self) -> int:
        """Real elements of trainable parameters."""
        return sum(layout.parameter_numel for layout in self.trainable_layouts)

    @property
    def layouts(self) -> tuple[FlatLayout, ...]:
        """Of all units, in plan order."""
        return tuple(layout for unit in self.units for layout in unit.layouts)

    @property
    def trainable_layouts(self) -> tuple[FlatLayout, ...]:
        """Of all units, those that have gradients."""
        return tuple(layout for layout in self.layouts if layout.trainable)

    def rest_of(self, layout: FlatLayout) -> Rest:
        """Where the bytes of one of the plan's layouts rest between uses."""
        return rest_of(layout, self.placement, self.offload)

    @property
    def fetch_nbytes(self) -> int:
        """Bytes of the largest unit's shards that rest elsewhere than where they are gathered, each in whole pages."""
        if not self.placement.shards_parameters:
            return 0
        return max(
            sum(
                align_up(layout.shard_numel * layout.compute_dtype.itemsize, PAGE_NBYTES)
                for layout in unit.layouts
                if self.rest_of(layout).gathered_from is not Tier.DEVICE
            )
            for unit in self.units
        )

    @property
    def staging_nbytes(self) -> tuple[int, int]:
        """Size of a staging buffer for gradients from an accelerator, and of one for weights to it."""
        gradients = cast = 0
        for layout in self.trainable_layouts:
            if self.rest_of(layout).gradients is Tier.HOST:
                gradients = max(gradients, layout.shard_numel * layout.reduce_dtype.itemsize)
                if layout.dtype != layout.compute_dtype:
                    cast = max(cast, layout.shard_numel * layout.compute_dtype.itemsize)
        return gradients, min(CAST_NBYTES, cast)

    def summary_lines(self) -> tuple[str, ...]:
        """The plan as canonical text: settings, then each unit, layout and parameter on a line of its own.

        Two plans that ranks may run together have equal lines, and only those, so the first line that differs between
        ranks names the cause. Paths and sizes of an offload's buffers are a machine's own matter, and not in it.
        """
        placement, offload = self.placement, self.offload
        offloaded = "none"
        if offload is not None:
            offloaded = f"{offload.tier.value} (optimizer {offload.optimizer}, parameters {offload.parameters})"
        lines = [
            f"plan: world size {self.world_size}, parameters {placement.parameters.value}, "
            f"gradients {placement.gradients.value}, optimizer {placement.optimizer.value}, "
            f"prefetch {self.prefetch}, root {self.root}, offload {offloaded}"
            + (f", shard groups of {self.group_size}" if self.group_size != self.world_size else "")
        ]
        for unit in self.units:
            lines.append(
                f"unit {unit.index}: {unit.name!r}, module {unit.module!r}, depth {unit.depth}, "
                f"ancestors {unit.ancestors}, slot {unit.slot}, gradient slot {unit.gradient_slot}"
            )
            for number, layout in enumerate(unit.layouts):
                lines.append(
                    f"unit {unit.index} layout {number}: {layout.numel} elements, {layout.dtype}, computed in "
                    f"{layout.compute_dtype}, reduced in {layout.reduce_dtype}, trainable {layout.trainable}"
                )
                lines += [
                    f"parameter {spec.name!r}: aliases {spec.aliases}, shape {spec.shape}, {spec.dtype}, "
                    f"trainable {spec.trainable}, unit {unit.index} layout {number} offset {offset}"
                    for spec, offset in zip(layout.parameters, layout.offsets, strict=True)
                ]
        for kind, slots in (("slot", self.slots), ("gradient slot", self.gradient_slots)):
            lines += [f"{kind} {slot.index}: {slot.nbytes} bytes" for slot in slots]
        return tuple(lines)

    def fingerprint(self) -> str:
        """sha256 over ``summary_lines()``, as 64 hexadecimal digits."""
        return hashlib.sha256("\n".join(self.summary_lines()).encode()).hexdigest()

    def collecting_apart(self) -> frozenset[int]:
        """Indices of the units whose gradients are collected in a slot that no other unit has."""
        users = Counter(unit.gradient_slot for unit in self.units)
        return frozenset(u.index for u in self.units if u.gradient_slot is not None and users[u.gradient_slot] == 1)

    @classmethod
    def build(
        cls: type[AnyPlan],
        module: nn.Module,
        *,
        placement: Placement | None = None,
        stage: int = 3,
        world_size: int,
        units: UnitsLike | None = None,
        bucket_mib: float = 100.0,
        prefetch: int = 1,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        full_precision: Sequence[str] = (),
        offload: OffloadLike = None,
        broadcast_buffers: bool = True,
    ) -> AnyPlan:
        """Turn a module, settings and a world size into a plan. Needs no process group, no device and no data.

        Args:
            module: the root; may be on the meta device.
            placement: what is sharded; None: that of ``stage``. One rank alone may keep parameters whole all the same.
            stage: used only if ``placement`` is None.
            world_size: of all ranks.
            units: classes whose modules become units, or their names; None: found automatically. Checked in any stage.
            bucket_mib: size of a gradient bucket in MiB of the reduce dtype. Used only where parameters are replicated.
            prefetch: units gathered ahead of the one computing; 0 switches it off.
            param_dtype: compute dtype of floating parameters, except those a batch norm holds; None: their own.
            reduce_dtype: of floating gradients; None: the parameters' own.
            full_precision: class names of modules whose parameters are computed with in their own dtype.
            offload: what rests on the host or in files; None: nothing.
            broadcast_buffers: whether rank 0 sends its buffers to the others.

        Raises:
            ValueError: for bad settings and class names, and what cannot be laid out (``plan.tree``), naming it.
        """
        check_whole("world_size", world_size, least=1, unit="ranks")
        bucket_nbytes = max(int(validate_bucket_mib(bucket_mib) * 2**20), 1)
        tree = ModuleTree(module)
        validate_prefetch(prefetch)
        refuse_modules(module, world_size)
        keep = tree.in_batch_norm() | names_inside(tree, full_precision)
        dtypes = DtypeRules(param_dtype=param_dtype, reduce_dtype=reduce_dtype, keep=keep)
        chosen = placement if placement is not None else Placement.from_stage(stage)
        offload = validate_offload(offload, chosen)
        alone = offload is None and (chosen.span or world_size) == 1
        if alone and not any(dtypes.narrows(held.spec) for held in tree.parameters):
            # Its shard is the whole, and what the module computes with: no slot, no gather, no hook around a unit.
            chosen = replace(chosen, parameters=Residence.REPLICATED)
        specs = _specs(tree, chosen, units, bucket_nbytes, dtypes)
        laid_out, slots, gradient_slots = _lay_out(specs, chosen, chosen.span or world_size, dtypes, prefetch)
        return cls(
            placement=chosen,
            world_size=world_size,
            units=laid_out,
            slots=slots,
            gradient_slots=gradient_slots,
            prefetch=prefetch,
            root=0 if chosen.shards_parameters else None,
            offload=offload,
            buffers=tuple(BufferSpec.of(*named) for named in sent_buffers(module)) if broadcast_buffers else (),
        )


def _specs(
    tree: ModuleTree, placement: Placement, units: UnitsLike | None, bucket_nbytes: int, dtypes: DtypeRules
) -> tuple[UnitSpec, ...]:
    """Units of modules, or buckets where parameters are replicated."""
    if placement.shards_parameters:
        return find_units(tree, validate_units(units))
    find_named(tree, validate_units(units) or ())  # a name that nothing has is a mistake in every stage
    parameters = [held.spec for held in tree.parameters]
    limit = limit_bucket(parameters, bucket_nbytes, dtypes, beside=placement.shards_gradients)
    buckets = make_buckets(parameters, limit, dtypes)
    return tuple(UnitSpec(f"bucket {index}", bucket, 0, ()) for index, bucket in enumerate(buckets))


def _lay_out(
    specs: Sequence[UnitSpec], placement: Placement, group_size: int, dtypes: DtypeRules, prefetch: int
) -> tuple[tuple[UnitPlan, ...], tuple[SlotPlan, ...], tuple[SlotPlan, ...]]:
    """Flat buffers for units (or for buckets where parameters are replicated), their slots, and gradient slots."""
    index_of = {spec.name: index for index, spec in enumerate(specs)}
    units = [
        UnitPlan(
            index=index,
            name=spec.name,
            module=spec.name if placement.shards_parameters else None,
            depth=spec.depth,
            ancestors=tuple(index_of[name] for name in spec.ancestors),
            layouts=_layouts(spec.parameters, group_size, dtypes),
        )
        for index, spec in enumerate(specs)
    ]
    parameters: list[int | None] = [unit.slot_nbytes if placement.shards_parameters else None for unit in units]
    gradients = [(unit.gradient_slot_nbytes or None) if placement.shards_gradients else None for unit in units]
    depths = [unit.depth for unit in units] if placement.shards_parameters else None
    assigned, slots = assign_slots(parameters, depths, prefetch)
    apart = 1 if depths is None else min(prefetch, 1)  # one fills while the other is reduced
    gradient_assigned, gradient_slots = assign_slots(gradients, depths, apart)
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


def assign_slots(
    nbytes: Sequence[int | None], depths: Sequence[int] | None, apart: int
) -> tuple[tuple[int | None, ...], tuple[SlotPlan, ...]]:
    """Which slot each unit uses, and the slots, numbered in order of first use. See [Note: slots].

    Large units come first, and each takes the first slot that no unit near it has.

    Args:
        nbytes: that each unit needs; None: the unit needs no slot.
        depths: of each unit: none shares a slot with one of another depth; None: all are of one.
        apart: units of one depth that are so many places from each other, or fewer, do not share a slot.
    """
    levels: dict[int, list[int]] = {}
    for unit, size in enumerate(nbytes):
        if size is not None:
            levels.setdefault(0 if depths is None else depths[unit], []).append(unit)
    sharing: list[list[int]] = []
    for level in levels.values():
        slots: list[dict[int, int]] = []  # the units of each slot, by their places in the level
        # By size class, so that neighbours of nearly one size take turns.
        for place in sorted(range(len(level)), key=lambda place: -max((nbytes[level[place]] or 0) - 1, 0).bit_length()):
            near = range(place - apart, place + apart + 1)
            slot = next((slot for slot in slots if slot.keys().isdisjoint(near)), None)
            if slot is None:
                slots.append(slot := {})
            slot[place] = level[place]
        sharing += [sorted(slot.values()) for slot in slots]
    sharing.sort()
    assigned = {unit: index for index, users in enumerate(sharing) for unit in users}
    largest = (max(nbytes[unit] or 0 for unit in users) for users in sharing)
    slots_of = tuple(map(assigned.get, range(len(nbytes))))
    return slots_of, tuple(SlotPlan(index, size) for index, size in enumerate(largest))
