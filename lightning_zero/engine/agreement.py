"""What the parts of an engine share: the wire, memory, and rounds in which the ranks tell each other what they do.

[Note: external writes]
Under plain data parallelism a rank that writes something else than the others goes on with a model of its own. Shards
make one model, of which every rank holds a part, so there it would be a mixture that no rank meant. What user code
writes is noted as a number that depends on every bit, and compared in an agreement that the ranks make anyway.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from lightning_zero.comm import Collectives, ControlGroup
from lightning_zero.engine.events import Phase, Spans
from lightning_zero.engine.pool import BufferPool
from lightning_zero.errors import DivergenceError
from lightning_zero.offload.transfers import MemoryTiers

__all__ = ["Agreement", "ExternalWrites", "Means"]

_REMEMBERED = 4096
_NOTHING = nullcontext()


class Agreement:
    """Rounds over the control group, of messages with ``width`` numbers besides their place."""

    def __init__(self, control: ControlGroup, width: int, spans: Spans | None = None) -> None:
        self.control = control
        self.width = width
        control.width = max(control.width, width + 2)
        self.notice = 0
        """What this rank was asked for by signals, as bits, which each round tells the others."""
        self.noticed = 0
        """What any rank was, as of the last round: so it changes on all of them in the same place."""
        self._spans = spans or Spans()

    def round(self, place: str, values: Sequence[int] = ()) -> list[list[int]]:
        """Exchange 64-bit integers with all ranks; missing ones count as 0. Returns a list of ``width`` per rank.

        Collective. Raises ``DivergenceError`` on every rank if ``place``, what a rank is doing, differs between them.
        """
        message = [self.notice, *values]
        message += [0] * (self.width + 1 - len(message))
        with self._spans.of(Phase.AGREE, place) if self._spans.heard else _NOTHING:
            rows = self.control.exchange(message, place)
        for row in rows:
            self.noticed |= row[0]
        return [row[1:] for row in rows]


class ExternalWrites:
    """The writes of one rank since the ranks last compared: see [Note: external writes]."""

    def __init__(self) -> None:
        self._digest = 0
        self.cleared = 0
        """A number for the averaged gradients that ``zero_grad`` has cleared: not noted, since every step does so."""
        self._notes: list[tuple[str, int]] = []

    @property
    def digest(self) -> int:
        """A number for all of it; 0 if nothing was written."""
        return zlib.crc32(f"{self._digest} {self.cleared}".encode()) or 1 if self._digest or self.cleared else 0

    def note(self, what: str, number: int) -> None:
        """Note one write to what is called ``what`` on every rank, by a number for what was written."""
        self._digest = zlib.crc32(f"{self._digest} {what} {number}".encode()) or 1
        if len(self._notes) < _REMEMBERED:  # enough for a message
            self._notes.append((what, number))

    def forget(self) -> None:
        """The ranks have compared, or the step was given up."""
        self._digest = self.cleared = 0
        self._notes.clear()

    def compare(self, digests: list[int], control: ControlGroup) -> None:
        """Go on if all ranks wrote the same, as the ``digests`` of all ranks tell. Collective.

        Raises ``DivergenceError`` on every rank, naming the first difference, if they did not.
        """
        if not any(digests):
            return
        if digests.count(digests[0]) < len(digests):
            rows = control.gather_objects((self._notes, self.cleared))
            notes = [row for row, _ in rows]
            if all(note == notes[0] for note in notes):
                notes = [[("None to gradients, in zero_grad", number)] for _, number in rows]
            self.forget()
            raise DivergenceError(_difference(notes, digests))
        self.forget()


@dataclass(frozen=True, eq=False)
class Means:
    """What all parts of one engine work with.

    Attributes:
        collectives: the wire.
        control: the control plane.
        agreement: rounds between the hosts.
        tiers: where shards are, by tier; and where the module computes.
        pool: memory for full parameters and gradients.
        spans: records what time is spent on.
        writes: what user code wrote.
    """

    collectives: Collectives
    control: ControlGroup
    agreement: Agreement
    tiers: MemoryTiers
    pool: BufferPool
    spans: Spans
    writes: ExternalWrites = field(default_factory=ExternalWrites)


def _difference(notes: list[list[tuple[str, int]]], digests: list[int]) -> str:
    other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    pairs = zip(notes[0], notes[other], strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(notes[0]), len(notes[other])))
    wrote = [f"rank {rank} {_said(notes[rank], place)}" for rank in (0, other)]
    return (
        f"The ranks wrote different things: {wrote[0]}, {wrote[1]}. Parameters and averaged gradients are one for all "
        "ranks, of which each holds a part. Write the same on every rank: seed random numbers alike, reduce what a "
        "write depends on over the ranks (`self.all_gather`, `sync_dist=True`), and do not ask for the rank before it."
    )


def _said(notes: list[tuple[str, int]], place: int) -> str:
    if place >= len(notes):
        return "wrote nothing more" if notes else "wrote nothing"
    what, number = notes[place]
    return f"wrote {what} (values {number & 0xFFFFFFFF:08x})"
