"""What one training step sends, computed from the plan.

[Note: Counting traffic]

Bytes are those of the whole flat buffer, the counting of the ZeRO paper (section 7): an all-gather or a reduce-scatter
of n elements counts n, of which a rank sends the fraction (world size - 1) / world size. With a model of P elements,
replicated parameters cost 2 P per step and sharded ones 3 P, less what is still resident in its slot when it is needed
again. Buffers that rank 0 sends to the others, once per step, come on top: a broadcast of n bytes counts n elements.

With shard groups smaller than the world all of that, but for the buffers, happens within each group; and once per step
the gradient shards are all-reduced across the groups (the second hop of MiCS, arXiv:2205.00119). An all-reduce of n
elements counts n, of which a rank sends 2 (groups - 1) / groups.

Prefetching changes when a unit is gathered, not how often, so it appears here only through the number of slots.

[Note: links]

Of n bytes that R hosts of S ranks gather or reduce, (R - 1) / R leave a host in two hops (over gloo, and on devices
where something is rounded or kept), of which the first sums up and hands on within hosts: a rank sends (S - 1) / S
there. Rings, nccl's otherwise and DDP's, pass every host with all that a rank sends:
(R S - 1) / (R S) leave it, and S - 1 of S ranks send as much within. Where shard groups are hosts, or parts of one,
nothing leaves one but the all-reduces across groups, rings of a shard each. Where groups reach over several hosts,
their ranks exchange directly: S times as much leaves a host. Where a host's ranks keep weights (``Placement.keeping``),
those of each unit that is trained cross hosts once a step. Buffers, which are few, count as gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lightning_zero.plan import FlatLayout, Plan, UnitPlan, make_pieces

__all__ = [
    "ROUNDED_NBYTES",
    "CollectiveTraffic",
    "Traffic",
    "expected_traffic",
    "gather_order",
    "lasting_slots",
]

ROUNDED_NBYTES = {"bfloat16": 2.0, "int8": 1 + 4 / 64, "int4": 1 / 2 + 4 / 64}
"""Of an element that ``Compression`` rounds, by the format, with its part of a scale."""


@dataclass(frozen=True)
class CollectiveTraffic:
    """Collectives of one kind.

    Attributes:
        calls: how many.
        numel: elements of their flat buffers, padding included.
        nbytes: the same in bytes of the dtype on the wire.
    """

    calls: int = 0
    numel: int = 0
    nbytes: int = 0

    def __add__(self, other: CollectiveTraffic) -> CollectiveTraffic:
        return CollectiveTraffic(self.calls + other.calls, self.numel + other.numel, self.nbytes + other.nbytes)

    def times(self, count: int) -> CollectiveTraffic:
        """The same collectives ``count`` times."""
        return CollectiveTraffic(self.calls * count, self.numel * count, self.nbytes * count)

    def rounded(self, kind: str | None) -> int:
        """Their bytes in a format of ``Compression``, which makes nothing larger; ``None``: as they are."""
        return self.nbytes if kind is None else min(self.nbytes, int(self.numel * ROUNDED_NBYTES[kind]))


@dataclass(frozen=True)
class Traffic:
    """Collectives of one step, by kind, of so many ranks in groups of so many. See [Note: Counting traffic]."""

    all_gather: CollectiveTraffic = CollectiveTraffic()
    reduce_scatter: CollectiveTraffic = CollectiveTraffic()
    broadcast: CollectiveTraffic = CollectiveTraffic()
    all_reduce: CollectiveTraffic = CollectiveTraffic()
    world_size: int = field(default=1, compare=False)
    group_size: int = field(default=1, compare=False)
    copies: CollectiveTraffic = field(
        default=CollectiveTraffic(), compare=False
    )  # gathered across hosts, beside masters
    exact: CollectiveTraffic = field(default=CollectiveTraffic(), compare=False)  # likewise, and nobody may round them

    @property
    def total(self) -> CollectiveTraffic:
        """All kinds together."""
        return self.all_gather + self.reduce_scatter + self.broadcast + self.all_reduce

    @property
    def sent_nbytes(self) -> int:
        """What one rank sends, where no host keeps any of it; it receives as many."""
        return self.on_links(1, rings=False)[1]

    def on_links(self, hosts: int, *, rings: bool, formats: Sequence[str | None] = (None, None)) -> tuple[int, int]:
        """Bytes that leave a host, weights and gradients in ``formats``, and that a rank sends in it: [Note: links]."""
        ranks, groups = self.world_size // hosts, self.world_size // self.group_size
        weights, gradients = formats if groups == 1 else (None, None)
        crossing = self.exact.nbytes + self.copies.rounded(weights) + self.reduce_scatter.rounded(gradients)
        flat, buffers = self.all_gather.nbytes + self.reduce_scatter.nbytes, self.broadcast.nbytes
        leaving = within = 0
        for whole, out, size in ((flat, crossing, self.group_size), (buffers, buffers, self.world_size)):
            spanned, inside = max(1, size // ranks), min(size, ranks)  # hosts of a group, and its ranks on each
            if rings and spanned > 1:
                whole = out = whole * (size - 1) // size
            elif spanned > 1 and size < self.world_size:
                whole, out = whole // spanned, out * inside * (spanned - 1) // spanned
            else:
                out = out * (spanned - 1) // spanned
            leaving += out
            within += whole * (inside - 1) // inside
        ring = 2 * self.all_reduce.rounded(formats[1] if hosts > 1 else None) * (groups - 1) // groups
        inside = max(1, ranks // self.group_size)  # ranks of a ring that are on one host
        if hosts == 1:
            return 0, within + ring
        return leaving + ring * ranks // inside, within + ring * (inside - 1) // inside


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


def lasting_slots(plan: Plan) -> frozenset[int]:
    """Indices of the slots whose units outlast an optimizer step: those of entirely frozen units."""
    return frozenset(_gathers(plan, 1)[1])


def _gathers(plan: Plan, micro_steps: int) -> tuple[tuple[int, ...], dict[int, int]]:
    """The units that are gathered, in their order, and those that are still in their slots after the optimizer step."""
    order = (*plan.units, *_backward_order(plan)) * micro_steps
    resident: dict[int, int] = {}
    gathered: list[int] = []
    # Twice: what the step before left behind is known only then.
    for _ in range(2):
        gathered = []
        for unit in order:
            if unit.layouts and unit.slot is not None and resident.get(unit.slot) != unit.index:
                resident[unit.slot] = unit.index
                gathered.append(unit.index)
        resident = {slot: index for slot, index in resident.items() if not plan.units[index].trainable_layouts}
    return tuple(gathered), resident


def _backward_order(plan: Plan) -> list[UnitPlan]:
    """Siblings in reverse, each before the units nested in it: a unit's backward starts at its outputs."""
    nested: dict[int | None, list[UnitPlan]] = {}
    for unit in plan.units:
        # Ancestors ascend in registration order, so the innermost comes last.
        nested.setdefault(unit.ancestors[-1] if unit.ancestors else None, []).append(unit)
    order: list[UnitPlan] = []
    waiting = list(nested.get(None, ()))
    while waiting:
        unit = waiting.pop()
        order.append(unit)
        waiting.extend(nested.get(unit.index, ()))
    return order


def _flat(layouts: Iterable[FlatLayout], dtype: str = "compute_dtype", numel: str = "numel") -> CollectiveTraffic:
    """A collective over the flat buffer of each, with attributes that say how many elements it has, of what dtype."""
    sizes = ((getattr(layout, numel), getattr(layout, dtype).itemsize) for layout in layouts)
    return sum((CollectiveTraffic(1, count, count * itemsize) for count, itemsize in sizes), CollectiveTraffic())
