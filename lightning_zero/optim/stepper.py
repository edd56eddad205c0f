"""The step of an elementwise optimizer, for masters in every tier of memory. See [Note: segments].

[Note: a step before the step]
``optimizer.step()`` stays what schedulers, step hooks and the user call. Its last pre-hook updates offloaded units one
after the other, so that each one's weights are on their way to the device while the next one is updated. The groups
hold none of them then: the call that torch makes of the optimizer's own ``step`` finds nothing left to do.

[Note: a failure on one rank]
Publishing a unit may be a collective. A rank that cannot step on a unit (a full disk, an optimizer that raises)
publishes what it has for that one and all after it, and only then do the ranks tell each other: every rank raises, none
waits for a rank that is gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero._torch import bare_step, untracked
from lightning_zero.optim.segments import Member, Range, Segment, Together
from lightning_zero.optim.state import Kind, StateHomes, copied, covers
from lightning_zero.plan.costs import SEGMENT_NUMEL, SMALL_NUMEL
from lightning_zero.shards.slice import Slice

__all__ = ["RANGE_NUMEL", "Memory", "SegmentStep", "Stepper", "Steps"]

RANGE_NUMEL = 2**18
"""Elements. With masters, gradients, two tensors of state and a temporary in float32 they are 5 MiB."""

_AT_ONCE = 16  # segments in a step of the optimizers that take one parameter after the other
_LINE_NBYTES = 64
_EXACT = (torch.float32, torch.float64)  # see [Note: what rounding depends on]
_NOTHING = nullcontext()
_WAY = ("fused", "foreach", "capturable", "differentiable")


class Memory:
    """The memory of ranges of parameters, and of their state: that of the parameters, if these are in memory."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._made: dict[tuple[nn.Parameter, Kind], Tensor] = {}  # in this step

    def master(self, part: Range) -> Tensor:
        """1-D: the range's elements. Written."""
        if not part.numel:  # wherever the parameter rests
            return torch.empty(0, dtype=part.member.parameter.dtype)
        return part.member.parameter.detach().narrow(0, part.start, part.numel)

    def state(self, part: Range, kind: Kind) -> Tensor | None:
        """1-D: the range's elements of one tensor of state, written; ``None`` if there is no memory for them."""
        found = self._made.get((part.member.parameter, kind))
        if found is None:
            held = self._optimizer.state.get(part.member.parameter, {}).get(kind.key)
            found = held if covers(held, part.member.numel) and held.dtype == kind.dtype else None
        return None if found is None else found.narrow(0, part.start, part.numel)

    def keep(self, part: Range, kind: Kind, values: Tensor) -> None:
        """Take over elements of state that have no memory: make it for the whole parameter, and put them there."""
        made = torch.empty(part.member.numel, dtype=kind.dtype, device=values.device)
        self._made[part.member.parameter, kind] = made
        made.narrow(0, part.start, part.numel).copy_(values)

    def whole(self, member: Member, kind: Kind, held: Any) -> Tensor:
        """What holds a whole parameter's state, that of ``keep`` included; it was ``held`` before, or ``None``."""
        made: Tensor = self._made.get((member.parameter, kind), held)
        return made


