"""What one rank holds after a training step and at the worst moment of one, computed from a plan: on its device, and
with offloading in host memory and in files. No plan knows activations: ``activations.measure`` does.

[Note: the worst moment]

What rests, rests all the time: buckets, masters and state have their memory from set-up to the end, and slots on an
accelerator. On the CPU the pages of slots are given back before each optimizer step, but for slots of frozen units;
those of parameters when the backward has come to its end, before the last gradients are reduced. Shards of gradients
that are reduced on their way (stages 2 and 3) have memory from their reduction on, until nobody has a gradient in them
any more. Two things come and go beside it:

* In backward, autograd hands over each gradient in memory of its own, from which it is copied into its bucket at once:
  one parameter's at a time. A parameter that is used in several places (tied weights, a shared module) gets its
  gradient in parts, and autograd holds their sum until the last of them. Where linear layers and embeddings give them,
  they are added to the first one (an embedding's row by row, on the CPU), which lies where it is collected as soon as
  it is made, if its unit has that memory for itself. Elsewhere autograd adds them out of place, and for a moment there
  are three: the sum so far, the last part, and both together.
* In a step, the optimizer computes with temporary tensors: see [Note: memory of a step].

Not counted: activations and other tensors of the module's own, what libraries hold for themselves (cuBLAS, nccl), and
what an allocator keeps in reserve. In a first step a unit that shares its gradient slot with another one may need
memory of its own for a moment, until the order of the backward is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate

from lightning_zero.analysis.optimizers import ADAM, SEGMENT_NUMEL, SMALL_NUMEL, OptimizerCost
from lightning_zero.analysis.traffic import Traffic, expected_traffic, lasting_slots
from lightning_zero.config import HostOffload, NvmeOffload, Tier
from lightning_zero.plan import (
    FETCH_UNITS,
    PAGE_NBYTES,
    ROUND_NBYTES,
    STAGING_BUFFERS,
    FlatLayout,
    ParameterSpec,
    Plan,
    align_up,
    deal_out,
)

__all__ = [
    "DiskBytes",
    "HostBytes",
    "Memory",
    "StageMemory",
    "expected_disk",
    "expected_host_memory",
    "expected_memory",
    "fullest_rank",
    "stage_memory",
]


class _Categories:
    """What all tables of bytes can do."""

    @property
    def total(self) -> int:
        """The sum of all categories."""
        return sum(nbytes for _, nbytes in self.items())

    def items(self) -> tuple[tuple[str, int], ...]:
        """``(category, bytes)`` for each category, without the total."""
        return tuple((one.name, getattr(self, one.name)) for one in fields(self))  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Memory(_Categories):
    """Bytes on the device of one rank, by category.

    Attributes:
        parameters: full flat buffers in compute dtype, where parameters are replicated.
        weights: shards in compute dtype that units are gathered from, beside masters that rest elsewhere, and what a
            host's ranks keep of them (``Placement.keeping``).
        masters: master shards; 0 where they are views of replicated parameters.
        gradients: accumulated gradients, full or sharded. Shards are gone after ``zero_grad`` (not in a world of one).
        optimizer: optimizer state of the rank's own elements.
        slots: for unsharded parameters, without those that are given back between steps; on an accelerator also for
            shards that are fetched from host memory ahead of their gather.
        gradient_slots: for gradients on their way to the reduce-scatter, likewise.
        transport: receive buffers of the reduce-scatter, and what error feedback keeps (``Placement.feedback``).
        raw_gradients: gradients in memory of autograd's own, before they are copied; 0 at rest.
        temporaries: what the optimizer's step computes with; 0 at rest.
        activations: what forward and backward hold beside that, where it was measured; 0 at rest.
    """

    parameters: int = 0
    weights: int = 0
    masters: int = 0
    gradients: int = 0
    optimizer: int = 0
    slots: int = 0
    gradient_slots: int = 0
    transport: int = 0
    raw_gradients: int = 0
    temporaries: int = 0
    activations: int = 0


@dataclass(frozen=True, kw_only=True)
class HostBytes(_Categories):
    """Bytes that offloading keeps in host memory on one rank, by category. All 0 without it.

    Attributes:
        weights: shards in compute dtype that units are gathered from, beside masters of another dtype.
        masters: master shards.
        gradients: reduced gradient shards.
        optimizer: optimizer state of the rank's own elements.
        buffers: what bytes on their way go through: the pool for files, shards that are read ahead of their gather, and
            on an accelerator gradients that are added to others and weights that are cast; and checksums of files.
    """

    weights: int = 0
    masters: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0


@dataclass(frozen=True, kw_only=True)
class DiskBytes(_Categories):
    """Bytes that offloading keeps in the files of one rank, by category, in whole pages. All 0 without it.

    Attributes:
        weights: shards in compute dtype that units are gathered from, beside masters of another dtype.
        masters: master shards.
        optimizer: optimizer state, of whole shards.
    """

    weights: int = 0
    masters: int = 0
    optimizer: int = 0


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """What one stage takes of one rank.

    Attributes:
        name: ``"none"``, or what the strategy is called.
        rest: on the device between steps.
        peak: on the device at the worst moment of a step, without activations that nobody measured.
        host: in host memory, because it is offloaded.
        disk: in files.
        traffic: of a step.
    """

    name: str
    rest: Memory
    peak: Memory
    host: HostBytes = field(default_factory=HostBytes)
    disk: DiskBytes = field(default_factory=DiskBytes)
    traffic: Traffic


def stage_memory(
    plan: Plan, name: str, rank: int, optimizer: OptimizerCost, *, receive_buffer: bool, accelerator: bool
) -> StageMemory:
    """What a plan takes of one rank, everywhere, with the traffic of one micro-step; see ``expected_memory``."""
    rest, peak = (
        expected_memory(
            plan, rank=rank, optimizer=optimizer, receive_buffer=receive_buffer, accelerator=accelerator, peak=peak
        )
        for peak in (False, True)
    )
    host = expected_host_memory(plan, rank=rank, optimizer_tensors=optimizer.state, accelerator=accelerator)
    disk = expected_disk(plan, rank=rank, optimizer_tensors=optimizer.state)
    return StageMemory(name=name, rest=rest, peak=peak, host=host, disk=disk, traffic=expected_traffic(plan))


def expected_memory(
    plan: Plan,
    *,
    rank: int = 0,
    optimizer: OptimizerCost = ADAM,
    optimizer_tensors: int | None = None,
    training: bool = True,
    receive_buffer: bool = True,
    accelerator: bool = False,
    peak: bool = False,
) -> Memory:
    """What is on one rank's device after a training step.

    Args:
        plan: the plan.
        rank: in the shard group. Ranks differ only in ``optimizer``: it counts real elements, not padding.
        optimizer: what it keeps and makes.
        optimizer_tensors: how many tensors it keeps for a parameter, where that is known better.
        training: False: gradients, optimizer state and everything for reductions are absent.
        receive_buffer: whether the wire does (``Collectives.receives``): not shared memory, nor an accelerator.
        accelerator: whether the device is one.
        peak: at the worst moment of a step instead of after it; see [Note: the worst moment].

    Raises:
        ValueError: if there is no such rank, or ``optimizer_tensors`` is negative.
    """
    tensors = optimizer.state if optimizer_tensors is None else optimizer_tensors
    _check(plan, rank, tensors)
    trained = plan.trainable_layouts if training else ()
    stepped = _resting(plan, trained, "state", Tier.DEVICE)
    masters = _resting(plan, plan.layouts, "master", Tier.DEVICE)
    replicated = not plan.placement.shards_parameters
    if replicated:  # masters of the same dtype are views of the parameters
        masters = [layout for layout in masters if layout.compute_dtype != layout.dtype]
    fetched = FETCH_UNITS * plan.fetch_nbytes if accelerator and isinstance(plan.offload, HostOffload) else 0
    # The owner of a whole parameter keeps a copy of it, with its state.
    whole = sum(nbytes for owner, nbytes in _owners(plan, stepped) if owner == rank) if optimizer.whole else 0
    slots, gradient_slots = sum(slot.nbytes for slot in plan.slots), _gradient_slots(plan) * training
    lasting = range(len(plan.slots)) if accelerator or not training else lasting_slots(plan)
    rest = Memory(
        parameters=sum(layout.numel * layout.compute_dtype.itemsize for layout in plan.layouts) if replicated else 0,
        weights=sum(map(_weight_nbytes, _resting(plan, plan.layouts, "weights", Tier.DEVICE))) + _kept_nbytes(plan),
        masters=sum(map(_master_nbytes, masters)),
        gradients=sum(_gradient_nbytes(plan, layout) for layout in trained),
        optimizer=(1 + tensors) * whole if optimizer.whole else tensors * _owned_nbytes(stepped, rank),
        slots=sum(slot.nbytes for slot in plan.slots if slot.index in lasting) + fetched,
        gradient_slots=gradient_slots if accelerator else 0,
        transport=_transport_nbytes(plan, trained, receive_buffer),
    )
    if not (peak and training):
        return rest
    missing, raw = _backward_nbytes(plan, accelerator)
    last = replace(rest, gradient_slots=gradient_slots + _leaving_nbytes(plan) * accelerator)  # parameters have gone
    backward = replace(last, gradients=rest.gradients - missing, raw_gradients=raw, slots=slots + fetched)
    if optimizer.whole:  # whole gradients at their owner, and beside them what travels or what the optimizer makes
        sizes = [spec.numel * layout.dtype.itemsize for layout in stepped for spec in layout.parameters]
        step = whole + max(2 * min(whole, ROUND_NBYTES), optimizer.loop * max(sizes, default=0))
    else:
        step = _step_nbytes(plan, stepped, rank, optimizer, accelerator)
    return max(backward, last, replace(rest, temporaries=step), key=lambda memory: memory.total)


def expected_host_memory(
    plan: Plan, *, rank: int = 0, optimizer_tensors: int = 2, training: bool = True, accelerator: bool = False
) -> HostBytes:
    """What offloading keeps in one rank's host memory. Arguments and errors as for ``expected_memory``."""
    _check(plan, rank, optimizer_tensors)
    trained = plan.trainable_layouts if training else ()
    buffers = 0
    if isinstance(plan.offload, NvmeOffload):
        buffers += int(plan.offload.buffer_mib * 2**20) + FETCH_UNITS * plan.fetch_nbytes
        if plan.offload.checksums:  # 8 bytes for each page
            files = expected_disk(plan, rank=rank, optimizer_tensors=optimizer_tensors, training=training)
            buffers += files.total // PAGE_NBYTES * 8
    if accelerator and training:
        buffers += STAGING_BUFFERS * _in_pages(plan.staging_nbytes)
    return HostBytes(
        weights=sum(map(_weight_nbytes, _resting(plan, plan.layouts, "weights", Tier.HOST))),
        masters=sum(map(_master_nbytes, _resting(plan, plan.layouts, "master", Tier.HOST))),
        gradients=sum(map(_master_nbytes, _resting(plan, trained, "gradients", Tier.HOST))),
        optimizer=optimizer_tensors * _owned_nbytes(_resting(plan, trained, "state", Tier.HOST), rank),
        buffers=buffers,
    )


