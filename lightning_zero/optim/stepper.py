"""Steps of an elementwise optimizer on segments. See [Note: segments]."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero._torch import bare_step, untracked
from lightning_zero.analysis.optimizers import SEGMENT_NUMEL, SMALL_NUMEL
from lightning_zero.optim.segments import Member, Range, Segment, Together
from lightning_zero.optim.state import Kind, copied, covers

__all__ = ["Memory", "SegmentStep", "SegmentStepper", "threads"]

_AT_ONCE = 16  # segments in a step of the optimizers that take one parameter after the other
_LINE_NBYTES = 64
_EXACT = (torch.float32, torch.float64)  # see [Note: what rounding depends on]
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
        self._changed: dict[nn.Parameter, tuple[Member, dict[str, Any]]] = {}

    def begin(self) -> None:
        """Forget a step that was not finished."""
        self._changed.clear()

    def run(self, segments: Sequence[Segment], memory: Memory) -> None:
        """Update some segments, and their state: of a parameter's ranges all before ``commit``."""
        stand_ins: list[list[nn.Parameter]] = [[] for _ in self._optimizer.param_groups]
        ranges: list[tuple[Range, nn.Parameter, Tensor]] = []
        together = [segment for segment in segments if isinstance(segment, Together)]
        try:
            with untracked():
                for segment in segments:
                    if isinstance(segment, Range):
                        ranges.append(self._take(segment, memory))
                        parameter = ranges[-1][1]
                    else:
                        parameter = segment.take() if isinstance(segment, Together) else segment.parameter
                    stand_ins[segment.group].append(parameter)
            self.bare(stand_ins)
            with untracked():
                for found in ranges:
                    self._give_back(*found, memory)
                for segment in together:
                    segment.give_back()
        finally:
            for _, parameter, _ in ranges:
                self._optimizer.state.pop(parameter, None)
            for segment in together:
                segment.let_go()

    def commit(self, memory: Memory) -> None:
        """Give parameters of which all ranges were stepped on the state that these were left with."""
        for parameter, (member, found) in self._changed.items():
            state = self._optimizer.state[parameter]
            for key, value in found.items():
                state[key] = memory.whole(member, value, state.get(key)) if isinstance(value, Kind) else value
        self._changed.clear()

    def bare(self, stand_ins: Sequence[Sequence[nn.Parameter]]) -> None:
        """Step on what stands in for the ``params`` of each param group, in host memory."""
        if not any(stand_ins):
            return
        kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
        try:
            for group, parameters in zip(self._optimizer.param_groups, stand_ins, strict=True):
                # An option may be a tensor on the device, such as a learning rate.
                on_host = {k: v.cpu() for k, v in group.items() if isinstance(v, Tensor) and v.device.type != "cpu"}
                changed = {"params": list(parameters), **on_host}
                if _exactly_fused(self._optimizer, group, parameters):
                    changed["fused"] = True
                kept.append((group, {key: group[key] for key in changed}))
                group.update(changed)
            with untracked():
                bare_step(self._optimizer)()
        finally:
            for group, options in kept:
                group.update(options)

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
        _, changed = self._changed.setdefault(part.member.parameter, (part.member, {}))
        for key, value in self._optimizer.state.get(parameter, {}).items():
            changed[key] = value
            if covers(value, part.numel):
                kind = changed[key] = Kind(key, value.dtype)
                place = memory.state(part, kind)
                if place is None:
                    memory.keep(part, kind, value.detach())
                elif value.data_ptr() != place.data_ptr():
                    place.copy_(value.detach())


def _exactly_fused(optimizer: Optimizer, group: dict[str, Any], parameters: Sequence[nn.Parameter]) -> bool:
    """See [Note: when fused is exact]."""
    return (
        isinstance(optimizer, torch.optim.SGD)
        and "fused" in group
        and group["fused"] is None
        and group["foreach"] is None
        and group["momentum"] == 0
        and isinstance(group["lr"], float)
        and all(parameter.dtype in _EXACT for parameter in parameters)
    )


@dataclass
class _Plan:
    """How some parameters are stepped on, as long as all that this depends on is as it was."""

    depends: tuple[Sequence[Member], list[torch.dtype | None], list[Any]]
    """The members, the dtypes of their gradients (``None``: there is none), and the options of groups that count."""
    together: list[Together]
    batches: list[list[Segment]]
    """What the optimizer gets in one step each."""
    stepped: list[nn.Parameter]


class SegmentStepper:
    """Steps on parameters in host memory, in segments, of which a range has at most ``range_numel`` elements, a
    multiple of 64. ``None``: only what can be put together is stepped on, the rest is left to the optimizer's own step.
    """

    def __init__(self, optimizer: Optimizer, range_numel: int | None) -> None:
        self._optimizer = optimizer
        self._step = SegmentStep(optimizer)
        self._range_numel = range_numel
        self._plans: dict[int, _Plan] = {}

    def run(self, members: Sequence[Member], unit: int = 0) -> list[nn.Parameter]:
        """Step on those of ``members`` with a gradient, and return what was stepped on. The same object means the same
        parameters; ``unit`` tells several such calls of a step apart."""
        gradients = [None if (g := member.parameter.grad) is None else g.dtype for member in members]
        ways = [*(tuple(map(group.get, _WAY)) for group in self._optimizer.param_groups), torch.get_num_threads()]
        plan = self._plans.get(unit)
        same = plan is not None and plan.depends == (members, gradients, ways)
        with untracked():
            if plan is None or not same or not all(segment.prepare() for segment in plan.together):
                former = [] if plan is None else plan.together
                plan = self._plans[unit] = self._planned(members, gradients, ways, former)
        memory = Memory(self._optimizer)
        self._step.begin()
        for batch in plan.batches:
            self._step.run(batch, memory)
        self._step.commit(memory)
        return plan.stepped

    def forget(self) -> None:
        """Hold no state any more: it is about to be loaded anew, or given up."""
        self._plans.clear()

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
        if self._range_numel is None:
            return _Plan((members, gradients, ways), together, self._batches(together, []), list(taken))
        batches = self._batches(together, [member for member in present if member.parameter not in taken])
        return _Plan((members, gradients, ways), together, batches, [member.parameter for member in present])

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
        most = (self._range_numel or SEGMENT_NUMEL) * (1 if foreach and self._range_numel else _AT_ONCE)
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
        most = self._range_numel or 0
        return [member] if fused or rounded or member.numel <= most else member.ranges(most)


def _number(value: Any) -> Any:
    """What tells a value for a whole parameter from others."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else id(value)
    return value if isinstance(value, (int, float, str)) else id(value)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute with ``count`` threads inside."""
    before = torch.get_num_threads()
    if count != before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count != before:
            torch.set_num_threads(before)
