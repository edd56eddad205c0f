"""The step of an elementwise optimizer on offloaded masters, in ranges of parameters. Without offload there is none:
the optimizer's own step updates the shards.

[Note: a step before the step]
``optimizer.step()`` stays what schedulers, step hooks and the user call. Its last pre-hook updates offloaded units one
after the other, so that each one's weights are copied to the device while the next one is updated. The groups are empty
in the optimizer's own step that follows.

[Note: ranges]
An elementwise optimizer does not know where a parameter ends, so it may step on a part of one: a temporary parameter
over the same memory. Then its temporary tensors are as small as the part, and stay in the cache: AdamW's loop over 16
million elements in ranges of 256 Ki was measured at 3.3 times the speed of that over the whole (one core, 1 MiB of L2
cache). Each range of a parameter starts from the step counter before the step; ``commit`` takes over the new one when
all ranges are done. A fused kernel needs no temporary tensors, and in 16 bit the end of what each thread gets is
rounded otherwise (measured in torch 2.13): there parameters are cut only where their masters are in files.

[Note: a failure on one rank]
Publishing a unit may be a collective. A rank that cannot step on a unit (a full disk, an optimizer that raises)
publishes what it has for that one and all after it. Only then the ranks tell each other, and every rank raises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero._torch import bare_step, untracked
from lightning_zero.optim.state import Kind, StateHomes, copied, covers, extent
from lightning_zero.shards.slice import Slice, shard_parameter

__all__ = ["RANGE_NUMEL", "Memory", "Range", "RangeStep", "Stepper", "Steps", "ranges_of"]

RANGE_NUMEL = 2**18
"""Elements. With masters, gradients, two tensors of state and a temporary in float32 they are 5 MiB."""

_AT_ONCE = 16  # ranges in one step of optimizers that update one parameter after the other


class Range(NamedTuple):
    """``numel`` elements of this rank's slice of a parameter, from element ``start`` of the slice on."""

    entry: Slice
    group: int  # index of the parameter's param group
    start: int
    numel: int


def ranges_of(entry: Slice, group: int, most: int, start: int = 0, end: int | None = None) -> Iterator[Range]:
    """Elements ``start`` to ``end`` of this rank's slice, ``most`` at a time; one range if there are none."""
    end = entry.place.numel if end is None else end
    for begin in range(start, max(end, start + 1), most):
        yield Range(entry, group, begin, min(most, end - begin))


class Memory:
    """The memory of masters and state during a step: here the parameters' own. What a file was read into is another."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._made: dict[tuple[Slice, Kind], Tensor] = {}  # in this step

    def master(self, part: Range) -> Tensor:
        """1-D: the range's elements. Written."""
        if not part.numel:  # whatever tier the parameter is on
            return torch.empty(0, dtype=part.entry.target.dtype)
        return part.entry.target.detach().narrow(0, part.start, part.numel)

    def state(self, part: Range, kind: Kind) -> Tensor | None:
        """1-D: the range's elements of one tensor of state, written; ``None`` if there is no memory for them."""
        found = self._made.get((part.entry, kind))
        if found is None:
            value = self._optimizer.state.get(part.entry.target, {}).get(kind.key)
            found = value if covers(kind.key, value, part.entry.place.numel) and value.dtype == kind.dtype else None
        return None if found is None else found.narrow(0, extent(kind.key, part.start), extent(kind.key, part.numel))

    def keep(self, part: Range, kind: Kind, values: Tensor) -> None:
        """Allocate a tensor of state for the whole parameter, and write the range's elements."""
        made = torch.empty(extent(kind.key, part.entry.place.numel), dtype=kind.dtype, device=values.device)
        self._made[part.entry, kind] = made
        made.narrow(0, extent(kind.key, part.start), values.numel()).copy_(values)

    def whole(self, entry: Slice, kind: Kind, former: Any) -> Tensor:
        """A whole parameter's state after the step; it was ``former`` before, or ``None``."""
        made: Tensor = self._made.get((entry, kind), former)
        return made


