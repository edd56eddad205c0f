"""One number for what an optimizer is about to step with, so that ranks find out at each step whether they agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from numbers import Real
from operator import is_
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.comm import ControlGroup
from lightning_zero.optim.agreement import NOT_OPTIONS, agree_on_step, described, number_of

__all__ = ["Fingerprint"]

_PLAIN = (int, float, str, type(None))
_CHANGING = object()


@dataclass
class _Group:
    """What was found in one param group: its keys and values in their order, and a number for each that counts.

    A value that may change while it is the same object stands as ``_CHANGING`` among those that were seen.
    """

    keys: list[str]
    seen: list[Any]
    parts: list[int]
    code: int


class Fingerprint:
    """The options and members of one optimizer's param groups as a 64-bit number.

    Numbers, texts, and flat sequences of them count. What else an optimizer keeps in a group (caches, modules) may be
    another thing on every rank. An option that is the object that it was is not looked at again.

    Args:
        optimizer: whose.
        label: how to name it in messages.
        whole: whether its step sees whole parameters.
    """

    def __init__(self, optimizer: Optimizer, label: str, whole: bool) -> None:
        self._optimizer = optimizer
        self._label = label
        self._whole = whole
        self._names: Sequence[Sequence[str]] = []
        self._members = 0
        self._groups: list[_Group] = []
        self._read: dict[int, tuple[Tensor, int, Any]] = {}

    def take(self, names: Sequence[Sequence[str]]) -> int:
        """The number for now.

        Args:
            names: of each param group the names of its parameters. The same object means the same names.
        """
        if names is not self._names:
            self._names, self._members = names, _code(repr(names))
        groups = self._optimizer.param_groups
        if len(groups) != len(self._groups):
            self._groups = [_Group([], [], [], 0) for _ in groups]
        read: dict[int, tuple[Tensor, int, Any]] = {}
        for group, found in zip(groups, self._groups, strict=True):
            if len(group) != len(found.seen) or not all(map(is_, group.values(), found.seen)):
                self._look_at(group, found, read)
        self._read = read
        return hash((self._members, *[found.code for found in self._groups]))

    def _look_at(self, group: dict[str, Any], found: _Group, read: dict[int, tuple[Tensor, int, Any]]) -> None:
        if found.keys != (keys := list(group)):
            found.keys, found.seen, found.parts = keys, [_CHANGING] * len(keys), [0] * len(keys)
        for place, (key, value) in enumerate(group.items()):
            if value is found.seen[place]:
                continue
            counted = key not in NOT_OPTIONS and counts(value)
            found.parts[place] = _code(f"{key} {_text(self._number(value, read))}") if counted else 0
            found.seen[place] = _CHANGING if counted and _can_change(value) else value
        found.code = hash(tuple(sorted(found.parts)))  # the order of options does not matter

    def compare(self, control: ControlGroup) -> None:
        """Say what differs between the ranks, now that their numbers do.

        Raises:
            DivergenceError: on every rank, if something does.

        Collective: every rank.
        """
        mine = described(self._optimizer, self._label, self._names, counts=counts)
        agree_on_step(control, mine, self._whole)

    def _number(self, value: Any, read: dict[int, tuple[Tensor, int, Any]]) -> Any:
        """Options that are tensors elsewhere than on the host: only read, which waits for the device, if written to."""
        if not isinstance(value, Tensor) or value.device.type == "cpu" or value.is_inference():
            return number_of(value)
        known = self._read.get(id(value))
        if known is None or known[1] != value._version:
            known = (value, value._version, number_of(value))
        read[id(value)] = known
        return known[2]


def counts(value: Any) -> bool:
    """Whether an option has to be the same on every rank in every step."""
    if isinstance(value, _PLAIN):
        return True
    if isinstance(value, (tuple, list)):
        return all(isinstance(item, _PLAIN) or _is_number(item) for item in value)
    return _is_number(value)


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_meta
    return isinstance(value, Real)


def _can_change(value: Any) -> bool:
    """Whether a value may be another while it is the same object."""
    return isinstance(value, (Tensor, list)) or (isinstance(value, tuple) and any(isinstance(v, Tensor) for v in value))


def _text(value: Any) -> str:
    """The same for what means the same: 1, 1.0 and True; the last digits are left out, because machines round."""
    if isinstance(value, float):
        return f"{value:.10g}"
    if isinstance(value, int):
        return f"{value:.10g}" if -(2**33) < value < 2**33 else str(value)
    if isinstance(value, (tuple, list)):
        return f"[{' '.join(map(_text, value))}]"
    return repr(value)


def _code(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
