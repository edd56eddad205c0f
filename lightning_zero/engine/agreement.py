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
from lightning_zero.comm.control import Met
from lightning_zero.engine.events import Phase, Spans
from lightning_zero.engine.pool import BufferPool
from lightning_zero.offload.transfers import MemoryTiers

__all__ = ["Agreement", "ExternalWrites", "Means"]

_NOTHING = nullcontext()
_WRITE_ALIKE = (
    "The ranks wrote different things. Parameters and averaged gradients are one for all ranks, of which each holds a "
    "part. Write the same on every rank: seed random numbers alike, reduce what a write depends on over the ranks "
    "(`self.all_gather`, `sync_dist=True`), and do not ask for the rank before it."
)


class Agreement:
    """Rounds over the control group, of messages with ``width`` numbers and ``marks`` besides their place."""

    def __init__(self, control: ControlGroup, width: int, marks: int = 0, spans: Spans | None = None) -> None:
        self.control = control
        self.width = width
        control.width = max(control.width, 2 + marks + width)
        self.notice = 0
        """What this rank was asked for by signals, as bits, which each round tells the others."""
        self.noticed = 0
        """What any rank was, as of the last round: so it changes on all of them in the same place."""
        self._marks = marks
        self._spans = spans or Spans()

    def round(self, place: str, values: Sequence[int] = (), marks: Sequence[int] = ()) -> Met:
        """Tell all ranks 64-bit integers, and learn theirs: see ``ControlGroup.meet``. Missing ones count as 0.

        Collective. Raises ``DivergenceError`` on every rank if ``place``, what a rank is doing, differs between them.
        """
        told = [self.notice, *marks, *[0] * (self._marks - len(marks))]
        with self._spans.of(Phase.AGREE, place) if self._spans.heard else _NOTHING:
            met = self.control.meet(place, [*values, *[0] * (self.width - len(values))], told)
        self.noticed |= met.marks[0]
        return Met(met.rows, met.marks[1:], met.alike[1:])

    def end(self, place: str, then: str, values: Sequence[int], marks: Sequence[int] = ()) -> tuple[Met, bool]:
        """A round at the end of a phase. Returns also whether all ranks say the same, and go on with ``then`` at once.

        Collective.
        """
        after = zlib.crc32(then.encode())  # 0 of nothing
        met = self.round(place, [*values, *[0] * (self.width - 1 - len(values)), after], marks)
        return met, after != 0 and len(met.rows) == 1


class ExternalWrites:
    """The writes of one rank since the ranks last compared: see [Note: external writes]."""

    def __init__(self) -> None:
        self._notes: list[str] = []
        self.cleared = 0
        """A number for the averaged gradients that ``zero_grad`` has cleared, whatever the order."""

    @property
    def digest(self) -> int:
        """A number for all of it; 0 if nothing was written."""
        return zlib.crc32("\n".join(self._lines()).encode()) or 1 if self._notes or self.cleared else 0

    def note(self, what: str, number: int) -> None:
        """Note one write to what is called ``what`` on every rank, by a number for what was written."""
        self._notes.append(f"{what} (values {number})")

    def take(self) -> ExternalWrites:
        """Those noted so far, to be compared later than what follows is noted."""
        taken = ExternalWrites()
        taken._notes, taken.cleared = self._notes, self.cleared
        self.forget()
        return taken

    def forget(self) -> None:
        """The ranks have compared, or the step was given up."""
        self._notes, self.cleared = [], 0

    def compare(self, digests: list[int], control: ControlGroup) -> None:
        """Go on if all ranks wrote the same, as the ``digests`` of all ranks tell. Collective.

        Raises ``DivergenceError`` on every rank, naming the first differences, if they did not.
        """
        if any(digests):
            lines = self._lines()
            self.forget()
            if digests.count(digests[0]) < len(digests):
                control.alike("list of writes", lines, _WRITE_ALIKE)

    def _lines(self) -> list[str]:
        return [*self._notes, f"None to gradients, in zero_grad (number {self.cleared})"][
            : None if self.cleared else -1
        ]


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
