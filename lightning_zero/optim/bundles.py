"""Small parameters, stepped on as one.

[Note: bundles]
An optimizer of torch spends some 25 microseconds of Python and of launching kernels on each parameter, whatever its
size: for biases and norms that is nearly all of it. So small parameters of one group are put end to end, wherever they
lie, stepped on as one parameter, and put back. 800 of them: 2 instead of 20 ms with AdamW's loop on a CPU.

Elementwise optimizers do not know where a parameter ends, so that no bit changes. A fused kernel rounds otherwise in
what is left over after the last whole vector; there only parameters of whole cache lines take part.

What is put together is gone after the step. State stays together, and each parameter's is a view of it, so that users
and checkpoints find what they would find without: tensors of a parameter's own, also for what is one value for the
whole parameter. Whoever writes to them, or puts others in their place, is noticed before the next step. A parameter
that leaves its bundle, because it has no gradient this time, takes its state along: a view would keep all of it alive.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero._torch import bare_step, untracked
from lightning_zero.analysis import BUNDLE_NUMEL, SMALL_NUMEL
from lightning_zero.optim.groups import OwnedParameter
from lightning_zero.optim.state import covers

__all__ = ["BUNDLE_NUMEL", "SMALL_NUMEL", "Bundles"]

_LINE_NBYTES = 64
_DTYPES = (torch.float32, torch.float64)  # 16 bit kernels round by where a thread's part ends


class Bundles:
    """Steps on the small parameters of one optimizer, on the CPU, before the optimizer steps on the others.

    Args:
        optimizer: the user's, elementwise.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._groups: list[list[OwnedParameter]] | None = None
        self._small: list[tuple[int, list[nn.Parameter]]] = []  # of each param group
        self._absent: list[list[bool]] = []  # which of them had no gradient when bundles were made
        self._bundles: list[_Bundle] = []

    @staticmethod
    def serves(optimizer: Optimizer) -> bool:
        """Whether an elementwise optimizer takes all parameters of a group alike, as torch's own do."""
        found: Any = getattr(type(optimizer), "_init_group", None)
        return found is not None and found.__module__.startswith("torch.optim.")

    def run(self, groups: list[list[OwnedParameter]]) -> list[tuple[nn.Parameter, Tensor | None]]:
        """Step on small parameters with a gradient.

        Args:
            groups: the parameters of each param group. The same object means the same parameters.

        Returns:
            What was stepped on, and its gradients.
        """
        if groups is not self._groups:
            self._groups, self._absent = groups, []
            self._small = [(index, list(self._small_of(index, entries))) for index, entries in enumerate(groups)]
        absent = [[parameter.grad is None for parameter in small] for _, small in self._small]
        if absent != self._absent:
            self._absent, former = absent, self._bundles
            self._bundles = self._make()
            staying = {member for bundle in self._bundles for member in bundle.members}
            self._part(member for bundle in former for member in bundle.members if member not in staying)
        stepped: list[tuple[nn.Parameter, Tensor | None]] = []
        stand_ins: list[list[nn.Parameter]] = [[] for _ in groups]
        taken: list[_Bundle] = []
        try:
            with untracked():
                for bundle in self._bundles:
                    gradients = [parameter.grad for parameter in bundle.members]
                    if bundle.suits(self._optimizer.param_groups[bundle.group]) and bundle.take(gradients):
                        taken.append(bundle)
                        stand_ins[bundle.group].append(bundle.parameter)
                        stepped += zip(bundle.members, gradients, strict=True)
                    else:  # options or state are not what they were: find what is alike before the next step
                        self._groups = None
                        self._part(bundle.members)
                if taken:
                    self._step(stand_ins)
                for bundle in taken:
                    bundle.give_back()
        finally:
            for bundle in taken:
                bundle.let_go()
        return stepped

    def forget(self) -> None:
        """Hold no state any more: it is about to be loaded anew, or given up."""
        self._groups, self._small, self._absent, self._bundles = None, [], [], []

    def _small_of(self, group: int, entries: Sequence[OwnedParameter]) -> Iterator[nn.Parameter]:
        fused = bool(self._optimizer.param_groups[group].get("fused"))
        for entry in entries:
            if entry.shard.parameter is not None and _is_small(entry.shard.parameter, fused):
                yield entry.shard.parameter

    def _make(self) -> list[_Bundle]:
        """Bundles of what has a gradient, and has been stepped on as often."""
        chosen: dict[Any, list[list[nn.Parameter]]] = {}
        room: dict[Any, int] = {}
        for (group, small), absent in zip(self._small, self._absent, strict=True):
            for parameter in (p for p, gone in zip(small, absent, strict=True) if not gone):
                state, numel = self._optimizer.state.get(parameter, {}), parameter.numel()
                scalars = [(key, _number(value)) for key, value in state.items() if not covers(value, numel)]
                kind = (group, parameter.dtype, *scalars)
                chunks = chosen.setdefault(kind, [])
                if room.get(kind, 0) < numel:
                    chunks.append([])
                    room[kind] = BUNDLE_NUMEL
                chunks[-1].append(parameter)
                room[kind] -= numel
        return [
            _Bundle(self._optimizer, key[0], members)
            for key, chunks in chosen.items()
            for members in chunks
            if len(members) > 1
        ]

    def _part(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give parameters that are not in a bundle any more state in memory of its own."""
        with untracked():
            for parameter in parameters:
                state = self._optimizer.state.get(parameter, {})
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.untyped_storage().nbytes() > value.nbytes:
                        state[key] = value.detach().clone()

    def _step(self, stand_ins: Sequence[list[nn.Parameter]]) -> None:
        kept = [group["params"] for group in self._optimizer.param_groups]
        try:
            for group, parameters in zip(self._optimizer.param_groups, stand_ins, strict=True):
                group["params"] = parameters
            bare_step(self._optimizer)()
        finally:
            for group, parameters in zip(self._optimizer.param_groups, kept, strict=True):
                group["params"] = parameters


class _Bundle:
    """Parameters that are stepped on as one.

    Args:
        optimizer: whose.
        group: index of their param group.
        members: shard parameters of one dtype.
    """

    def __init__(self, optimizer: Optimizer, group: int, members: list[nn.Parameter]) -> None:
        self._optimizer = optimizer
        self.group = group
        self.members = members
        self._targets: list[Tensor] = list(members)
        self._sizes = [member.numel() for member in members]
        self._numel = sum(self._sizes)
        self._fused = bool(optimizer.param_groups[group].get("fused"))
        with untracked():
            self._nothing = torch.empty(0, dtype=members[0].dtype)
            self.parameter = nn.Parameter(self._nothing)
        self._state: dict[str, Any] = {}  # of the bundle
        self._kept: dict[str, Any] = {}  # what was in it after its last step
        self._values: list[Any] = []  # of the members' own, as the last step left them
        self._ids: list[int] = []
        self._tensors: list[Tensor] = []  # of the values
        self._places: list[int] = []  # where they lie
        self._scalars: list[tuple[Tensor, Tensor]] = []  # the members' values for a whole parameter, and the bundle's

    def suits(self, group: dict[str, Any]) -> bool:
        """Whether the options of the param group are such that parameters may be put together, as when it was made."""
        return bool(group.get("fused")) == self._fused and not (group.get("capturable") or group.get("differentiable"))

    def take(self, gradients: Sequence[Tensor | None]) -> bool:
        """Put parameters and gradients together.

        Returns:
            Whether that was possible; if not, each has to be stepped on by itself.
        """
        found: list[Tensor] = []
        dtype = self._nothing.dtype
        for gradient in gradients:
            if gradient is None or gradient.dtype is not dtype:
                return False
            found.append(gradient)
        state: Any = self._optimizer.state
        states = [state.get(member) for member in self.members]
        if not self._is_as_left(states) and not self._collect(states):
            return False
        self.parameter.data = torch.cat(self._targets)
        self.parameter.grad = torch.cat(found)
        if self._state:
            state[self.parameter] = self._state
        return True

    def give_back(self) -> None:
        """Bring new values to the parameters, and new state to theirs."""
        torch._foreach_copy_(self._targets, self.parameter.data.split(self._sizes))
        found = self._optimizer.state.get(self.parameter, {})
        same = found.keys() == self._kept.keys() and all(value is self._kept[key] for key, value in found.items())
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

    # ----------------------------------------------------------------- private

    def _is_as_left(self, states: Sequence[dict[str, Any] | None]) -> bool:
        """Whether nobody has touched the members' state since the last step."""
        if not self._values or None in states:
            return False
        if list(map(id, chain.from_iterable(map(dict.values, states)))) != self._ids:  # type: ignore[arg-type]
            return False
        # Writes and moves that no version counts, through ``.data``, count too.
        if list(map(Tensor.data_ptr, self._tensors)) != self._places:
            return False
        return all(bool((scalars == value).all()) for scalars, value in self._scalars)

    def _collect(self, states: Sequence[dict[str, Any] | None]) -> bool:
        """Put the members' state together: after it was loaded, or written to. False if it is not alike."""
        self._values, self._tensors, self._scalars, self._state = [], [], [], {}
        if not any(states):
            return True
        first = states[0] or {}
        if any(state is None or state.keys() != first.keys() for state in states):
            return False
        whole: dict[str, Any] = {}
        for key in first:
            values = [state[key] for state in states]  # type: ignore[index]
            alike = [covers(value, size) for value, size in zip(values, self._sizes, strict=True)]
            if all(alike) and len({value.dtype for value in values}) == 1:
                whole[key] = torch.cat(values)
            elif any(alike) or any(not _equal(value, values[0]) for value in values):
                return False
            else:
                whole[key] = values[0].detach().clone() if isinstance(values[0], Tensor) else values[0]
        self._state = whole
        return True

    def _hand_out(self, found: dict[str, Any]) -> None:
        """Give every member state of its own: views of the bundle's, and of as many scalars as there are members."""
        self._state, self._kept, self._scalars = dict(found), dict(found), []
        columns: list[Sequence[Any]] = []
        for value in found.values():
            if covers(value, self._numel):
                columns.append(value.split(self._sizes))
            elif isinstance(value, Tensor):
                scalars = value.detach().expand(len(self.members), *value.shape).clone()
                self._scalars.append((scalars, value))
                columns.append(scalars.unbind(0))
            else:
                columns.append([value] * len(self.members))
        self._values = []
        for index, member in enumerate(self.members):
            values = [column[index] for column in columns]
            if found:  # looking at the state of a parameter that has none would make one
                self._optimizer.state[member] = dict(zip(found, values, strict=True))
            self._values += values
        self._ids = list(map(id, self._values))
        self._tensors = [value for value in self._values if isinstance(value, Tensor)]
        self._places = list(map(Tensor.data_ptr, self._tensors))


def _is_small(parameter: nn.Parameter, fused: bool) -> bool:
    numel = parameter.numel()
    if not 0 < numel <= SMALL_NUMEL or parameter.dtype not in _DTYPES or parameter.device.type != "cpu":
        return False
    return not (fused and numel * parameter.element_size() % _LINE_NBYTES)


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else id(value)


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return isinstance(first, Tensor) and isinstance(second, Tensor) and torch.equal(first, second)
    return bool(first is second or first == second)