class SegmentStep:
    """One step of an elementwise optimizer on some segments at a time. Its ``step`` is run as its class defines it: no
    hook and no scheduler sees.

    [Note: when fused is exact]
    Where the user left ``foreach`` and ``fused`` open, torch's fused CPU kernel may run instead of the loop over
    operations if that changes no bit. Measured (torch 2.13, AVX2, sizes 1 to 40, 4099 and 100003): SGD without momentum
    in float32 and float64 is equal, with any weight decay, and saves the temporary of it; SGD with momentum differs in
    the elements behind the last full vector, and everything in 16 bit, Adam, AdamW and Adagrad in about 1.6 % of all
    elements.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.changed: dict[nn.Parameter, tuple[Member, dict[str, Any]]] = {}
        # Where the kernel that steps on everything at once may be taken: see the note.
        self._may_fuse = isinstance(optimizer, torch.optim.SGD)

    def run(self, segments: Sequence[Segment], memory: Memory) -> None:
        """Update some segments, untracked, and their state: of a parameter's ranges all before ``commit``."""
        groups = self._optimizer.param_groups
        stand_ins: list[list[nn.Parameter]] = list(map(list, repeat((), len(groups))))
        ranges: list[tuple[Range, nn.Parameter, Tensor]] = []
        together: list[Together] = []
        try:
            for segment in segments:
                if isinstance(segment, Range):
                    ranges.append(self._take(segment, memory))
                    parameter = ranges[-1][1]
                elif isinstance(segment, Together):
                    together.append(segment)
                    parameter = segment.take()
                else:
                    parameter = segment.parameter
                stand_ins[segment.group].append(parameter)
            if segments:
                self.bare(stand_ins)
            for found in ranges:
                self._give_back(*found, memory)
            for one in together:
                one.give_back()
        finally:
            for _, parameter, _ in ranges:
                self._optimizer.state.pop(parameter, None)
            for one in together:
                one.let_go()

    def commit(self, memory: Memory) -> None:
        """Give parameters of which all ranges were stepped on the state that these were left with."""
        for parameter, (member, found) in self.changed.items():
            state = self._optimizer.state[parameter]
            for key, value in found.items():
                state[key] = memory.whole(member, value, state.get(key)) if isinstance(value, Kind) else value
        self.changed.clear()

    def bare(self, stand_ins: Sequence[list[nn.Parameter]]) -> None:
        """Step on what stands in for the ``params`` of each param group, in host memory."""
        kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
        try:
            for group, parameters in zip(self._optimizer.param_groups, stand_ins, strict=True):
                changed: dict[str, Any] = {"params": parameters}
                for key, value in group.items():
                    if isinstance(value, Tensor) and value.device.type != "cpu":  # such as a learning rate
                        changed[key] = value.cpu()
                if self._may_fuse and _exactly_fused(group, parameters):
                    changed["fused"] = True
                before = {}
                for key in changed:
                    before[key] = group[key]
                kept.append((group, before))
                group.update(changed)
            bare_step(self._optimizer)()
        finally:
            for group, before in kept:
                group.update(before)

    def _take(self, part: Range, memory: Memory) -> tuple[Range, nn.Parameter, Tensor]:
        member, master = part.member, memory.master(part)
        parameter, gradient = nn.Parameter(master), member.parameter.grad
        parameter.grad = None if gradient is None else gradient.detach().narrow(0, part.start, part.numel)
        found: dict[str, Any] = {}
        for key, value in self._optimizer.state.get(member.parameter, {}).items():
            view = memory.state(part, Kind(key, value.dtype)) if covers(value, member.numel) else None
            found[key] = copied(value) if view is None else view
        if found:
            self._optimizer.state[parameter] = found
        return part, parameter, master

    def _give_back(self, part: Range, parameter: nn.Parameter, master: Tensor, memory: Memory) -> None:
        """Have everything new in its place, whether the optimizer wrote there or made new tensors."""
        if parameter.data_ptr() != master.data_ptr():
            master.copy_(parameter.detach())
        _, changed = self.changed.setdefault(part.member.parameter, (part.member, {}))
        for key, value in self._optimizer.state.get(parameter, {}).items():
            changed[key] = value
            if covers(value, part.numel):
                kind = changed[key] = Kind(key, value.dtype)
                place = memory.state(part, kind)
                if place is None:
                    memory.keep(part, kind, value.detach())
                elif value.data_ptr() != place.data_ptr():
                    place.copy_(value.detach())


def _exactly_fused(group: dict[str, Any], parameters: Sequence[nn.Parameter]) -> bool:
    """Whether an SGD's step may be: see [Note: when fused is exact]."""
    return (
        "fused" in group
        and group["fused"] is None
        and group["foreach"] is None
        and group["momentum"] == 0
        and isinstance(group["lr"], float)
        and all(parameter.dtype in _EXACT for parameter in parameters)
    )


def _reraise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure


@dataclass
class _Plan:
    """How some parameters are stepped on, as long as all that this depends on is as it was."""

    members: Sequence[Member]
    gradients: list[torch.dtype | None]
    """The dtypes of gradients (``None``: there is none)."""
    ways: list[Any]
    """The options of groups that count."""
    together: list[Together]
    batches: list[list[Segment]]
    """What the optimizer gets in one step each."""
    stepped: list[nn.Parameter]