def expected_disk(plan: Plan, *, rank: int = 0, optimizer_tensors: int = 2, training: bool = True) -> DiskBytes:
    """What offloading keeps in one rank's files. Arguments and errors as for ``expected_memory``."""
    _check(plan, rank, optimizer_tensors)
    stepped = _resting(plan, plan.trainable_layouts if training else (), "state", Tier.DISK)
    owned = [layout for layout in stepped if any(part.numel for part in layout.slices(rank))]
    return DiskBytes(
        weights=_in_pages(map(_weight_nbytes, _resting(plan, plan.layouts, "weights", Tier.DISK))),
        masters=_in_pages(map(_master_nbytes, _resting(plan, plan.layouts, "master", Tier.DISK))),
        optimizer=optimizer_tensors * _in_pages(map(_master_nbytes, owned)),
    )


def fullest_rank(plan: Plan, *, whole: bool) -> int:
    """The rank with most optimizer state, the first of equals. Everything else is the same on all ranks.

    ``whole``: the optimizer needs whole parameters. Costs O(parameters + ranks).
    """
    held = [0] * plan.group_size
    if whole:
        for owner, nbytes in _owners(plan, plan.trainable_layouts):
            held[owner] += nbytes
        return held.index(max(held))
    more = [0] * (plan.group_size + 1)  # than the rank before, by shards that one parameter fills
    for layout in plan.trainable_layouts:
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


