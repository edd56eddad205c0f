"""All ranks issue the same gathers in the same order, whatever each of them needs, and none waits for ever.

Ranks are threads here, the wire is a list, and memory has the rules of the engine: a gather takes the buffer of the
unit's place, or another one while somebody computes with the unit that has it.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from typing import Any

import pytest

from lightning_zero.comm.control import Met
from lightning_zero.engine.agreement import Agreement
from lightning_zero.engine.schedule import UnitOrder
from lightning_zero.errors import DivergenceError

DEADLINE = 20.0


class Meeting:
    """What threads exchange at one place."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._barrier = threading.Barrier(world_size, timeout=DEADLINE)
        self._rows: list[Any] = [None] * world_size
        self.rounds = 0

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._rows[rank] = value
        self._barrier.wait()
        rows = list(self._rows)
        if self._barrier.wait() == 0:
            self.rounds += 1
        return rows

    def abort(self) -> None:
        self._barrier.abort()


class Control:
    """A ``ControlGroup`` over a meeting of threads."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.world_size, self.width = meeting, rank, meeting.world_size, 8

    def meet(self, place: str, values: Sequence[int] = (), marks: Sequence[int] = ()) -> Met:
        rows = self.meeting.exchange(self.rank, (place, [*values], [*marks]))
        if len({place for place, _, _ in rows}) > 1:
            raise DivergenceError("\n".join(f"rank {rank}: {place}" for rank, (place, _, _) in enumerate(rows)))
        assert len({(len(row), len(marks)) for _, row, marks in rows}) == 1
        told = [row for _, row, _ in rows]
        each = [*zip(*(marks for _, _, marks in rows), strict=True)]
        marks = [reduce(or_, words) for words in each]
        return Met(told[: 1 if told.count(told[0]) == len(told) else None], marks, [len({*one}) == 1 for one in each])

    def gather_objects(self, value: Any) -> list[Any]:
        return self.meeting.exchange(self.rank, value)


class Rank:
    """One rank's memory and its order."""

    def __init__(self, meeting: Meeting, rank: int, slots: Sequence[int], prefetch: int) -> None:
        self.slots = slots
        self.rank = rank
        self.issued: list[int] = []
        self.in_slot: dict[int, int] = {}  # slot -> unit
        self.there: set[int] = set()
        self.pins: dict[int, int] = {}
        self.fetches = False
        self.order = UnitOrder(Agreement(Control(meeting, rank), 2, 1), slots, self, prefetch)

    def resident(self, unit: int) -> bool:
        return unit in self.there

    def pinned(self, unit: int) -> bool:
        return self.pins.get(unit, 0) > 0

    def may_take(self, unit: int) -> bool:
        holder = self.in_slot.get(self.slots[unit])
        return not self.pinned(unit) and (holder is None or not self.pinned(holder))

    def issue(self, unit: int) -> None:
        self.issued.append(unit)
        holder = self.in_slot.get(self.slots[unit])
        if holder is not None and not self.pinned(holder):
            self.there.discard(holder)
        self.in_slot[self.slots[unit]] = unit
        self.there.add(unit)

    def use(self, unit: int, inside: Callable[[], None] | None = None) -> None:
        """Compute with a unit, and with others while it is pinned."""
        self.order.need(unit)
        assert self.resident(unit), f"rank {self.rank} computes with unit {unit}, which is not there"
        self.pins[unit] = self.pins.get(unit, 0) + 1
        if inside is not None:
            inside()
        assert self.resident(unit), f"rank {self.rank}: unit {unit} was overwritten while it computed"
        self.pins[unit] -= 1
        if not self.pinned(unit) and self.in_slot.get(self.slots[unit]) != unit:
            self.there.discard(unit)

    def phase(self, name: str, uses: Sequence[int], nested: bool = False) -> tuple[int | None, bool]:
        self.order.open(name, f"phase {name}")
        if nested and len(uses) > 2:
            self.use(uses[0], lambda: [self.use(unit) for unit in uses[1:-1]] and None)
            self.use(uses[-1])
        else:
            for unit in uses:
                self.use(unit)
        met, change, _ = self.order.close()
        agreed = met.alike[0]
        return change, agreed

    def step(self) -> None:
        """An optimizer step voids every gathered value."""
        self.there.clear()
        self.order.forget(range(len(self.slots)))


def world(world_size: int, slots: Sequence[int], prefetch: int, body: Callable[[Rank], Any]) -> list[Any]:
    """Run ``body`` in one thread per rank and check that all issued the same gathers. Returns what it returned."""
    meeting = Meeting(world_size)
    ranks = [Rank(meeting, rank, slots, prefetch) for rank in range(world_size)]
    results: list[Any] = [None] * world_size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = body(ranks[rank])
        except BaseException as error:
            errors.append(error)
            meeting.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE + 5)
        assert not thread.is_alive(), "a rank waits for ever"
    real = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if real or errors:
        raise (real or errors)[0]
    for rank in ranks[1:]:
        assert rank.issued == ranks[0].issued
    return [(ranks[index], result) for index, result in enumerate(results)]


ROUND_ROBIN = [0, 1, 0, 1, 0, 1]


def test_the_second_phase_replays_the_first() -> None:
    def body(rank: Rank) -> int:
        rank.phase("forward", [0, 1, 2, 3])
        first = list(rank.issued)
        rank.step()
        rank.phase("forward", [0, 1, 2, 3])
        assert rank.issued[len(first) :] == [0, 1, 2, 3]
        return len(first)

    for rank, first in world(2, ROUND_ROBIN, 1, body):
        assert (first, len(rank.issued)) == (4, 8)


