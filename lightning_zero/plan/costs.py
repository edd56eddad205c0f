"""What a plan costs: bytes that a rank holds and that a step sends, computed before anything runs.

Not counted are activations and other tensors of the module's own, what libraries hold for themselves (cuBLAS, nccl),
and what an allocator keeps in reserve.

[Note: memory of a step]
A step passes over the masters in one of three ways. *Loop*, torch's default on the CPU: one parameter after the other,
so what it makes has the size of the largest, beside what Python still holds of the one before. *Foreach*, the default
on accelerators: each operation passes over all parameters of a group before the next one begins, so what it makes has
the size of all of them. *Fused*: one pass, which makes nothing. Numbers are those of torch 2.11 to 2.15; a test counts
them.

[Note: counting traffic]
Bytes are those of the whole flat buffer, as the ZeRO paper counts them (section 7): an all-gather or a reduce-scatter
of n elements counts n, of which a rank sends the fraction (world size - 1) / world size. With a model of P elements,
replicated parameters cost 2 P per step and sharded ones 3 P, less what is still resident when it is needed again.
Buffers that rank 0 sends, once per step, come on top.

With shard groups smaller than the world all of that, but for the buffers, happens within each group; and once per step
the gradient shards are all-reduced across the groups (the second hop of MiCS, arXiv:2205.00119). An all-reduce of n
elements counts n, of which a rank sends 2 (groups - 1) / groups.

[Note: the worst moment]
Buckets, masters and state have their memory from set-up to the end, and slots on an accelerator. On the CPU slots are
let go before each optimizer step, but for those of frozen units; those of parameters when the backward ends, before the
last gradients are reduced. Shards of gradients that are reduced during the backward (stages 2 and 3) have memory from
their reduction on, until gradients are cleared. Two things come and go beside that:

* In backward, autograd hands over each gradient in memory of its own, from which it is copied into its bucket at once:
  one parameter's at a time. A parameter that is used in several places gets its gradient in parts, and autograd holds
  their sum until the last of them. Where linear layers and embeddings give them, they are added to the first one, which
  lies where it is collected, if its unit has that memory for itself. Elsewhere autograd adds them out of place, and for
  a moment there are three: the sum so far, the last part, and both together.
* In a step, the optimizer computes with temporary tensors: see [Note: memory of a step].
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any

from torch.optim import Optimizer

from lightning_zero._torch import without_hooks
from lightning_zero.config import NvmeOffload, Tier
from lightning_zero.plan.buckets import ROUND_NBYTES, deal_out, make_pieces
from lightning_zero.plan.layout import PAGE_NBYTES, FlatLayout, ParameterSpec, align_up
from lightning_zero.plan.plan import FETCH_UNITS, KEPT_NBYTES, STAGING_BUFFERS, Plan, UnitPlan
from lightning_zero.registry import extension

__all__ = [
    "ADAM",
    "CollectiveTraffic",
    "DiskBytes",
    "HostBytes",
    "Memory",
    "OptimizerCost",
]
__all__ += ["StageMemory", "Traffic", "ZeroPlan", "build_plan", "expected_disk", "expected_host_memory"]
__all__ += ["expected_memory", "expected_traffic", "gather_order", "owners_of", "stage_memory"]

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

    def __post_init__(self) -> None:
        if min(self.state, self.loop, self.kept, self.foreach) < 0:
            raise ValueError(f"An optimizer holds 0 tensors or more, got {self}.")
        if self.way not in (None, "loop", "foreach", "fused"):
            raise ValueError(f"way must be 'loop', 'foreach' or 'fused', got {self.way!r}.")

    def way_on(self, accelerator: bool) -> str:
        """How it steps on such a device. Whole parameters are updated one by one."""
        return self.way or ("foreach" if accelerator and not self.whole else "loop")

    def step_nbytes(self, sizes: Sequence[int], accelerator: bool) -> int:
        """Most bytes that a step makes and holds at once, for tensors of these sizes in bytes, in its order."""
        way = self.way_on(accelerator)
        if way == "foreach":
            return self.foreach * sum(sizes)
        if way == "fused":
            return 0
        return max((self.loop * size + self.kept * before for before, size in pairwise([0, *sizes])), default=0)

    @classmethod
    def of(cls, optimizer: Optimizer | type | str | OptimizerCost, **options: Any) -> OptimizerCost:
        """What is known about an optimizer; a cost stays as it is.

        A class that is not torch's, nor derived from one, counts as one that needs whole parameters and keeps two
        tensors for each, as most of them do. One with a ``step`` of its own, or an ``_init_group``, needs whole
        parameters, too.

        Args:
            optimizer: an instance, whose largest param group's options count; a class; or the name of one of torch's.
            options: arguments that a class is used with, such as ``momentum=0.9`` or ``fused=True``.

        Raises:
            ValueError: if it is none of these.
        """
        if isinstance(optimizer, OptimizerCost):
            return optimizer
        changed = isinstance(optimizer, Optimizer) and "_init_group" in vars(optimizer)
        if isinstance(optimizer, Optimizer):
            groups = optimizer.param_groups
            # Sizes are asked only where there is a choice: parameters that are not in memory answer slowly.
            sizes = [sum(p.numel() for p in group["params"]) for group in groups] if len(groups) > 1 else [0]
            largest = groups[sizes.index(max(sizes))] if groups else {}
            options = {**largest, **options}
            optimizer = type(optimizer)
        if isinstance(optimizer, type):
            name = optimizer.__name__
            known, own_step = _of_torch(optimizer)
            changed |= own_step
        elif isinstance(optimizer, str):
            module, _, name = optimizer.rpartition(".")
            known = name if name in _COSTS and (not module or module.startswith("torch.optim")) else None
            if known is None and not module:
                raise ValueError(f"torch has no optimizer {name!r} that is known here: give its class.")
        else:
            raise ValueError(f"An optimizer, its class or its name is needed, got {optimizer!r}.")
        costs = [(2, 2, 1, 0)]
        if known is not None:
            base, added = _COSTS[known]
            costs = [base, *(more for names, more in added.items() if any(map(options.get, names.split())))]
        state, loop, kept, foreach = map(sum, zip(*costs, strict=True))
        way = next((way for way in ("fused", "foreach") if options.get(way)), None)
        if way is None and options.get("foreach") is False:
            way = "loop"
        whole = changed or known is None or known in _WHOLE
        return cls(name=name, state=state, loop=loop, kept=kept, foreach=foreach, way=way, whole=whole)


def _of_torch(cls: type) -> tuple[str | None, bool]:
    """The name of torch's optimizer that a class is or derives from, and whether it steps in a way of its own."""
    base: Any = next((base for base in cls.__mro__ if base.__module__.startswith("torch.optim")), None)
    if base is None or base.__name__ not in _COSTS:
        return None, False
    derived = [vars(each) for each in cls.__mro__[: cls.__mro__.index(base)]]
    # Without what torch puts around a class's step when the first optimizer of it is made, also where it inherits it.
    own_step = any(without_hooks(own["step"]) is not without_hooks(base.step) for own in derived if "step" in own)
    # An `_init_group` sees, and may change, all that the step is about to update.
    init_group = base._init_group
    return base.__name__, own_step or any(own.get("_init_group", init_group) is not init_group for own in derived)


