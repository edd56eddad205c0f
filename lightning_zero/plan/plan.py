"""The plan: every decision about who holds what, made once, before the first tensor is allocated.

[Note: where bytes rest]

Each layout's bytes rest in a tier of memory between uses: decided here from numbers, executed by the engine.

| layout | master | weights | gradients, state |
| --- | --- | --- | --- |
| not offloaded | device | the master | device |
| trained, optimizer offloaded, parameters replicated | host or disk | the full buffers | host; host or disk |
| trained, optimizer offloaded, parameters sharded | host or disk | a copy on the device | host; host or disk |
| the same with ``parameters=True`` | host or disk | the master, or a copy beside it in another dtype | same |
| frozen | with the weights, or as a trained one where the dtypes differ | as above | none |
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from lightning_zero.config import (
    Offload,
    Placement,
    Tier,
    validate_bucket_mib,
    validate_offload,
    validate_prefetch,
    validate_units,
)
from lightning_zero.plan.buckets import BufferSpec, make_buckets, sent_buffers
from lightning_zero.plan.layout import PAGE_NBYTES, DtypeRules, FlatLayout, ParameterSpec, align_up
from lightning_zero.plan.slots import SlotPlan, UnitPlan, lay_out
from lightning_zero.plan.tree import ModuleTree, refuse_modules
from lightning_zero.plan.units import UnitSpec, find_named, find_units

__all__ = ["FETCH_UNITS", "STAGING_BUFFERS", "Plan", "Rest", "rest_of"]

FETCH_UNITS = 2
"""Units whose shards may be on their way from host memory or files, or have arrived, ahead of their gather."""

STAGING_BUFFERS = 2
"""Host buffers for each direction, where the host computes for what travels to or from an accelerator: gradients that
are added to others, and weights that are cast."""

CAST_NBYTES = 16 * 2**20
"""Bytes of weights that are cast at a time on their way to an accelerator."""

AnyPlan = TypeVar("AnyPlan", bound="Plan")


@dataclass(frozen=True, kw_only=True)
class Rest:
    """Where one layout's bytes rest. See [Note: where bytes rest].

    Attributes:
        master: the shard that the optimizer updates, in the parameters' dtype.
        weights: a copy of it in the compute dtype, which units are gathered from; ``None``: there is none, the master
            (or the full buffer) is used.
        gradients: the reduced gradient shard.
        state: the optimizer's state.
    """

    master: Tier
    weights: Tier | None
    gradients: Tier
    state: Tier

    @property
    def offloaded(self) -> bool:
        """Whether the master is not on the device."""
        return self.master is not Tier.DEVICE


def rest_of(layout: FlatLayout, placement: Placement, offload: Offload | None) -> Rest:
    """Where the bytes of ``layout`` rest."""
    device = Rest(master=Tier.DEVICE, weights=None, gradients=Tier.DEVICE, state=Tier.DEVICE)
    if offload is None or (layout.trainable and not offload.optimizer):
        return device
    same = layout.dtype == layout.compute_dtype
    if not placement.shards_parameters:
        if not layout.trainable and (same or not offload.optimizer):
            return device  # the full buffer is all there is
        weights = None
    elif not layout.trainable and same:
        if not offload.parameters:
            return device
        weights = None
    elif offload.parameters:
        weights = None if same else offload.tier
    else:
        weights = Tier.DEVICE
    return Rest(master=offload.tier, weights=weights, gradients=Tier.HOST, state=offload.tier)


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
        seen: set[str] = set()
        for index, unit in enumerate(self.units):
            self._prove_unit(index, unit)
            names = [spec.name for spec in unit.parameters]
            twice = seen.intersection(names)
            if twice or len(set(names)) != len(names):
                raise ValueError(
                    f"Unit '{unit.name}' holds parameters that the plan already has: {sorted(twice) or names}."
                )
            seen.update(names)
        self._prove_slots()

    def _prove_unit(self, index: int, unit: UnitPlan) -> None:
        if unit.index != index:
            raise ValueError(f"Unit '{unit.name}' says index {unit.index} but is number {index} of the plan.")
        if any(layout.world_size != self.group_size for layout in unit.layouts):
            raise ValueError(
                f"Unit '{unit.name}' has a layout for another world size than the plan's {self.group_size}."
            )
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

    def _prove_slots(self) -> None:
        for unit in self.units:
            for kind, slots, index, nbytes in (
                ("slot", self.slots, unit.slot, unit.slot_nbytes),
                ("gradient slot", self.gradient_slots, unit.gradient_slot, unit.gradient_slot_nbytes),
            ):
                if index is not None and not (0 <= index < len(slots) and nbytes <= slots[index].nbytes):
                    raise ValueError(f"Unit '{unit.name}' does not fit into {kind} {index}: it needs {nbytes} bytes.")
            shared = [
                above for above in unit.ancestors if unit.slot is not None and self.units[above].slot == unit.slot
            ]
            if shared:
                raise ValueError(
                    f"Unit '{unit.name}' shares slot {unit.slot} with '{self.units[shared[0]].name}' around it."
                )
        for slots in (self.slots, self.gradient_slots):
            if [slot.index for slot in slots] != list(range(len(slots))):
                raise ValueError("Slots must be numbered in order.")

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
        """Real elements of all units."""
        return sum(unit.numel for unit in self.units)

    @property
    def trainable_numel(self) -> int:
        """Real elements of trainable parameters."""
        return sum(unit.trainable_numel for unit in self.units)

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

        def away(layout: FlatLayout) -> bool:
            rest = self.rest_of(layout)
            return (rest.master if rest.weights is None else rest.weights) is not Tier.DEVICE

        return max(
            (
                sum(
                    align_up(layout.shard_numel * layout.compute_dtype.itemsize, PAGE_NBYTES)
                    for layout in unit.layouts
                    if away(layout)
                )
                for unit in self.units
            ),
            default=0,
        )

    @property
    def staging_nbytes(self) -> tuple[int, int]:
        """Size of a staging buffer for gradients from an accelerator, and of one for weights to it."""
        moved = [layout for layout in self.trainable_layouts if self.rest_of(layout).gradients is Tier.HOST]
        gradients = [layout.shard_numel * layout.reduce_dtype.itemsize for layout in moved]
        cast = [
            layout.shard_numel * layout.compute_dtype.itemsize
            for layout in moved
            if layout.dtype != layout.compute_dtype
        ]
        return max(gradients, default=0), min(CAST_NBYTES, max(cast, default=0))

    def summary_lines(self) -> tuple[str, ...]:
        """The plan as canonical text: settings, then each unit, layout and parameter on a line of its own.

        Two plans that ranks may run together have equal lines, and only those, so the first line that differs between
        ranks names the cause.
        """
        return tuple(_summary(self))

    def fingerprint(self) -> str:
        """sha256 over ``summary_lines()``, as 64 hexadecimal digits."""
        return hashlib.sha256("\n".join(self.summary_lines()).encode()).hexdigest()

    @classmethod
    def build(
        cls: type[AnyPlan],
        module: nn.Module,
        *,
        placement: Placement | None = None,
        stage: int = 3,
        world_size: int,
        units: Sequence[str] | None = None,
        bucket_mib: float = 25.0,
        prefetch: int = 1,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        offload: Offload | None = None,
        broadcast_buffers: bool = True,
    ) -> AnyPlan:
        """Turn a module, settings and a world size into a plan. Needs no process group, no device and no data.

        Args:
            module: the root; may be on the meta device.
            placement: what is sharded; None: that of ``stage``.
            stage: used only if ``placement`` is None.
            world_size: of all ranks.
            units: class names whose modules become units; None: found automatically. Used only where parameters are
                sharded, and checked everywhere.
            bucket_mib: size of a gradient bucket in MiB of the reduce dtype. Used only where parameters are replicated.
            prefetch: units gathered ahead of the one computing; 0 switches it off.
            param_dtype: compute dtype of floating parameters, except those a batch norm holds; None: their own.
            reduce_dtype: reduction dtype of floating gradients; None: the parameters' own.
            offload: what rests on the host or in files; None: nothing.
            broadcast_buffers: whether rank 0 sends its buffers to the others.

        Raises:
            ValueError: for settings out of range or an ``offload`` that does not fit the placement, for rules in
                ``units`` that match nothing, and for what cannot be laid out (see ``plan.tree``), naming it.
        """
        if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
            raise ValueError(f"world_size must be a whole number of ranks, 1 or more, got {world_size!r}.")
        bucket_nbytes = max(int(validate_bucket_mib(bucket_mib) * 2**20), 1)
        rules = validate_units(units)
        chosen = placement if placement is not None else Placement.from_stage(stage)
        tree = ModuleTree.of(module)
        dtypes = DtypeRules(param_dtype=param_dtype, reduce_dtype=reduce_dtype, keep=tree.in_batch_norm())
        validate_prefetch(prefetch)
        validate_offload(offload, chosen)
        refuse_modules(module, sharded=chosen.shards_parameters, copied=param_dtype is not None)
        specs = find_units(tree, rules) if chosen.shards_parameters else _buckets(tree, rules, bucket_nbytes, dtypes)
        laid_out, slots, gradient_slots = lay_out(specs, chosen, chosen.span or world_size, dtypes, prefetch)
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


def _buckets(
    tree: ModuleTree, rules: Sequence[str] | None, bucket_nbytes: int, dtypes: DtypeRules
) -> tuple[UnitSpec, ...]:
    if rules is not None:
        find_named(tree, rules)  # a name that nothing has is a mistake in every stage
    buckets = make_buckets([held.spec for held in tree.parameters], bucket_nbytes, dtypes=dtypes)
    return tuple(UnitSpec(f"bucket {index}", bucket, 0, ()) for index, bucket in enumerate(buckets))


def _summary(plan: Plan) -> Iterator[str]:
    placement = plan.placement
    yield (
        f"plan: world size {plan.world_size}, parameters {placement.parameters.value}, "
        f"gradients {placement.gradients.value}, optimizer {placement.optimizer.value}, "
        f"prefetch {plan.prefetch}, root {plan.root}, offload {_offload_text(plan.offload)}"
        + (f", shard groups of {plan.group_size}" if plan.group_size != plan.world_size else "")
    )
    for unit in plan.units:
        yield (
            f"unit {unit.index}: {unit.name!r}, module {unit.module!r}, depth {unit.depth}, "
            f"ancestors {unit.ancestors}, slot {unit.slot}, gradient slot {unit.gradient_slot}"
        )
        for number, layout in enumerate(unit.layouts):
            yield (
                f"unit {unit.index} layout {number}: {layout.numel} elements, {layout.dtype}, computed in "
                f"{layout.compute_dtype}, reduced in {layout.reduce_dtype}, trainable {layout.trainable}"
            )
            for spec, offset in zip(layout.parameters, layout.offsets, strict=True):
                yield (
                    f"parameter {spec.name!r}: aliases {spec.aliases}, shape {spec.shape}, {spec.dtype}, "
                    f"trainable {spec.trainable}, unit {unit.index} layout {number} offset {offset}"
                )
    for kind, slots in (("slot", plan.slots), ("gradient slot", plan.gradient_slots)):
        for slot in slots:
            yield f"{kind} {slot.index}: {slot.nbytes} bytes"


def _offload_text(offload: Offload | None) -> str:
    """What ranks must agree on: not paths and sizes of buffers, which are a machine's own matter."""
    if offload is None:
        return "none"
    return f"{offload.tier.value} (optimizer {offload.optimizer}, parameters {offload.parameters})"
