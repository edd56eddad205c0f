"""The plan: every decision about who holds what, made once, before the first tensor is allocated.

[Note: slots]

A slot is a reusable byte buffer, like a direct-mapped cache line: a unit always uses the same slot, so the views that
autograd saved in forward are valid again once the unit is gathered again in backward. Units that compute at the same
time (a unit and those nested in it) must never share a slot, hence no slot is shared between depths. Units that follow
one another should not, so that one can be gathered while the other computes; those further apart do, whatever their
sizes: embedding and head of a language model have one slot, and in between blocks use it too.

[Note: what passes]
On an accelerator, where buffers last, the largest units of a slot would have it hold their size while others use it,
or nobody does: 3 GB of a language model's embedding and head, just where activations peak. So a slot keeps what at
least three of its units need. The one or two that need more take memory of the allocator's for as long as they are in
the slot, which has nothing else meanwhile. All steps do so alike, so that the allocator has what it needs after the
first ones. A unit that has its slot alone gives it back for the optimizer's step.

[Note: counting traffic]
Bytes are those of the whole flat buffer, as the ZeRO paper counts them (section 7): an all-gather or a reduce-scatter
of n elements counts n, of which a rank sends the fraction (world size - 1) / world size. With a model of P elements,
replicated parameters cost 2 P per step and sharded ones 3 P, less what is still resident when it is needed again.
Buffers that rank 0 sends, once per step, come on top.

With shard groups smaller than the world all of that, but for the buffers, happens within each group; and once per step
the gradient shards are all-reduced across the groups (the second hop of MiCS, arXiv:2205.00119). An all-reduce of n
elements counts n, of which a rank sends 2 (groups - 1) / groups.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from lightning_zero.config import (
    Offload,
    OffloadLike,
    Placement,
    Tier,
    UnitsLike,
    check_whole,
    validate_bucket_mib,
    validate_offload,
    validate_prefetch,
    validate_units,
)
from lightning_zero.plan.buckets import BufferSpec, limit_bucket, make_buckets, make_pieces, sent_buffers
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
from lightning_zero.plan.units import UnitSpec, find_named, find_units, full_precision_names
from lightning_zero.registry import extension

__all__ = [
    "MIXED_DTYPES",
    "TRUE_DTYPES",
    "FETCH_UNITS",
    "IDLE_NBYTES",
    "KEPT_NBYTES",
    "STAGING_BUFFERS",
    "CollectiveTraffic",
    "Plan",
    "Traffic",
    "UnitPlan",
    "ZeroPlan",
    "assign_slots",
    "build_plan",
    "kept_nbytes",
    "pack",
]

TRUE_DTYPES = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}
"""What everything is in, by the names of Lightning's precisions; in ``32-true`` it stays as it is."""

MIXED_DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""What modules compute in, with masters in ``float32``."""

FETCH_UNITS = 2
"""Units whose shards may be on their way from files, or have arrived, ahead of their gather."""

STAGING_BUFFERS = 2
"""Host buffers for each direction, where the host computes for what travels to or from an accelerator: gradients that
are added to others, and weights that are cast."""

PASSING_NBYTES = 2**20
"""What an accelerator saves at least by not keeping the buffer of a slot's largest units: see [Note: what passes]."""

IDLE_NBYTES = 256 * 2**20
"""A buffer for gradients of so many bytes is not kept on an accelerator from one backward to the next. What computes
with such a unit takes longer than the host takes to make views of its gradients anew."""

KEPT_NBYTES = 64 * 2**10
"""A buffer of fewer bytes stays on a CPU from step to step: the views of it are worth more than its memory."""

CAST_NBYTES = 16 * 2**20
"""Bytes of weights that are cast at a time on their way to an accelerator."""


def pack(parts: Iterable[tuple[int, torch.dtype]]) -> tuple[tuple[int, ...], int]:
    """Place flat buffers, given as (elements, dtype), one after the other in a byte buffer.

    Returns:
        The byte offset of each, a multiple of ``ALIGNMENT`` elements of its own dtype, and the bytes needed for all.
    """
    offsets, end = [], 0
    for numel, dtype in parts:
        start = align_up(end, ALIGNMENT * dtype.itemsize)
        offsets.append(start)
        end = start + numel * dtype.itemsize
    return tuple(offsets), end