_Cost = tuple[int, int, int, int]  # state, made in a loop, of it kept, made by foreach
_STATE: _Cost = (1, 0, 0, 0)
_IN_LOOP: _Cost = (0, 1, 0, 0)  # a changed gradient
_IN_BOTH: _Cost = (0, 1, 0, 1)
# Of torch's classes what they cost, and what is added where any of some options is on.
_COSTS: Mapping[str, tuple[_Cost, Mapping[str, _Cost]]] = {
    "SGD": ((0, 0, 0, 0), {"momentum": _STATE, "weight_decay maximize": _IN_BOTH, "nesterov": _IN_LOOP}),
    "Adam": ((2, 2, 1, 1), {"amsgrad": _STATE, "weight_decay maximize": _IN_LOOP}),
    "AdamW": ((2, 2, 1, 1), {"amsgrad": _STATE, "maximize": _IN_LOOP}),
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
_WHOLE = frozenset({"Muon", "Adafactor"})

ADAM = OptimizerCost.of("AdamW")


# -------------------------------------------------------------------------------------------------------------- traffic


@dataclass(frozen=True)
class CollectiveTraffic:
    """Collectives of one kind."""

    calls: int = 0
    numel: int = 0  #: Elements of their flat buffers, padding included.
    nbytes: int = 0  #: The same in bytes of the dtype on the wire.

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

    @property
    def sent_nbytes(self) -> int:
        """What one rank sends; it receives as many."""
        size, groups = self.group_size, self.world_size // self.group_size
        sent = (self.all_gather.nbytes + self.reduce_scatter.nbytes) * (size - 1) // size
        sent += self.broadcast.nbytes * (self.world_size - 1) // self.world_size
        return sent + 2 * self.all_reduce.nbytes * (groups - 1) // groups


def expected_traffic(plan: Plan, *, micro_steps: int = 1) -> Traffic:
    """Traffic of one step of ``micro_steps`` forwards and backwards; zero for a single rank, which needs no wire.

    Buffers are not sent in the step after an evaluation, whose first batch has had them.

    Raises:
        ValueError: if ``micro_steps`` is less than 1.
    """
    if micro_steps < 1:
        raise ValueError(f"A step has at least one micro-step, got {micro_steps}.")
    trainable = plan.trainable_layouts
    gathered = reduced = buffers = across = copies = exact = CollectiveTraffic()
    if plan.world_size > 1:
        pieces = make_pieces(plan.buffers)
        buffers = sum((CollectiveTraffic(1, piece.nbytes, piece.nbytes) for piece in pieces), buffers)
    if plan.world_size > plan.group_size:
        across = _flat(trainable, "dtype", "shard_numel")
    if plan.group_size > 1:
        reduced = _flat(trainable, "reduce_dtype")
        if plan.placement.shards_gradients:
            reduced = reduced.times(micro_steps)
        if plan.placement.shards_parameters:
            units = [plan.units[index] for index in gather_order(plan, micro_steps=micro_steps)]
            gathered = copies = _flat(la for unit in units for la in unit.layouts)
            if plan.placement.keeping:
                copies = _flat(la for unit in plan.units if unit.trainable_layouts for la in unit.layouts)
        else:  # what the optimizer updated, gathered once, after it
            mixed = {unit.index for unit in plan.units if any(la.compute_dtype != la.dtype for la in unit.layouts)}
            exact = _flat(la for unit in plan.units if unit.index not in mixed for la in unit.trainable_layouts)
            copies = _flat(la for unit in plan.units if unit.index in mixed for la in unit.trainable_layouts)
            gathered = exact + copies
    return Traffic(gathered, reduced, buffers, across, plan.world_size, plan.group_size, copies, exact)


def gather_order(plan: Plan, *, micro_steps: int = 1) -> tuple[int, ...]:
    """Indices of the units in the order in which one step gathers them, where parameters are sharded.

    Every unit runs once per forward, in plan order, and once per backward: siblings in reverse, a unit before those
    nested in it. A unit stays resident until another unit is gathered into its slot, the root throughout. Weights do
    not change between the micro-steps of a step, so residents stay valid; after the optimizer step all are stale but
    those of entirely frozen units. Units without parameters (an empty root) are not gathered.

    An upper bound where autograd has no reason to run a unit's backward: a frozen unit with nothing trainable before it
    is gathered in forward only, which the plan cannot know.
    """
    return _gathers(plan, micro_steps)[0]


def _gathers(plan: Plan, micro_steps: int) -> tuple[tuple[int, ...], dict[int, int]]:
    """The units that are gathered, in their order, and those of entirely frozen ones that outlast the optimizer step,
    by their slots."""
    nested: dict[int | None, list[UnitPlan]] = {}
    for unit in plan.units:
        # Ancestors ascend in registration order, so the innermost comes last.
        nested.setdefault(unit.ancestors[-1] if unit.ancestors else None, []).append(unit)
    backward: list[UnitPlan] = []  # a unit's backward starts at its outputs
    waiting = list(nested.get(None, ()))
    while waiting:
        backward.append(waiting.pop())
        waiting.extend(nested.get(backward[-1].index, ()))
    resident: dict[int, int] = {}
    gathered: list[int] = []
    for _ in range(2):  # what the step before left behind is known only in the second one
        gathered = []
        for unit in (*plan.units, *backward) * micro_steps:
            if unit.layouts and unit.slot is not None and resident.get(unit.slot) != unit.index:
                resident[unit.slot] = unit.index
                gathered.append(unit.index)
        resident = {slot: index for slot, index in resident.items() if not plan.units[index].trainable_layouts}
    return tuple(gathered), resident


def _flat(layouts: Iterable[FlatLayout], dtype: str = "compute_dtype", numel: str = "numel") -> CollectiveTraffic:
    """A collective over the flat buffer of each, with attributes that say how many elements it has, of what dtype."""
    sizes = ((getattr(layout, numel), getattr(layout, dtype).itemsize) for layout in layouts)
    return sum((CollectiveTraffic(1, count, count * itemsize) for count, itemsize in sizes), CollectiveTraffic())


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
    receive_buffer: bool = True,
    accelerator: bool = False,
    peak: bool = False,
) -> Memory:
    """What is on one rank's device after a training step.

    Args:
        plan: the plan.
        rank: in the shard group. Ranks differ only in ``optimizer``: it counts real elements, not padding.
        optimizer: what it keeps and makes.
        receive_buffer: whether the wire does (``Collectives.receives``): not shared memory, nor an accelerator.
        accelerator: whether the device is one.
        peak: at the worst moment of a step instead of after it; see [Note: the worst moment].

    Raises:
        ValueError: if there is no such rank.
    """
    _check(plan, rank)
    trained, placement, layouts = plan.trainable_layouts, plan.placement, plan.layouts
    stepped = [layout for layout in trained if plan.rest_of(layout).state is Tier.DEVICE]
    parameters = keeping = 0
    if not placement.shards_parameters:  # masters of the same dtype are views of the parameters
        parameters = sum(layout.numel * layout.compute_dtype.itemsize for layout in layouts)
        mastered = [layout for layout in layouts if layout.compute_dtype != layout.dtype]
    else:
        mastered, keeping = [*layouts], placement.keeping or 0
    kept = sum(la.numel // keeping * la.compute_dtype.itemsize for la in layouts) if keeping else 0
    # The owner of a whole parameter keeps a copy of it, with its state.
    whole = sum(nbytes for owner, nbytes in owners_of(plan, stepped) if owner == rank) if optimizer.whole else 0
    lasting = range(len(plan.slots)) if accelerator else _gathers(plan, 1)[1]
    # A world of one collects gradients where they are to be.
    in_place = all(la.dtype == la.reduce_dtype and not plan.rest_of(la).offloaded for la in trained)
    collected = () if plan.group_size == 1 and in_place else plan.gradient_slots
    small = (nbytes for nbytes in collected if nbytes < KEPT_NBYTES and plan.group_size > 1)
    rest = Memory(
        parameters=parameters,
        weights=_shards(plan, layouts, "weights", Tier.DEVICE, "compute_dtype") + kept,
        masters=_shards(plan, mastered, "master", Tier.DEVICE),
        gradients=sum(_gradient_nbytes(plan, layout) for layout in trained),
        optimizer=(1 + optimizer.state) * whole if optimizer.whole else optimizer.state * _owned_nbytes(stepped, rank),
        slots=sum(n for slot, n in enumerate(plan.slots) if slot in lasting or n < KEPT_NBYTES),
        gradient_slots=sum(collected if accelerator else small),
        transport=_transport_nbytes(plan, trained, receive_buffer),
    )
    if not peak:
        return rest
    missing, raw = _backward_nbytes(plan, accelerator)
    # Sums on an accelerator, in no slot, that leave for the host when shard groups have averaged them.
    narrow = [la for la in trained if la.reduce_dtype != la.dtype and plan.group_size < plan.world_size]
    leaving = _shards(plan, narrow, "gradients", Tier.HOST) * accelerator
    last = replace(rest, gradient_slots=sum(collected) + leaving)  # parameters have gone
    backward = replace(last, gradients=rest.gradients - missing, raw_gradients=raw, slots=sum(plan.slots))
    if optimizer.whole:  # whole gradients at their owner, and beside them what travels or what the optimizer makes
        sizes = [spec.numel * layout.dtype.itemsize for layout in stepped for spec in layout.parameters]
        step = whole + max(2 * min(whole, ROUND_NBYTES), optimizer.loop * max(sizes, default=0))
    else:
        step = _step_nbytes(plan, stepped, rank, optimizer, accelerator)
    return max(backward, last, replace(rest, temporaries=step), key=lambda memory: memory.total)


def expected_host_memory(
    plan: Plan, *, rank: int = 0, optimizer_tensors: int = 2, accelerator: bool = False
) -> HostBytes:
    """What offloading keeps in one rank's host memory, of an optimizer that keeps so many tensors for a parameter.

    Other arguments, and errors, are as for ``expected_memory``.
    """
    _check(plan, rank)
    buffers = 0
    if isinstance(plan.offload, NvmeOffload):
        buffers += int(plan.offload.buffer_mib * 2**20) + FETCH_UNITS * plan.fetch_nbytes
        if plan.offload.checksums:  # 8 bytes for each page
            files = expected_disk(plan, rank=rank, optimizer_tensors=optimizer_tensors)
            buffers += files.total // PAGE_NBYTES * 8
    if accelerator:
        buffers += STAGING_BUFFERS * sum(align_up(nbytes, PAGE_NBYTES) for nbytes in plan.staging_nbytes)
    on_host = [layout for layout in plan.trainable_layouts if plan.rest_of(layout).state is Tier.HOST]
    return HostBytes(
        weights=_shards(plan, plan.layouts, "weights", Tier.HOST, "compute_dtype"),
        masters=_shards(plan, plan.layouts, "master", Tier.HOST),
        gradients=_shards(plan, plan.trainable_layouts, "gradients", Tier.HOST),
        optimizer=optimizer_tensors * _owned_nbytes(on_host, rank),
        buffers=buffers,
    )


def expected_disk(plan: Plan, *, rank: int = 0, optimizer_tensors: int = 2) -> DiskBytes:
    """What offloading keeps in one rank's files. Arguments and errors as for ``expected_host_memory``."""
    _check(plan, rank)
    owned = [layout for layout in plan.trainable_layouts if _owned_nbytes([layout], rank)]
    return DiskBytes(
        weights=_shards(plan, plan.layouts, "weights", Tier.DISK, "compute_dtype", PAGE_NBYTES),
        masters=_shards(plan, plan.layouts, "master", Tier.DISK, page=PAGE_NBYTES),
        optimizer=optimizer_tensors * _shards(plan, owned, "state", Tier.DISK, page=PAGE_NBYTES),
    )


def owners_of(plan: Plan, layouts: Sequence[FlatLayout]) -> list[tuple[int, int]]:
    """Of each parameter the rank that owns it, for an optimizer that needs whole ones, and its bytes."""
    held = [(spec.numel, layout.dtype.itemsize) for layout in layouts for spec in layout.parameters]
    if not plan.placement.shards_parameters:
        held.reverse()  # buckets are in backward order, and a tie goes to the first parameter
    owners = deal_out([numel for numel, _ in held], plan.group_size)
    return [(owner, numel * itemsize) for (numel, itemsize), owner in zip(held, owners, strict=True)]


def _check(plan: Plan, rank: int) -> None:
    if not 0 <= rank < plan.group_size:
        raise ValueError(f"There is no rank {rank} in a shard group of {plan.group_size}.")


def _shards(
    plan: Plan, layouts: Iterable[FlatLayout], part: str, tier: Tier, dtype: str = "dtype", page: int = 1
) -> int:
    """Bytes of the shards whose ``part`` (a field of ``Rest``) is in a tier, each in whole pages."""
    resting = (layout for layout in layouts if getattr(plan.rest_of(layout), part) is tier)
    return sum(align_up(layout.shard_numel * getattr(layout, dtype).itemsize, page) for layout in resting)


def _owned_nbytes(layouts: Iterable[FlatLayout], rank: int) -> int:
    """Bytes of one state tensor for every element that the rank owns."""
    return sum(layout.dtype.itemsize * sum(part.numel for part in layout.slices(rank)) for layout in layouts)


def _gradient_nbytes(plan: Plan, layout: FlatLayout) -> int:
    shard = _shards(plan, [layout], "gradients", Tier.DEVICE)
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


def _backward_nbytes(plan: Plan, accelerator: bool) -> tuple[int, int]:
    """At the worst moment of a backward: bytes of shards that are still to come, and what autograd holds.

    Of weights that are reached under several names; one that is used twice under one name cannot be told from one that
    is used once.
    """
    sharded, apart = plan.placement.shards_parameters, plan.collecting_apart()
    units = plan.units[::-1] if sharded else plan.units
    layouts = [layout for unit in units for layout in unit.trainable_layouts]
    # A shard of gradients that is not replicated is there from its reduction on, until gradients are cleared.
    passing = plan.placement.shards_gradients and plan.group_size > 1
    shards = [_shards(plan, [layout], "gradients", Tier.DEVICE) * passing for layout in layouts]
    sizes = [
        [_parts(spec, layout, unit.index in apart, accelerator) for spec in layout.parameters]
        for unit in units
        for layout in unit.trainable_layouts
    ]
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
            moments += [(missing + late, waiting + own[0 if sharded else -1][0])]
    return max(moments, key=lambda found: found[1] - found[0])


def _parts(spec: ParameterSpec, layout: FlatLayout, apart: bool, accelerator: bool) -> tuple[int, int, int]:
    """Bytes of a gradient, of what autograd keeps of it until its last part comes, and of what it has beside that then.

    ``apart``: the unit has its gradient slot alone, so that the first part may be collected there.
    """
    nbytes = spec.numel * layout.compute_dtype.itemsize
    if not spec.aliases:
        return nbytes, 0, nbytes
    apart &= layout.compute_dtype.itemsize <= layout.reduce_dtype.itemsize and spec.parts < 3
    more = max(spec.parts, 1 + accelerator) - 1  # on a CPU an embedding's part is added row by row
    return nbytes, 0 if apart else nbytes, nbytes * more


def _step_nbytes(
    plan: Plan, layouts: Sequence[FlatLayout], rank: int, optimizer: OptimizerCost, accelerator: bool
) -> int:
    """What an elementwise optimizer makes."""
    sizes = [part.numel * layout.dtype.itemsize for layout in layouts for part in layout.slices(rank)]
    # The user's order is that of registration as a rule, and buckets are in the opposite one.
    return optimizer.step_nbytes(sizes if plan.placement.shards_parameters else sizes[::-1], accelerator)


# -------------------------------------------------------------------------------------------- the plan as users have it


class ZeroPlan(Plan):
    """Who holds what, in what order it moves, and how many bytes that takes. Numbers only; equal on all ranks.

    ``build_plan`` makes one. What is decided is in ``Plan``; what follows from it can be asked for by method.
    """

    expected_traffic = expected_traffic
    expected_memory = expected_memory
    expected_host_memory = expected_host_memory
    expected_disk = expected_disk

    def describe(self, *, optimizer: OptimizerCost = ADAM, accelerator: bool = False, micro_steps: int = 1) -> str:
        """The plan as a table for people: units, totals, traffic and memory with that optimizer, on such a device."""
        text: str = extension("planner").describe_plan(
            self, optimizer=optimizer, accelerator=accelerator, micro_steps=micro_steps
        )
        return text


build_plan = ZeroPlan.build
"""Turn a module, settings and a world size into a plan; see ``Plan.build``."""
