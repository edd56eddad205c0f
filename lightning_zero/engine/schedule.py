"""Which sharded units are whole right now: gathered in order, pinned while they compute, resharded afterwards.

[Note: a unit that stays]
User code may compute with a parameter while nothing of its unit runs (``F.linear(x, self.blocks[0].weight)``, or a
penalty on it). Then the unit is gathered there and then, and stays until the phase ends. The ranks tell each other at
that end, and from the next phase on it is what the root is: whole from the beginning to the end of every phase. So what
autograd saved of it is valid in the backward without a guard, because its buffer is nobody else's, and because the
parameter shows it in the backward too.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext

import torch

from lightning_zero._torch import compiler_of_frames, in_function_transform, is_tracing
from lightning_zero.comm import raising
from lightning_zero.comm.streams import Event
from lightning_zero.engine.agreement import Means
from lightning_zero.engine.events import Phase
from lightning_zero.engine.guard import SavedTensorGuard
from lightning_zero.engine.hooks import EngineHooks
from lightning_zero.engine.order import UnitOrder
from lightning_zero.engine.unit import ShardedUnit, Unit
from lightning_zero.errors import OffloadError, some
from lightning_zero.plan import Plan

__all__ = ["UnitSchedule"]

_log = logging.getLogger(__name__)

_NOTHING = nullcontext()


class UnitSchedule:
    """The full parameters of all sharded units of an engine.

    Args:
        plan: places, root and prefetch.
        units: all units, by index; those that are not sharded do not concern it.
        means: what they work with.
        restore: what the saved-tensor guard asks for a unit's memory during backward.
        hooks: watch the modules inside of units, once one stays.
    """

    def __init__(
        self,
        plan: Plan,
        units: Sequence[Unit],
        means: Means,
        restore: Callable[[ShardedUnit], bool],
        hooks: EngineHooks,
    ) -> None:
        self._means = means
        self._hooks = hooks
        self.sharded = {unit.index: unit for unit in units if isinstance(unit, ShardedUnit)}
        """By index."""
        self._trained = {index: unit for index, unit in self.sharded.items() if unit.plan.trainable_layouts}
        # What is whole in all of a phase.
        self._staying = tuple(unit for unit in self.sharded.values() if unit.index == plan.root)
        self._joined: dict[ShardedUnit, str] = {}  # what is to stay, unknown to other ranks; of which parameter
        self._latest: dict[Hashable, ShardedUnit] = {}  # what was gathered last for each place
        self._failure: OffloadError | None = None  # a shard that could not be fetched: its unit computes with NaN
        self._masters: Event = None
        self._version = 0  # of the masters; see ``_changed``
        self._amid = False
        self.uniform = True
        """Whether all ranks used the same units, in the same order, in the last phase."""
        self.fetches = plan.offload is not None
        """Whether shards may be elsewhere than on the device."""
        self.guard = SavedTensorGuard(means.pool, restore, means.tiers.streams)
        for unit in self.sharded.values():
            self.guard.know(unit)
        self._order = UnitOrder(
            means.agreement,
            [unit.plan.slot if unit.plan.slot is not None else -1 for unit in units],
            self,
            plan.prefetch,
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
        self._amid = amid
        self._changed()
        for unit in (*self._staying, *self._joined):
            self.unshard(unit, ahead=not amid)  # else what user code is about to write to would be gathered

    def stay(self, unit: ShardedUnit, parameter: str) -> None:
        """Make a unit whole until the running phase ends, and in all later ones. See [Note: a unit that stays].

        Not in code that is compiled, traced or transformed.
        """
        watched = compiler_of_frames() is not None or is_tracing() or in_function_transform()
        if watched or not self.is_open:
            return
        if unit not in self._staying and unit not in self._joined:
            self._joined[unit] = parameter
            self._hooks.watch_parts(self.sharded.values())
        self.unshard(unit)

    def guard_root(self) -> None:
        """Have what is saved of the root gathered again, where no step method tells when its backward comes. Local."""
        if self._staying and torch.is_grad_enabled():
            self.guard.push()
            self.guard.of_root = True

    def close(self, values: Sequence[int] = ()) -> list[list[int]]:
        """End the phase, and tell the other ranks ``values`` on this occasion. Returns those of all ranks. Collective.

        Raises ``OffloadError`` on every rank if one could not fetch a shard in this phase.
        """
        control, writes = self._means.control, self._means.writes
        for unit in (*self._staying, *self._joined):
            if unit.pins:
                self.reshard(unit)
        told = [int(self._failure is not None), writes.digest, int(bool(self._joined)), *values]
        rows, change, self.uniform = self._order.close(told)
        for unit in self.sharded.values() if self._means.tiers.streams.beside else ():
            unit.wait()  # also if nobody used it: its gather reads the shard, which may be written from here on
        if 1 in [row[0] for row in rows]:
            failure, self._failure = self._failure, None
            advice = "Resume from the last checkpoint, which is intact."
            control.together("fetch its part of the weights", raising(failure), OffloadError, advice)
        writes.compare([row[1] for row in rows], control)
        joined = 1 in [row[2] for row in rows] and self._agree_who_stays()
        if change is not None and not joined:
            # Not a warning: an order that changes at random (layer dropout) is as good as any, and nothing is wrong.
            _log.debug("Unit '%s' was needed in another order than before.", self.sharded[change].name)
        return [row[3:] for row in rows]

    def unshard(self, unit: ShardedUnit, ahead: bool = True) -> None:
        """Make a unit whole, show its values in the user's parameters, and keep them there until ``reshard``."""
        self._order.need(unit.plan.index, ahead)
        if self._means.spans.heard and not all(handle.done for handle in unit.pending):
            with self._means.spans.of(Phase.WAIT_GATHER, unit.name, unit.nbytes):
                unit.wait()
        unit.bind()

    def reshard(self, unit: ShardedUnit) -> None:
        """Take back one ``unshard``; the last one lets the memory be used by another unit."""
        if unit.unbind(self._means.tiers.streams) and self._latest.get(unit.place) is not unit:
            unit.release()  # another unit was gathered for its place meanwhile

    def bring(self, unit: ShardedUnit) -> bool:
        """Have a unit's full parameters in memory. Returns whether they stay until it is let go."""
        if not unit.resident:
            self._order.need(unit.index)
        with self._means.spans.of(Phase.WAIT_GATHER, unit.name, unit.nbytes) if unit.pending else _NOTHING:
            unit.wait()
        return unit.pins > 0

    def masters_changed(self, units: Sequence[int]) -> None:
        """Note that the full values of some units are void. The same call on every rank."""
        self._changed()
        self.void(units)

    def void(self, units: Sequence[int]) -> None:
        """The same between phases, of which each begins with what is in the masters then. Sends nothing."""
        self._masters = self._means.tiers.streams.mark()
        changed = {self.sharded[index] for index in units if index in self.sharded}
        for unit in changed or self.sharded.values():
            unit.content += 1
        if changed:
            self._means.pool.warn_of_kept(changed)
        self._means.tiers.fetcher.forget()
        self._order.forget(units)

    def vacate(self) -> None:
        """Give the memory of buffers back until they are needed again, where no device has memory of its own.

        Units that are frozen stay where they are. The same call on every rank, between phases.
        """
        if self._means.tiers.streams.beside or self._means.collectives.abandoned:
            return
        for unit in self._trained.values():
            if unit.storage is not None and not unit.pins:
                unit.release()
        self._order.forget(self._trained)
        self._means.pool.trim()

    def abandon(self) -> None:
        """Forget every claim after an error in the middle of a step."""
        self.guard.abandon()
        for unit in self.sharded.values():
            self._means.collectives.abandon(unit.pending)
            unit.abandon()
        self._means.pool.used.clear()
        self._failure = None
        self._order.abandon()

    def _agree_who_stays(self) -> bool:
        """Let units stay from now on that any rank needs so, and that no rank computes with. Collective."""
        mine = (
            {unit.index: name for unit, name in self._joined.items()},
            [u.index for u in self.sharded.values() if u.pins],
        )
        told = self._means.control.gather_objects(mine)
        busy = {index for _, pinned in told for index in pinned}
        names = {index: name for wanted, _ in told for index, name in wanted.items() if index not in busy}
        joining = tuple(unit for unit in self.sharded.values() if unit.index in names and unit not in self._staying)
        for unit in joining:
            unit.release()
            unit.place = ("parameters", unit.index, "apart")
            self._means.pool.add_place(unit.place, unit.plan.slot_nbytes)
        self._staying += joining
        self._joined = {unit: name for unit, name in self._joined.items() if unit not in self._staying}
        if joining:
            self._order.set_apart([unit.index for unit in joining])
            self._hooks.watch_parts(self.sharded.values())
            warnings.warn(
                f"{some(repr(names[unit.index]) for unit in joining)} of {some(repr(unit.name) for unit in joining)}: "
                "used in a forward or backward while no module of its unit ran. It computes as it should, but from "
                "now on all parameters of such a unit are gathered when a forward or backward begins and stay until "
                f"it ends: {sum(unit.nbytes for unit in joining) / 2**20:.1f} MiB on each rank. To avoid that, call "
                "the module that owns the parameter, or make a module around both the unit (ZeroStrategy(units=...)).",
                stacklevel=2,
            )
        return bool(joining)

    def issue(self, index: int) -> None:
        """For ``UnitOrder``, as the next three."""
        unit = self.sharded[index]
        before = self._latest.get(unit.place)
        if before is not None and before is not unit and not before.pins:
            before.release()
        self._latest[unit.place] = unit
        stays = unit in self._staying
        if not stays:  # what was written since the phase began counts
            self._version |= 1
        spans = self._means.spans
        with spans.of(Phase.GATHER, unit.name, unit.nbytes) if spans.heard else _NOTHING:
            failure = unit.launch(self._means, self._masters, None if self._amid and stays else self._version)
        self._failure = self._failure or failure

    def resident(self, index: int) -> bool:
        unit = self.sharded[index]
        return unit.storage is not None and unit.filled_at == unit.version

    def announce(self, index: int) -> None:
        self._means.tiers.fetcher.ahead(self.sharded[index].sources)

    def may_take(self, index: int) -> bool:
        unit = self.sharded[index]
        before = self._latest.get(unit.place)
        return not unit.pins and (before is None or not before.pins)

    def _changed(self) -> None:
        """Note that masters may have other values now: where a phase begins too, because users write to their shards.

        Versions are even where a phase begins and odd from its first gather on (the root's apart), so that ranks which
        an error stopped at different places of a phase agree again at the next.
        """
        self._version = (self._version | 1) + 1
