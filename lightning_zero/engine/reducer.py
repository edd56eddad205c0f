"""Gradients on their way: from parameters through a full buffer into this rank's shard, in one order on all ranks.

[Note: one order, and nothing left over]
Reductions pair up by order, so every rank launches buckets in the same one: a bucket that is ready waits for those
before it. At the end of the backward the ranks tell each other which buckets they touched, and every rank launches the
rest that *anybody* touched, with zeros for what did not arrive. A branch that only some ranks took, or a unit nobody
used, therefore neither hangs nor skews anything, and a parameter without a gradient on every rank is left alone by the
optimizer. The order starts as the plan's and becomes the one in which rank 0's buckets were ready in the first
backward.

[Note: copy mode]
Autograd hands each gradient over in a fresh tensor; the hook copies it into its place in the full buffer and drops it.
Preset ``.grad`` views would save nothing (they cost a zero pass and a read-modify-write) and lose the first gradients
whenever a parameter's gradient arrives before its unit was seen.

[Note: one backward may reduce a bucket more than once]
A parameter whose unit looked finished can still get a gradient (activation checkpointing runs a backward within the
backward). The bucket then starts another *round*; rounds of one backward add up.

[Note: averages that stay]
A shard parameter's ``.grad`` is the truth about accumulation: ``None`` (after ``zero_grad``) means the next gradient
replaces, anything else means it is added. Averages of earlier backwards that nobody cleared are *kept*: they lie in the
shard, and a reduction's result is added there. Where the shard is a part of the full buffer it leaves that first, for
memory that goes when its gradients are cleared; one rank alone goes on adding in place. Without a reduction the full
gradients stay in the full buffer as *local* sums, to which the next micro-step adds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from lightning_zero._torch import bytes_of, foreach_zero, untracked
from lightning_zero.comm import PATIENCE_SECONDS, Collectives, Pending
from lightning_zero.engine.agreement import Means
from lightning_zero.engine.events import Phase
from lightning_zero.engine.pool import Buffer, FlatBuffer, Form
from lightning_zero.engine.unit import Unit
from lightning_zero.offload.transfers import Copy, Transfer, Transfers
from lightning_zero.shards.binding import set_data
from lightning_zero.shards.slice import FlatParameters

__all__ = ["GradientBucket", "GradientReducer", "put_gradient", "report_width"]


_FEW = 64  # elements
_BITS = 62
_NOTHING = nullcontext()


def put_gradient(gradient: Tensor, view: Tensor) -> None:
    """Copy a gradient to its place. It may be there already, or wait at the end of it in a narrower dtype.

    What else lies there is some view of it that user code has made.
    """
    offset, start, numel = gradient.data_ptr() - view.data_ptr(), 0, view.numel()
    if not 0 <= offset < view.nbytes:
        view.copy_(gradient)
    elif gradient.dtype == view.dtype or not gradient.is_contiguous():
        if offset or gradient.stride() != view.stride():
            view.copy_(gradient.clone())
    else:
        source, target = gradient.view(-1), view.view(-1)
        while numel - start > _FEW:
            end = (start + numel) // 2  # what is written up to there is nothing that is still to be read
            target[start:end].copy_(source[start:end])
            start = end
        target[start:].copy_(source[start:].clone())


class GradientShard:
    """This rank's averages of a layout's gradients: 1-D, of the master dtype; what optimizers' ``.grad`` are views of.

    ``lasting``: its memory. Without it, and where it has left it, the shard has other memory until nobody has a
    gradient there any more.
    """

    def __init__(self, flat: FlatParameters, lasting: Tensor | None) -> None:
        self._flat = flat
        self.lasting = lasting
        self._parts = [] if lasting is None else flat.cut(lasting)
        self._held: Tensor | None = None  # other memory, in a backward
        self._elsewhere = lasting is None  # whether gradients are in other memory, as long as there are any
        self.numbers = [0] * len(flat.parameters)
        """How many gradients each parameter has had: of one that was cleared nobody may go on to use the memory."""

    @property
    def there(self) -> Tensor | None:
        """Its memory, if it has any."""
        if self._held is None and self._elsewhere:
            layout, gradients = self._flat.layout, [one.target.grad for one in self._flat.shards]
            for storage in [gradient.untyped_storage() for gradient in gradients if gradient is not None]:
                if storage.nbytes() == layout.shard_numel * layout.dtype.itemsize:  # not the user's
                    return bytes_of(storage).view(layout.dtype)
            self._elsewhere = self.lasting is None
        return self.lasting if self._held is None else self._held

    def memory(self, whole: bool = False) -> Tensor:
        """Its memory, which is taken if there is none. ``whole``: it is about to be overwritten as a whole."""
        memory = self._held
        if memory is None and not (whole and self.lasting is None):
            memory = self.there
        if memory is None:
            layout, make = self._flat.layout, torch.empty if whole else torch.zeros
            memory = make(layout.shard_numel, dtype=layout.dtype, device=self._flat.master.device)
        if memory is not self.lasting:
            self._held = memory
        return memory

    def move(self) -> None:
        """Leave the lasting memory, with what is there."""
        self._held, self._elsewhere = self.memory().clone(), True

    def parts(self) -> list[Tensor]:
        """Its memory, cut by parameters."""
        memory = self.memory()
        return self._parts if memory is self.lasting else self._flat.cut(memory)

    def leave(self) -> None:
        """Leave memory that comes and goes to those who have a gradient in it."""
        self._held = None


@dataclass(eq=False, slots=True)
class Round:
    """What a bucket has collected since the last publication, and its averages on their way to the shard.

    Positions are those of its parameters.
    """

    arrived: set[int] = field(default_factory=set)  # in the running round
    local: set[int] = field(default_factory=set)  # what holds unreduced gradients of earlier micro-steps
    used: set[int] = field(default_factory=set)  # what had a gradient in an earlier round of the running backward
    kept: set[int] = field(default_factory=set)  # of which the shard has averages that a reduction's result is added to
    further: bool = False  # there was an earlier round: the shard holds gradients of some rank
    launched: bool = False  # a reduction was started in the running backward
    dirty: bool = False  # gradients arrived that no reduction has taken yet
    plain: bool = False  # gradients only have to be copied: nothing is added to anything
    held: dict[int, TensorWeakRef] = field(default_factory=dict)  # what autograd keeps of those whose parts still come
    pending: Pending | None = None  # the reduction under way
    direct: bool = False  # what it ends with is in the shard
    total: Tensor | None = None  # on the device: what leaves for the host, and is averaged between groups before
    averaging: Pending | None = None  # what makes the shard's averages those of all shard groups
    leaving: Transfer | None = None  # brings averages to the host, out of the full buffer


class GradientBucket:
    """Gradients of one trainable layout.

    Args:
        index: place among all buckets of the engine, the same on every rank.
        unit: the unit the layout belongs to.
        flat: its parameters and shard parameters.
        shard: 1-D, of the master dtype: memory of the averages; ``None``: it comes and goes.
        resident: the full buffer, where full gradients stay between micro-steps; ``None``: one is claimed per backward.
        collectives: the wire.
        transfers: what brings reduced gradients to ``shard`` where that is on the host; ``None`` where it is not.
        apart: whether the buffer that is claimed is no other unit's for all of the backward.
    """

    def __init__(
        self,
        index: int,
        unit: Unit,
        flat: FlatParameters,
        shard: Tensor | None,
        resident: Tensor | None,
        collectives: Collectives,
        transfers: Transfers | None = None,
        apart: bool = False,
    ) -> None:
        self.index = index
        self.unit = unit
        self.flat = flat
        self._targets = [one.target for one in flat.shards]  # what optimizers step on
        self.shard = GradientShard(flat, shard)
        self.resident = resident
        self._collectives = collectives
        self.transfers = transfers
        self.apart = apart
        # Whether a reduction's result can be the shard as it is: nobody has to convert it.
        self._exact = transfers is None and flat.layout.reduce_dtype == flat.layout.dtype
        self._lasting = None if resident is None else FlatBuffer.of(resident, flat.layout)
        self.room = self._lasting
        """Where gradients are collected, of the reduce dtype."""
        self.grouped = False
        """Whether the averages in the shard are those of one shard group of several."""
        self.round = Round()

    @property
    def nbytes(self) -> int:
        """Of the full buffer."""
        return self.flat.layout.numel * self.flat.layout.reduce_dtype.itemsize

    @property
    def in_place(self) -> bool:
        """Whether gradients are collected in a buffer of which the shard is this rank's range."""
        collects = self._exact and self.resident is not None and self.room is self._lasting
        return collects and self.shard.there is self.shard.lasting

    @property
    def touched(self) -> bool:
        """Whether any gradient arrived in the running backward or is left from earlier micro-steps."""
        return bool(self.round.arrived or self.round.used or self.round.local)

    def replace(self, position: int, own: Tensor) -> None:
        """Let this rank's slice of a parameter's averaged gradient be ``own``: 1-D. Read once. Not in a backward."""
        part = self.shard.parts()[position]
        part.copy_(own)
        self._show(position, part)
        self.shard.leave()

    def drainable(self, seconds: float) -> bool:
        """Whether ``drain`` would return within ``seconds``."""
        return self.round.pending is None or self.round.pending.ready_within(seconds)

    def has_gradient(self, position: int) -> bool:
        """Whether this rank had a gradient for a parameter since the gradients were last cleared and published."""
        return position in self.round.arrived or position in self.round.used or self.still_local(position)

    def still_local(self, position: int) -> bool:
        """Whether unreduced gradients of earlier micro-steps are there and were not cleared by ``zero_grad``."""
        return position in self.round.local and self._targets[position].grad is not None

    def give_buffer(self, room: FlatBuffer | None) -> None:
        """Collect in ``room`` from now on."""
        if self.round.leaving is not None:
            self.round.leaving.order()
        self.room, self.round.plain = room, False

    def open(self) -> None:
        """Begin a backward: gradients, the first one too, need no more than to be copied, where that can be."""
        now = self.round
        now.plain = not (self._look() or now.local or now.held)

    def add(self, position: int, gradient: Tensor) -> None:
        """Take over a parameter's gradient, of full shape and any floating dtype. Read once."""
        now = self.round
        if self.room is None:
            raise RuntimeError(f"A gradient of unit '{self.unit.name}' arrived before memory for it was claimed.")
        if not now.dirty:
            self._make_way()
        with untracked():
            if gradient.layout is not torch.strided:
                gradient = gradient.to_dense()
            view = self.room.views[position]
            if position in now.held:
                held = now.held.pop(position)()
                if held is not None and held.data_ptr() != gradient.data_ptr():  # a backward's around this one
                    set_data(held, held.clone())
            if position in now.arrived or self.still_local(position):
                view.add_(gradient)
            else:
                put_gradient(gradient, view)
                now.local.discard(position)
        now.arrived.add(position)
        now.dirty = True
        now.plain = not (now.held or now.local or torch.is_grad_enabled())

    def hold(self, position: int, part: Tensor) -> Tensor:
        """Put the first part of a gradient where that is to be, full shape. Returns it: itself, if it cannot be there.

        What is returned may be added to until it arrives.
        """
        now = self.round
        if not now.dirty:
            self._make_way()
        if self.room is None or self.has_gradient(position) or now.launched or position in now.held:
            return part
        view = self.room.views[position].view(-1)
        if part.dtype != view.dtype and part.dtype.itemsize >= view.dtype.itemsize:
            return part
        with untracked():
            held = view.view(part.dtype)[-part.numel() or None :].view(part.shape)  # at its end, so that it can widen
            held.copy_(part)
        now.held[position], now.plain = TensorWeakRef(held), False
        return held

    def start_round(self) -> None:
        """Make room for gradients that arrive after this backward's reduction was launched."""
        now = self.round
        if self.in_place and self._collectives.world_size == 1:
            return  # they are added where they are
        self.drain()
        if self.in_place and self.resident is not None:
            # Not there: some rank may join the averages between groups only at the end of its backward.
            self.give_buffer(FlatBuffer.of(torch.empty_like(self.resident), self.flat.layout))
        elif now.leaving is not None:
            now.leaving.order()
        now.plain, now.further, now.kept = False, True, set(range(len(self._targets)))
        now.used |= now.arrived | now.local
        now.arrived.clear()
        now.local.clear()

    def launch(self, patience: float, last: bool = True) -> None:
        """Start averaging over the ranks. Everything that did not arrive here counts as zero.

        ``patience``: seconds to wait for memory of the wire. ``last``: over those of all shard groups, as a step
        follows. Collective: every rank, in the agreed order of buckets.
        """
        now = self.round
        if now.averaging is not None:
            self.settle()
        if self.room is None:
            raise RuntimeError(f"No gradient memory was claimed for unit '{self.unit.name}'.")
        if not now.dirty:
            self._make_way()
        full, views, empty = self.room
        now.launched, now.dirty, now.plain = True, False, False
        with untracked():
            if len(now.arrived) < len(views):
                missing = [i for i in range(len(views)) if i not in now.arrived and not self.still_local(i)]
                empty = [*(views[position] for position in missing), *empty]
            if empty:
                foreach_zero(empty)
            if self._collectives.world_size == 1 and self.in_place:
                return
            now.direct = self._exact and not now.kept
            target = self.shard.memory(whole=True) if now.direct else self._collectives.own_range(full)
            what = f"gradients of '{self.unit.plan.name or '(root)'}'"
            now.pending = self._collectives.reduce_scatter(full, target, what, patience, self.index)
            self.grouped = self._collectives.across is not None
            if self.grouped and last:
                self.average_across()

    def drain(self) -> None:
        """Wait for the reduction and add its result to the shard.

        On the host it is added in the background, until ``publish``; the full buffer is in use as long.
        """
        now, pending = self.round, self.round.pending
        if pending is None:
            return
        now.pending = None
        if self.transfers is not None and not now.direct:
            copies = self._additions() if now.total is None else [Copy(now.total, self.shard.memory())]
            now.leaving = self.transfers.out(copies, pending)
            return
        pending.wait()
        if not now.direct:
            with untracked():
                _run(self._additions())

    def average_across(self) -> None:
        """Make averages of a shard group those of all ranks, behind the reduction under way, until ``settle``.

        Collective: every rank, in one order.
        """
        self.settle()  # an earlier round
        now, what, copies = self.round, f"gradients of '{self.unit.name}'", list[Copy]()
        if self.transfers is not None and self.transfers.beside:
            # The wire of an accelerator does not reach the host, where micro-steps add up: that sum is made on the
            # device, in what the other ranks have reduced of the full buffer, if that is of its dtype.
            layout, room = self.flat.layout, self.room
            if room is None or room.flat.dtype != layout.dtype:
                now.total = torch.empty(layout.shard_numel, dtype=layout.dtype, device=self._collectives.device)
            else:
                first = 0 if self._collectives.rank else layout.shard_numel
                now.total = room.flat.narrow(0, first, layout.shard_numel)
            copies += [Copy(self.shard.memory(), now.total)] if now.pending is None or now.kept else []
        if now.pending is not None and not now.direct:
            # What is added to what is decided here, and not when some thread comes to it.
            copies += self._additions(now.total)
            now.pending.then(partial(_run, copies))
        else:
            with untracked():
                _run(copies)
        shard = self.shard.memory() if now.total is None else now.total
        reduced, averaging = self._collectives.average_across(shard, what, now.pending, self.index)
        now.pending, now.averaging = (reduced, averaging) if now.total is None else (averaging, None)
        self.grouped, now.direct = False, now.total is None

    def settle(self) -> None:
        """Wait until the shard holds the averages of all ranks, if that has begun."""
        now = self.round
        if now.averaging is not None:
            now.averaging.wait()
        now.averaging = None
        if now.leaving is not None:
            now.leaving.wait()

    def publish(self, used: Collection[int]) -> None:
        """Show the reduced gradients to the optimizer, and forget the backward.

        Parameters that no rank has ``used`` keep what ``.grad`` they had, so that the optimizer skips them.
        """
        if self.round.averaging is not None or self.round.leaving is not None:
            self.settle()
        for position, (target, part) in enumerate(zip(self._targets, self.shard.parts(), strict=True)):
            if position in used and (target.grad is None or target.grad.data_ptr() != part.data_ptr()):
                target.grad = part
                self.shard.numbers[position] += 1
        self.reset()

    def keep_local(self) -> None:
        """End a micro-step without a reduction: full gradients stay, the optimizer sees this rank's part."""
        now, parts = self.round, self.shard.parts()
        if self.room is None:
            return
        new = now.arrived - now.kept
        if not self.in_place:
            own = self._collectives.own_range(self.room.flat)
            pieces = self.flat.cut(own)
            copies = [Copy(pieces[position], parts[position]) for position in new]
            if len(new) == len(parts):
                copies = [Copy(own, self.shard.memory())]
            with untracked():
                _run(copies) if self.transfers is None else self.transfers.out(copies).wait()
        for position in new:
            self._show(position, parts[position])
        now.plain = now.dirty = False
        now.local |= now.arrived
        now.arrived.clear()

    def reset(self) -> None:
        """Forget the backward, not the gradients."""
        self.round = Round()
        self.room = self._lasting
        self.shard.leave()

    def _show(self, position: int, part: Tensor) -> None:
        self._targets[position].grad = part
        self.shard.numbers[position] += 1

    def _look(self) -> bool:
        """Note what is kept, and return whether anything is: see [Note: averages that stay]."""
        now = self.round
        if not now.further:
            known, now.kept = now.kept, set()
            for position, target in enumerate(self._targets):
                if target.grad is not None and (position in known or not now.local):  # user code may have cleared it
                    now.kept.add(position)
        return bool(now.kept)

    def _make_way(self) -> None:
        """Let nothing that is kept be where gradients are collected."""
        if not self._look() or not self.in_place:
            return
        now = self.round
        if self._collectives.world_size == 1:
            now.local |= now.kept
            now.kept.clear()
            return
        with untracked():
            self.shard.move()
        parts = self.shard.parts()
        for position in now.kept:
            self._show(position, parts[position])

    def _additions(self, total: Tensor | None = None) -> list[Copy]:
        """How a reduction's result gets into the shard, or ``total``: added to what is kept there, or instead of it."""
        if self.room is None:
            raise RuntimeError(f"Unit '{self.unit.name}' has no memory with reduced gradients.")
        kept, result = self.round.kept, self._collectives.own_range(self.room.flat)
        target = self.shard.memory(whole=not kept) if total is None else total
        if not kept or len(kept) == len(self._targets):
            return [Copy(result, target, bool(kept))]
        pairs = enumerate(zip(self.flat.cut(result), self.flat.cut(target), strict=True))
        return [Copy(piece, part, position in kept) for position, (piece, part) in pairs]