@dataclass(frozen=True)
class CollectiveTraffic:
    """Collectives of one kind."""

    calls: int = 0
    numel: int = 0  #: Elements of their flat buffers, padding included.
    nbytes: int = 0  #: The same in bytes of the dtype on the wire.

    @classmethod
    def over(cls, buffers: Iterable[tuple[int, torch.dtype]]) -> CollectiveTraffic:
        """One for each flat buffer, of so many elements of a dtype."""
        return sum((cls(1, numel, numel * dtype.itemsize) for numel, dtype in buffers), cls())

    def __add__(self, other: CollectiveTraffic) -> CollectiveTraffic:
        return CollectiveTraffic(self.calls + other.calls, self.numel + other.numel, self.nbytes + other.nbytes)

    def times(self, count: int) -> CollectiveTraffic:
        """The same collectives ``count`` times."""
        return CollectiveTraffic(self.calls * count, self.numel * count, self.nbytes * count)


@dataclass(frozen=True)
class Traffic:
    """Collectives of one step, by kind, of so many ranks in groups of so many. See [Note: counting traffic]."""

    all_gather: CollectiveTraffic = CollectiveTraffic()
    reduce_scatter: CollectiveTraffic = CollectiveTraffic()
    broadcast: CollectiveTraffic = CollectiveTraffic()
    all_reduce: CollectiveTraffic = CollectiveTraffic()
    world_size: int = field(default=1, compare=False)
    group_size: int = field(default=1, compare=False)
    # Of what is gathered, what crosses hosts: copies beside masters, and what nobody may round.
    copies: CollectiveTraffic = field(default=CollectiveTraffic(), compare=False)
    exact: CollectiveTraffic = field(default=CollectiveTraffic(), compare=False)

    @property
    def total(self) -> CollectiveTraffic:
        """All kinds together."""
        return self.all_gather + self.reduce_scatter + self.broadcast + self.all_reduce


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
    looks_up: bool = False  # whether its module is an embedding, whose backward needs no weights

    @property
    def parameters(self) -> tuple[ParameterSpec, ...]:
        """Of all layouts, in layout order."""
        return tuple([spec for layout in self.layouts for spec in layout.parameters])

    @property
    def trainable_layouts(self) -> tuple[FlatLayout, ...]:
        """The layouts that have gradients."""
        return tuple([layout for layout in self.layouts if layout.trainable])

    @property
    def slot_nbytes(self) -> int:
        """Bytes that the unsharded parameters take in compute dtype."""
        return pack([(layout.numel, layout.compute_dtype) for layout in self.layouts])[1]

    @property
    def gradient_slot_nbytes(self) -> int:
        """Bytes that the unit's gradients take in reduce dtype."""
        return pack([(layout.numel, layout.reduce_dtype) for layout in self.trainable_layouts])[1]


