"""The step of an elementwise optimizer on segments: small parameters together, large ones cut.

[Note: segments]
An optimizer of torch spends some 25 microseconds of Python and of launching kernels on each parameter, whatever its
size: for biases and norms that is nearly all of it. And where it makes one operation after the other over a large
parameter, each of them waits for memory. An elementwise optimizer does not know where a parameter ends, so it gets
temporary parameters instead, with the bits of the parameters themselves:

    together   neighbours of one group with the same state and step counters, as one parameter. 800 of 256 elements: 2
               instead of 20 ms with AdamW's loop on a CPU.
    range      a part of a large parameter, over the parameter's own memory, so that the step needs no more memory than
               for a range, and finds it in the cache: AdamW's loop over 16 million elements in ranges of 256 Ki was
               measured at 3.3 times the speed of that over the whole (one core, 1 MiB of L2 cache).

Masters of neighbours lie side by side, and so do gradients in most stages: then nothing is copied. Where something lies
elsewhere, or in a gap, small parameters are copied together and back.

Each parameter has state of its own for users and checkpoints: views of the segment's, and for what is one value for a
whole parameter (its step counter) a value of its own. Whoever writes to them, or puts others in their place, is noticed
before the next step. A parameter that leaves its segment, because it has no gradient this time, takes its state along:
a view would keep all of the segment's alive. Ranges of one parameter each start from the state before the step; what
is one value is taken over when the last of them is done.

[Note: what rounding depends on]
A fused kernel rounds otherwise in what is left over after the last whole vector, so there only parameters of whole
cache lines are put together. In 16 bit the end of what a thread gets is rounded otherwise, too (measured in torch
2.13): such parameters are not put together, and cut only where there is one thread, or where they rest in files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, repeat
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero._torch import foreach_copy, untracked
from lightning_zero.optim.state import copied, covers
from lightning_zero.plan.costs import SEGMENT_NUMEL, SMALL_NUMEL
from lightning_zero.shards.slice import Slice

_GRADIENT = attrgetter("grad")
_NONE: dict[str, Any] = {}  # of a parameter without state; never written to

__all__ = ["Member", "Range", "Segment", "Together", "members_of"]


@dataclass(frozen=True, eq=False)
class Member:
    """A shard parameter that an optimizer steps on, and the index of its param group."""

    entry: Slice
    group: int
    parameter: nn.Parameter

    @property
    def numel(self) -> int:
        """Its elements on this rank."""
        return self.parameter.numel()

    @property
    def start(self) -> int:
        """Its first element in the shard."""
        return self.entry.place.shard_start

    @property
    def end(self) -> int:
        """Where it ends in the shard."""
        return self.start + self.numel

    def ranges(self, most: int, start: int = 0, end: int | None = None) -> Iterator[Range]:
        """Elements ``start`` to ``end`` of this rank's slice, at most ``most`` at a time."""
        end = self.numel if end is None else end
        for begin in range(start, end, most):
            yield Range(self, begin, min(most, end - begin))


class Range(NamedTuple):
    """``numel`` elements of this rank's slice of a parameter, from element ``start`` of the slice on."""

    member: Member
    start: int
    numel: int

    @property
    def group(self) -> int:
        return self.member.group


def members_of(groups: Sequence[Sequence[Slice]]) -> list[Member]:
    """The trainable parameters of each param group."""
    return [
        Member(entry, index, entry.parameter)
        for index, group in enumerate(groups)
        for entry in group
        if entry.parameter is not None
    ]