def _run(copies: Sequence[Copy]) -> None:
    for source, target, add in copies:
        if add:
            target.add_(source)
        else:
            target.copy_(source, non_blocking=True)  # where one is on the host, nobody writes to it meanwhile


def report_width(buckets: int) -> int:
    """How many integers a report about ``buckets`` buckets takes."""
    return -(-3 * buckets // _BITS)


@dataclass(eq=False, slots=True)
class _Backward:
    """What a reducer knows of the backward that runs."""

    name: str = ""
    order: tuple[int, ...] = ()
    last: bool = True  # before a step
    patience: float = PATIENCE_SECONDS
    launched: int = 0  # how many of the order
    ready: dict[int, None] = field(default_factory=dict)  # what may be launched, in the order in which it was ready
    leaving: list[GradientBucket] = field(default_factory=list)  # launched, to be brought to the host once reduced


class GradientReducer:
    """Collects, reduces and publishes gradients.

    Args:
        buckets: all buckets, by index.
        means: what they work with.
        forwards: whether buckets are in the order of the forward. Until the order of the backward has been seen, the
            opposite one is taken for it: in a wrong one, full gradients of the whole model would pile up.
    """

    def __init__(self, buckets: Sequence[GradientBucket], means: Means, forwards: bool = False) -> None:
        self.buckets = tuple(buckets)
        self._means = means
        self._plan_order = tuple(range(len(self.buckets)))[:: -1 if forwards else 1]
        self._orders: dict[str, tuple[int, ...]] = {}
        self._unlike: set[str] = set()  # backwards in which a rank joined a reduction late once
        self._running = _Backward(order=self._plan_order)
        self._siblings: defaultdict[int, list[GradientBucket]] = defaultdict(list)  # by unit
        self._guests: defaultdict[int, list[GradientBucket]] = defaultdict(list)  # those without memory of their own
        for bucket in self.buckets:
            self._siblings[bucket.unit.plan.index].append(bucket)
            if bucket.resident is None:
                self._guests[bucket.unit.plan.index].append(bucket)
        self._forms: dict[int, Form] = {}  # of those in a buffer
        for unit, guests in self._guests.items():
            layouts = [bucket.flat.layout for bucket in guests]
            self._forms[unit] = means.pool.form(layouts, [layout.reduce_dtype for layout in layouts])
        self._taken: dict[Hashable, tuple[int, Buffer]] = {}  # by place: which unit collects there, and where
        self._further: list[Buffer] = []  # for units whose place was taken

    @property
    def holds_local(self) -> bool:
        """Whether there are gradients that were never reduced over all ranks, because more micro-steps are to come."""
        return True in [bucket.grouped or bool(bucket.round.local) for bucket in self.buckets]

    @property
    def units(self) -> list[int]:
        """Indices of the buckets' units in the order in which a backward ends with them: alike on all ranks."""
        return [self.buckets[index].unit.plan.index for index in next(iter(self._orders.values()), self._plan_order)]

    def open(self, name: str, last: bool = True) -> None:
        """Begin a backward. Those of one ``name`` share an order of buckets.

        Averages are those of this rank's shard group until the ``last`` backward before a step.

        A rank that skips a unit joins its reduction only at the very end: nobody waits for one before, once that was
        seen in a backward of this name.
        """
        patience = 0.0 if name in self._unlike else PATIENCE_SECONDS
        self._running = _Backward(name, self._orders.get(name, self._plan_order), last, patience)
        for bucket in self.buckets:
            if bucket.resident is not None:
                bucket.open()

    def arrive(self, bucket: GradientBucket, position: int, gradient: Tensor, reduce: bool) -> None:
        """Take over a gradient of full shape, and launch its bucket if this micro-step does and that was the last one.

        Read once.
        """
        again = bucket.round.launched and not bucket.round.dirty
        if again:
            bucket.start_round()
        if bucket.room is None or again:
            self.claim(bucket)
        bucket.add(position, gradient)
        if reduce and len(bucket.round.arrived) == len(bucket.flat.parameters) and bucket.unit.outstanding == 0:
            self.finish([bucket])

    def hold(self, bucket: GradientBucket, position: int, part: Tensor) -> Tensor:
        """Put the first part of a gradient where that is to be, if that memory is its unit's alone, and return it."""
        if not bucket.apart:
            return part
        if bucket.room is None:
            self.claim(bucket)
        return bucket.hold(position, part)

    def finish_unit(self, unit: int) -> None:
        """Note that a unit gets no more gradients in this backward, as far as can be told, and launch what may go."""
        waiting = [bucket for bucket in self._siblings[unit] if bucket.round.dirty]
        if waiting or self._running.leaving:
            self.finish(waiting)

    def finish(self, buckets: Sequence[GradientBucket]) -> None:
        """The same of some buckets."""
        running = self._running
        for bucket in buckets:
            now = bucket.round
            if now.dirty and not (now.launched or now.held):
                running.ready.setdefault(bucket.index)
        # Not the last one: its shard takes memory, and at the end of the backward there is room. It is an embedding's,
        # often the largest of all, with nothing left to overlap with.
        while running.launched < len(running.order) - 1 and running.order[running.launched] in running.ready:
            bucket = self.buckets[running.order[running.launched]]
            self._launch(bucket)
            running.launched += 1
            if bucket.transfers is not None:
                running.leaving.append(bucket)
        for bucket in running.leaving[:]:
            if bucket.drainable(0.0):
                bucket.drain()
                running.leaving.remove(bucket)

    def report(self) -> list[int]:
        """What this rank has to tell at the end of a backward: touched, complete and late buckets, as bits."""
        flags = [bucket.touched for bucket in self.buckets]
        for bucket in self.buckets:
            count = len(bucket.flat.parameters)
            flags.append(len(bucket.round.arrived) == count or all(map(bucket.has_gradient, range(count))))
        flags += [bucket.round.launched and bucket.round.dirty for bucket in self.buckets]
        bits = sum([1 << index for index, flag in enumerate(flags) if flag])
        return [bits >> start & (1 << _BITS) - 1 for start in range(0, len(flags), _BITS)]

    def close(self, merged: Sequence[int], alike: bool) -> None:
        """Reduce what is left, and publish. ``merged`` are the bits of all ranks' reports; ``alike``: whether these are
        the same.

        Collective: every rank.
        """
        running, count = self._running, len(self.buckets)
        if not alike:
            self._unlike.add(running.name)
        flags = [bool(merged[index // _BITS] >> index % _BITS & 1) for index in range(3 * count)]
        touched, complete, late = flags[:count], flags[count : 2 * count], flags[2 * count :]
        for index in running.order[running.launched :]:
            if touched[index]:
                self._launch(self.buckets[index])
        for bucket in [self.buckets[index] for index in running.order if late[index]]:
            if not bucket.round.dirty:
                bucket.start_round()
            self._launch(bucket)
        for bucket in self.buckets:
            if bucket.grouped and running.last:  # in earlier micro-steps
                bucket.average_across()
        for bucket in self.buckets:
            if bucket.round.pending is not None:
                self._drain(bucket)
        used = self._agree_used(touched, complete)
        self._remember_order(touched)
        for bucket in self.buckets:
            if bucket.round.averaging is not None:
                with self._span(Phase.WAIT_REDUCE, bucket):
                    bucket.settle()
            if touched[bucket.index]:
                bucket.publish(used[bucket.index])
            else:
                bucket.settle()  # what it had of earlier micro-steps may have been averaged now
                bucket.reset()
        self._give_back()

    def keep_local(self) -> None:
        """End a backward without reducing; gradients stay where they are."""
        for bucket in self.buckets:
            if bucket.touched:
                bucket.keep_local()

    def abandon(self) -> list[Pending]:
        """Drop the running backward and all accumulated gradients after an error.

        Returns reductions still under way; their memory must not be used again before they are done.
        """
        rounds = [bucket.round for bucket in self.buckets]
        orphans = [pending for now in rounds for pending in (now.pending, now.averaging) if pending is not None]
        for bucket in self.buckets:
            bucket.reset()
            bucket.grouped = False
            for shard in bucket.flat.shards:
                shard.target.grad = None
        self._running.leaving.clear()
        self._give_back()
        return orphans

    def _launch(self, bucket: GradientBucket) -> None:
        if bucket.room is None:
            self.claim(bucket)
        with self._span(Phase.REDUCE, bucket):
            bucket.launch(self._running.patience, self._running.last)

    def _drain(self, bucket: GradientBucket) -> None:
        if bucket.round.pending is not None:
            with self._span(Phase.WAIT_REDUCE, bucket):
                bucket.drain()

    def _span(self, phase: Phase, bucket: GradientBucket) -> AbstractContextManager[None]:
        return self._means.spans.of(phase, bucket.unit.name, bucket.nbytes) if self._means.spans.heard else _NOTHING

    def claim(self, bucket: GradientBucket) -> None:
        """Give a unit's buckets memory: that of their place, or more of it while another unit still collects there."""
        if bucket.resident is not None:
            return
        index, pool, place = bucket.unit.plan.index, self._means.pool, ("gradients", bucket.unit.plan.gradient_slot)
        group, form = self._guests[index], self._forms[index]
        holder, buffer = self._taken.get(place, (index, None))
        if buffer is not None and holder != index:
            holders = self._guests[holder]
            if self._free(holders):
                for other in holders:
                    self._drain(other)
                    other.give_buffer(None)
                pool.give(buffer)
                del self._taken[place]
                buffer = None
            else:
                buffer = pool.take(place, index, lent=True)
                self._further.append(buffer)
        if buffer is None:
            buffer = pool.take(place, index, lent=True)
            self._taken[place] = index, buffer
        rooms, _ = buffer.made.get(form) or buffer.keep(form, form)
        for member, room in zip(group, rooms, strict=True):
            if member.room is None or not member.round.dirty:
                if member.round.pending is not None:
                    member.drain()
                member.give_buffer(room)
                if not member.round.launched:
                    member.open()

    def _free(self, holders: Sequence[GradientBucket]) -> bool:
        """Whether these are done with their memory, or soon are: else other ranks may be waiting for this one."""
        if True in [one.round.dirty or (not one.round.launched and one.touched) for one in holders]:
            return False
        if False not in [holder.drainable(0.0) for holder in holders]:
            return True
        with self._means.spans.of(Phase.WAIT_REDUCE, holders[0].unit.name, sum(holder.nbytes for holder in holders)):
            if all(holder.drainable(self._running.patience) for holder in holders):
                return True
        self._running.patience = 0.0
        self._unlike.add(self._running.name)
        return False

    def _give_back(self) -> None:
        for buffer in (*(buffer for _, buffer in self._taken.values()), *self._further):
            self._means.pool.give(buffer, last=True)
        self._taken.clear()
        self._further.clear()

    def _agree_used(self, touched: list[bool], complete: list[bool]) -> list[Collection[int]]:
        """For each bucket, which parameters had a gradient on some rank. A second round only if that is in doubt."""
        used: list[Collection[int]] = [range(len(bucket.flat.parameters)) for bucket in self.buckets]
        doubtful = [b for b in self.buckets if touched[b.index] and not complete[b.index]]
        if doubtful:
            flags = [bucket.has_gradient(position) for bucket in doubtful for position in used[bucket.index]]
            answer = iter(self._means.control.any_of(torch.tensor(flags, dtype=torch.uint8, device="cpu")).tolist())
            for bucket in doubtful:
                used[bucket.index] = [position for position in used[bucket.index] if next(answer)]
        return used

    def _remember_order(self, touched: list[bool]) -> None:
        if self._running.name not in self._orders:
            seen: list[int] = self._means.control.gather_objects(list(self._running.ready))[0]
            order = [index for index in seen if touched[index]]
            order += [i for i in self._plan_order if touched[i] and i not in order]
            order += [i for i in self._plan_order if not touched[i]]
            self._orders[self._running.name] = tuple(order)