@dataclass(frozen=True, kw_only=True)
class ZeroPlan:
    """The sharding, the order of collectives and their sizes in bytes. Numbers only; equal on all ranks.

    ``build_plan`` makes one.

    Attributes:
        placement: what is replicated and what is sharded between uses.
        world_size: of all ranks, which are one shard group or, with ``placement.span``, several that hold the same.
        units: sharded parameters: the root first, then units in registration order. Replicated parameters: gradient
            buckets in backward order, frozen ones last.
        slots: bytes of each slot for unsharded parameters; none where parameters are replicated.
        gradient_slots: likewise for gradients on their way to the reduce-scatter; none where gradients are replicated.
        prefetch: units gathered ahead of the one computing.
        root: index of the root unit; None where parameters are replicated.
        offload: what is offloaded to the host or to files; None: nothing. Its path and the sizes of its
            buffers may differ between ranks, and are the only part of a plan that may.
        buffers: of the module, as rank 0 sends them to the others before every step; none where it does not. Not part
            of the fingerprint: they may change in the middle of a run, and are compared whenever they are sent.
    """

    placement: Placement
    world_size: int
    units: tuple[UnitPlan, ...]
    slots: tuple[int, ...]
    gradient_slots: tuple[int, ...]
    prefetch: int
    root: int | None
    offload: Offload | None = None
    buffers: tuple[BufferSpec, ...] = ()

    @property
    def group_size(self) -> int:
        """Ranks that share each flat buffer: the shard group."""
        return self.placement.span or self.world_size

    @property
    def parameters(self) -> tuple[ParameterSpec, ...]:
        """Of all units, in plan order."""
        return tuple([spec for unit in self.units for spec in unit.parameters])

    @property
    def layouts(self) -> tuple[FlatLayout, ...]:
        """Of all units, in plan order."""
        return tuple([layout for unit in self.units for layout in unit.layouts])

    @property
    def trainable_layouts(self) -> tuple[FlatLayout, ...]:
        """Of all units, those that have gradients."""
        return tuple(layout for layout in self.layouts if layout.trainable)

    def rest_of(self, layout: FlatLayout) -> Rest:
        """The memory tiers of one of the plan's layouts between uses."""
        return rest_of(layout, self.placement, self.offload)

    @property
    def fetch_nbytes(self) -> int:
        """Bytes of the largest unit's offloaded shards, each in whole pages."""
        found = [0]
        for unit in self.units if self.placement.shards_parameters else ():
            rests = ((layout, self.rest_of(layout)) for layout in unit.layouts)
            away = (layout for layout, rest in rests if (rest.weights or rest.master) is not Tier.DEVICE)
            found += [sum(align_up(la.shard_numel * la.compute_dtype.itemsize, PAGE_NBYTES) for la in away)]
        return max(found)

    @property
    def staging_nbytes(self) -> tuple[int, int]:
        """Size of a staging buffer for gradients from an accelerator, and of one for weights to it."""
        away = [layout for layout in self.trainable_layouts if self.rest_of(layout).gradients is Tier.HOST]
        gradients = (layout.shard_numel * layout.reduce_dtype.itemsize for layout in away)
        cast = (la.shard_numel * la.compute_dtype.itemsize for la in away if la.dtype != la.compute_dtype)
        return max(gradients, default=0), min(CAST_NBYTES, max(cast, default=0))

    def expected_traffic(self, *, micro_steps: int = 1) -> Traffic:
        """Traffic of one step of ``micro_steps`` forwards and backwards; zero for a single rank, which needs no wire.

        Buffers are not sent in the step after an evaluation, whose first batch has had them.

        Raises:
            ValueError: if ``micro_steps`` is less than 1.
        """
        if micro_steps < 1:
            raise ValueError(f"A step has at least one micro-step, got {micro_steps}.")
        placement, units, trainable = self.placement, self.units, self.trainable_layouts
        gathered = reduced = buffers = across = copies = exact = CollectiveTraffic()
        if self.world_size > 1:
            pieces = make_pieces(self.buffers)
            buffers = CollectiveTraffic.over((piece.nbytes, torch.uint8) for piece in pieces)
        if self.world_size > self.group_size:
            across = CollectiveTraffic.over((la.shard_numel, la.dtype) for la in trainable)
        if self.group_size > 1:
            reduced = CollectiveTraffic.over((la.numel, la.reduce_dtype) for la in trainable)
            reduced = reduced.times(micro_steps if placement.shards_gradients else 1)
            if placement.shards_parameters:
                gathered = copies = _gather(la for index in self.gathers(micro_steps)[0] for la in units[index].layouts)
                if placement.keeping:
                    copies = _gather(la for unit in units if unit.trainable_layouts for la in unit.layouts)
            else:  # what the optimizer updated, gathered once, after it
                mixed = {unit.index for unit in units if any(la.compute_dtype != la.dtype for la in unit.layouts)}
                exact = _gather(la for unit in units if unit.index not in mixed for la in unit.trainable_layouts)
                copies = _gather(la for unit in units if unit.index in mixed for la in unit.trainable_layouts)
                gathered = exact + copies
        return Traffic(gathered, reduced, buffers, across, self.world_size, self.group_size, copies, exact)

    def gathers(self, micro_steps: int = 1) -> tuple[tuple[int, ...], dict[int, int]]:
        """Indices of the units in the order in which one step gathers them, where parameters are sharded; and by their
        slots the entirely frozen ones, which outlast the optimizer step.

        Every unit runs once per forward, in plan order, and once per backward: siblings in reverse, a unit before those
        nested in it; embeddings in the forward alone. A unit stays resident until another one is gathered into its
        slot, the root throughout. Weights do not change between the micro-steps of a step, so residents stay valid;
        after the optimizer step all are stale but those of entirely frozen units. Units without parameters (an empty
        root) are not gathered.

        An upper bound where autograd has no reason to run a unit's backward: a frozen unit with nothing trainable
        before it is gathered in forward only, which the plan cannot know.
        """
        backward = [unit for unit in self.backward() if not unit.looks_up]
        resident: dict[int, int] = {}
        gathered: list[int] = []
        for _ in range(2):  # what the step before left behind is known only in the second one
            gathered = []
            for unit in (*self.units, *backward) * micro_steps:
                if unit.layouts and unit.slot is not None and resident.get(unit.slot) != unit.index:
                    resident[unit.slot] = unit.index
                    gathered.append(unit.index)
            resident = {slot: index for slot, index in resident.items() if not self.units[index].trainable_layouts}
        return tuple(gathered), resident

    def backward(self) -> list[UnitPlan]:
        """Sharded units in the order of their backwards: each starts at the unit's outputs, before what it nests."""
        nested: dict[int | None, list[UnitPlan]] = {}
        for unit in self.units:
            # Ancestors ascend in registration order, so the innermost comes last.
            nested.setdefault(unit.ancestors[-1] if unit.ancestors else None, []).append(unit)
        found: list[UnitPlan] = []
        waiting = list(nested.get(None, ()))
        while waiting:
            found.append(waiting.pop())
            waiting.extend(nested.get(found[-1].index, ()))
        return found

    def needs(self) -> dict[tuple[str, int], dict[int, int]]:
        """Of each slot, ``("parameters" or "gradients", slot)``, the bytes that its units need, by their indices."""
        found: dict[tuple[str, int], dict[int, int]] = {}
        for unit in self.units:
            if unit.slot is not None:
                found.setdefault(("parameters", unit.slot), {})[unit.index] = unit.slot_nbytes
            if unit.gradient_slot is not None:
                found.setdefault(("gradients", unit.gradient_slot), {})[unit.index] = unit.gradient_slot_nbytes
        return found

    def slots_in_step(self, accelerator: bool, collects: bool) -> tuple[tuple[int, int], dict[int, tuple[int, int]]]:
        """Bytes of slots for parameters and, if it ``collects``, for gradients: after a step; and in the backward of
        each unit, by its index, at the end of the backward (-1), and of the forward (the number of units)."""
        units, sharded, needs = self.units, self.placement.shards_parameters, self.needs()
        lasting, there = self.gathers()[1], dict[tuple[str, int], int]()
        if not accelerator:
            small = (nbytes for nbytes in self.gradient_slots if nbytes < KEPT_NBYTES and self.group_size > 1)
            slots = sum(n for slot, n in enumerate(self.slots) if slot in lasting or n < KEPT_NBYTES)
            whole = sum(self.slots), sum(self.gradient_slots) * collects
            during = {**dict.fromkeys(range(len(units) + 1), whole), -1: (slots, whole[1])}
            return (slots, sum(small) * collects), during
        kept = {place: kept_nbytes(of_units.values()) for place, of_units in needs.items()}

        def take(index: int, kind: str, slot: int | None) -> tuple[int, int]:
            if slot is not None and (collects or kind == "parameters"):
                there[kind, slot] = max(needs[kind, slot][index], kept[kind, slot])
            found = sum(nbytes for (kind, _), nbytes in there.items() if kind == "parameters")
            return found, sum(there.values()) - found

        during = {}
        for _ in range(2):  # what the step before left behind is known only in the second one
            for unit in units:
                during[len(units)] = take(unit.index, "parameters", unit.slot)
            for unit in self.backward() if sharded else units:
                take(unit.index, "parameters", None if unit.looks_up else unit.slot)
                during[unit.index] = during[-1] = take(unit.index, "gradients", unit.gradient_slot)
            for (kind, slot), nbytes in list(there.items()):
                passes, gradients = nbytes > kept[kind, slot], kind == "gradients"
                if nbytes >= IDLE_NBYTES or passes if gradients else passes and slot not in lasting:
                    del there[kind, slot]
        if sharded:
            during[0] = during[-1]  # gradients of the root are complete at the end
        return take(0, "parameters", None), during

    def expected_memory(self, **settings: Any) -> Any:
        """Bytes on one rank's device, a ``Memory``; ``settings`` are those of ``planner.costs.expected_memory``."""
        return extension("planner").expected_memory(self, **settings)

    def expected_host_memory(self, **settings: Any) -> Any:
        """Bytes that offloading keeps in one rank's host memory; see ``planner.costs.expected_host_memory``."""
        return extension("planner").expected_host_memory(self, **settings)

    def expected_disk(self, **settings: Any) -> Any:
        """Bytes that offloading keeps in one rank's files; see ``planner.costs.expected_disk``."""
        return extension("planner").expected_disk(self, **settings)

    def describe(self, **settings: Any) -> str:
        """The plan as a table for people: units, totals, traffic and memory.

        ``settings``: ``optimizer``, an ``OptimizerCost``; ``accelerator``, whether the device is one; ``micro_steps``.
        """
        text: str = extension("planner").describe_plan(self, **settings)
        return text

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
            f"plan: world size {self.world_size}, {placement}, "
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
            lines += [f"{kind} {index}: {nbytes} bytes" for index, nbytes in enumerate(slots)]
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
        cls,
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
    ) -> ZeroPlan:
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
            offload: what is offloaded to the host or to files; None: nothing.
            broadcast_buffers: whether rank 0 sends its buffers to the others.

        Raises:
            ValueError: for bad settings and class names, and what cannot be laid out (``plan.tree``), naming it.
        """
        check_whole("world_size", world_size, least=1, unit="ranks")
        bucket_nbytes = max(int(validate_bucket_mib(bucket_mib) * 2**20), 1)
        tree = ModuleTree(module)
        validate_prefetch(prefetch)
        refuse_modules(module, world_size)
        dtypes = DtypeRules(param_dtype, reduce_dtype, full_precision_names(tree, full_precision))
        placement = placement if placement is not None else Placement.from_stage(stage)
        offload, group_size = validate_offload(offload, placement), placement.span or world_size
        if world_size % group_size:
            raise ValueError(f"{world_size} ranks cannot be split into shard groups of {group_size}.")
        parameters, rules = [held.spec for held in tree.parameters], validate_units(units)
        if group_size == 1 and offload is None and all(dtypes.compute(spec) == spec.dtype for spec in parameters):
            # Its shard is the whole, and what the module computes with: no slot, no gather, no hook around a unit.
            placement = replace(placement, shards_parameters=False)
        gathers, reduces = placement.shards_parameters, placement.shards_gradients
        if gathers:
            specs = find_units(tree, rules)
        else:
            if rules is not None:
                find_named(tree, rules)  # a name that nothing has is a mistake in every stage
            limit = limit_bucket(parameters, bucket_nbytes, dtypes, beside=reduces)
            buckets = make_buckets(parameters, limit, dtypes)
            specs = tuple(UnitSpec(f"bucket {index}", bucket) for index, bucket in enumerate(buckets))
        index_of = {spec.name: index for index, spec in enumerate(specs)}
        laid_out = [
            UnitPlan(
                index=index,
                name=spec.name,
                module=spec.name if gathers else None,
                depth=spec.depth,
                ancestors=tuple(index_of[name] for name in spec.ancestors),
                layouts=_layouts(spec.parameters, group_size, dtypes),
                looks_up=spec.looks_up,
            )
            for index, spec in enumerate(specs)
        ]
        depths = [unit.depth for unit in laid_out]
        used, slots = assign_slots([unit.slot_nbytes if gathers else None for unit in laid_out], depths, prefetch)
        nbytes = [(unit.gradient_slot_nbytes or None) if reduces else None for unit in laid_out]
        apart = min(prefetch, 1) if gathers else 1  # one fills while the other is reduced
        gradient_used, gradient_slots = assign_slots(nbytes, depths, apart)
        return cls(
            placement=placement,
            world_size=world_size,
            units=tuple(
                replace(unit, slot=used[unit.index], gradient_slot=gradient_used[unit.index]) for unit in laid_out
            ),
            slots=slots,
            gradient_slots=gradient_slots,
            prefetch=prefetch,
            root=0 if gathers else None,
            offload=offload,
            buffers=tuple(
                BufferSpec(name, one.shape, one.dtype) for name, one in sent_buffers(module) if broadcast_buffers
            ),
        )


Plan = ZeroPlan
"""Its name inside of the package."""

build_plan = ZeroPlan.build
"""Turn a module, settings and a world size into a plan; see ``ZeroPlan.build``."""


def _gather(layouts: Iterable[FlatLayout]) -> CollectiveTraffic:
    return CollectiveTraffic.over((layout.numel, layout.compute_dtype) for layout in layouts)


def _layouts(parameters: Sequence[ParameterSpec], group_size: int, dtypes: DtypeRules) -> tuple[FlatLayout, ...]:
    """One flat buffer per group of dtypes, in order of the group's first parameter."""
    groups: dict[tuple[torch.dtype, torch.dtype, bool], list[ParameterSpec]] = {}
    for spec in parameters:
        groups.setdefault(dtypes.group(spec), []).append(spec)
    return tuple(
        FlatLayout.build(group, group_size, dtypes.compute(group[0]), dtypes.reduce(group[0]))
        for group in groups.values()
    )