def _backward_nbytes(plan: Plan, accelerator: bool) -> tuple[int, int]:
    """At the worst moment of a backward: bytes of shards that are still to come, and what autograd holds.

    Of weights that are reached under several names; one that is used twice under one name cannot be told from one that
    is used once.
    """
    units = plan.units[::-1] if plan.placement.shards_parameters else plan.units
    held, owned = plan.collecting_apart(), [(unit.index, la) for unit in units for la in unit.trainable_layouts]
    layouts = [layout for _, layout in owned]
    shards = [_passing_nbytes(plan, layout) for layout in layouts]
    sizes = [[_parts(spec, la, unit in held, accelerator) for spec in la.parameters] for unit, la in owned]
    missing, waiting = sum(shards), sum(kept for own in sizes for _, kept, _ in own)
    # Where nothing waits for further parts, the first one is made apart.
    moments = [(missing, waiting + max((first for own in sizes for first, kept, _ in own if not kept), default=0))]
    late = 0  # what is reduced in another dtype comes to its shard when the next bucket needs the memory
    for position, (layout, shard, own) in enumerate(zip(layouts, shards, sizes, strict=True)):
        moments += [(missing + late, waiting + max(more for _, _, more in own))]
        missing -= shard
        late = shard if layout.reduce_dtype != layout.dtype else 0
        waiting -= sum(kept for _, kept, _ in own)
        # The reduction begins while autograd still holds the last gradient of a bucket; not of the last bucket.
        if position + 1 < len(layouts):
            moments += [(missing + late, waiting + own[0 if plan.placement.shards_parameters else -1][0])]
    return max(moments, key=lambda found: found[1] - found[0])


