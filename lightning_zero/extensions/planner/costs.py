"""What a plan costs: bytes that a rank holds and that a step sends, computed before anything runs.

Not counted are activations and other tensors of the module's own, what libraries hold for themselves (cuBLAS, nccl),
and what an allocator keeps in reserve.

[Note: memory of a step]
*Loop*, torch's default on the CPU: one parameter after the other, so what a step makes has the size of the largest,
beside what Python still holds of the one before. *Foreach*, the default on accelerators: each operation passes over all
parameters of a group, so what it makes has the size of all of them. *Fused*: one pass, which makes nothing. Numbers are
those of torch 2.11 to 2.15; a test counts them.

[Note: the worst moment]
Buckets, masters and state have their memory from set-up to the end, and slots on an accelerator, but for what passes
there: see [Note: what passes] in ``plan.plan``. So there are two high moments, the end of the forward, where
activations peak, and the end of the backward, where an embedding's gradient is made. On the CPU slots are let go before
each optimizer step, but for those of frozen units; those of parameters when the backward ends, before the last
gradients are reduced. Shards of gradients that are reduced during the backward (stages 2 and 3) have memory from
their reduction on, until gradients are cleared. Two things come and go beside that:

* In backward, autograd hands over each gradient in memory of its own, from which it is copied into its bucket at once.
  A parameter that is used in several places gets its gradient in parts, and autograd holds their sum until the last of
  them. Where linear layers and embeddings give them, they are added to the first one, which lies where it is collected,
  if its unit has that memory for itself. Elsewhere there are three for a moment: the sum so far, the last part, and
  both together. Of an embedding whose rows tensor parallelism splits, torch makes the whole gradient on every rank.
* In a step, the optimizer computes with temporary tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_zero.config import NvmeOffload, Tier
from lightning_zero.optim.rules import steps_on_slices, torch_class
from lightning_zero.plan.buckets import ROUND_NBYTES, deal_out
from lightning_zero.plan.layout import ALIGNMENT, PAGE_NBYTES, FlatLayout, ParameterSpec, align_up
from lightning_zero.plan.plan import FETCH_UNITS, STAGING_BUFFERS, Plan, Traffic
from lightning_zero.registry import extension

__all__ = ["ADAM", "DiskBytes", "HostBytes", "Memory", "OptimizerCost", "StageMemory"]
__all__ += ["expected_disk", "expected_host_memory", "expected_memory", "owners_of"]
__all__ += ["stage_memory"]

# ----------------------------------------------------------------------------------------------------------- optimizers


@dataclass(frozen=True, kw_only=True)
class OptimizerCost:
    """What an optimizer costs, in tensors as large as what it updates. See [Note: memory of a step]."""

    name: str  #: Of its class, for people.
    state: int  #: Kept between steps: 2 for Adam, 1 for SGD with momentum, 0 for plain SGD.
    loop: int = 0  #: Made for a parameter by a step that takes one after the other.
    kept: int = 0  #: Of those, left over while the next parameter has its turn.
    foreach: int = 0  #: Made during a step that takes all at once, each as large as all.
    way: str | None = None  #: ``"loop"``, ``"foreach"`` or ``"fused"``; ``None``: torch chooses by the device.
    whole: bool = False  #: Each parameter has an owner, which keeps a copy of it and in a step its whole gradient.
    #: From how many elements on a parameter has state of 8 bits for each, and of 32 for each block of them.
    eight_bit: int | None = None

    def way_on(self, accelerator: bool) -> str:
        """How it steps on such a device. Whole parameters are updated one by one."""
        return self.way or ("foreach" if accelerator and not self.whole else "loop")

    def state_nbytes(self, numel: int, itemsize: int, whole_numel: int | None = None) -> int:
        """Bytes of its state for so many elements of a parameter, which has ``whole_numel``; ``None``: very many."""
        if self.eight_bit is None or (whole_numel is not None and whole_numel < self.eight_bit):
            return self.state * numel * itemsize
        return self.state * (numel + 4 * (align_up(numel) // ALIGNMENT))

    def step_nbytes(self, sizes: Sequence[int], accelerator: bool) -> int:
        """Most bytes that a step makes and holds at once, for tensors of these sizes in bytes, in its order."""
        way = self.way_on(accelerator)
        if self.eight_bit is not None:  # piece by piece, in float32
            most: int = 4 * extension("eight_bit").PIECE_NUMEL[accelerator]
            return self.loop * min(max(sizes, default=0), most)
        if way != "loop":
            return self.foreach * sum(sizes) if way == "foreach" else 0
        return max((self.loop * size + self.kept * before for before, size in pairwise([0, *sizes])), default=0)

    @classmethod
    def of(cls, optimizer: Optimizer | type | str | OptimizerCost, **options: Any) -> OptimizerCost:
        """What is known about an optimizer; a cost stays as it is.

        One that does not step on slices, and any that is not torch's, counts as one that needs whole parameters; what
        is not derived from one of torch's keeps two tensors for each.

        Args:
            optimizer: an instance, whose largest param group's options count; a class; or the name of one of torch's.
            options: arguments that a class is used with, such as ``momentum=0.9`` or ``fused=True``.

        Raises:
            ValueError: if it is none of these.
        """
        if isinstance(optimizer, OptimizerCost):
            return optimizer
        made: Any = optimizer
        if isinstance(optimizer, Optimizer):
            groups = optimizer.param_groups
            # Sizes are asked only where there is a choice: parameters that are not in memory answer slowly.
            sizes = [sum(p.numel() for p in group["params"]) for group in groups] if len(groups) > 1 else [0]
            options = {**(groups[sizes.index(max(sizes))] if groups else {}), **options}
            optimizer = type(optimizer)
        elif isinstance(optimizer, str):
            module, _, name = optimizer.rpartition(".")
            if name == "AdamW8bit" and module in ("", "lightning_zero"):
                made = optimizer = extension("eight_bit").AdamW8bit
            elif name in _COSTS and (not module or module.startswith("torch.optim")):
                made = optimizer = getattr(torch.optim, name)
            elif not module:
                raise ValueError(f"torch has no optimizer {name!r} that is known here: give its class.")
            else:
                made = optimizer = type(name, (), {})
        if not isinstance(optimizer, type):
            raise ValueError(f"An optimizer, its class or its name is needed, got {optimizer!r}.")
        base = torch_class(optimizer)
        costs = [(2, 2, 1, 0)]
        if base is not None and base.__name__ in _COSTS:
            known, added = _COSTS[base.__name__]
            costs = [known, *(more for names, more in added.items() if any(map(options.get, names.split())))]
        state, loop, kept, foreach = map(sum, zip(*costs, strict=True))
        way = next((way for way in ("fused", "foreach") if options.get(way)), None)
        way = way or ("loop" if options.get("foreach") is False else None)
        whole = not steps_on_slices(made)
        in_blocks = not whole and base is not None and base.__name__ == "AdamW8bit"
        return cls(
            name=optimizer.__name__,
            state=state,
            loop=loop,
            kept=kept,
            foreach=foreach,
            way=way,
            whole=whole,
            eight_bit=options.get("min_8bit_size", 4096) if in_blocks else None,
        )


_Cost = tuple[int, int, int, int]  # state, made in a loop, of it kept, made by foreach
_STATE: _Cost = (1, 0, 0, 0)
_IN_LOOP: _Cost = (0, 1, 0, 0)  # a changed gradient
_IN_BOTH: _Cost = (0, 1, 0, 1)
# Of torch's classes what they cost, and what is added where any of some options is on.
_COSTS: Mapping[str, tuple[_Cost, Mapping[str, _Cost]]] = {
    "SGD": ((0, 0, 0, 0), {"momentum": _STATE, "weight_decay maximize": _IN_BOTH, "nesterov": _IN_LOOP}),
    "Adam": ((2, 2, 1, 1), {"amsgrad": _STATE, "weight_decay maximize": _IN_LOOP}),
    "AdamW": ((2, 2, 1, 1), {"amsgrad": _STATE, "maximize": _IN_LOOP}),
    "AdamW8bit": ((2, 4, 0, 0), {}),
    "Adamax": ((2, 1, 0, 1), {"weight_decay": _IN_LOOP}),
    "NAdam": ((2, 2, 1, 1), {"weight_decay": _IN_BOTH}),
    "RAdam": ((2, 2, 0, 1), {"weight_decay": _IN_LOOP}),
    "Adagrad": ((1, 1, 1, 2), {"weight_decay": _IN_LOOP}),
    "Adadelta": ((2, 2, 1, 2), {"weight_decay": _IN_BOTH}),
    "RMSprop": ((1, 1, 1, 1), {"weight_decay": _IN_BOTH, "momentum": _STATE, "centered": _STATE}),
    "Rprop": ((2, 3, 0, 2), {}),
    "ASGD": ((1, 0, 0, 1), {"weight_decay": _IN_LOOP}),
    "Muon": ((1, 3, 0, 0), {}),
    "Adafactor": ((0, 3, 0, 0), {}),  # its state is a row and a column of a matrix
}

ADAM = OptimizerCost.of("AdamW")


# --------------------------------------------------------------------------------------------------------------- memory


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
    """Bytes on the device of one rank, by category."""

    parameters: int = 0  #: Full flat buffers in compute dtype, where parameters are replicated.
    weights: int = 0  #: Shards to gather from, where masters are elsewhere; what a host keeps (``Placement.keeping``).
    masters: int = 0  #: Master shards; 0 where they are views of replicated parameters.
    gradients: int = 0  #: Accumulated, full or sharded. Shards are gone after ``zero_grad`` (not in a world of one).
    optimizer: int = 0  #: State of the rank's own elements.
    slots: int = 0  #: For unsharded parameters.
    gradient_slots: int = 0  #: For gradients on their way to the reduce-scatter.
    transport: int = 0  #: Receive buffers of the reduce-scatter, and what error feedback keeps.
    raw_gradients: int = 0  #: Gradients in memory of autograd's own, before they are copied; 0 at rest.
    temporaries: int = 0  #: What the optimizer's step computes with; 0 at rest.
    activations: int = 0  #: What forward and backward hold beside that, where it was measured; 0 at rest.


@dataclass(frozen=True, kw_only=True)
class HostBytes(_Categories):
    """Bytes that offloading keeps in host memory on one rank, by category. All 0 without it."""

    weights: int = 0  #: Shards in compute dtype to gather from, beside masters of another dtype.
    masters: int = 0  #: Master shards.
    gradients: int = 0  #: Reduced gradient shards.
    optimizer: int = 0  #: State of the rank's own elements.
    buffers: int = 0  #: Pools for files, shards read ahead, what is added or cast on its way, and checksums.


@dataclass(frozen=True, kw_only=True)
class DiskBytes(_Categories):
    """Bytes that offloading keeps in the files of one rank, by category, in whole pages. All 0 without it."""

    weights: int = 0  #: Shards in compute dtype to gather from, beside masters of another dtype.
    masters: int = 0  #: Master shards.
    optimizer: int = 0  #: State of whole shards.


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """What one stage takes of one rank."""

    name: str  #: ``"none"``, or what the strategy is called.
    rest: Memory  #: On the device between steps.
    peak: Memory  #: On the device at the worst moment of a step, without activations that nobody measured.
    host: HostBytes = field(default_factory=HostBytes)  #: In host memory, because it is offloaded.
    disk: DiskBytes = field(default_factory=DiskBytes)  #: In files.
    traffic: Traffic  #: Of a step.


def stage_memory(
    plan: Plan, name: str, rank: int, optimizer: OptimizerCost, *, accelerator: bool, activations: int = 0, **wire: bool
) -> StageMemory:
    """What a plan takes of one rank, everywhere, with the traffic of one micro-step; see ``expected_memory``."""
    where: dict[str, Any] = {"rank": rank, "accelerator": accelerator}
    device = {"optimizer": optimizer, **wire, **where}
    return StageMemory(
        name=name,
        rest=expected_memory(plan, **device),
        peak=expected_memory(plan, **device, peak=True, activations=activations),
        host=expected_host_memory(plan, optimizer=optimizer, **where),
        disk=expected_disk(plan, rank=rank, optimizer=optimizer),
        traffic=plan.expected_traffic(),
    )


def expected_memory(
    plan: Plan,
    *,
    rank: int = 0,
    optimizer: OptimizerCost = ADAM,
    receive_buffer: bool = True,
    accelerator: bool = False,
    peak: bool = False,
    activations: int = 0,
) -> Memory:
    """What is on one rank's device after a training step.

    Args:
        plan: the plan.
        rank: in the shard group. Ranks differ only in ``optimizer``: it counts real elements, not padding.
        optimizer: what it keeps and makes.
        receive_buffer: whether the wire does (``Collectives.receives``): not shared memory, nor an accelerator.
        accelerator: whether the device is one.
        peak: at the worst moment of a step instead of after it; see [Note: the worst moment].
        activations: what forward and backward hold beside that at most. They have gone when the first unit of the
            forward has its backward, and when the optimizer steps.

    Raises:
        ValueError: if there is no such rank.
    """
    trained, placement, layouts = plan.trainable_layouts, plan.placement, plan.layouts
    shards = _shards(plan, rank, replace(optimizer, state=0) if optimizer.whole else optimizer)
    stepped = [layout for layout in trained if plan.rest_of(layout).state is Tier.DEVICE]
    keeping = (placement.keeping or 0) if placement.shards_parameters else 0
    kept = sum(la.numel // keeping * la.compute_dtype.itemsize for la in layouts) if keeping else 0
    # The owner of a whole parameter keeps a copy of it, with its state.
    whole = sum(nbytes for owner, nbytes in owners_of(plan, stepped) if owner == rank) if optimizer.whole else 0
    # A world of one collects gradients where they are to be.
    in_place = all(la.dtype == la.reduce_dtype and not plan.rest_of(la).offloaded for la in trained)
    after, during = plan.slots_in_step(accelerator, collects=not (plan.group_size == 1 and in_place))
    rest = Memory(
        # Masters of the same dtype are views of the parameters.
        parameters=0 if placement.shards_parameters else sum(la.numel * la.compute_dtype.itemsize for la in layouts),
        weights=shards[Tier.DEVICE, "weights"] + kept,
        masters=shards[Tier.DEVICE, "masters"],
        gradients=shards[Tier.DEVICE, "gradients"],
        optimizer=shards[Tier.DEVICE, "optimizer"] + (1 + optimizer.state) * whole,
        slots=after[0],
        gradient_slots=after[1],
        transport=_transport_nbytes(plan, trained, receive_buffer),
    )
    if not peak:
        return rest
    # Sums on an accelerator, in no slot, that leave for the host when shard groups have averaged them.
    narrow = [la for la in trained if la.reduce_dtype != la.dtype and plan.group_size < plan.world_size]
    leaving = sum(_shard(la) for la in narrow if plan.rest_of(la).gradients is Tier.HOST) * accelerator
    first = min((u.index for u in plan.units if u.layouts and u.index != plan.root and not u.looks_up), default=0)
    missing, raw, (slots, collected), there = max(
        ((missing, raw, during[at], activations * (at >= first)) for at, missing, raw in _moments(plan, accelerator)),
        key=lambda one: one[1] - one[0] + sum(one[2]) + one[3],
    )
    backward = replace(rest, gradients=rest.gradients - missing, raw_gradients=raw, activations=there)
    backward = replace(backward, slots=slots, gradient_slots=collected + leaving)
    if optimizer.whole:  # whole gradients at their owner, and beside them what travels or what the optimizer makes
        sizes = [spec.numel * layout.dtype.itemsize for layout in stepped for spec in layout.parameters]
        step = whole + max(2 * min(whole, max([ROUND_NBYTES, *sizes])), optimizer.loop * max(sizes, default=0))
    else:
        sizes = [part.numel * layout.dtype.itemsize for layout in stepped for part in layout.slices(rank)]
        # The user's order is that of registration as a rule, and buckets are in the opposite one.
        step = optimizer.step_nbytes(sizes if placement.shards_parameters else sizes[::-1], accelerator)
    return max(backward, replace(rest, temporaries=step), key=lambda memory: memory.total)


def expected_host_memory(
    plan: Plan, *, rank: int = 0, optimizer: OptimizerCost = ADAM, accelerator: bool = False
) -> HostBytes:
    """What offloading keeps in one rank's host memory. Arguments and errors as for ``expected_memory``."""
    shards, buffers = _shards(plan, rank, optimizer), 0
    if isinstance(plan.offload, NvmeOffload):
        buffers += int(plan.offload.buffer_mib * 2**20) + FETCH_UNITS * plan.fetch_nbytes
        if plan.offload.checksums:  # 8 bytes for each page
            buffers += sum(n for (tier, _), n in shards.items() if tier is Tier.DISK) // PAGE_NBYTES * 8
    if accelerator:
        buffers += STAGING_BUFFERS * sum(align_up(nbytes, PAGE_NBYTES) for nbytes in plan.staging_nbytes)
    return HostBytes(buffers=buffers, **{part: n for (tier, part), n in shards.items() if tier is Tier.HOST})


