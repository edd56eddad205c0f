"""Which sharded units are whole right now: gathered in order, pinned while they compute, given up afterwards.

[Note: a unit that stays]
User code may compute with a parameter while nothing of its unit runs (``F.linear(x, self.blocks[0].weight)``, or a
penalty on it). Then the unit is gathered there and then, and stays until the phase ends. The ranks tell each other at
that end, and from the next phase on it is what the root is: whole from the beginning to the end of every phase. So what
autograd saved of it is valid in the backward without a guard, because its buffer is nobody else's, and because the
parameter shows it in the backward too.
"""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import nullcontext

import torch

from lightning_zero._torch import (
    compiler_of_frames,
    current_graph_task,
    held_in_python,
    in_function_transform,
    is_tracing,
)
from lightning_zero.comm import Collectives, Streams, raising
from lightning_zero.comm.streams import Event
from lightning_zero.engine.agreement import Agreement, ExternalWrites
from lightning_zero.engine.events import Phase, Spans
from lightning_zero.engine.guard import SavedTensorGuard
from lightning_zero.engine.order import OrderChange, UnitOrder
from lightning_zero.engine.pool import BufferPool
from lightning_zero.engine.sharded import ShardedUnit
from lightning_zero.engine.unit import Unit
from lightning_zero.errors import OffloadError, some
from lightning_zero.offload.transfers import Fetcher
from lightning_zero.plan import Plan

__all__ = ["UnitSchedule"]

_log = logging.getLogger(__name__)

_NOTHING = nullcontext()
_MOMENT_SECONDS = 0.02
_LOOKS = 3  # at who has old weights, to warn of it: each takes a while