class RangeStep:
    """One step of an elementwise optimizer, range by range. Its ``step`` runs as its class defines it, without hooks
    and schedulers."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._changed: dict[Slice, dict[str, Any]] = {}

    def begin(self) -> None:
        """Forget a step that was not finished."""
        self._changed.clear()

    def run(self, ranges: Sequence[Range], memory: Memory) -> None:
        """Update some ranges, untracked, and their state: of a parameter's ranges all before ``commit``."""
        stand_ins: list[list[nn.Parameter]] = [[] for _ in self._optimizer.param_groups]
        taken: list[tuple[Range, nn.Parameter, Tensor]] = []
        try:
            for part in ranges:
                taken.append((part, *self._take(part, memory)))
                stand_ins[part.group].append(taken[-1][1])
            if taken:
                self.bare(stand_ins)
            for one in taken:
                self._give_back(*one, memory)
        finally:
            for _, parameter, _ in taken:
                self._optimizer.state.pop(parameter, None)

    def commit(self, memory: Memory) -> None:
        """Set the new state of parameters whose ranges were all updated."""
        for entry, found in self._changed.items():
            state = self._optimizer.state[entry.target]
            for key, value in found.items():
                state[key] = memory.whole(entry, value, state.get(key)) if isinstance(value, Kind) else value
        self._changed.clear()

    def bare(self, stand_ins: Sequence[list[nn.Parameter]]) -> None:
        """Step on stand-ins for the ``params`` of each param group, in host memory."""
        former: list[tuple[dict[str, Any], dict[str, Any]]] = []
        try:
            for group, parameters in zip(self._optimizer.param_groups, stand_ins, strict=True):
                changed: dict[str, Any] = {"params": parameters}
                for key, value in group.items():
                    if isinstance(value, Tensor) and value.device.type != "cpu":  # such as a learning rate
                        changed[key] = value.cpu()
                former.append((group, {key: group[key] for key in changed}))
                group.update(changed)
            bare_step(self._optimizer)()
        finally:
            for group, before in former:
                group.update(before)

    def _take(self, part: Range, memory: Memory) -> tuple[nn.Parameter, Tensor]:
        """The stand-in for a range, with gradient and state, and the memory that it shows."""
        entry, master = part.entry, memory.master(part)
        parameter, gradient = shard_parameter(master, entry.spec.numel), entry.target.grad
        parameter.grad = None if gradient is None else gradient.detach().narrow(0, part.start, part.numel)
        state: dict[str, Any] = {}
        for key, value in self._optimizer.state.get(entry.target, {}).items():
            view = memory.state(part, Kind(key, value.dtype)) if covers(key, value, entry.place.numel) else None
            state[key] = copied(value) if view is None else view
        if state:
            self._optimizer.state[parameter] = state
        return parameter, master

    def _give_back(self, part: Range, parameter: nn.Parameter, master: Tensor, memory: Memory) -> None:
        """Have everything new in its place, whether the optimizer wrote there or made new tensors."""
        if parameter.data_ptr() != master.data_ptr():
            master.copy_(parameter.detach())
        changed = self._changed.setdefault(part.entry, {})
        for key, value in self._optimizer.state.get(parameter, {}).items():
            changed[key] = value
            if covers(key, value, part.numel):
                kind = changed[key] = Kind(key, value.dtype)
                place = memory.state(part, kind)
                if place is None:
                    memory.keep(part, kind, value.detach())
                elif value.data_ptr() != place.data_ptr():
                    place.copy_(value.detach())


@dataclass(frozen=True, kw_only=True)
class Steps:
    """How the optimizers of a run with offload step: see [Note: a step before the step]. A tier that is an extension's
    derives this.

    Attributes:
        range_numel: elements that are updated at a time, a multiple of 64.
        threads: to compute with.
        publish: called with the index of every unit of the optimizer, ascending, as soon as its masters are new: the
            same sequence on every rank, also after a failure. Collective: every rank.
        agree: called once a step with what went wrong here, or ``None``. Raises on every rank if anything went wrong
            anywhere. Collective: every rank.
    """

    range_numel: int = RANGE_NUMEL
    threads: int
    publish: Callable[[int], None]
    agree: Callable[[Exception | None], None]

    def homes(self, optimizer: Optimizer, label: str) -> StateHomes:
        """Where an optimizer's state is kept."""
        return StateHomes()

    def stepper(self, optimizer: Optimizer, homes: StateHomes) -> Stepper:
        """What steps with an elementwise optimizer."""
        return Stepper(optimizer, self)


class Stepper:
    """Updates the offloaded parameters of one elementwise optimizer, unit by unit."""

    def __init__(self, optimizer: Optimizer, steps: Steps) -> None:
        self.steps = steps
        self.members: Mapping[Slice, int] = {}
        """What is updated where it has a gradient, with the index of its param group."""
        self._optimizer = optimizer
        self._ranges = RangeStep(optimizer)
        self._left: deque[int] = deque()  # units that are to be published in this step
        self._publishing = False

    def take_over(self, groups: Sequence[Sequence[Slice]], take: Callable[[], None]) -> None:
        """Call ``take``, which puts state where it belongs, when there is room for that of new parameters in groups."""
        take()

    def run(self) -> None:
        """One step on the members with a gradient.

        Raises ``OffloadError`` on every rank if one could not step: see [Note: a failure on one rank]. Collective:
        every rank.
        """
        self._left, self._publishing = deque(sorted({entry.unit for entry in self.members})), False
        self._ranges.begin()
        failure: Exception | None = None
        try:
            with _threads(self.steps.threads):
                self._update()
        except Exception as error:
            if self._publishing:  # then the other ranks cannot be reached
                raise
            failure = error
            while self._left:
                self._publish()
        self.steps.agree(failure)

    def _update(self) -> None:
        """Step on all units, and publish each as soon as it is done."""
        units: dict[int, list[Slice]] = {}
        for entry in self.members:
            units.setdefault(entry.unit, []).append(entry)
        # With `foreach` each operation goes over all parameters before the next one begins.
        at_once = 1 if any(group.get("foreach") for group in self._optimizer.param_groups) else _AT_ONCE
        while self._left:
            memory = Memory(self._optimizer)
            stepped = [entry for entry in units[self._left[0]] if entry.gradient is not None]
            ranges = [r for e in stepped for r in ranges_of(e, self.members[e], self._most(e))]
            with untracked():
                for start in range(0, len(ranges), at_once):
                    self._ranges.run(ranges[start : start + at_once], memory)
                self._ranges.commit(memory)
            self._publish()

    def _most(self, entry: Slice) -> int:
        """Elements of a range: see [Note: ranges]."""
        fused = self._optimizer.param_groups[self.members[entry]].get("fused")
        rounded = torch.get_num_threads() > 1 and entry.target.dtype.itemsize < 4
        return max(1, entry.place.numel) if fused or rounded else self.steps.range_numel

    def _publish(self) -> None:
        unit = self._left.popleft()
        self._publishing = True
        self.steps.publish(unit)
        self._publishing = False


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Compute with ``count`` threads inside; 0: as many as before."""
    before = torch.get_num_threads()
    if count and count != before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count and count != before:
            torch.set_num_threads(before)
