"""Updated weights of replicated units on their way to all ranks, and who waits for them, when.

[Note: who may wait late]
The gather of updated weights is issued at the end of an optimizer step. Where the module computes in a dtype of its own
(mixed precision), its parameters show placeholders between steps, so that nobody can see a half-gathered weight: there
each unit's gather is waited for when the first module that owns one of its parameters, under any name, is called. Until
then its parameters go on showing NaN.

Where the module computes with what the user sees (one dtype), weights may be read and written at any moment after the
step, and no hook would notice. A torn read is the worst that could happen, so there the step itself waits.

[Note: weights that are read where no module is called]
``F.linear(x, self.head.weight)`` in a training step reads a weight that no forward has brought. Its parameter is absent
then (``engine/binding.py``), asks for its values, and gets them. Dynamo cannot trace that, so where parts of the module
are compiled everything is waited for at the beginning of a scope.

[Note: who may write]
A rank has its result before the others have read its part. Until then nothing may be written to it. The engine waits
for them before it writes, at the next step. User code may not write to these copies at all: its masters are of another
dtype, so what is written is refused at the end of the scope.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from lightning_zero._torch import is_compiled_module
from lightning_zero.comm import Collectives, Pending
from lightning_zero.engine.events import Phase, Spans
from lightning_zero.engine.replicated import ReplicatedUnit
from lightning_zero.engine.writes import Writes

__all__ = ["PublishedWeights"]


class PublishedWeights:
    """The weights of replicated units between an optimizer step and their next use.

    Args:
        units: those whose parameters show placeholders between scopes.
        collectives: the wire.
        spans: told what is waited for.
        writes: told what user code wrote.
        module: which they are of.
    """

    def __init__(
        self,
        units: Sequence[ReplicatedUnit],
        collectives: Collectives,
        spans: Spans,
        writes: Writes,
        module: nn.Module,
    ) -> None:
        self._scoped = tuple(units)
        self._collectives = collectives
        self._spans = spans
        self._writes = writes
        self._module = module
        self._arriving: dict[ReplicatedUnit, list[Pending]] = {}
        self._lent: list[Pending] = []  # arrived; other ranks may still be reading this rank's part
        self._open = False  # parameters show values
        self._compiled: dict[str, bool] = {}  # by scope

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
        if self._arriving and (scope is None or self._is_compiled(scope)):
            self._receive(list(self._arriving))
        self._open = True
        for unit in self._scoped:
            if unit not in self._arriving:
                unit.bind()

    def unbind(self) -> None:
        """Let parameters show placeholders again.

        Raises:
            ParameterAccessError: if user code wrote to one.
        """
        self._open = False
        try:
            for unit in self._scoped:
                if unit not in self._arriving and not unit.held and unit.written:
                    unit.note_written(self._writes)
        finally:
            for unit in self._scoped:
                unit.unbind()

    def bring(self, units: Iterable[ReplicatedUnit]) -> None:
        """Parameters of these units are about to be computed with; not between scopes."""
        if self._arriving and self._open:
            self._receive([unit for unit in units if unit in self._arriving])

    def abandon(self) -> None:
        """Leave what is under way to the wire, after an error."""
        under_way = [handle for handles in self._arriving.values() for handle in handles]
        self._collectives.abandon([*under_way, *self._lent])
        self._arriving.clear()
        self._lent.clear()

    def _is_compiled(self, scope: str) -> bool:
        if scope not in self._compiled:
            self._compiled[scope] = any(is_compiled_module(module) for module in self._module.modules())
        return self._compiled[scope]

    def _receive(self, units: Sequence[ReplicatedUnit]) -> None:
        for unit in units:
            with self._spans.of(Phase.WAIT_PUBLISH, unit.name, unit.nbytes):
                for handle in self._arriving[unit]:
                    handle.receive()
            self._lent += self._arriving.pop(unit)
            if self._open:
                unit.bind()