class UnitSchedule:
    """The full parameters of all sharded units of an engine.

    Args:
        plan: places, root and prefetch.
        pool: where units take their buffers.
        units: all units, by index; those that are not sharded do not concern it.
        collectives: the wire.
        streams: where device work is ordered.
        agreement: rounds between the hosts.
        restore: what the saved-tensor guard asks for a unit's memory during backward.
        fetcher: brings shards from where they rest; ``None``: they rest on the device.
        spans: told of gathers, and of waiting for them.
        writes: what user code wrote.
    """

    def __init__(
        self,
        plan: Plan,
        pool: BufferPool,
        units: Sequence[Unit],
        collectives: Collectives,
        streams: Streams,
        agreement: Agreement,
        restore: Callable[[ShardedUnit], bool],
        fetcher: Fetcher | None,
        spans: Spans,
        writes: ExternalWrites,
    ) -> None:
        self._units = units
        self._pool = pool
        self._writes = writes
        self._spans = spans
        self._agreement = agreement
        self._fetcher = fetcher
        self._failure: OffloadError | None = None  # a shard that could not be fetched: its unit computes with NaN
        self._collectives = collectives
        self._streams = streams
        self._masters: Event = None
        self.sharded = tuple(unit for unit in units if isinstance(unit, ShardedUnit))
        self._trained = tuple(unit for unit in self.sharded if unit.plan.trainable_layouts)
        self.root = next((unit for unit in self.sharded if unit.index == plan.root), None)
        self._staying: tuple[ShardedUnit, ...] = () if self.root is None else (self.root,)  # whole in all of a phase
        self.stayed: Callable[[], object] = tuple  # called when a unit becomes one that stays
        self._joined: dict[ShardedUnit, str] = {}  # what is to stay, unknown to other ranks; of which parameter
        self.gathered = False
        """Whether something beside what stays was gathered in the running phase."""
        self._amid = False
        self._version = 0  # of the masters; see ``_changed``
        self.uniform = True  # whether all ranks used the same units, in the same order, in the last phase
        self.guard = SavedTensorGuard(pool, restore, self.was_read)
        self._root_is_guarded = False
        for unit in self.sharded:
            self.guard.know(unit)
        self._at = {unit.index: unit for unit in self.sharded}
        self._holders: dict[Hashable, ShardedUnit] = {}  # what was gathered last for each place
        self._looks = _LOOKS
        self._thread = 0  # which runs the phase
        self._order = UnitOrder(
            agreement,
            [unit.plan.slot if unit.plan.slot is not None else -1 for unit in units],
            self._issue,
            self._resident,
            self._may_take,
            plan.prefetch,
            None if fetcher is None else lambda index: fetcher.ahead(self._at[index].sources),
        )

    @property
    def is_open(self) -> bool:
        """Whether a phase is running."""
        return self._order.is_open

    def open(self, name: str, place: str, amid: bool = False) -> None:
        """Begin a phase (a stretch of forward, or a backward) and make the root whole for all of it. Collective.

        Phases of one ``name`` share an order of units; ``place`` is this very occurrence. ``amid``: code of the user's
        goes on at once, which may write to its shards (weight clipping behind a step of manual optimization) before a
        slower rank has read what belongs to the root.
        """
        if not self.sharded:
            return
        self._order.open(name, place)
        self.gathered, self._amid = False, amid
        self._changed()
        self._thread = threading.get_ident()
        for unit in (*self._staying, *self._joined):
            self.unshard(unit, ahead=not amid)  # else what user code is about to write to would be gathered

    def stay(self, unit: ShardedUnit, parameter: str) -> None:
        """Make a unit whole until the running phase ends, and in all later ones. See [Note: a unit that stays].

        Not in code that is compiled, traced or transformed, nor on another thread than the phase's and autograd's.
        """
        watched = compiler_of_frames() is not None or is_tracing() or in_function_transform()
        here = threading.get_ident() == self._thread or current_graph_task() != -1
        if watched or not here or not self.is_open:
            return
        if unit not in self._staying and unit not in self._joined:
            self._joined[unit] = parameter
            self.stayed()
        self.unshard(unit)

    def guard_root(self) -> None:
        """Have what is saved of the root gathered again, where no step method tells when its backward comes. Local."""
        if self._staying and torch.is_grad_enabled():
            self.guard.push()
            self._root_is_guarded = True

    def unguard_root(self) -> None:
        """Undo ``guard_root``, if it did something."""
        if self._root_is_guarded:
            self.guard.pop()
            self._root_is_guarded = False

    def close(self, values: Sequence[int] = ()) -> list[list[int]]:
        """End the phase, and tell the other ranks ``values`` on this occasion. Returns those of all ranks. Collective.

        Raises ``OffloadError`` on every rank if one could not fetch a shard in this phase.
        """
        for unit in (*self._staying, *self._joined):
            if unit.pins:
                self.reshard(unit)
        told = [int(self._failure is not None), self._writes.digest, int(bool(self._joined)), *values]
        rows, change, self.uniform = self._order.close(told)
        for unit in self.sharded if self._streams.beside else ():
            unit.wait()  # also if nobody used it: its gather reads the shard, which may be written from here on
        if 1 in [row[0] for row in rows]:
            failure, self._failure = self._failure, None
            advice = "Resume from the last checkpoint, which is intact."
            self._agreement.control.together("fetch its part of the weights", raising(failure), OffloadError, advice)
        self._writes.compare([row[1] for row in rows], self._agreement.control)
        joined = 1 in [row[2] for row in rows] and self._agree_who_stays()
        rows = [row[3:] for row in rows]
        if change is not None and self._order.first_change(change) and not joined:
            self._note(change)
        return rows

    def unshard(self, unit: ShardedUnit, ahead: bool = True) -> None:
        """Make a unit whole, show its values in the user's parameters, and keep them there until ``reshard``."""
        self._order.need(unit.index, ahead)
        if self._spans.heard and not all(handle.done for handle in unit.pending):
            with self._spans.of(Phase.WAIT_GATHER, unit.name, unit.nbytes):
                unit.wait()
        unit.bind()

    def reshard(self, unit: ShardedUnit) -> None:
        """Take back one ``unshard``; the last one lets the memory be used by another unit."""
        if unit.unbind(self._streams) and self._holders.get(unit.place) is not unit:
            unit.release()  # another unit was gathered for its place meanwhile

    def bring(self, unit: ShardedUnit) -> bool:
        """Have a unit's full parameters in memory. Returns whether they stay until it is let go."""
        if not unit.resident:
            self._order.need(unit.index)
        with self._spans.of(Phase.WAIT_GATHER, unit.name, unit.nbytes) if unit.pending else _NOTHING:
            unit.wait()
        return unit.pins > 0

    def was_read(self, unit: ShardedUnit) -> None:
        """Note that a unit's memory was read up to here, so that nothing overwrites it before that on a device."""
        if unit.storage is not None:
            unit.storage.free = self._streams.mark()

    def masters_changed(self, units: Sequence[int]) -> None:
        """Note that the full values of some units are void. The same call on every rank."""
        self._changed()
        self.void(units)

    def void(self, units: Sequence[int]) -> None:
        """The same between phases, of which each begins with what is in the masters then. Sends nothing."""
        self._masters = self._streams.mark()
        changed = {self._at[index] for index in units if index in self._at}
        for unit in changed or self.sharded:
            unit.content += 1
        if changed and self._looks:
            self._warn_of_kept(changed)
        if self._fetcher is not None:
            self._fetcher.forget()
        self._order.forget(units)

    def vacate(self) -> bool:
        """Give the memory of buffers back until they are needed again, where no device has memory of its own.

        Units that are frozen stay where they are. The same call on every rank, between phases. Returns whether memory
        is given back now.
        """
        if self._streams.beside or self._collectives.abandoned:
            return False
        for unit in self._trained:
            if unit.storage is not None and not unit.pins:
                unit.release()
        self._order.forget([unit.index for unit in self._trained])
        self._pool.trim()
        return True

    def abandon(self) -> None:
        """Forget every claim after an error in the middle of a step."""
        while self.guard.depth:
            self.guard.pop()
        self._root_is_guarded = False
        for unit in self.sharded:
            self._collectives.abandon(unit.pending)
            unit.abandon()
        self._pool.used.clear()
        self._failure = None
        self._order.abandon()

    def _agree_who_stays(self) -> bool:
        """Let units stay from now on that any rank needs so, and that no rank computes with. Collective."""
        mine = {unit.index: name for unit, name in self._joined.items()}, [u.index for u in self.sharded if u.pins]
        told = self._agreement.control.gather_objects(mine)
        busy = {index for _, pinned in told for index in pinned}
        names = {index: name for wanted, _ in told for index, name in wanted.items() if index not in busy}
        joining = tuple(unit for unit in self.sharded if unit.index in names and unit not in self._staying)
        for unit in joining:
            unit.release()
            unit.place = ("parameters", unit.index, "apart")
            self._pool.add_place(unit.place, unit.plan.slot_nbytes)
        self._staying += joining
        self._joined = {unit: name for unit, name in self._joined.items() if unit not in self._staying}
        if joining:
            self._order.set_apart([unit.index for unit in joining])
            self.stayed()
            warnings.warn(
                f"{some(repr(names[unit.index]) for unit in joining)} of {some(repr(unit.name) for unit in joining)}: "
                "used in a forward or backward while no module of its unit ran. It computes as it should, but from "
                "now on all parameters of such a unit are gathered when a forward or backward begins and stay until "
                f"it ends: {sum(unit.nbytes for unit in joining) / 2**20:.1f} MiB on each rank. To avoid that, call "
                "the module that owns the parameter, or make a module around both the unit (ZeroStrategy(units=...)).",
                stacklevel=2,
            )
        return bool(joining)

    def _warn_of_kept(self, changed: Collection[ShardedUnit]) -> None:
        """Warn of tensors of the user's that show weights of these units, which have just got other values."""
        kept = self._pool.kept_of(changed)
        if not kept:
            return
        self._looks -= 1
        time.sleep(_MOMENT_SECONDS)  # another thread may hold a frame of ours for a moment, with what stands there
        for unit, memory in kept:
            names = {unit.name_at(alias.storage_offset() * alias.element_size()) for alias in held_in_python(memory)}
            if names:  # a graph alone says itself that its weights have changed
                self._looks = 0
                warnings.warn(
                    f"A tensor that shares memory with {some(map(repr, sorted(names)))} (a view, `detach()` or `data`) "
                    "was kept while the weight got new values. Under DDP such a tensor follows its weight; here it "
                    "goes on showing the old values. Clone it where it is made, or read the weight anew, in a step or "
                    "inside of `full_parameters`.",
                    stacklevel=2,
                )

    def _issue(self, index: int) -> None:
        unit = self._at[index]
        before = self._holders.get(unit.place)
        if before is not None and before is not unit and not before.pins:
            before.release()
        self._holders[unit.place] = unit
        stays = unit in self._staying
        if not stays and not self.gathered:  # what was written since the phase began counts
            self.gathered = True
            self._version |= 1
        where = self._collectives, self._streams, self._masters, self._fetcher
        with self._spans.of(Phase.GATHER, unit.name, unit.nbytes) if self._spans.heard else _NOTHING:
            failure = unit.launch(*where, None if self._amid and stays else self._version)
        self._failure = self._failure or failure

    def _resident(self, index: int) -> bool:
        return self._at[index].resident

    def _changed(self) -> None:
        """Note that masters may have other values now: where a phase begins too, because users write to their shards.

        Versions are even where a phase begins and odd from its first gather on (the root's apart), so that ranks which
        an error stopped at different places of a phase agree again at the next.
        """
        self._version = (self._version | 1) + 1

    def _may_take(self, index: int) -> bool:
        unit = self._at[index]
        before = self._holders.get(unit.place)
        return not unit.pins and (before is None or not before.pins)

    def _note(self, change: OrderChange) -> None:
        """Not a warning: an order that changes at random (layer dropout) is as good as any, and nothing is wrong."""
        expected = "nothing more" if change.expected is None else f"unit '{self._units[change.expected].name}'"
        got = self._units[change.got].name
        _log.debug("%s: the order of units changed: expected %s, got unit '%s'.", change.phase, expected, got)