class Together:
    """Parameters of one dtype, of one param group, that are stepped on as one; ``fused`` by a kernel that is so."""

    def __init__(self, optimizer: Optimizer, group: int, first: nn.Parameter, fused: bool) -> None:
        self._optimizer = optimizer
        self.group = group
        self.members = [first]
        self._fused = fused
        self._copied = False  # whether members do not lie side by side
        self._sizes = [first.numel()]
        with untracked():
            self._nothing = torch.empty(0, dtype=first.dtype)
            self.parameter = nn.Parameter(self._nothing)
        # Where masters lie, and gradients behind the first of them: these come and go.
        self._where: tuple[list[int], list[int]] = ([], [])
        self._master: Tensor | None = None  # as one, where they lie side by side
        self._aside = False  # whether gradients do
        self._state: dict[str, Any] = {}  # of the segment, as the last step left it
        self._values: list[Any] = []  # of the members' own, likewise
        self._places: tuple[list[Tensor], list[int]] = ([], [])  # tensors among the values, and where they lie
        self._scalars: list[tuple[Tensor, Tensor]] = []  # the members' values for a whole parameter, and the segment's

    @property
    def numel(self) -> int:
        """Elements of all members."""
        return sum(self._sizes)

    def join(self, parameter: nn.Parameter) -> bool:
        """Take in one more parameter, if there is room: without copies a fused kernel takes any number of elements."""
        last, numel = self.members[-1], self.numel + parameter.numel()
        aside = _adjacent(last, parameter) and _adjacent(last.grad, parameter.grad)
        in_place = aside and not self._copied
        if numel > SEGMENT_NUMEL and not (in_place and self._fused):
            return False
        if not in_place and any(p.numel() > SMALL_NUMEL for p in (*self.members, parameter)):
            return False
        self.members.append(parameter)
        self._sizes.append(parameter.numel())
        self._copied = not in_place
        return True

    def prepare(self) -> bool:
        """Whether the members can still be stepped on as one; state that was touched is put together again."""
        gradients: list[Any] = list(map(_GRADIENT, self.members))
        first = gradients[0].data_ptr()
        where = list(map(Tensor.data_ptr, self.members)), list(map(first.__rsub__, map(Tensor.data_ptr, gradients)))
        if where != self._where:
            self._where, self._master, self._aside = where, _span(self.members), _span(gradients) is not None
            if not (self._master is not None and self._aside) and max(self._sizes) > SMALL_NUMEL:
                return False
        states = [*map(self._optimizer.state.get, self.members, repeat(_NONE))]
        return self._is_as_left(states) or self._collect(states)

    def take(self) -> nn.Parameter:
        """What stands in for the members, with gradients and state."""
        gradients: list[Any] = list(map(_GRADIENT, self.members))
        self.parameter.data = torch.cat([*self.members]) if self._master is None else self._master
        self.parameter.grad = _as_one(gradients) if self._aside else torch.cat(gradients)
        if self._state:
            self._optimizer.state[self.parameter] = dict(self._state)
        return self.parameter

    def give_back(self) -> None:
        """Bring new values to the parameters, and new state to theirs."""
        if self._master is None or self.parameter.data_ptr() != self._master.data_ptr():
            foreach_copy(self.members, self.parameter.data.split(self._sizes))
        found = self._optimizer.state.get(self.parameter, {})
        same = list(found) == list(self._state) and all(map(is_, found.values(), self._state.values()))
        if not self._values or not same:
            self._hand_out(found)
            return
        for scalars, value in self._scalars:
            scalars.copy_(value)

    def let_go(self) -> None:
        """Drop what was put together."""
        self.parameter.data = self._nothing
        self.parameter.grad = None
        self._optimizer.state.pop(self.parameter, None)

    def _is_as_left(self, states: Sequence[dict[str, Any]]) -> bool:
        """Whether nobody has touched the members' state since the last step."""
        values = list(chain.from_iterable(map(dict.values, states)))
        if not values or len(values) != len(self._values) or not all(map(is_, values, self._values)):
            return False
        # Writes and moves that no version counts, through ``.data``, count too.
        tensors, places = self._places
        if list(map(Tensor.data_ptr, tensors)) != places:
            return False
        same = True
        for scalars, value in self._scalars:
            same = same and bool((scalars == value).all())
        return same

    def _collect(self, states: Sequence[dict[str, Any]]) -> bool:
        """Put the members' state together, after it was loaded or written to. False if it is not alike."""
        self._values, self._state = [], {}
        first = states[0]
        if any(state.keys() != first.keys() for state in states):
            return False
        values = {key: [state[key] for state in states] for key in first}
        for column in values.values():
            alike = {covers(v, n) and v.dtype for v, n in zip(column, self._sizes, strict=True)}
            if len(alike) > 1 or (alike == {False} and any(not _equal(value, column[0]) for value in column)):
                return False
        for key, column in values.items():
            if not covers(column[0], self._sizes[0]):
                self._state[key] = copied(column[0])
                continue
            span = _span(column)
            if span is None or span.untyped_storage().nbytes() > span.nbytes:
                span = torch.cat(column)
                for state, part in zip(states, span.split(self._sizes), strict=True):
                    state[key] = part  # so that only one of them is there twice
            self._state[key] = span
        if first:
            self._hand_out(self._state)
        return True

    def _hand_out(self, found: dict[str, Any]) -> None:
        """Give every member state of its own: views of the segment's, and of as many scalars as there are members."""
        self._state, self._scalars = dict(found), []
        columns: list[Sequence[Any]] = []
        for value in found.values():
            if covers(value, self.numel):
                columns.append(value.split(self._sizes))
            elif isinstance(value, Tensor):
                scalars = value.detach().expand(len(self.members), *value.shape).clone()
                self._scalars.append((scalars, value))
                columns.append(scalars.unbind(0))
            else:
                columns.append([value] * len(self.members))
        self._values = []
        # Looking at the state of a parameter that has none would make one.
        for index, member in enumerate(self.members if found else ()):
            values = [column[index] for column in columns]
            self._optimizer.state[member] = dict(zip(found, values, strict=True))
            self._values += values
        tensors = [value for value in self._values if isinstance(value, Tensor)]
        self._places = tensors, list(map(Tensor.data_ptr, tensors))


Segment = Range | Member | Together
"""What an optimizer gets as one parameter."""


def _adjacent(first: Any, second: Any) -> bool:
    """Whether one tensor's elements begin where the other's end, in the same memory."""
    found: bool = (
        first.data_ptr() + first.nbytes == second.data_ptr()
        and first.dtype == second.dtype
        and first.is_contiguous()
        and second.is_contiguous()
        and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    )
    return found


def _span(parts: Sequence[Tensor]) -> Tensor | None:
    """What 1-D tensors that lie side by side show, as one; ``None`` if they do not."""
    if not all(_adjacent(first, second) for first, second in pairwise(parts)):
        return None
    return _as_one(parts)


def _as_one(parts: Sequence[Tensor]) -> Tensor:
    """1-D tensors that lie side by side as one."""
    return parts[0].detach().as_strided((sum(map(torch.numel, parts)),), (1,))


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return isinstance(first, Tensor) and isinstance(second, Tensor) and torch.equal(first, second)
    return bool(first is second or first == second)