def _parts(spec: ParameterSpec, layout: FlatLayout, held: bool, accelerator: bool) -> tuple[int, int, int]:
    """Bytes of a gradient, of what autograd keeps of it until its last part comes, and of what it has beside that then.

    ``held``: whether the gradient is collected where the first part is.
    """
    nbytes = spec.numel * layout.compute_dtype.itemsize
    if not spec.aliases:
        return nbytes, 0, nbytes
    held &= layout.compute_dtype.itemsize <= layout.reduce_dtype.itemsize and spec.parts < 3
    return nbytes, 0 if held else nbytes, nbytes * (max(spec.parts, 1 + accelerator) - 1)  # of an embedding's only rows


def _gradient_slots(plan: Plan) -> int:
    """Bytes of slots for gradients in a step. A world of one collects gradients where they are to be."""
    layouts = plan.trainable_layouts
    if plan.group_size == 1 and all(la.dtype == la.reduce_dtype and not plan.rest_of(la).offloaded for la in layouts):
        return 0
    return sum(slot.nbytes for slot in plan.gradient_slots)


def _leaving_nbytes(plan: Plan) -> int:
    """Sums on an accelerator, in no slot, that leave for the host when shard groups have averaged them."""
    layouts = plan.trainable_layouts if plan.group_size < plan.world_size else ()
    narrow = [layout for layout in layouts if layout.reduce_dtype != layout.dtype]
    return sum(map(_master_nbytes, _resting(plan, narrow, "gradients", Tier.HOST)))


def _passing_nbytes(plan: Plan, layout: FlatLayout) -> int:
    """Bytes of a shard of gradients that is there from its reduction on, until gradients are cleared."""
    passing = plan.placement.shards_gradients and plan.group_size > 1
    return _master_nbytes(layout) if passing and plan.rest_of(layout).gradients is Tier.DEVICE else 0