@dataclass(frozen=True, kw_only=True)
class Steps:
    """How the optimizers of a run step on its shards: by default on masters that stay on the device, where small ones
    in host memory are stepped on together, and the rest is left to the optimizer's own step.

    With offload the optimizer's own step has nothing left to do: see [Note: a step before the step].

    Attributes:
        range_numel: elements that are stepped on at a time with offload, a multiple of 64; ``None``: no offload.
        threads: with offload: threads to compute with.
        publish: with offload: called with the index of every unit of the optimizer, ascending, as soon as its masters
            are new: the same sequence on every rank, also after a failure. Collective: every rank.
        agree: called with what went wrong here, with offload once a step also with ``None``. Raises on every rank if
            anything went wrong anywhere. With offload collective: every rank.
    """

    range_numel: int | None = None
    threads: int = 0
    publish: Callable[[int], None] = lambda unit: None
    agree: Callable[[Exception | None], None] = _reraise

    @property
    def own_options(self) -> tuple[str, ...]:
        """Options of param groups that belong to the run, so that a checkpoint does not bring them."""
        return ("params",) if self.range_numel is None else ("params", "capturable", "differentiable")

    def homes(self, optimizer: Optimizer, label: str, former: StateHomes | None) -> StateHomes:
        """Where an optimizer's state is kept; ``former``: where an earlier fit has kept it."""
        return StateHomes()

    def stepper(self, optimizer: Optimizer, homes: StateHomes) -> Stepper:
        """What steps with an elementwise optimizer."""
        return Stepper(optimizer, self)