def kept_nbytes(needs: Iterable[int]) -> int:
    """Bytes that an accelerator keeps for a slot whose units need so many: see [Note: what passes]."""
    most, *others = sorted(needs, reverse=True)
    kept = others[1] if len(others) > 1 else 0
    return kept if most - kept >= PASSING_NBYTES else most


def assign_slots(
    nbytes: Sequence[int | None], depths: Sequence[int], apart: int
) -> tuple[tuple[int | None, ...], tuple[int, ...]]:
    """Which slot each unit uses, and the bytes of the slots, in order of first use. See [Note: slots].

    Large units come first, and each takes the first slot that no unit near it has.

    Args:
        nbytes: that each unit needs; None: the unit needs no slot.
        depths: of each unit: none shares a slot with one of another depth.
        apart: units of one depth that are so many places from each other, or fewer, do not share a slot.
    """
    sizes = {unit: size for unit, size in enumerate(nbytes) if size is not None}
    sharing: list[list[int]] = []
    for depth in sorted({depths[unit] for unit in sizes}):
        level = [unit for unit in sizes if depths[unit] == depth]
        slots: list[dict[int, int]] = []  # the units of each slot, by their places in the level
        # By size class, so that neighbours of nearly one size take turns.
        for place in sorted(range(len(level)), key=lambda place: -max(sizes[level[place]] - 1, 0).bit_length()):
            near = range(place - apart, place + apart + 1)
            slot = next((slot for slot in slots if slot.keys().isdisjoint(near)), None)
            if slot is None:
                slots.append(slot := {})
            slot[place] = level[place]
        sharing += [sorted(slot.values()) for slot in slots]
    sharing.sort()
    assigned = {unit: index for index, users in enumerate(sharing) for unit in users}
    return tuple(map(assigned.get, range(len(nbytes)))), tuple(max(map(sizes.__getitem__, users)) for users in sharing)