def expected_disk(plan: Plan, *, rank: int = 0, optimizer: OptimizerCost = ADAM) -> DiskBytes:
    """What offloading keeps in one rank's files. Arguments and errors as for ``expected_memory``."""
    shards = _shards(plan, rank, optimizer)
    return DiskBytes(**{part: nbytes for (tier, part), nbytes in shards.items() if tier is Tier.DISK})


def owners_of(plan: Plan, layouts: Sequence[FlatLayout]) -> list[tuple[int, int]]:
    """Of each parameter the rank that owns it, for an optimizer that needs whole ones, and its bytes."""
    held = [(spec.numel, layout.dtype.itemsize) for layout in layouts for spec in layout.parameters]
    if not plan.placement.shards_parameters:
        held.reverse()  # buckets are in backward order, and a tie goes to the first parameter
    owners = deal_out([numel for numel, _ in held], plan.group_size)
    return [(owner, numel * itemsize) for (numel, itemsize), owner in zip(held, owners, strict=True)]


def _shard(layout: FlatLayout) -> int:
    """Bytes of a shard in the masters' dtype."""
    return layout.shard_numel * layout.dtype.itemsize


def _shards(plan: Plan, rank: int, optimizer: OptimizerCost) -> Counter[tuple[Tier, str]]:
    """Bytes of a rank between steps by tier and category, in files in whole pages."""
    if not 0 <= rank < plan.group_size:
        raise ValueError(f"There is no rank {rank} in a shard group of {plan.group_size}.")
    placement, found = plan.placement, Counter[tuple[Tier, str]]()

    def add(tier: Tier | None, category: str, nbytes: int, count: int = 1) -> None:
        if tier is not None:
            found[tier, category] += count * (align_up(nbytes, PAGE_NBYTES) if tier is Tier.DISK else nbytes)

    for layout in plan.layouts:
        rest = plan.rest_of(layout)
        add(rest.weights, "weights", layout.shard_numel * layout.compute_dtype.itemsize)
        if rest.offloaded or placement.shards_parameters or layout.compute_dtype != layout.dtype:
            add(rest.master, "masters", _shard(layout))
        if not layout.trainable:
            continue
        own = layout.reduce_dtype != layout.dtype  # else the averaged shard is a part of the full local gradients
        if placement.shards_gradients or own or rest.gradients is Tier.HOST:
            add(rest.gradients, "gradients", _shard(layout))
        if not placement.shards_gradients:
            add(Tier.DEVICE, "gradients", layout.numel * layout.reduce_dtype.itemsize)
        parts = [(p.numel, spec.numel) for p, spec in zip(layout.slices(rank), layout.parameters, strict=True)]
        if rest.state is not Tier.DISK:
            add(rest.state, "optimizer", sum(optimizer.state_nbytes(n, layout.dtype.itemsize, of) for n, of in parts))
        elif any(numel for numel, _ in parts):
            add(rest.state, "optimizer", _shard(layout), optimizer.state)
    return found


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