def _step_nbytes(
    plan: Plan, layouts: Sequence[FlatLayout], rank: int, optimizer: OptimizerCost, accelerator: bool
) -> int:
    """What an elementwise optimizer makes."""
    parts = [(part.numel, layout.dtype.itemsize) for layout in layouts for part in layout.slices(rank)]
    small = [numel * itemsize for numel, itemsize in parts if 0 < numel <= SMALL_NUMEL]
    together = 0
    if small and not accelerator:  # copies of the parameters and the gradients, and what is made for them
        parts = [part for part in parts if not 0 < part[0] <= SMALL_NUMEL]
        most = SEGMENT_NUMEL * max(itemsize for _, itemsize in [*parts, (0, 4)])
        together = 2 * min(sum(small), most) + optimizer.step_nbytes([min(sum(small), most)], accelerator)
    sizes = [numel * itemsize for numel, itemsize in parts]
    # The user's order is that of registration as a rule, and buckets are in the opposite one.
    return max(together, optimizer.step_nbytes(sizes if plan.placement.shards_parameters else sizes[::-1], accelerator))


def _owners(plan: Plan, layouts: Sequence[FlatLayout]) -> list[tuple[int, int]]:
    """Of each parameter the rank that owns it, for an optimizer that needs whole ones, and its bytes."""
    held = [(spec.numel, layout.dtype.itemsize) for layout in layouts for spec in layout.parameters]
    if not plan.placement.shards_parameters:
        held.reverse()  # buckets are in backward order, and a tie goes to the first parameter
    owners = deal_out([numel for numel, _ in held], plan.group_size)
    return [(owner, numel * itemsize) for (numel, itemsize), owner in zip(held, owners, strict=True)]


def _check(plan: Plan, rank: int, optimizer_tensors: int) -> None:
    if not 0 <= rank < plan.group_size:
        raise ValueError(f"There is no rank {rank} in a shard group of {plan.group_size}.")
    if optimizer_tensors < 0:
        raise ValueError(f"optimizer_tensors must be 0 or more, got {optimizer_tensors}.")


def _resting(plan: Plan, layouts: Iterable[FlatLayout], what: str, tier: Tier) -> list[FlatLayout]:
    """The layouts whose part of that name (of ``Rest``) is in that tier."""
    return [layout for layout in layouts if getattr(plan.rest_of(layout), what) is tier]


def _in_pages(nbytes: Iterable[int]) -> int:
    return sum(align_up(size, PAGE_NBYTES) for size in nbytes)


def _master_nbytes(layout: FlatLayout) -> int:
    return layout.shard_numel * layout.dtype.itemsize


def _weight_nbytes(layout: FlatLayout) -> int:
    return layout.shard_numel * layout.compute_dtype.itemsize


def _kept_nbytes(plan: Plan) -> int:
    keeping = plan.placement.keeping if plan.placement.shards_parameters else None
    return sum(la.numel // keeping * la.compute_dtype.itemsize for la in plan.layouts) if keeping else 0


def _owned_nbytes(layouts: Iterable[FlatLayout], rank: int) -> int:
    """Bytes of one state tensor for every element that the rank owns."""
    return sum(layout.dtype.itemsize * sum(part.numel for part in layout.slices(rank)) for layout in layouts)


def _gradient_nbytes(plan: Plan, layout: FlatLayout) -> int:
    shard = _master_nbytes(layout) if plan.rest_of(layout).gradients is Tier.DEVICE else 0
    if plan.placement.shards_gradients:
        return shard
    # The full local gradients; the averaged shard is a part of them unless the optimizer needs another dtype.
    full = layout.numel * layout.reduce_dtype.itemsize
    return full if layout.reduce_dtype == layout.dtype else full + shard


def _transport_nbytes(plan: Plan, layouts: Sequence[FlatLayout], receive_buffer: bool) -> int:
    kept = sum(layout.residual_nbytes(plan.placement.feedback, plan.world_size) for layout in layouts)
    largest: dict[object, int] = {}
    groups = plan.world_size // plan.group_size
    for layout in layouts if receive_buffer and plan.group_size > 1 else ():
        within = ("within", layout.reduce_dtype), layout.numel * layout.reduce_dtype.itemsize
        across = ("across", layout.dtype), (groups > 1) * align_up(layout.shard_numel, groups) * layout.dtype.itemsize
        for key, nbytes in (within, across):
            largest[key] = max(largest.get(key, 0), nbytes)
    return kept + sum(largest.values())