class Stepper:
    """Updates the parameters of one elementwise optimizer, window by window: the one step for every tier.

    A window is memory that holds masters and state while they are stepped on: what they are in anyway, on the device
    and on the host (``Memory``), or what a file was read into.
    """

    def __init__(self, optimizer: Optimizer, steps: Steps) -> None:
        self.steps = steps
        self._optimizer = optimizer
        self._segments = SegmentStep(optimizer)
        self._members: Sequence[Member] = []
        self._windows: dict[int, list[Member]] = {}
        self._left: deque[int] = deque()  # units that are to be published in this step
        self._publishing = False
        self._plans: dict[int, _Plan] = {}
        self._passed: list[nn.Parameter] = []

    @property
    def members(self) -> Sequence[Member]:
        """What is stepped on where it has a gradient."""
        return self._members

    @members.setter
    def members(self, members: Sequence[Member]) -> None:
        self._members, self._passed = members, [member.parameter for member in members]
        windows: dict[int, list[Member]] = {}
        for member in members:  # without offload nobody waits for a unit: all are one window
            windows.setdefault(0 if self.steps.range_numel is None else member.entry.unit, []).append(member)
        self._windows = dict(sorted(windows.items()))

    def take_over(self, groups: Sequence[Sequence[Slice]], take: Callable[[], None]) -> None:
        """Call ``take``, which puts state where it belongs, when there is room for that of new parameters in groups."""
        take()

    def forget(self) -> None:
        """Hold no state any more: it is about to be loaded anew, or given up."""
        self._plans.clear()

    def run(self) -> list[nn.Parameter]:
        """One step on the members with a gradient. Returns what is left to no other step: the same list for the same.

        Where ranks publish units, it raises ``OffloadError`` on every rank if one could not step: see [Note: a failure
        on one rank]. Collective there: every rank.
        """
        self._left, self._publishing = deque(self._windows), False
        failure: Exception | None = None
        try:
            with _threads(self.steps.threads) if self.steps.threads else _NOTHING:
                self._update()
        except Exception as error:
            if self._publishing:  # then the other ranks cannot be reached
                raise
            failure = error
            while self._left:
                self._publish()
        self.steps.agree(failure)
        if self.steps.range_numel is not None:
            return self._passed
        return self._plans[0].stepped if self._plans else []

    def _update(self) -> None:
        """Step on all windows, and publish each unit as soon as it is done."""
        for unit, members in self._windows.items():
            self._step_in_memory(members, unit)
            self._publish()

    def _publish(self) -> None:
        unit = self._left.popleft()
        self._publishing = True
        self.steps.publish(unit)
        self._publishing = False

    def _step_in_memory(self, members: Sequence[Member], unit: int) -> None:
        """Step on parameters that are in memory; ``unit`` tells the plans for several such calls of a step apart."""
        gradients: list[torch.dtype | None] = []
        for member in members:
            gradient = member.parameter.grad
            gradients.append(None if gradient is None else gradient.dtype)
        ways: list[Any] = [torch.get_num_threads()]
        for group in self._optimizer.param_groups:
            ways += map(group.get, _WAY)
        plan = self._plans.get(unit)
        memory = Memory(self._optimizer)
        self._segments.changed.clear()  # of a step that was not finished
        with untracked():
            former: Sequence[Together] = () if plan is None else plan.together
            fits = plan is not None and plan.members is members and (plan.gradients, plan.ways) == (gradients, ways)
            for segment in former:
                fits = fits and segment.prepare()
            if plan is None or not fits:
                plan = self._plans[unit] = self._planned(members, gradients, ways, former)
            for batch in plan.batches:
                self._segments.run(batch, memory)
            if self._segments.changed:
                self._segments.commit(memory)

    def _planned(
        self,
        members: Sequence[Member],
        gradients: list[torch.dtype | None],
        ways: list[Any],
        former: Sequence[Together],
    ) -> _Plan:
        present = [member for member, dtype in zip(members, gradients, strict=True) if dtype is not None]
        together = [segment for segment in self._together(present) if segment.prepare()]
        taken = {parameter for segment in together for parameter in segment.members}
        for segment in former:
            self._part(parameter for parameter in segment.members if parameter not in taken)
        if self.steps.range_numel is None:
            return _Plan(members, gradients, ways, together, self._batches(together, []), list(taken))
        batches = self._batches(together, [member for member in present if member.parameter not in taken])
        return _Plan(members, gradients, ways, together, batches, self._passed)

    def _together(self, members: Sequence[Member]) -> Iterator[Together]:
        """Neighbours that may be stepped on as one."""
        segments: dict[Any, list[Together]] = {}
        found = [member for member in members if self._may_join(member)]
        found.sort(key=lambda m: (m.group, m.parameter.untyped_storage().data_ptr(), m.parameter.data_ptr()))
        for member in found:
            group, parameter = self._optimizer.param_groups[member.group], member.parameter
            state = self._optimizer.state.get(parameter, {})
            values = [(k, v.dtype if covers(v, member.numel) else _number(v)) for k, v in state.items()]
            known = segments.setdefault((member.group, parameter.dtype, *values), [])
            if not known or not known[-1].join(parameter):
                known.append(Together(self._optimizer, member.group, parameter, bool(group.get("fused"))))
        return (segment for known in segments.values() for segment in known if len(segment.members) > 1)

    def _may_join(self, member: Member) -> bool:
        """See [Note: what rounding depends on]."""
        group, parameter = self._optimizer.param_groups[member.group], member.parameter
        if group.get("capturable") or group.get("differentiable"):
            return False
        if not member.numel or parameter.dtype not in _EXACT or parameter.device.type != "cpu":
            return False
        if parameter.grad is None or parameter.grad.dtype is not parameter.dtype:
            return False
        return parameter.nbytes % _LINE_NBYTES == 0 if group.get("fused") else member.numel <= SMALL_NUMEL

    def _part(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give parameters that are not in a segment any more state in memory of its own."""
        for parameter in parameters:
            state = self._optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.untyped_storage().nbytes() > value.nbytes:
                    state[key] = value.detach().clone()

    def _batches(self, together: Sequence[Together], alone: Sequence[Member]) -> list[list[Segment]]:
        """What the optimizer gets at once: as many elements as bound its temporary tensors and the copies."""
        # With `foreach` each operation goes over all that it is given before the next one begins.
        foreach = any(group.get("foreach") for group in self._optimizer.param_groups)
        most = (self.steps.range_numel or SEGMENT_NUMEL) * (1 if foreach and self.steps.range_numel else _AT_ONCE)
        batches: list[list[Segment]] = []
        room = 0
        for segment in chain(together, *map(self._cut, alone)):
            if not batches or room < segment.numel:
                batches.append([])
                room = most
            batches[-1].append(segment)
            room -= segment.numel
        return batches

    def _cut(self, member: Member) -> Iterable[Range | Member]:
        # A fused kernel passes over everything once, and needs no memory for it.
        fused = self._optimizer.param_groups[member.group].get("fused")
        rounded = torch.get_num_threads() > 1 and member.parameter.dtype.itemsize < 4
        most = self.steps.range_numel or 0
        return [member] if fused or rounded or member.numel <= most else member.ranges(most)


def _number(value: Any) -> Any:
    """What tells a value for a whole parameter from others."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else id(value)
    return value if isinstance(value, (int, float, str)) else id(value)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Compute with ``count`` threads inside."""
    before = torch.get_num_threads()
    if count != before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count != before:
            torch.set_num_threads(before)
