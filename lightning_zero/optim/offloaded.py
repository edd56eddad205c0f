"""The step of an optimizer whose masters do not rest on the device: unit by unit, and all ranks together or none.

[Note: a step before the step]
``optimizer.step()`` stays what schedulers, step hooks and the user call. Its last pre-hook updates the units one after
the other, so that each one's weights are on their way to the device while the next one is stepped on. The groups are
empty then: the call that torch makes of the optimizer's own ``step`` finds nothing left to do.

[Note: a failure on one rank]
Publishing a unit may be a collective. A rank that cannot step on a unit (a full disk, an optimizer that raises)
publishes what it has for that one and all after it, and only then do the ranks tell each other: every rank raises, none
waits for a rank that is gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch.optim import Optimizer

from lightning_zero.config import Tier
from lightning_zero.optim.files import WindowedStep
from lightning_zero.optim.groups import OffloadedSteps, OwnedParameter
from lightning_zero.optim.segments import Member, members_of
from lightning_zero.optim.state import StateRegions
from lightning_zero.optim.stepper import SegmentStepper, threads

__all__ = ["OffloadedUpdate"]


class OffloadedUpdate:
    """Updates all parameters of one optimizer that have a gradient.

    Args:
        optimizer: the user's, elementwise, adapted to shards.
        steps: the run's side of it.
        regions: where state rests in files; ``None`` without a store.
    """

    def __init__(self, optimizer: Optimizer, steps: OffloadedSteps, regions: StateRegions | None) -> None:
        self._steps = steps
        self._memory = SegmentStepper(optimizer, steps.range_numel)
        self._windows = None if regions is None else WindowedStep(optimizer, steps, regions)
        self._groups: Sequence[Sequence[OwnedParameter]] | None = None
        self._units: list[tuple[int, list[Member]]] = []  # what is in memory of each unit with trainable parameters

    def forget(self) -> None:
        """Hold no state any more: it is about to be loaded anew, or given up."""
        self._memory.forget()

    def run(self, groups: Sequence[Sequence[OwnedParameter]]) -> None:
        """One step. See [Note: a failure on one rank].

        Args:
            groups: the parameters of each param group. The same object means the same parameters.

        Raises:
            OffloadError: on every rank, if one could not make the step.

        Collective: every rank.
        """
        if groups is not self._groups:
            units: dict[int, list[Member]] = {}
            for member in members_of(groups):
                found = units.setdefault(member.entry.unit, [])
                if member.entry.flat.rest.master is not Tier.DISK:
                    found.append(member)
            self._groups, self._units = groups, sorted(units.items())
        turns = _Turns(self._units, self._memory, self._steps)
        failure: Exception | None = None
        try:
            with threads(self._steps.threads):
                if self._windows is not None:
                    self._windows.run(groups, turns.finish_before, turns.finish_through)
                turns.finish_all()
        except Exception as error:
            if turns.broken:
                raise
            failure = error
            turns.skip_all()
        self._steps.agree(failure)


class _Turns:
    """The units of one step in their order: steps on what is in memory of each, and says that it is finished."""

    def __init__(
        self, units: Sequence[tuple[int, list[Member]]], memory: SegmentStepper, steps: OffloadedSteps
    ) -> None:
        self._memory = memory
        self._steps = steps
        # Whether publishing itself failed: then the other ranks cannot be reached.
        self.broken = False
        self._left = deque(units)

    def finish_before(self, unit: int) -> None:
        while self._left and self._left[0][0] < unit:
            self._finish()

    def finish_through(self, unit: int) -> None:
        self.finish_before(unit + 1)

    def finish_all(self) -> None:
        while self._left:
            self._finish()

    def skip_all(self) -> None:
        while self._left:
            self._publish()

    def _finish(self) -> None:
        unit, members = self._left[0]
        self._memory.run(members, unit)
        self._publish()

    def _publish(self) -> None:
        unit, _ = self._left.popleft()
        self.broken = True
        self._steps.unit_stepped(unit)
        self.broken = False
