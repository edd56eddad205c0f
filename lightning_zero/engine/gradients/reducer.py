"""Gradients from ready parameters to shards: which bucket is reduced when, in one order on all ranks.

[Note: one order, and nothing left over]
Reductions pair up by order, so every rank launches buckets in the same one: a bucket that is ready waits for those
before it. At the end of the backward the ranks tell each other which buckets they touched, and every rank launches the
rest that *anybody* touched, with zeros for what did not arrive. A branch that only some ranks took, or a unit nobody
used, therefore neither hangs nor skews anything, and a parameter without a gradient on every rank is left alone by the
optimizer. The order starts as the plan's and becomes the one in which rank 0's buckets were ready in the first
backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from lightning_zero.comm import PATIENCE_SECONDS, Collectives, ControlGroup, Pending
from lightning_zero.engine.events import Phase, Spans
from lightning_zero.engine.gradients.bucket import GradientBucket
from lightning_zero.engine.units.sharded import Slot, carve

__all__ = ["GradientReducer", "report_width"]

_BITS = 62
_NOTHING = nullcontext()


def report_width(buckets: int) -> int:
    """How many integers a report about ``buckets`` buckets takes."""
    return 3 * -(-buckets // _BITS) if buckets else 0


class GradientReducer:
    """Collects, reduces and publishes gradients.

    Args:
        buckets: all buckets, by index.
        slots: for each bucket's unit, the slot its full gradients are collected in; ``None``: in memory of their own.
        wire: what slots are memory of.
        control: the control plane.
        spans: told of reductions, and of waiting for them.
        forwards: whether buckets are in the order of the forward. Until the order of the backward has been seen, the
            opposite one is taken for it: in a wrong one, full gradients of the whole model would pile up.
    """

    def __init__(
        self,
        buckets: Sequence[GradientBucket],
        slots: Sequence[Slot | None],
        wire: Collectives,
        control: ControlGroup,
        spans: Spans,
        forwards: bool = False,
    ) -> None:
        self.buckets = tuple(buckets)
        self._spans = spans
        self._slots = tuple(slots)
        self._wire = wire
        self._control = control
        self._order: dict[str, tuple[int, ...]] = {}
        self._alone = [bucket for bucket in self.buckets if bucket.is_alone]
        self._plan_order = tuple(reversed(range(len(self.buckets))) if forwards else range(len(self.buckets)))
        self._phase = ""
        self._patience = PATIENCE_SECONDS
        self._unlike: set[str] = set()  # backwards in which ranks had gradients for different parameters the last time
        self._last = True
        self._queue = self._plan_order  # the order of the running backward
        self._next = 0
        self._ready: dict[int, None] = {}  # buckets that may be launched, in the order in which they were ready
        self._siblings: dict[int, list[GradientBucket]] = {}
        for bucket in self.buckets:
            self._siblings.setdefault(bucket.unit.index, []).append(bucket)
        self._carved: dict[int, list[Tensor]] = {}  # by unit: its part of its slot, which never changes
        self._reducing: list[GradientBucket] = []  # launched, and to be brought to the host as soon as they are reduced
        self.holds_local = False
        """Whether there are gradients that were never reduced over all ranks, because more micro-steps are to come."""

    @property
    def units(self) -> list[int]:
        """Indices of the buckets' units in the order in which a backward ends with them: alike on all ranks."""
        return [self.buckets[index].unit.index for index in next(iter(self._order.values()), self._plan_order)]

    def open(self, name: str, uniform: bool = True, last: bool = True) -> None:
        """Begin a backward. Those of one ``name`` share an order of buckets.

        Averages are those of this rank's shard group until the ``last`` backward before a step.

        Unless all ranks used the same units in the forward (``uniform``), and had gradients for the same parameters in
        the last backward of this name, a rank may join a reduction only at the very end: nobody waits for one before.
        """
        self._patience = PATIENCE_SECONDS if uniform and name not in self._unlike else 0.0
        self._last = last
        self._phase = name
        self._queue = self._order.get(name, self._plan_order)
        self._next = 0
        self._ready.clear()
        self._reducing.clear()
        for bucket in self._alone:  # so that not even the first gradient needs more than to be copied
            busy = bucket.dirty or bucket.holds or True in bucket.local or bucket.pending or bucket.averaging
            bucket.plain = not busy and bucket.collect_in_shard()

    def arrive(self, bucket: GradientBucket, position: int, gradient: Tensor, reduce: bool) -> None:
        """Take over a gradient of full shape, and launch its bucket if this micro-step does and that was the last one.

        Read once.
        """
        again = bucket.launched and not bucket.dirty
        if again:
            bucket.start_round()
        if bucket.full is None or (again and bucket.resident is None):
            self._claim(bucket)
        bucket.add(position, gradient)
        if reduce and not bucket.missing and bucket.unit.outstanding == 0:
            self.finish([bucket])

    def hold(self, bucket: GradientBucket, position: int, part: Tensor) -> Tensor:
        """Put the first part of a gradient where that is to be, if that memory is its unit's alone, and return it."""
        if not bucket.apart:
            return part
        if bucket.full is None:
            self._claim(bucket)
        return bucket.hold(position, part)

    def finish_unit(self, unit: int) -> None:
        """Note that a unit gets no more gradients in this backward, as far as can be told, and launch what may go."""
        waiting = [bucket for bucket in self._siblings.get(unit, ()) if bucket.dirty]
        if waiting or self._reducing:
            self.finish(waiting)

    def finish(self, buckets: Sequence[GradientBucket]) -> None:
        """Note that these get no more gradients in this backward, as far as can be told, and launch what may go."""
        for bucket in buckets:
            if bucket.dirty and not (bucket.launched or bucket.holds) and bucket.index not in self._ready:
                self._ready[bucket.index] = None
        order = self._queue
        # Not the last one: its shard takes memory, and at the end of the backward there is room. It is an embedding's,
        # often the largest of all, with nothing left to overlap with.
        while self._next < len(order) - 1 and order[self._next] in self._ready:
            bucket = self.buckets[order[self._next]]
            with self._span(Phase.REDUCE, bucket):
                bucket.launch(self._patience, self._last)
            self._next += 1
            if bucket.transfers is not None:
                self._reducing.append(bucket)
        for bucket in self._reducing[:]:
            if bucket.drainable(0.0):
                bucket.drain()
                self._reducing.remove(bucket)

    def report(self) -> list[int]:
        """What this rank has to tell at the end of a backward: touched, complete and late buckets, as bits."""
        touched = [bucket.touched for bucket in self.buckets]
        complete = [False not in b.arrived or all(map(b.has_gradient, range(len(b.arrived)))) for b in self.buckets]
        late = [bucket.launched and bucket.dirty for bucket in self.buckets]
        return [word for flags in (touched, complete, late) for word in _pack(flags)]

    def close(self, rows: Sequence[Sequence[int]]) -> None:
        """Reduce what is left, and publish. ``rows`` holds every rank's report.

        Collective: every rank.
        """
        words = report_width(len(self.buckets)) // 3
        merged = [0] * (3 * words)
        for row in rows:
            merged = [a | b for a, b in zip(merged, row, strict=True)]
        count = len(self.buckets)
        touched = _unpack(merged[:words], count)
        complete = _unpack(merged[words : 2 * words], count)
        if all(row[: 2 * words] == rows[0][: 2 * words] for row in rows):
            self._unlike.discard(self._phase)
        else:
            self._unlike.add(self._phase)
        late = _unpack(merged[2 * words :], count)
        order = self._queue
        for index in order[self._next :]:
            if touched[index]:
                self._launch_now(self.buckets[index])
        for index in order:
            if late[index]:
                bucket = self.buckets[index]
                if not bucket.dirty:
                    bucket.start_round()
                self._launch_now(bucket)
        for bucket in self.buckets:
            if bucket.grouped and self._last:  # in earlier micro-steps
                bucket.average_across()
        for bucket in self.buckets:
            if bucket.pending is not None:
                with self._span(Phase.WAIT_REDUCE, bucket):
                    bucket.drain()
        used = self._agree_used(touched, complete)
        self._remember_order(touched)
        for bucket in self.buckets:
            if bucket.averaging is not None:
                with self._span(Phase.WAIT_REDUCE, bucket):
                    bucket.settle()
            if touched[bucket.index]:
                bucket.publish(used[bucket.index])
            else:
                bucket.settle()  # what it had of earlier micro-steps may have been averaged now
                bucket.reset()
        self._release_slots()
        self.holds_local = any(bucket.grouped for bucket in self.buckets)

    def keep_local(self) -> None:
        """End a backward without reducing; gradients stay where they are."""
        for bucket in self.buckets:
            if bucket.touched:
                bucket.keep_local()
                self.holds_local = True
            bucket.dirty = False

    def vacate(self) -> None:
        """Give the memory of slots back until they are needed again. Between backwards."""
        for slot in {id(slot): slot for slot in self._slots if slot is not None and not slot.vacant}.values():
            there = [bucket for bucket, home in zip(self.buckets, self._slots, strict=True) if home is slot]
            carved = [part for unit in {b.unit.index for b in there} for part in self._carved.get(unit, ())]
            # What else lies there is the user's: `.grad` of a hook.
            slot.users = slot.alone + len(carved) + sum(bucket.known_views(carved) for bucket in there)
            slot.vacate(self._wire)

    def abandon(self) -> list[Pending]:
        """Drop the running backward and all accumulated gradients after an error.

        Returns reductions still under way; their memory must not be used again before they are done.
        """
        under_way = [pending for bucket in self.buckets for pending in (bucket.pending, bucket.averaging)]
        orphans = [pending for pending in under_way if pending is not None]
        for bucket in self.buckets:
            bucket.reset()
            bucket.grouped = False
            for shard in bucket.flat.shards:
                if shard.parameter is not None:
                    shard.parameter.grad = None
        self._reducing.clear()
        self._release_slots()
        self.holds_local = False
        return orphans

    def _launch_now(self, bucket: GradientBucket) -> None:
        if bucket.full is None:
            self._claim(bucket)
        with self._span(Phase.REDUCE, bucket):
            bucket.launch(self._patience, self._last)

    def _span(self, phase: Phase, bucket: GradientBucket) -> AbstractContextManager[None]:
        return self._spans.of(phase, bucket.unit.name, bucket.nbytes) if self._spans.heard else _NOTHING

    def _claim(self, bucket: GradientBucket) -> None:
        """Give a unit's buckets memory: their slot, or fresh memory while another unit still collects there."""
        if bucket.resident is not None or (bucket.is_alone and bucket.collect_in_shard()):
            return
        group = self._siblings[bucket.unit.index]
        slot = self._slots[bucket.index]
        if slot is None:
            raise RuntimeError(f"Unit '{bucket.unit.name}' has no gradient memory in the plan.")
        if slot.owner is not None and slot.owner != bucket.unit.index:
            holders = self._siblings[slot.owner]
            busy = [holder for holder in holders if holder.dirty or not (holder.launched or not holder.touched)]
            if not busy and self._drainable(holders):
                for holder in holders:
                    if holder.pending is not None:
                        with self._span(Phase.WAIT_REDUCE, holder):
                            holder.drain()
                    holder.give_buffer(None)
                slot.owner = None
        own = slot.owner is None or slot.owner == bucket.unit.index
        if own:
            slot.occupy(self._wire)
            slot.owner = bucket.unit.index
            if bucket.unit.index not in self._carved:
                self._carved[bucket.unit.index] = _carve(slot.buffer, group)
            parts = self._carved[bucket.unit.index]
        else:
            parts = _carve(Slot.allocate(slot.buffer.numel(), slot.buffer.device).buffer, group)
        for member, full in zip(group, parts, strict=True):
            if member.full is None or not member.dirty:
                if member.pending is not None:
                    member.drain()
                member.give_buffer(full, lasting=own)

    def _drainable(self, holders: Sequence[GradientBucket]) -> bool:
        """Whether reductions are done soon. If not, other ranks may be waiting for this one: then take other memory."""
        if False not in [holder.drainable(0.0) for holder in holders]:
            return True
        with self._spans.of(Phase.WAIT_REDUCE, holders[0].unit.name, sum(holder.nbytes for holder in holders)):
            if all(holder.drainable(self._patience) for holder in holders):
                return True
        self._patience = 0.0
        return False

    def _release_slots(self) -> None:
        for slot in self._slots:
            if slot is not None:
                slot.owner = None

    def _agree_used(self, touched: list[bool], complete: list[bool]) -> list[list[bool]]:
        """For each bucket, which parameters had a gradient on some rank. A second round only if that is in doubt."""
        used = [[True] * len(bucket.arrived) for bucket in self.buckets]
        doubtful = [b for b in self.buckets if touched[b.index] and not complete[b.index]]
        if not doubtful:
            return used
        flags = [bucket.has_gradient(i) for bucket in doubtful for i in range(len(bucket.arrived))]
        answer = iter(self._control.any_of(torch.tensor(flags, dtype=torch.uint8, device="cpu")).tolist())
        for bucket in doubtful:
            used[bucket.index] = [bool(next(answer)) for _ in bucket.arrived]
        return used

    def _remember_order(self, touched: list[bool]) -> None:
        if self._phase in self._order:
            return
        seen: list[int] = self._control.gather_objects(list(self._ready))[0]
        order = [index for index in seen if touched[index]]
        order += [i for i in self._plan_order if touched[i] and i not in order]
        order += [i for i in self._plan_order if not touched[i]]
        self._order[self._phase] = tuple(order)


def _carve(buffer: Tensor, group: Sequence[GradientBucket]) -> list[Tensor]:
    """The full buffers of a unit's buckets in a slot's memory."""
    layouts = [bucket.layout for bucket in group]
    return carve(buffer, layouts, [layout.reduce_dtype for layout in layouts])


def _pack(flags: Sequence[bool]) -> list[int]:
    words = [0] * -(-len(flags) // _BITS)
    for index, flag in enumerate(flags):
        if flag:
            words[index // _BITS] |= 1 << (index % _BITS)
    return words


def _unpack(words: Sequence[int], count: int) -> list[bool]:
    return [bool(words[index // _BITS] >> (index % _BITS) & 1) for index in range(count)]
