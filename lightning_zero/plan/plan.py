"""The plan: every decision about who holds what, made once, before the first tensor is allocated."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lightning_zero.config import (
    Offload,
    Placement,
    validate_bucket_mib,
    validate_offload,
    validate_prefetch,
    validate_units,
)
from lightning_zero.plan.buckets import make_buckets
from lightning_zero.plan.buffers import BufferSpec, sent_buffers
from lightning_zero.plan.dtypes import DtypeRules
from lightning_zero.plan.flat import FlatLayout, ParameterSpec
from lightning_zero.plan.memory import (
    DiskBytes,
    HostBytes,
    Memory,
    expected_disk,
    expected_host_memory,
    expected_memory,
)
from lightning_zero.plan.optimizers import ADAM, OptimizerCost
from lightning_zero.plan.peak import at_peak
from lightning_zero.plan.report import describe, summary_lines
from lightning_zero.plan.resting import Rest, rest_of
from lightning_zero.plan.slots import SlotPlan, assign_pooled_slots, assign_ring_slots, pack
from lightning_zero.plan.traffic import Traffic, expected_traffic
from lightning_zero.plan.tree import ModuleTree
from lightning_zero.plan.unit_plan import UnitPlan
from lightning_zero.plan.units import UnitSpec, find_named, units_of
from lightning_zero.plan.unsupported import refuse_modules

GRADIENT_BUCKET_SLOTS = 2
"""Slots of the ring that sharded gradients of replicated parameters go through: one fills while the other is
reduced."""


@dataclass(frozen=True, kw_only=True)
class ZeroPlan:
    """Who holds what, in what order it moves, and how many bytes that takes. Numbers only; equal on all ranks.

    Attributes:
        placement: what is replicated and what is sharded between uses.
        world_size: of the shard group.
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
        if any(layout.world_size != self.world_size for layout in unit.layouts):
            raise ValueError(
                f"Unit '{unit.name}' has a layout for another world size than the plan's {self.world_size}."
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

    def summary_lines(self) -> tuple[str, ...]:
        """The plan as canonical text: settings, then each unit, layout and parameter on a line of its own.

        Two plans that ranks may run together have equal lines, and only those, so the first line that differs between
        ranks names the cause.
        """
        return summary_lines(self)

    def fingerprint(self) -> str:
        """sha256 over ``summary_lines()``, as 64 hexadecimal digits."""
        return hashlib.sha256("\n".join(self.summary_lines()).encode()).hexdigest()

    def rest_of(self, layout: FlatLayout) -> Rest:
        """Where the bytes of one of the plan's layouts rest between uses."""
        return rest_of(layout, self.placement, self.offload)

    def expected_traffic(self, *, micro_steps: int = 1) -> Traffic:
        """What one training step sends; see ``lightning_zero.plan.traffic``.

        Raises:
            ValueError: if ``micro_steps`` is less than 1.
        """
        return expected_traffic(self, micro_steps=micro_steps)

    def expected_memory(
        self,
        *,
        rank: int = 0,
        optimizer: OptimizerCost = ADAM,
        optimizer_tensors: int | None = None,
        training: bool = True,
        receive_buffer: bool = True,
        accelerator: bool = False,
        peak: bool = False,
    ) -> Memory:
        """What is on one rank's device after a training step; see ``lightning_zero.plan.memory``.

        Args:
            rank: in the shard group.
            optimizer: what it keeps and makes.
            optimizer_tensors: how many tensors it keeps for a parameter, where that is known better.
            training: False: gradients, optimizer state and everything for reductions are absent.
            receive_buffer: whether the transport keeps one. Not within one host, nor on an accelerator.
            accelerator: whether the device is one.
            peak: at the worst moment of a step instead of after it; see ``lightning_zero.plan.peak``.

        Raises:
            ValueError: if there is no such rank, or ``optimizer_tensors`` is negative.
        """
        rest = expected_memory(
            self,
            rank=rank,
            optimizer_tensors=optimizer.state if optimizer_tensors is None else optimizer_tensors,
            training=training,
            receive_buffer=receive_buffer,
            accelerator=accelerator,
            whole=optimizer.whole,
        )
        if not (peak and training):
            return rest
        return at_peak(self, rest, rank=rank, optimizer=optimizer, accelerator=accelerator)

    def expected_host_memory(
        self, *, rank: int = 0, optimizer_tensors: int = 2, training: bool = True, accelerator: bool = False
    ) -> HostBytes:
        """What offloading keeps in one rank's host memory; see ``lightning_zero.plan.memory``.

        Raises:
            ValueError: if there is no such rank, or ``optimizer_tensors`` is negative.
        """
        return expected_host_memory(
            self, rank=rank, optimizer_tensors=optimizer_tensors, training=training, accelerator=accelerator
        )

    def expected_disk(self, *, rank: int = 0, optimizer_tensors: int = 2, training: bool = True) -> DiskBytes:
        """What offloading keeps in one rank's files; see ``lightning_zero.plan.memory``.

        Raises:
            ValueError: if there is no such rank, or ``optimizer_tensors`` is negative.
        """
        return expected_disk(self, rank=rank, optimizer_tensors=optimizer_tensors, training=training)

    def describe(self, *, optimizer: OptimizerCost = ADAM, accelerator: bool = False) -> str:
        """The plan as a table for people: units, totals, traffic and memory with that optimizer, on such a device."""
        return describe(self, optimizer, accelerator)


def build_plan(
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
) -> ZeroPlan:
    """Turn a module, settings and a world size into a plan. Needs no process group, no device and no data.

    Args:
        module: the root; may be on the meta device.
        placement: what is sharded; None: that of ``stage``.
        stage: used only if ``placement`` is None.
        world_size: ranks of the shard group.
        units: class names whose modules become units; None: found automatically. Used only where parameters are
            sharded, and checked everywhere.
        bucket_mib: size of a gradient bucket in MiB of the reduce dtype. Used only where parameters are replicated.
        prefetch: units gathered ahead of the one computing; 0 switches it off.
        param_dtype: compute dtype of floating parameters, except those a batch norm holds; None: their own.
        reduce_dtype: reduction dtype of floating gradients; None: the parameters' own.
        offload: what rests on the host or in files; None: nothing.
        broadcast_buffers: whether rank 0 sends its buffers to the others.

    Raises:
        ValueError: for settings out of range or an ``offload`` that does not fit the placement, for rules in ``units``
            that match nothing, and for what cannot be laid out (see ``lightning_zero.plan.unsupported``), naming it.
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size must be a whole number of ranks, 1 or more, got {world_size!r}.")
    bucket_nbytes = max(int(validate_bucket_mib(bucket_mib) * 2**20), 1)
    rules = validate_units(units)
    chosen = placement if placement is not None else Placement.from_stage(stage)
    tree = ModuleTree.of(module)
    dtypes = DtypeRules(param_dtype=param_dtype, reduce_dtype=reduce_dtype, keep=tree.in_batch_norm())
    settings = _Settings(
        placement=chosen,
        world_size=world_size,
        prefetch=validate_prefetch(prefetch),
        dtypes=dtypes,
        offload=validate_offload(offload, chosen),
        buffers=tuple(BufferSpec.of(*named) for named in sent_buffers(module)) if broadcast_buffers else (),
    )
    refuse_modules(module, sharded=chosen.shards_parameters, copied=param_dtype is not None)
    if chosen.shards_parameters:
        return _plan_units(units_of(tree, rules), settings)
    if rules is not None:
        find_named(tree, rules)  # a name that nothing has is a mistake in every stage
    return _plan_buckets(make_buckets([held.spec for held in tree.parameters], bucket_nbytes, dtypes=dtypes), settings)


@dataclass(frozen=True, kw_only=True)
class _Settings:
    placement: Placement
    world_size: int
    prefetch: int
    dtypes: DtypeRules
    offload: Offload | None
    buffers: tuple[BufferSpec, ...]

    def layouts(self, parameters: Sequence[ParameterSpec]) -> tuple[FlatLayout, ...]:
        """One flat buffer per group, in order of the group's first parameter."""
        groups: dict[tuple[torch.dtype, torch.dtype, bool], list[ParameterSpec]] = {}
        for spec in parameters:
            groups.setdefault(self.dtypes.group(spec), []).append(spec)
        return tuple(
            FlatLayout.build(
                group,
                self.world_size,
                compute_dtype=self.dtypes.compute(group[0]),
                reduce_dtype=self.dtypes.reduce(group[0]),
            )
            for group in groups.values()
        )


def _plan_units(specs: Sequence[UnitSpec], settings: _Settings) -> ZeroPlan:
    index_of = {spec.name: index for index, spec in enumerate(specs)}
    layouts = [settings.layouts(spec.parameters) for spec in specs]
    depths = [spec.depth for spec in specs]
    nbytes = [pack((layout.numel, layout.compute_dtype) for layout in unit)[1] for unit in layouts]
    gradient_nbytes = [
        pack((layout.numel, layout.reduce_dtype) for layout in unit if layout.trainable)[1] or None for unit in layouts
    ]
    pool_slots = settings.prefetch + 1
    assigned, slots = assign_pooled_slots(depths, nbytes, pool_slots)
    gradient_assigned, gradient_slots = assign_pooled_slots(depths, gradient_nbytes, pool_slots)
    return ZeroPlan(
        placement=settings.placement,
        world_size=settings.world_size,
        units=tuple(
            UnitPlan(
                index=index,
                name=spec.name,
                module=spec.name,
                depth=spec.depth,
                ancestors=tuple(index_of[name] for name in spec.ancestors),
                layouts=layouts[index],
                slot=assigned[index],
                gradient_slot=gradient_assigned[index],
            )
            for index, spec in enumerate(specs)
        ),
        slots=slots,
        gradient_slots=gradient_slots,
        prefetch=settings.prefetch,
        offload=settings.offload,
        buffers=settings.buffers,
        root=0,
    )


def _plan_buckets(buckets: Sequence[Sequence[ParameterSpec]], settings: _Settings) -> ZeroPlan:
    layouts = [settings.layouts(bucket) for bucket in buckets]
    sharded = settings.placement.shards_gradients
    nbytes = [
        bucket[0].numel * bucket[0].reduce_dtype.itemsize if sharded and bucket[0].trainable else None
        for bucket in layouts
    ]
    assigned, gradient_slots = assign_ring_slots(nbytes, GRADIENT_BUCKET_SLOTS)
    return ZeroPlan(
        placement=settings.placement,
        world_size=settings.world_size,
        units=tuple(
            UnitPlan(
                index=index,
                name=f"bucket {index}",
                module=None,
                depth=0,
                ancestors=(),
                layouts=bucket,
                slot=None,
                gradient_slot=assigned[index],
            )
            for index, bucket in enumerate(layouts)
        ),
        slots=(),
        gradient_slots=gradient_slots,
        prefetch=settings.prefetch,
        offload=settings.offload,
        buffers=settings.buffers,
        root=None,
    )
