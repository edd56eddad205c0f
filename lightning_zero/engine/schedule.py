"""When sharded units are gathered, and which of them are whole right now.

[Note: one order of gathers]
Gathers pair up by order. If rank 0 skipped unit 2 and rank 1 skipped unit 3, equal sizes would let each read the
other's weights, and unequal sizes would hang. So a rank never issues a gather of its own accord:

* *Replay.* Once an order of uses is recorded, every rank issues exactly the gathers of that order. A rank that skips a
  unit issues its gather all the same when it needs a later one, or at the end. What is still resident follows from
  the gathers alone, so all ranks agree on it without a word.
* *Service.* A rank that needs a unit the order does not (any longer) offer first issues the rest of the order, then
  asks. The others, at the end of their phase, answer: in rounds, every rank says which unit it wants, and all gather
  those, in rank order, until nobody wants any. An unknown order (the first step) is this and nothing else.

A phase is a stretch of forward or one backward. It ends with one small agreement on the host.

[Note: places]
Units of one place in the plan share a buffer: the last one that was gathered there is resident, on every rank. A rank
that still computes with the one before keeps that in its own buffer until it has finished, and the order does not count
on it.

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
import zlib
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lightning_zero._torch import compiler_of_frames, in_function_transform, is_tracing
from lightning_zero.comm import raising
from lightning_zero.comm.control import Met
from lightning_zero.comm.streams import Event
from lightning_zero.config import Tier
from lightning_zero.engine.agreement import Agreement, Means
from lightning_zero.engine.events import Phase
from lightning_zero.engine.guard import SavedTensorGuard
from lightning_zero.engine.hooks import EngineHooks
from lightning_zero.engine.unit import REPORT, ShardedUnit, Unit
from lightning_zero.errors import OffloadError, ParameterAccessError, some
from lightning_zero.plan.plan import Plan

__all__ = ["UnitOrder", "UnitSchedule"]

_log = logging.getLogger(__name__)

_NOTHING = nullcontext()


@dataclass
class _Phase:
    name: str
    place: str
    uses: tuple[int, ...] | None  # the order to replay; ``None`` while it is recorded
    prefetch: int
    cursor: int = 0  # next expected use
    issued: int = 0  # uses[:issued] have been gathered or were resident
    seen: list[int] = field(default_factory=list)
    served: list[int] = field(default_factory=list)
    ended: bool = False


class UnitOrder:
    """Decides which gathers are issued, and when.

    Args:
        agreement: rounds between the hosts.
        places: of each unit, by index. Units of one place share a buffer.
        gathers: the ``UnitSchedule``. On this rank, by the index of a unit: ``issue`` starts its gather, ``resident``
            says whether its current weights are here or on their way, ``may_take`` whether it may be gathered now;
            ``announce`` learns which one is gathered next, ahead of time, if the schedule ``fetches`` shards.
        prefetch: units gathered ahead.
    """

    def __init__(self, agreement: Agreement, places: Sequence[Hashable], gathers: Any, prefetch: int) -> None:
        self._agreement = agreement
        self._gathers = gathers
        self._prefetch = prefetch
        self._places = list(places)
        self.last: dict[Hashable, int] = {}
        """The unit that was gathered last for each place, if its weights are still the current ones."""
        self._recorded: dict[str, tuple[tuple[int, ...], int]] = {}  # uses, and how many to gather ahead
        self._changed: set[str] = set()  # phases that did not keep to their order once
        self._phase: _Phase | None = None

    @property
    def is_open(self) -> bool:
        """Whether a phase is running."""
        return self._phase is not None and not self._phase.ended

    @property
    def has_ended(self) -> bool:
        """Whether a phase has ended that is not closed yet."""
        return self._phase is not None and self._phase.ended

    def open(self, name: str, place: str) -> None:
        """Begin a phase. Those of one ``name`` share an order; ``place`` is this very occurrence, for agreement."""
        self._phase = _Phase(name, place, *self._recorded.get(name, (None, 0)))

    def need(self, unit: int, ahead: bool = True) -> None:
        """Make sure a unit's gather has been issued, and look ``ahead``.

        Collective: only if the unit is not resident; then in step with the other ranks' phases.
        """
        phase = self._phase or self._running()
        phase.seen.append(unit)
        uses, at = phase.uses or (), phase.cursor
        if at >= len(uses) or uses[at] != unit:
            if self._gathers.resident(unit):
                return  # a use the order does not know
            at = uses.index(unit, at) if unit in uses[at:] else len(uses)
        while phase.issued <= at < len(uses):
            self._issue_next(phase, uses)
        if at < len(uses) and self._gathers.resident(unit):
            phase.cursor = at + 1
            if ahead:
                self._look_ahead(phase, uses)
            return
        self._issue_rest(phase)
        phase.cursor = len(uses)
        while not self._gathers.resident(unit):
            self._serve(phase, self._agreement.end(phase.place, "", [unit + 1])[0].rows)

    def end(self) -> None:
        """End the phase on this rank: nothing is needed any more until it is closed. Local."""
        phase = self._running()
        phase.ended = True
        if self._agreement.control.world_size > 1:
            self._issue_rest(phase)

    def close(
        self, values: Sequence[int] = (), marks: Sequence[int] = (), then: str = ""
    ) -> tuple[Met, int | None, bool]:
        """End the phase together with the other ranks, and tell them ``values`` and ``marks`` on this occasion.

        Returns what the ranks told, of which the first mark says whether all used the same units in the same order; the
        unit that some rank needed and the order did not offer, if that has never happened in such a phase; and whether
        all ranks go on with ``then`` at once. Raises ``DivergenceError`` on every rank if the others are elsewhere.
        Collective.
        """
        phase = self._running()
        self.end()
        signature = zlib.crc32(f"{phase.seen}".encode())
        while True:
            met, begun = self._agreement.end(phase.place, then, [0, *values], [signature, *marks])
            if not self._serve(phase, met.rows):
                break
        self._phase = None
        agreed, change = met.alike[0], None
        if phase.uses is None:
            # Ranks that took different units agree on what was gathered, in which order; looking ahead in it would
            # throw out units that a rank still needs.
            found = (tuple(phase.seen), self._prefetch) if agreed else (tuple(phase.served), 0)
            self._recorded[phase.name] = found
        elif phase.served and phase.name not in self._changed:  # recorded anew, once
            change = phase.served[0]
            self._changed.add(phase.name)
            del self._recorded[phase.name]
        return met, change, begun

    def forget(self, units: Container[int]) -> None:
        """Note that the full weights of some units are void. The same call on every rank."""
        self.last = {place: unit for place, unit in self.last.items() if unit not in units}

    def set_apart(self, unit: int, place: Hashable) -> None:
        """Note that a unit has another place now. Between phases; the same call on every rank."""
        self.forget([unit])
        self._recorded.clear()
        self._places[unit] = place

    def abandon(self) -> None:
        """Drop the phase after an error; recorded orders stay."""
        self._phase = None
        self.last.clear()

    def _running(self) -> _Phase:
        if self._phase is None:
            raise RuntimeError(f"A unit was needed outside of a forward or backward the engine knows of. {REPORT}")
        return self._phase

    def _issue_next(self, phase: _Phase, uses: tuple[int, ...]) -> None:
        unit = uses[phase.issued]
        phase.issued += 1
        if self.last.get(place := self._places[unit]) != unit:
            self._gathers.issue(unit)
            self.last[place] = unit

    def _issue_rest(self, phase: _Phase) -> None:
        while phase.uses and phase.issued < len(phase.uses):
            self._issue_next(phase, phase.uses)

    def _look_ahead(self, phase: _Phase, uses: tuple[int, ...]) -> None:
        while phase.issued < len(uses) and phase.issued - phase.cursor < phase.prefetch:
            unit = uses[phase.issued]
            holder = self.last.get(self._places[unit])
            # Not what is needed now (uses[cursor - 1], not pinned yet) or before this one.
            needed = holder in uses[phase.cursor - 1 : phase.issued]
            if holder != unit and (needed or not self._gathers.may_take(unit)):
                break
            self._issue_next(phase, uses)
        if self._gathers.fetches:
            for unit in uses[phase.issued :]:
                if self.last.get(self._places[unit]) != unit:
                    self._gathers.announce(unit)
                    break

    def _serve(self, phase: _Phase, rows: list[list[int]]) -> bool:
        """Gather what ranks have asked for. Returns whether any has."""
        wanted = list(dict.fromkeys(row[0] - 1 for row in rows if row[0]))
        for unit in wanted:
            phase.served.append(unit)
            self._gathers.issue(unit)
            self.last[self._places[unit]] = unit
        return bool(wanted)


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
        self._failure: OffloadError | None = None  # a shard that could not be fetched: its unit computes with NaN
        self._written = means.writes  # before the phase ended, if it is closed later
        self._masters: Event = None
        self._changes = 0  # how often masters may have got other values: at a step, and where a phase begins
        self._gathered = False  # whether anything but the root was gathered since then
        self._amid = False
        masters = {flat.rest.master for unit in self.sharded.values() for flat in unit.flats}
        self.fetches = Tier.DISK in masters or (Tier.HOST in masters and means.tiers.streams.beside)
        """Whether shards are worth fetching ahead of their gather."""
        self.guard = SavedTensorGuard(means.pool, restore, means.tiers.streams)
        places = [unit.place if isinstance(unit, ShardedUnit) else None for unit in units]
        self.order = UnitOrder(means.agreement, places, self, plan.prefetch)

    # ------------------------------------------------------------------ a phase

    def open(self, name: str, place: str, amid: bool = False) -> None:
        """Begin a phase (a stretch of forward, or a backward) and make the root whole for all of it. Collective.

        Phases of one ``name`` share an order of units; ``place`` is this very occurrence. ``amid``: code of the user's
        goes on at once, which may write to its shards (weight clipping behind a step of manual optimization) before a
        slower rank has read what belongs to the root.
        """
        if not self.sharded:
            return
        self.order.open(name, place)
        self._amid = amid
        self._changed()
        for unit in (*self._staying, *self._joined):
            self.unshard(unit, ahead=not amid)  # else what user code is about to write to would be gathered

    def unshard(self, unit: ShardedUnit, ahead: bool = True) -> None:
        """Make a unit whole, show its values in the user's parameters, and keep them there until ``reshard``."""
        self.order.need(unit.plan.index, ahead)
        if self._means.spans.heard and not all(handle.done for handle in unit.pending):
            with self._means.spans.of(Phase.WAIT_GATHER, unit.name, unit.nbytes):
                unit.wait()
        unit.bind()

    def reshard(self, unit: ShardedUnit) -> None:
        """Take back one ``unshard``; the last one lets the memory be used by another unit."""
        if unit.unbind(self._means.tiers.streams) and self.order.last.get(unit.place) != unit.plan.index:
            unit.release()  # another unit was gathered for its place meanwhile

    def bring(self, unit: ShardedUnit) -> bool:
        """Have a unit's full parameters in memory. Returns whether they stay until it is let go."""
        if not self.resident(unit.index):
            self.order.need(unit.index)
        with self._means.spans.of(Phase.WAIT_GATHER, unit.name, unit.nbytes) if unit.pending else _NOTHING:
            unit.wait()
        return unit.pins > 0

    def end(self) -> None:
        """End the phase on this rank, which is closed later: before anything else that is collective. Local."""
        self._let_go()
        self.order.end()
        self._written = self._means.writes.take()
        self._wait()

    def close(self, report: Sequence[int] = (), then: str = "") -> tuple[Met, bool]:
        """End the phase, and tell the other ranks a ``report`` on this occasion. Collective.

        Returns of the report the bits that any rank has, and which of its numbers are alike; and whether all ranks go
        on with ``then`` at once. Raises ``OffloadError`` on every rank if one could not fetch a shard in this phase.
        """
        control, writes = self._means.control, self._means.writes
        if self.order.has_ended:
            writes = self._written
        else:
            self._let_go()
        told = [int(self._failure is not None), writes.digest, int(bool(self._joined))]
        (rows, marks, alike), change, begun = self.order.close(told, report, then)
        self._wait()
        if 1 in [row[1] for row in rows]:
            failure, self._failure = self._failure, None
            advice = "Resume from the last checkpoint, which is intact."
            control.together("fetch its part of the weights", raising(failure), OffloadError, advice)
        writes.compare([row[2] for row in rows], control)
        joined = 1 in [row[3] for row in rows] and self._agree_who_stays()
        if change is not None and not joined:
            # Not a warning: an order that changes at random (layer dropout) is as good as any, and nothing is wrong.
            _log.debug("Unit '%s' was needed in another order than before.", self.sharded[change].name)
        return Met([], marks[1:], alike[1:]), begun

    def _let_go(self) -> None:
        for unit in (*self._staying, *self._joined):
            if unit.pins:
                self.reshard(unit)

    def _wait(self) -> None:
        for unit in self.sharded.values() if self._means.tiers.streams.beside else ():
            unit.wait()  # also if nobody used it: its gather reads the shard, which may be written from here on

    def guard_root(self) -> None:
        """Have what is saved of the root gathered again, where no step method tells when its backward comes. Local."""
        if self._staying and torch.is_grad_enabled():
            self.guard.push()
            self.guard.of_root = True

    def abandon(self) -> None:
        """Forget every claim after an error in the middle of a step."""
        self.guard.abandon()
        for unit in self.sharded.values():
            self._means.collectives.abandon(unit.pending)
            unit.abandon()
        self._means.pool.used.clear()
        self._failure = None
        self.order.abandon()

    # ------------------------------------------------------------ between phases

    def masters_changed(self, units: Iterable[int]) -> None:
        """Note that masters may have other values, and that the full ones of some units are void. Sends nothing.

        The same call on every rank.
        """
        self._changed()
        self._masters = self._means.tiers.streams.mark()
        changed = {self.sharded[index] for index in units if index in self.sharded}
        for unit in changed or self.sharded.values():
            unit.content += 1
        for unit in changed:
            if unit.storage is not None and not unit.pins:
                unit.release()
        if changed:
            self._means.pool.warn_of_kept(changed)
            self.order.forget({unit.index for unit in changed})
        self._means.tiers.forget()

    def vacate(self) -> None:
        """Give the memory of buffers back until they are needed again, where no device has memory of its own.

        Units that are frozen stay where they are. The same call on every rank, between phases.
        """
        if self._means.tiers.streams.beside or self._means.collectives.abandoned:
            return
        for unit in self._trained.values():
            if unit.storage is not None and not unit.pins:
                unit.release()
        if self._trained:
            self.order.forget(self._trained)
        self._means.pool.trim()

    def _changed(self) -> None:
        """Note that masters may have other values now: where a phase begins too, because users write to their shards.

        Ranks that an error stopped at different places of a phase agree again at the next.
        """
        self._changes, self._gathered = self._changes + 1, False

    def check_holders(self) -> None:
        """Raise ParameterAccessError if user code has put another parameter in the place of one of a unit's, for longer
        than a forward (``torch.func.functional_call``). In the root it goes untrained, as under DDP."""
        for unit in self.sharded.values():
            for owner, key, name, parameter in unit.holders if unit.plan.module else ():
                if owner._parameters.get(key) is parameter:
                    continue
                # `torch.nn.utils.prune` and `register_parametrization` put it elsewhere, and take it back.
                if not any(other is parameter for other in nn.Module.parameters(owner)):
                    raise ParameterAccessError(
                        f"Parameter '{name}' of unit '{unit.name}' was replaced by another object after set-up "
                        "(load_state_dict(assign=True), a re-assigned attribute, or a re-tied weight). Change its "
                        "values inside `with lightning_zero.full_parameters(module):` instead."
                    )

    # ----------------------------------------------------------- units that stay

    def stay(self, unit: ShardedUnit, parameter: str) -> None:
        """Make a unit whole until the running phase ends, and in all later ones. See [Note: a unit that stays].

        Not in code that is compiled, traced or transformed.
        """
        watched = compiler_of_frames() is not None or is_tracing() or in_function_transform()
        if watched or not self.order.is_open:
            return
        if unit not in self._staying and unit not in self._joined:
            self._joined[unit] = parameter
            self._hooks.watch_parts(self.sharded.values())
        self.unshard(unit)

    def _agree_who_stays(self) -> bool:
        """Let units stay from now on that any rank needs so, and that no rank computes with. Collective."""
        pinned = [unit.index for unit in self.sharded.values() if unit.pins]
        mine = {unit.index: name for unit, name in self._joined.items()}, pinned
        told = self._means.control.gather_objects(mine)
        busy = {index for _, pinned in told for index in pinned}
        names = {index: name for wanted, _ in told for index, name in wanted.items() if index not in busy}
        joining = tuple(unit for unit in self.sharded.values() if unit.index in names and unit not in self._staying)
        for unit in joining:
            unit.release()
            unit.place = ("parameters", unit.index, "apart")
            self._means.pool.sizes[unit.place] = unit.plan.slot_nbytes
            self.order.set_apart(unit.index, unit.place)
        self._staying += joining
        self._joined = {unit: name for unit, name in self._joined.items() if unit not in self._staying}
        if joining:
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

    # ------------------------------------------------------- asked by `UnitOrder`

    def issue(self, index: int) -> None:
        """Start a unit's gather, into the buffer of its place."""
        unit = self.sharded[index]
        before = self.sharded.get(self.order.last.get(unit.place, -1))
        if before is not None and before is not unit and not before.pins:
            before.release()
        stays = unit in self._staying
        if not stays:  # what was written since the phase began counts
            self._gathered = True
        version = None if self._amid and stays else 2 * self._changes + self._gathered
        spans = self._means.spans
        with spans.of(Phase.GATHER, unit.name, unit.nbytes) if spans.heard else _NOTHING:
            failure = unit.launch(self._means, self._masters, version)
        self._failure = self._failure or failure

    def resident(self, index: int) -> bool:
        """Whether a unit's current weights are here or on their way."""
        unit = self.sharded[index]
        return unit.storage is not None and unit.storage.version == unit.version

    def announce(self, index: int) -> None:
        """Begin to fetch a unit's shards from where they are offloaded to."""
        self._means.tiers.ahead([flat.source for flat in self.sharded[index].flats])

    def may_take(self, index: int) -> bool:
        """Whether a unit may be gathered into the buffer of its place."""
        unit = self.sharded[index]
        before = self.sharded.get(self.order.last.get(unit.place, -1))
        return not unit.pins and (before is None or not before.pins)
