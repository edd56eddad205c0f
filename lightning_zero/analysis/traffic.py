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

Of n bytes that R hosts of S ranks gather or reduce, (R - 1) / R leave a host over gloo, which sums up and hands on
within hosts, and a rank sends (S - 1) / S there. Rings, nccl's and DDP's, pass every host with all that a rank sends:
(R S - 1) / (R S) leave it, and S - 1 of S ranks send as much within. Where shard groups are hosts, or parts of one,
nothing leaves one but the all-reduces across groups, rings of a shard each. Buffers, which are few, count as gathered.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch

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


@dataclass(frozen=True)
class Traffic:
    """Collectives of one step, by kind, of so many ranks in groups of so many. See [Note: Counting traffic]."""

    all_gather: CollectiveTraffic = CollectiveTraffic()
    reduce_scatter: CollectiveTraffic = CollectiveTraffic()
    broadcast: CollectiveTraffic = CollectiveTraffic()
    all_reduce: CollectiveTraffic = CollectiveTraffic()
    world_size: int = field(default=1, compare=False)
    group_size: int = field(default=1, compare=False)

    @property
    def total(self) -> CollectiveTraffic:
        """All kinds together."""
        return self.all_gather + self.reduce_scatter + self.broadcast + self.all_reduce

    @property
    def sent_nbytes(self) -> int:
        """What one rank sends; it receives as many."""
        return self.on_links(1, rings=False)[1]

    def rounded(self, kind: str, *, weights: bool) -> Traffic:
        """Gradients, and ``weights`` too, in a format of ``Compression``; for weights the least is ``"int8"``. Between
        groups that share shards only gradients go."""

        def narrow(part: CollectiveTraffic, kind: str) -> CollectiveTraffic:
            return replace(part, nbytes=min(part.nbytes, int(part.numel * ROUNDED_NBYTES[kind])))

        if self.group_size < self.world_size:
            return replace(self, all_reduce=narrow(self.all_reduce, kind))
        gathers = narrow(self.all_gather, "int8" if kind == "int4" else kind) if weights else self.all_gather
        return replace(self, all_gather=gathers, reduce_scatter=narrow(self.reduce_scatter, kind))

    def on_links(self, hosts: int, *, rings: bool) -> tuple[int, int]:
        """Bytes that leave a host, and that a rank sends within its host, in ``rings`` or not: see [Note: links]."""
        ranks, groups = self.world_size // hosts, self.world_size // self.group_size
        leaving = within = 0
        flat = self.all_gather.nbytes + self.reduce_scatter.nbytes
        for nbytes, size in ((flat, self.group_size), (self.broadcast.nbytes, self.world_size)):
            spanned, inside = max(1, size // ranks), min(size, ranks)  # hosts of a group, and its ranks on each
            if rings and spanned > 1:
                nbytes = nbytes * (size - 1) // size
            leaving += nbytes if rings and spanned > 1 else nbytes * (spanned - 1) // spanned
            within += nbytes * (inside - 1) // inside
        ring = 2 * self.all_reduce.nbytes * (groups - 1) // groups
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
    gathered = reduced = buffers = across = CollectiveTraffic()
    if plan.world_size > 1:
        pieces = make_pieces(plan.buffers)
        buffers = sum((CollectiveTraffic(1, piece.nbytes, piece.nbytes) for piece in pieces), buffers)
    if plan.world_size > plan.group_size:
        across = _flat((layout.shard_numel, layout.dtype) for layout in trainable)
    if plan.group_size > 1:
        reduced = _flat((layout.numel, layout.reduce_dtype) for layout in trainable)
        if plan.placement.shards_gradients:
            reduced = reduced.times(micro_steps)
        layouts: Iterable[FlatLayout] = trainable  # replicated: what the optimizer updated, gathered once, after it
        if plan.placement.shards_parameters:
            units = gather_order(plan, micro_steps=micro_steps)
            layouts = (layout for index in units for layout in plan.units[index].layouts)
        gathered = _flat((layout.numel, layout.compute_dtype) for layout in layouts)
    return Traffic(gathered, reduced, buffers, across, plan.world_size, plan.group_size)


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


def _flat(buffers: Iterable[tuple[int, torch.dtype]]) -> CollectiveTraffic:
    """A collective over each of these flat buffers, given as (elements, dtype)."""
    calls = (CollectiveTraffic(1, numel, numel * dtype.itemsize) for numel, dtype in buffers)
    return sum(calls, CollectiveTraffic())
