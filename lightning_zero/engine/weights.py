"""Updated weights of replicated units on their way to all ranks.

[Note: who may wait late]
The gather of updated weights is issued at the end of an optimizer step. Where the module computes in a dtype of its own
(mixed precision), its parameters show placeholders between steps, so that nobody can see a half-gathered weight: there
each unit's gather is waited for when the first module that owns one of its parameters, under any name, is called. Until
then its parameters go on showing NaN.

Where the module computes with what the user sees (one dtype), weights may be read and written at any moment after the
step, and no hook would notice. A torn read is the worst that could happen, so there the step itself waits.

[Note: weights that are read where no module is called]
``F.linear(x, self.head.weight)`` in a training step reads a weight that no forward has brought. Its parameter is absent
then (``shards/binding.py``), asks for its values, and gets them. Dynamo cannot trace that, so where parts of the module
are compiled everything is waited for at the beginning of a scope.

[Note: who may write]
A rank has its result before the others have read its part. Until then nothing may be written to it. The engine waits
for them before it writes, at the next step. User code may not write to these copies at all: its masters are of another
dtype, so what is written is refused at the end of the scope.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import nn

from lightning_zero._torch import is_compiled_module, untracked
from lightning_zero.comm import Pending, raising
from lightning_zero.config import Tier
from lightning_zero.engine.agreement import Means
from lightning_zero.engine.events import Phase
from lightning_zero.engine.unit import ReplicatedUnit, Unit
from lightning_zero.errors import OffloadError
from lightning_zero.offload.transfers import Copy

__all__ = ["HALF_UPDATED", "PublishedWeights"]

_NOTHING = nullcontext()

HALF_UPDATED = "No rank goes on with half-updated weights. Resume from the last checkpoint, which is intact."


class PublishedWeights:
    """The weights between an optimizer step and their next use.

    Args:
        units: all units of the engine, by index.
        means: what they work with.
        module: which they are of.
    """

    def __init__(self, units: Sequence[Unit], means: Means, module: nn.Module) -> None:
        self._units = units
        self._means = means
        self._module = module
        self.scoped = [u for u in units if isinstance(u, ReplicatedUnit) and not u.always_bound]
        """Those whose parameters show placeholders between scopes."""
        self._arriving: dict[ReplicatedUnit, list[Pending]] = {}
        self._lent: list[Pending] = []  # arrived; other ranks may still be reading this rank's part
        self._open = False  # parameters show values
        self._compiled: bool | None = None  # whether parts of the module are, once asked
        self._returned: set[int] = set()  # units of the running step whose masters are back, or on their way

    def begin_step(self) -> None:
        """Wait until nobody reads what an optimizer is about to write. Raises ``CommunicationError`` if a peer died."""
        self.settle()
        self._returned.clear()

    def unit_stepped(self, index: int) -> None:
        """Bring one unit's updated masters from the host to the compute copies, while the next one is stepped on.

        Collective: every rank, for every unit of the optimizer, in ascending order; also if stepping has failed here.
        """
        unit = self._units[index]
        copies = [  # those on disk went there piece by piece
            Copy(flat.master, flat.weights)
            for flat in unit.flats
            if flat.layout.trainable and flat.rest.master is Tier.HOST and flat.weights is not None
        ]
        if copies:
            self._means.tiers.transfers.back(copies).order()
        if isinstance(unit, ReplicatedUnit):
            self.publish(unit)
        self._returned.add(index)

    def refresh(self, indices: Iterable[int]) -> None:
        """Bring the masters of units that were stepped on to the compute copies, in this order, where they are not.

        Raises ``OffloadError`` on every rank if some could not be read. Collective: every rank.
        """
        failure: OffloadError | None = None
        stepped = list(indices)
        for unit in [self._units[index] for index in stepped if index not in self._returned]:
            try:
                for flat in unit.flats:
                    if flat.weights is not None:
                        flat.refresh()
            except OffloadError as error:  # the gather below must come all the same
                failure = failure or error
            if isinstance(unit, ReplicatedUnit):
                self.publish(unit)
        if self._means.tiers.can_fail and not self._returned.issuperset(stepped):
            what = "bring weights back that were changed"
            self._means.control.together(what, raising(failure), OffloadError, HALF_UPDATED)
        self._returned.clear()

    def publish(self, unit: ReplicatedUnit) -> None:
        """Start to bring a unit's new weights to all ranks. Collective: every rank, in the same order."""
        if unit in self._arriving or self._lent:
            self.settle([unit])
        with self._span(Phase.PUBLISH, unit), untracked():
            self._arriving[unit] = []
            for number, buffer in enumerate(unit.buffers):  # exact where it is what the user sees
                content = None if unit.always_bound else ((unit.index, number), unit.version)
                handle = self._means.collectives.all_gather(buffer, f"parameters of '{unit.name}'", content=content)
                self._arriving[unit].append(handle)

    def after_step(self, inside: bool) -> None:
        """Wait for what cannot be waited for later. ``inside``: of a scope, where parameters are in use."""
        if inside or self._open or self._means.collectives.world_size == 1:
            self.settle()
        else:
            self.settle([unit for unit in self._arriving if unit.always_bound])

    def settle(self, units: Iterable[ReplicatedUnit] | None = None) -> None:
        """Wait until nothing is on its way any more, in either direction, of some units or of all.

        Raises ``CommunicationError`` if a peer died.
        """
        self._receive(list(self._arriving) if units is None else units)
        while self._lent:
            self._lent.pop(0).wait()

    def bind(self, late: bool = False) -> None:
        """Let parameters show their values. ``late``: modules bring what is on its way when they are called."""
        if self._arriving and not (late and not self._is_compiled()):
            self._receive(list(self._arriving))
        self._open = True
        for unit in self.scoped:
            if unit not in self._arriving:
                unit.bind()

    def unbind(self) -> None:
        """Let parameters show placeholders again. Raises ``ParameterAccessError`` if user code wrote to one."""
        self._open = False
        try:
            for unit in self.scoped:
                if unit not in self._arriving and not unit.held and unit.written:
                    unit.refuse_written()
        finally:
            for unit in self.scoped:
                unit.unbind()

    def bring(self, units: Iterable[ReplicatedUnit]) -> None:
        """Parameters of these units are about to be computed with; not between scopes."""
        if self._arriving and self._open:
            self._receive(units)

    def abandon(self) -> None:
        """Leave what is under way to the wire, after an error."""
        under_way = [handle for handles in self._arriving.values() for handle in handles]
        self._means.collectives.abandon([*under_way, *self._lent])
        self._arriving.clear()
        self._lent.clear()
        self._returned.clear()

    def _span(self, phase: Phase, unit: ReplicatedUnit) -> AbstractContextManager[None]:
        return self._means.spans.of(phase, unit.name, unit.nbytes) if self._means.spans.heard else _NOTHING

    def _is_compiled(self) -> bool:
        if self._compiled is None:
            self._compiled = any(is_compiled_module(module) for module in self._module.modules())
        return self._compiled

    def _receive(self, units: Iterable[ReplicatedUnit]) -> None:
        for unit in units:
            if unit not in self._arriving:
                continue
            with self._span(Phase.WAIT_PUBLISH, unit):
                for handle in self._arriving[unit]:
                    handle.receive()
            self._lent += self._arriving.pop(unit)
            if self._open:
                unit.bind()