def _moments(plan: Plan, accelerator: bool) -> Iterator[tuple[int, int, int]]:
    """Moments of a backward: the index of a unit, or -1 at the end, and before the first one how many there are; bytes
    of shards that are still to come; and what autograd holds.

    Of weights that are reached under several names; one that is used twice under one name cannot be told from one that
    is used once.
    """
    sharded, apart = plan.placement.shards_parameters, plan.collecting_apart()
    units = plan.units[::-1] if sharded else plan.units
    layouts = [(unit.index, layout) for unit in units for layout in unit.trainable_layouts]
    # A shard of gradients that is not replicated is there from its reduction on, until gradients are cleared.
    passing = plan.placement.shards_gradients and plan.group_size > 1
    shards = [_shard(la) * (passing and plan.rest_of(la).gradients is Tier.DEVICE) for _, la in layouts]
    sizes = [[_parts(spec, la, index in apart, accelerator) for spec in la.parameters] for index, la in layouts]
    missing, waiting = sum(shards), sum(kept for own in sizes for _, kept, _ in own)
    yield from ((len(units), missing, 0), (-1, 0, 0))
    # Where nothing waits for further parts, the first one is made apart.
    for (index, _), own in zip(layouts, sizes, strict=True):
        yield index, missing, waiting + max((first for first, kept, _ in own if not kept), default=0)
    late = 0  # what is reduced in another dtype comes to its shard when the next bucket needs the memory
    for position, ((index, layout), shard, own) in enumerate(zip(layouts, shards, sizes, strict=True)):
        yield index, missing + late, waiting + max(more for _, _, more in own)
        missing -= shard
        late = shard if layout.reduce_dtype != layout.dtype else 0
        waiting -= sum(kept for _, kept, _ in own)
        # The reduction begins while autograd still holds the last gradient of a bucket; not of the last bucket.
        if position + 1 < len(layouts):
            yield index, missing + late, waiting + own[0 if sharded else -1][0]


def _parts(spec: ParameterSpec, layout: FlatLayout, apart: bool, accelerator: bool) -> tuple[int, int, int]:
    """Bytes of a gradient, of what autograd keeps of it until its last part comes, and of what it has beside that then.

    ``apart``: the unit has its gradient slot alone, so that the first part may be collected there.
    """
    nbytes = spec.numel * layout.compute_dtype.itemsize
    if not spec.aliases:  # on a CPU the slot of a parameter that has one alone is made for its gradient
        alone = apart and not accelerator and len(layout.parameters) == 1
        later = alone * layout.numel * layout.reduce_dtype.itemsize
        return nbytes, 0, max(nbytes, nbytes * spec.parts - later)
    apart &= layout.compute_dtype.itemsize <= layout.reduce_dtype.itemsize and spec.parts < 3
    more = max(spec.parts, 1 + accelerator) - 1  # on a CPU an embedding's part is added row by row
    return nbytes, 0 if apart else nbytes, nbytes * more
