"""What a program did to memory on several streams and threads, and which two things it did in no order.

An *actor* does one thing after the other: a stream of the device, or a thread of the host. A trace lists what actors
did in the order in which the host issued it. Who is ordered behind whom is told by vector clocks: of each actor, how
much of every other one is surely over when the next thing of it begins.

[Note: mutations]
A trace is looked through after the run, so what an event is good for can be asked of the same trace: look through it
as if the event were not there. An event without which no race is found is superfluous, or guards what was not played.

[Note: memory that is given up]
The allocator of a device hands memory on in the order of the stream that took it, as soon as the last tensor that shows
it has gone; nothing here uses ``record_stream``. So that stream has to be ordered behind what other streams do there,
and the thread that frees host memory behind what the device does there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

__all__ = ["Free", "Item", "Mark", "Race", "Use", "Wait", "Work", "find_races", "sites"]


class Use(NamedTuple):
    """The bytes of one memory, from ``begin`` to ``end``, that something reads or writes."""

    memory: int
    begin: int
    end: int
    writes: bool


class Work(NamedTuple):
    """One operator, copy or transfer. It begins behind all of its ``actor``, and behind what ``issuer`` has done."""

    actor: str
    issuer: str
    what: str
    where: str
    uses: Sequence[Use]


class Mark(NamedTuple):
    """An event behind all that ``actor`` does so far, and ``issuer`` has done."""

    actor: str
    issuer: str
    event: int
    site: str = ""


class Wait(NamedTuple):
    """``actor`` goes on behind an event."""

    actor: str
    event: int
    site: str = ""


class Free(NamedTuple):
    """The last tensor that shows a memory has gone; ``owner`` took it, ``issuer`` takes the next."""

    memory: int
    owner: str
    issuer: str


Item = Work | Mark | Wait | Free


class Race(NamedTuple):
    """Two things of which nothing says which comes first, in words."""

    first: str
    second: str


class _Known(NamedTuple):
    use: Use
    actor: str
    tick: int
    work: Work

    def __str__(self) -> str:
        return f"{self.work.what} on {self.actor} ({self.work.where})"


Clock = dict[str, int]


def sites(trace: Iterable[Item]) -> list[str]:
    """Where events are marked and waited for, each once, in the order of the trace."""
    return list(dict.fromkeys(item.site for item in trace if isinstance(item, (Mark, Wait)) and item.site))


def find_races(trace: Iterable[Item], without: Collection[str] = (), most: int | None = None) -> list[Race]:
    """All races of a trace, each kind once, or at least ``most`` of them if there are so many.

    ``without``: sites of marks that are behind nothing, and of waits that do not wait.
    """
    clocks: dict[str, Clock] = {}
    events: dict[int, Clock] = {}
    known: dict[int, list[_Known]] = {}
    found: dict[Race, None] = {}
    for item in trace:
        if isinstance(item, Work):
            clock = clocks.setdefault(item.actor, {})
            _join(clock, clocks.get(item.issuer, {}))
            tick = clock[item.actor] = clock.get(item.actor, 0) + 1
            for use in item.uses:
                new = _Known(use, item.actor, tick, item)
                before = known.get(use.memory, [])
                found.update((Race(str(old), str(new)), None) for old in before if _race(old, use, item.actor, clock))
                known[use.memory] = [old for old in before if not _superseded(old, new)] + [new]
        elif isinstance(item, Mark):
            if item.site not in without:
                clock = events[item.event] = dict(clocks.get(item.actor, {}))
                _join(clock, clocks.get(item.issuer, {}))
        elif isinstance(item, Wait):
            if item.site not in without:
                _join(clocks.setdefault(item.actor, {}), events.get(item.event, {}))
        else:
            clock = dict(clocks.get(item.owner, {}))
            _join(clock, clocks.get(item.issuer, {}))
            for old in known.pop(item.memory, []):
                of_host = old.actor == old.work.issuer  # a thread that uses a memory holds a tensor that shows it
                if old.actor != item.owner and not of_host and clock.get(old.actor, 0) < old.tick:
                    found[Race(str(old), f"its memory is given up by {item.owner}")] = None
        if most is not None and len(found) >= most:
            break
    return list(found)


def _join(clock: Clock, other: Clock) -> None:
    for actor, tick in other.items():
        if clock.get(actor, 0) < tick:
            clock[actor] = tick


def _race(old: _Known, use: Use, actor: str, clock: Clock) -> bool:
    if old.actor == actor or not (old.use.writes or use.writes):
        return False
    return old.use.begin < use.end and use.begin < old.use.end and clock.get(old.actor, 0) < old.tick


def _superseded(old: _Known, new: _Known) -> bool:
    """Whether who is ordered behind ``new`` is so behind ``old``, or races with ``new`` too."""
    within = new.use.begin <= old.use.begin and old.use.end <= new.use.end
    return within and (new.use.writes or (new.actor == old.actor and not old.use.writes))
