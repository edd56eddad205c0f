"""Updated weights of replicated units on their way to all ranks, and who waits for them, when.

[Note: who may wait late]
The gather of updated weights is issued at the end of an optimizer step. Where the module computes in a dtype of its own
(mixed precision), its parameters show placeholders between steps, so that nobody can see a half-gathered weight: there
each unit's gather is waited for when the first module that owns one of its parameters, under any name, is called. Until
then its parameters go on showing NaN.

Where the module computes with what the user sees (one dtype), weights may be read and written at any moment after the
step, and no hook would notice. A torn read is the worst that could happen, so there the step itself waits.

[Note: weights that are read where no module is called]
``F.linear(x, self.head.weight)`` in a training step reads a weight that no forward has brought. So the first time a
scope runs, everything is waited for at its beginning, and every torch call is looked at. Waited for at the beginning
from then on is a unit that was used before one of its modules was called, and one with a parameter that was not used
at all: what of it a branch not taken yet will do is not known. What is used with its module at first, and in a later
branch before it, shows NaN there, as every weight does that is read outside of its module in stage 3.

[Note: who may write]
A rank has its result before the others have read its part. Until then nothing may be written to it. The engine waits
for them before it writes, at the next step. Where the first run of a scope wrote to parameters (noise on weights, say),
the scope begins only when all have read. A forward that is called outside of Lightning's step methods never waits for
that: a rank that runs one alone is told so at the next agreement, and must get there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import nn

from lightning_zero.comm import Collectives, Pending
from lightning_zero.engine.events import Phase, Spans
from lightning_zero.engine.replicated import ReplicatedUnit

__all__ = ["PublishedWeights"]


class PublishedWeights:
    """The weights of replicated units between an optimizer step and their next use.

    Args:
        units: those whose parameters show placeholders between scopes.
        collectives: the wire.
        spans: told what is waited for.
    """

    def __init__(self, units: Sequence[ReplicatedUnit], collectives: Collectives, spans: Spans) -> None:
        self._scoped = tuple(units)
        self._collectives = collectives
        self._spans = spans
        self._arriving: dict[ReplicatedUnit, list[Pending]] = {}
        self._lent: list[Pending] = []  # arrived; other ranks may still be reading this rank's part
        self._early: dict[str, frozenset[ReplicatedUnit]] = {}  # by scope that has been looked at
        self._written: set[str] = set()  # scopes that write to parameters
        self._open = False  # parameters show values
        self._owners = {p: unit for unit in units for flat in unit.flats for p in flat.parameters}
        self._called: set[ReplicatedUnit] = set()
        self._method = ""  # of Lightning, that is about to begin
        self._use: _Use | None = None  # while a scope is being looked at

    def publish(self, unit: ReplicatedUnit) -> None:
        """Start to bring a unit's new weights to all ranks. Collective: every rank, in the same order."""
        self.settle([unit])
        with self._spans.of(Phase.PUBLISH, unit.name, unit.nbytes):
            self._arriving[unit] = unit.publish(self._collectives)

    def after_step(self, inside: bool) -> None:
        """Wait for what cannot be waited for later.

        Args:
            inside: whether the step was taken inside of a scope, where parameters are in use.
        """
        if inside or self._open or self._collectives.world_size == 1:
            self.settle()
        else:
            self.settle([unit for unit in self._arriving if unit.always_bound])

    def settle(self, units: Iterable[ReplicatedUnit] | None = None) -> None:
        """Wait until nothing is on its way any more, in either direction, of some units or of all.

        Raises:
            CommunicationError: if a peer died.
        """
        self._receive(list(self._arriving) if units is None else [unit for unit in units if unit in self._arriving])
        while self._lent:
            self._lent.pop(0).wait()

    def bind(self, scope: str | None = None) -> None:
        """Let parameters show their values.

        Args:
            scope: what begins; what its modules bring themselves is left for them. ``None``: everything is needed.
        """
        method, self._method = self._method, ""
        early = None if scope is None else self._early.get(scope)
        if scope is not None:
            self._called.clear()
        if early is None:
            self._receive(list(self._arriving))
        elif self._arriving:
            self._receive([unit for unit in early if unit in self._arriving])
        if scope is not None and scope == method and (early is None or scope in self._written):
            self.settle()
        self._open = True
        for unit in self._scoped:
            if unit not in self._arriving:
                unit.bind()

    def unbind(self) -> None:
        """Let parameters show placeholders again."""
        self._open = False
        for unit in self._scoped:
            unit.unbind()

    def bring(self, units: Iterable[ReplicatedUnit]) -> None:
        """A module with parameters of these units is about to compute."""
        if self._use is not None:
            self._called.update(units)
        if self._arriving:
            self._receive([unit for unit in units if unit in self._arriving])

    def look_at(self, scope: str, possible: bool) -> Callable[[nn.Parameter, bool], None] | None:
        """Begin to note how parameters are used in a step method, which is about to begin.

        Args:
            scope: its name.
            possible: whether torch calls are looked at in it.

        Returns:
            What is to be told of every parameter that a torch function gets, and whether that may write to it;
            ``None`` if that is known.
        """
        self._method = scope
        if not possible or not self._scoped or scope in self._early:
            return None
        use = self._use = _Use()

        def used(parameter: nn.Parameter, writes: bool) -> None:
            unit = self._owners.get(parameter)
            if unit is None:
                return
            use.seen.add(parameter)
            use.writes = use.writes or writes
            if unit not in self._called:
                use.early.add(unit)

        return used

    def looked_at(self, scope: str) -> None:
        """End what ``look_at`` began, if all of the scope was seen."""
        use, self._use = self._use, None
        if use is not None:
            unseen = {unit for parameter, unit in self._owners.items() if parameter not in use.seen}
            self._early[scope] = frozenset(use.early | unseen)
            if use.writes:
                self._written.add(scope)

    def abandon(self) -> None:
        """Leave what is under way to the wire, after an error."""
        under_way = [handle for handles in self._arriving.values() for handle in handles]
        self._collectives.abandon([*under_way, *self._lent])
        self._arriving.clear()
        self._lent.clear()
        self._use, self._method = None, ""

    def _receive(self, units: Sequence[ReplicatedUnit]) -> None:
        for unit in units:
            with self._spans.of(Phase.WAIT_PUBLISH, unit.name, unit.nbytes):
                for handle in self._arriving[unit]:
                    handle.receive()
            self._lent += self._arriving.pop(unit)
            if self._open:
                unit.bind()


@dataclass
class _Use:
    """What one run of a scope did with parameters."""

    seen: set[nn.Parameter] = field(default_factory=set)
    early: set[ReplicatedUnit] = field(default_factory=set)  # used before one of their modules was called
    writes: bool = False