def test_what_is_still_there_is_not_gathered_again() -> None:
    """Two slots: the last two units of the forward are the first two of the backward. 2 L - 2 gathers, not 2 L."""

    def body(rank: Rank) -> None:
        for _ in range(2):
            rank.phase("forward", [0, 1, 2, 3])
            rank.phase("backward", [3, 2, 1, 0])
            rank.step()
        rank.issued.clear()
        rank.phase("forward", [0, 1, 2, 3])
        rank.phase("backward", [3, 2, 1, 0])

    for rank, _ in world(2, ROUND_ROBIN, 1, body):
        assert rank.issued == [0, 1, 2, 3, 1, 0]


@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
def test_looking_ahead_is_bounded_by_prefetch_and_slots(prefetch: int) -> None:
    slots = [0, 1, 2, 0, 1, 2]  # at most two units ahead of the one that computes
    ahead: list[int] = []

    def body(rank: Rank) -> None:
        rank.phase("forward", list(range(6)))
        rank.step()
        rank.issued.clear()
        rank.order.open("forward", "again")
        for unit in range(6):
            rank.order.need(unit)
            if rank.rank == 0:
                ahead.append(len(rank.issued) - unit - 1)
            rank.use(unit)
        rank.order.close()

    world(2, slots, prefetch, body)
    assert ahead == [min(prefetch, 2, 5 - unit) for unit in range(6)]


def test_a_skipped_unit_is_gathered_all_the_same() -> None:
    def body(rank: Rank) -> None:
        for _ in range(2):
            rank.phase("forward", [0, 1, 2, 3])
            rank.step()
        rank.issued.clear()
        change, agreed = rank.phase("forward", [0, 2, 3] if rank.rank == 0 else [0, 1, 3])
        assert (change, agreed) == (None, False)

    for rank, _ in world(2, [0, 1, 0, 1], 1, body):
        assert sorted(rank.issued) == [0, 1, 2, 3]


def test_a_unit_the_order_does_not_know_is_served() -> None:
    """One rank asks, the others answer at their end; the change is reported once, with both units, to all."""

    def body(rank: Rank) -> list[Any]:
        for _ in range(2):
            rank.phase("forward", [0, 1, 2])
            rank.step()
        rank.issued.clear()
        found = []
        for _ in range(3):
            change, _ = rank.phase("forward", [0, 3, 1, 2] if rank.rank == 1 else [0, 1, 2])
            found.append(change)
            rank.step()
        return found

    for _, found in world(3, [0, 1, 2, 3], 0, body):
        assert found[0] == 3
        # Recorded again with what was served; after that the order holds whatever anybody needs.
        assert found[1:] == [None, None]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_unit_that_is_gathered_while_another_has_its_place_is_there_for_its_next_use(prefetch: int) -> None:
    """A block is recomputed while the one behind it computes, and has its backward next."""

    def body(rank: Rank) -> list[Any]:
        found = []
        for _ in range(4):
            rank.issued.clear()
            rank.order.open("backward", "backward")
            rank.use(0, lambda: rank.use(1))
            rank.use(1)
            met, change, _ = rank.order.close()
            agreed = met.alike[0]
            found.append((change, agreed, list(rank.issued)))
            rank.step()
        return found

    for _, found in world(2, [0, 0], prefetch, body):
        assert found == [(None, True, [0, 1])] * 4


def test_ranks_at_different_places_are_told_where() -> None:
    def body(rank: Rank) -> None:
        rank.order.open("forward", f"batch {rank.rank}")
        with pytest.raises(DivergenceError, match=r"(?s)rank 0: batch 0.*rank 1: batch 1"):
            rank.order.close()

    world(2, [0], 0, body)


def test_after_an_error_the_recorded_order_still_holds() -> None:
    def body(rank: Rank) -> None:
        rank.phase("forward", [0, 1, 2])
        rank.step()
        rank.order.open("forward", "broken")
        rank.use(0)
        rank.order.abandon()
        rank.there.clear()
        assert not rank.order.is_open
        rank.issued.clear()
        rank.phase("forward", [0, 1, 2])

    for rank, _ in world(1, [0, 1, 2], 1, body):
        assert rank.issued == [0, 1, 2]


@pytest.mark.parametrize("seed", range(60))
def test_any_uses_on_any_rank(seed: int) -> None:
    """Random units per rank and phase, slots, prefetch, nesting: the same gathers everywhere, and nobody waits."""
    numbers = random.Random(seed)
    world_size = numbers.randint(1, 4)
    count = numbers.randint(1, 6)
    slots = [numbers.randrange(numbers.randint(1, count)) for _ in range(count)]
    usual = [numbers.randrange(count) for _ in range(numbers.randint(1, 8))]
    divergence = numbers.choice([0.0, 0.2, 1.0])
    phases = numbers.randint(3, 8)

    def uses(rank: int, phase: int) -> list[int]:
        own = random.Random(f"{seed} {rank} {phase}")
        found = []
        for unit in usual:
            if own.random() >= divergence:
                found.append(unit)
            else:
                found += own.choice([[], [own.randrange(count)], [unit, own.randrange(count)]])
        return found

    steps = [numbers.random() < 0.5 for _ in range(phases)]
    nested = [numbers.random() < 0.3 for _ in range(phases)]

    def body(rank: Rank) -> None:
        for phase in range(phases):
            rank.phase(f"phase {phase % 2}", uses(rank.rank, phase), nested[phase])
            if steps[phase]:
                rank.step()

    world(world_size, slots, numbers.randint(0, 3), body)
