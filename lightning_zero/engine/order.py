"""In which order units are gathered: recorded once, agreed, replayed; and never out of step between ranks.

[Note: a schedule that ranks cannot leave]
Gathers pair up by order. If rank 0 skipped unit 2 and rank 1 skipped unit 3, equal sizes would let each read the
other's weights, and unequal sizes would hang. So a rank never issues a gather of its own accord:

* *Replay.* Once an order of uses is recorded, every rank issues exactly the gathers of that order. A rank that skips a
  unit issues its gather all the same when it needs a later one, or at the end. What is still resident follows from
  the gathers alone, so all ranks agree on it without a word.
* *Service.* A rank that needs a unit the order does not (any longer) offer first issues the rest of the order, then
  asks. The others, at the end of their phase, answer: in rounds, every rank says which unit it wants, and all gather
  those, in rank order, until nobody wants any. An unknown order (the first step) is this and nothing else.

A phase ends with one small agreement on the host. A phase is a stretch of forward or one backward.

[Note: what is still there]
A unit's place in the plan says which units it shares a buffer with: the last one gathered there is resident, on every
rank. A rank that still computes with the one before keeps that in its own buffer until it has finished, and the order
does not count on it.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from lightning_zero.engine.agreement import Agreement

__all__ = ["UnitOrder"]


class _Order(NamedTuple):
    uses: tuple[int, ...] = ()
    prefetch: int = 0


@dataclass
class _Phase:
    name: str
    place: str
    order: _Order  # the order to replay
    recording: bool  # whether there is none yet
    cursor: int = 0  # next expected use
    issued: int = 0  # uses[:issued] have been gathered or were resident
    seen: list[int] = field(default_factory=list)
    served: list[int] = field(default_factory=list)
    change: int | None = None  # the first unit that the order did not offer


class UnitOrder:
    """Decides which gathers are issued, and when.

    Args:
        agreement: rounds between the hosts.
        slots: the place of each unit in the plan, by unit index. Units of one place share a buffer.
        gathers: the ``UnitSchedule``. On this rank, by the index of a unit: ``issue`` starts its gather, ``resident``
            says whether its current weights are here or on their way, ``may_take`` whether it may be gathered
            now; ``announce`` learns which one is gathered next, ahead of time, if the schedule ``fetches`` shards.
        prefetch: units gathered ahead.
    """

    def __init__(
        self,
        agreement: Agreement,
        slots: Sequence[int],
        gathers: Any,
        prefetch: int,
    ) -> None:
        self._agreement = agreement
        self._slots = list(slots)
        self._gathers = gathers
        self._prefetch = prefetch
        self._ledger: dict[int, int] = {}  # slot -> unit, as it follows from the gathers issued so far
        self._recorded: dict[str, _Order] = {}
        self._changed: set[str] = set()  # phases that did not keep to their order once
        self._phase: _Phase | None = None
        self.recording = False
        """Whether the running phase has no order yet (the same on every rank)."""

    @property
    def is_open(self) -> bool:
        """Whether a phase is running."""
        return self._phase is not None

    def open(self, name: str, place: str) -> None:
        """Begin a phase. Those of one ``name`` share an order; ``place`` is this very occurrence, for agreement."""
        order = self._recorded.get(name)
        self.recording = order is None
        self._phase = _Phase(name, place, order or _Order(), self.recording)

    def need(self, unit: int, ahead: bool = True) -> None:
        """Make sure a unit's gather has been issued, and look ``ahead``.

        Collective: only if the unit is not resident; then in step with the other ranks' phases.
        """
        phase = self._phase or self._require_phase()
        phase.seen.append(unit)
        if phase.recording:
            if not self._gathers.resident(unit):
                self._ask(phase, unit)
            return
        uses, cursor = phase.order.uses, phase.cursor
        if cursor < len(uses) and uses[cursor] == unit:
            position = cursor
        else:
            position = uses.index(unit, cursor) if unit in uses[cursor:] else -1
        if position < 0 or (position != cursor and self._gathers.resident(unit)):
            # Not offered (any more), or offered later but still here: a use the order does not know.
            if not self._gathers.resident(unit):
                self._leave_order(phase, unit)
            return
        while phase.issued <= position:
            self._issue_next(phase)
        if not self._gathers.resident(unit):
            self._leave_order(phase, unit)
            return
        phase.cursor = position + 1
        if ahead and phase.order.prefetch:
            self._look_ahead(phase)
        if ahead and self._gathers.fetches:
            left = uses[phase.issued :]
            coming = next((index for index in left if self._ledger.get(self._slots[index]) != index), None)
            if coming is not None:
                self._gathers.announce(coming)

    def close(self, values: Sequence[int] = ()) -> tuple[list[list[int]], int | None, bool]:
        """End the phase together with the other ranks, and tell them ``values`` on this occasion. Collective.

        Returns every rank's ``values``; the unit that some rank needed and the order did not offer, if that has never
        happened in such a phase; and whether all ranks used the same units in the same order. Raises
        ``DivergenceError`` on every rank if the others are elsewhere.
        """
        phase = self._phase or self._require_phase()
        if self._agreement.control.world_size > 1:
            self._issue_rest(phase)
        signature = zlib.crc32(f"{phase.seen}".encode())
        while True:
            rows = self._agreement.round(phase.place, [0, signature, *values])
            if not self._serve(phase, rows):
                break
        self._phase, self.recording = None, False
        agreed = all(row[1] == signature for row in rows)
        change = None if phase.name in self._changed else phase.change
        self._remember(phase, agreed)
        return [row[2:] for row in rows], change, agreed

    def forget(self, units: Collection[int]) -> None:
        """Note that the full weights of some units are void. The same call on every rank."""
        void = set(units)
        self._ledger = {slot: unit for slot, unit in self._ledger.items() if unit not in void}

    def set_apart(self, units: Sequence[int]) -> None:
        """Note that these units have slots of their own now. Between phases; the same call on every rank."""
        self.forget(units)
        self._recorded = {}
        for unit in units:
            self._slots[unit] = -2 - unit

    def abandon(self) -> None:
        """Drop the phase after an error; recorded orders stay."""
        self._phase, self.recording = None, False
        self._ledger.clear()

    def _require_phase(self) -> NoReturn:
        raise RuntimeError(
            "A unit was needed outside of a forward or backward the engine knows of. This is an error in "
            "lightning_zero itself; please report it with the model that shows it."
        )

    def _issue_next(self, phase: _Phase) -> None:
        unit = phase.order.uses[phase.issued]
        phase.issued += 1
        slot = self._slots[unit]
        if self._ledger.get(slot) != unit:
            self._ledger[slot] = unit
            self._gathers.issue(unit)

    def _issue_rest(self, phase: _Phase) -> None:
        while phase.issued < len(phase.order.uses):
            self._issue_next(phase)

    def _look_ahead(self, phase: _Phase) -> None:
        uses = phase.order.uses
        while phase.issued < len(uses) and phase.issued - phase.cursor < phase.order.prefetch:
            unit = uses[phase.issued]
            slot = self._slots[unit]
            holder = self._ledger.get(slot)
            # Not what is needed now (uses[cursor - 1], not pinned yet) or before this one.
            needed = holder in uses[phase.cursor - 1 : phase.issued]
            if holder != unit and (needed or not self._gathers.may_take(unit)):
                return
            self._issue_next(phase)

    def _leave_order(self, phase: _Phase, unit: int) -> None:
        self._issue_rest(phase)
        phase.cursor = len(phase.order.uses)
        self._ask(phase, unit)

    def _ask(self, phase: _Phase, unit: int) -> None:
        while not self._gathers.resident(unit):
            self._serve(phase, self._agreement.round(phase.place, [unit + 1]))

    def _serve(self, phase: _Phase, rows: list[list[int]]) -> bool:
        wanted = list(dict.fromkeys(row[0] - 1 for row in rows if row[0]))
        if wanted and not phase.recording and phase.change is None:
            phase.change = wanted[0]
        for unit in wanted:
            phase.served.append(unit)
            self._ledger[self._slots[unit]] = unit
            self._gathers.issue(unit)
        return bool(wanted)

    def _remember(self, phase: _Phase, agreed: bool) -> None:
        """Keep the order for the next phase of this name. Uses only what is equal on all ranks."""
        if phase.recording:
            # Ranks that took different units agree on what was gathered, in which order; looking ahead in it would
            # throw out units that a rank still needs.
            own = _Order(tuple(phase.seen), self._prefetch)
            self._recorded[phase.name] = own if agreed else _Order(tuple(phase.served))
        elif phase.change is not None and phase.name not in self._changed:
            self._changed.add(phase.name)
            del self._recorded[phase.name]
