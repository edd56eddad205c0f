"""Neighbours in a shard that a fused optimizer may take for one parameter.

[Note: runs]
A fused kernel passes over a parameter once, so that what is left to save is the number of parameters: 75 of them were
measured at 0.81 times the speed of one as large as all. Parameters of one group that lie side by side in a shard, with
gradients and state side by side as well and the same step counter, are handed over as one. The kernel's bits do not
depend on that where a parameter is whole vectors: it works in units of a cache line, so only parameters of a multiple
of 64 elements take part, between which there are no gaps either.

State that a run's first step makes is one tensor, of which each parameter gets its view. State that came from elsewhere
(a checkpoint) is brought together once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero._torch import untracked
from lightning_zero.optim.pieces import Member
from lightning_zero.optim.state import copied, covers
from lightning_zero.plan import ALIGNMENT

__all__ = ["Run", "Runs"]

_NONE: dict[str, Any] = {}


@dataclass(frozen=True, eq=False)
class Run:
    """Parameters side by side.

    Attributes:
        members: two at least, in the order of the shard.
        parameter: stands for all of them.
        state: the optimizer's for ``parameter``, kept between steps.
        kept: what was in it after the last step.
        left: what the members' own state was left as: see ``_Left``.
    """

    members: tuple[Member, ...]
    parameter: nn.Parameter
    state: dict[str, Any] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)
    left: list[_Left] = field(default_factory=list)

    @property
    def numel(self) -> int:
        """Elements of all."""
        return sum(member.numel for member in self.members)

    def split(self, value: Tensor) -> list[Tensor]:
        """One view of ``value`` (1-D, all elements) for each member."""
        return list(value.split([member.numel for member in self.members]))


@dataclass(frozen=True, eq=False)
class _Left:
    """A member's state as a step left it, to see whether anybody has touched it since.

    Attributes:
        state: the dictionary.
        values: what was in it.
        versions: of the tensors that are one value for the whole parameter; those with an element for each of the
            parameter's are views of the run's, where every change counts.
    """

    state: dict[str, Any]
    values: tuple[Any, ...]
    versions: tuple[int, ...]


class Runs:
    """Finds runs among the parameters of one optimizer, and keeps their state.

    Args:
        optimizer: the user's, elementwise.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        # Of earlier steps, by the parameters that took part: most steps are like the one before.
        self._known: dict[tuple[int, ...], tuple[list[Member], list[Run]]] = {}

    def find(self, members: Sequence[Member]) -> list[Run]:
        """Runs, with their state under their own parameter. Members that have no neighbour are in none.

        Args:
            members: with masters in memory, of fused param groups.
        """
        key = tuple(id(member.parameter) for member in members)
        known = self._known.get(key)
        if known is not None and self._as_left(*known, members):
            for run in known[1]:
                self._optimizer.state[run.parameter] = run.state
            return known[1]
        runs: list[Run] = []
        ordered = sorted(members, key=lambda member: (id(member.entry.flat), member.group, member.start))
        chain: list[Member] = []
        for member in [*ordered, None]:
            if member is not None and chain and self._follows(chain[-1], member):
                chain.append(member)
                continue
            if len(chain) > 1:
                runs.append(self._run(chain))
            chain = [] if member is None else [member]
        self._known[key] = (list(members), runs)
        return runs

    def settle(self, run: Run) -> None:
        """Give a run's parameters the state that its step has left."""
        state = self._optimizer.state
        found = state.pop(run.parameter, {})
        if found is run.state and run.left and all(found[key] is value for key, value in run.kept.items()):
            for key, value in found.items():
                if isinstance(value, Tensor) and not covers(value, run.numel):
                    torch._foreach_copy_([left.state[key] for left in run.left], [value] * len(run.left))
            self._note(run)
            return
        for key, value in found.items():
            parts = run.split(value) if covers(value, run.numel) else [copied(value) for _ in run.members]
            for member, part in zip(run.members, parts, strict=True):
                held = state[member.parameter].get(key)
                if not (isinstance(held, Tensor) and held.data_ptr() == part.data_ptr()):
                    state[member.parameter][key] = part
        if found is not run.state:
            run.state.clear()
            run.state.update(found)
        self._note(run)

    def forget(self) -> None:
        """Hold no state any more: it is about to be loaded anew, or given up."""
        self._known.clear()

    def drop(self, run: Run) -> None:
        """Forget a run whose step raised."""
        self._optimizer.state.pop(run.parameter, None)

    # ----------------------------------------------------------------- private

    def _note(self, run: Run) -> None:
        run.kept.clear()
        run.kept.update(run.state)
        run.left.clear()
        for member in run.members:
            state = self._optimizer.state.get(member.parameter, _NONE)  # looking must not make one
            scalars = (v for v in state.values() if isinstance(v, Tensor) and not covers(v, member.numel))
            run.left.append(_Left(state, tuple(state.values()), tuple(value._version for value in scalars)))

    def _as_left(self, before: Sequence[Member], runs: Sequence[Run], members: Sequence[Member]) -> bool:
        """Whether these members are as they were after the last step."""
        if any(a.gradient is not b.gradient or a.group != b.group for a, b in zip(before, members, strict=True)):
            return False
        for run in runs:
            for member, left in zip(run.members, run.left, strict=False):
                state = self._optimizer.state.get(member.parameter, _NONE)
                if state is not left.state or len(state) != len(left.values):
                    return False
                if any(value is not other for value, other in zip(state.values(), left.values, strict=True)):
                    return False
                scalars = (v for v in left.values if isinstance(v, Tensor) and not covers(v, member.numel))
                if any(value._version != version for value, version in zip(scalars, left.versions, strict=True)):
                    return False
            if not run.left:
                return False
        return True

    def _run(self, members: Sequence[Member]) -> Run:
        with untracked():
            parameter = nn.Parameter(_span([member.parameter.detach() for member in members]))
            parameter.grad = _span([member.gradient.detach() for member in members])
        run = Run(tuple(members), parameter)
        first = self._optimizer.state.get(members[0].parameter, {})
        if first:
            for key, value in first.items():
                run.state[key] = self._together(run, key) if covers(value, members[0].numel) else copied(value)
            self._optimizer.state[parameter] = run.state
        return run

    def _together(self, run: Run, key: str) -> Tensor:
        """The state of a whole run, brought together if it is not."""
        parts = [self._optimizer.state[member.parameter][key] for member in run.members]
        if all(_adjacent(a, b) for a, b in pairwise(parts)):
            return _span(parts)
        with untracked():
            whole = torch.cat([part.detach() for part in parts])
        for member, part in zip(run.members, run.split(whole), strict=True):
            self._optimizer.state[member.parameter][key] = part
        return whole

    def _follows(self, before: Member, member: Member) -> bool:
        """Whether ``member`` goes on where ``before`` ends, in every respect."""
        return (
            before.entry.flat is member.entry.flat
            and before.group == member.group
            and before.end == member.start
            and not before.numel % ALIGNMENT
            and not member.numel % ALIGNMENT
            and bool(before.numel and member.numel)
            and _adjacent(before.parameter, member.parameter)
            and _adjacent(before.gradient, member.gradient)
            and _alike(
                self._optimizer.state.get(before.parameter, {}),
                self._optimizer.state.get(member.parameter, {}),
                (before.numel, member.numel),
            )
        )


def _adjacent(first: Tensor, second: Tensor) -> bool:
    """Whether one tensor's elements begin where the other's end, in the same memory."""
    return (
        first.dtype == second.dtype
        and first.is_contiguous()
        and second.is_contiguous()
        and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        and first.data_ptr() + first.nbytes == second.data_ptr()
    )


def _span(parts: Sequence[Tensor]) -> Tensor:
    """What adjacent 1-D tensors show, as one."""
    numel = sum(part.numel() for part in parts)
    return parts[0].detach().as_strided((numel,), (1,))


def _alike(first: Mapping[str, Any], second: Mapping[str, Any], numels: tuple[int, int]) -> bool:
    """Whether two parameters' states have the same keys and dtypes, and equal values for whole parameters."""
    if first.keys() != second.keys():
        return False
    for key, value in first.items():
        other = second[key]
        if covers(value, numels[0]) != covers(other, numels[1]):
            return False
        if covers(value, numels[0]):
            if value.dtype != other.dtype:
                return False
        elif isinstance(value, Tensor) or isinstance(other, Tensor):
            if not (isinstance(value, Tensor) and isinstance(other, Tensor) and torch.equal(value, other)):
                return False
        elif value is not other and value != other:
            return False
    return True
