"""What is inside of Python objects at one moment, and showing it once more.

[Note: in place]
An object keeps its identity, and its contents are exchanged: whoever shares it (two attributes, a cache that all layers
are given) sees them too. What a forward reaches from the contents of then was all written down then, or is its own; so
afterwards nothing is left of it once the contents of now are put back.

[Note: what is seen]
Lists, dicts, sets, deques and bytearrays, with their subclasses; attributes and slots of ordinary objects; the state of
``torch.Generator`` and ``random.Random``. All that is reached from there, tuples included. A tensor stands for itself
if it was not changed in place since, and is refused if it was, unless a copy was asked for. One with a graph is held
without it: else a chain of graphs would grow over steps.

Not seen: modules that are no submodules, scripted ones, and objects of torch, Lightning and the standard library; what
is behind iterators, closures, global variables and extension types (NumPy arrays and generators); what is in containers
of more than ``_MOST`` elements, or further away than ``_MOST`` objects; in-place changes that versions do not count
(``.data``, raw kernels), in tensors that are not copied.
"""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero._torch import untracked

__all__ = ["HeldTensor", "ObjectStates"]

_MOST = 4096
_PLAIN = frozenset([bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size])
_OPAQUE = (nn.Module, nn.Parameter, type, ModuleType, FunctionType, MethodType, BuiltinFunctionType)
_FOREIGN = frozenset(["torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_zero"])


@dataclass(eq=False)
class HeldTensor:
    """A tensor of then.

    Args:
        value: itself, or if it had a graph, a leaf with the same memory.
        version: what it counted; ``None``: it counts nothing.
        where: it was found, for people.
        without_graph: whether it had one.
        copy: its values, if asked for.
    """

    value: Tensor
    version: int | None
    where: str
    without_graph: bool = False
    copy: Tensor | None = None

    def is_changed(self) -> bool:
        """Whether it was changed in place since, as far as versions tell."""
        return self.version is not None and self.value._version != self.version

    def shown(self) -> Tensor:
        """With the values of then: a new tensor if it was copied."""
        if self.copy is None:
            return self.value
        return self.copy.clone().requires_grad_(self.value.requires_grad)


@dataclass(eq=False)
class _HeldTuple:
    """A tuple of then with tensors in it that had a graph."""

    kind: type[tuple[Any, ...]]
    inside: list[Any]


class _Contents:
    """Of one object: what ``read`` gives, ``write`` puts there."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def read(self) -> tuple[Any, list[Any]]:
        """What stays as it is (keys), and the values."""
        return None, list(self.owner)

    def write(self, keys: Any, values: list[Any]) -> None:
        self.owner[:] = values


class _Elements(_Contents):
    """Of a set or deque, whose own class may do more than that when it changes."""

    def write(self, keys: Any, values: list[Any]) -> None:
        base: Any = set if isinstance(self.owner, set) else deque
        base.clear(self.owner)
        (set.update if base is set else deque.extend)(self.owner, values)


class _List(_Contents):
    def read(self) -> tuple[Any, list[Any]]:
        return None, list.__getitem__(self.owner, slice(None))

    def write(self, keys: Any, values: list[Any]) -> None:
        list.__setitem__(self.owner, slice(None), values)


class _Mapping(_Contents):
    """Of a dict, all but some names."""

    def __init__(self, owner: dict[Any, Any], without: Collection[str] = ()) -> None:
        super().__init__(owner)
        self._without = without
        self._base: Any = OrderedDict if isinstance(owner, OrderedDict) else dict

    def read(self) -> tuple[Any, list[Any]]:
        found = {key: value for key, value in self._base.items(self.owner) if key not in self._without}
        return list(found), list(found.values())

    def write(self, keys: Any, values: list[Any]) -> None:
        base, owner = self._base, self.owner
        if [key for key in base.keys(owner) if key not in self._without] != keys:  # their order counts
            for key in self.read()[0]:
                base.__delitem__(owner, key)
        for key, value in zip(keys, values, strict=True):
            base.__setitem__(owner, key, value)


class _Slots(_Contents):
    def read(self) -> tuple[Any, list[Any]]:
        found = {}
        for slot in _slots_of(type(self.owner)):
            try:
                found[slot] = slot.__get__(self.owner)
            except AttributeError:
                continue
        return list(found), list(found.values())

    def write(self, keys: Any, values: list[Any]) -> None:
        for slot in self.read()[0]:
            if slot not in keys:
                slot.__delete__(self.owner)
        for slot, value in zip(keys, values, strict=True):
            slot.__set__(self.owner, value)


class _TorchState(_Contents):
    def read(self) -> tuple[Any, list[Any]]:
        return self.owner.get_state(), []

    def write(self, keys: Any, values: list[Any]) -> None:
        self.owner.set_state(keys)


class _RandomState(_Contents):
    def read(self) -> tuple[Any, list[Any]]:
        return self.owner.getstate(), []

    def write(self, keys: Any, values: list[Any]) -> None:
        self.owner.setstate(keys)


class ObjectStates:
    """Contents of objects, as they are when the objects are added."""

    def __init__(self) -> None:
        self.tensors: dict[int, HeldTensor] = {}  # by identity of the tensor
        self._contents: list[tuple[_Contents, Any, list[Any]]] = []
        self._seen: dict[int, Any] = {}  # objects, alive as long as their identities are in use
        self._left = _MOST

    def add_names(
        self, names: dict[str, Any], without: Collection[str], what: str, owner: str
    ) -> list[tuple[str, HeldTensor]]:
        """Add a namespace, and all that is reached from it.

        Args:
            names: the namespace itself.
            without: names to leave alone.
            what: each of its values is, for people.
            owner: class whose namespace it is, for people.

        Returns:
            The tensors among its own values, with their names.
        """
        contents = _Mapping(names, without)
        keys, values = contents.read()
        held = self._hold(values, [f"{what} '{key}' of a {owner}" for key in keys])
        self._contents.append((contents, keys, held))
        return [(key, value) for key, value in zip(keys, held, strict=True) if type(value) is HeldTensor]

    def add(self, value: Any, where: str) -> None:
        """Add an object and all that is reached from it.

        Args:
            value: anything.
            where: what it is called, for people.
        """
        self._hold([value], [where])

    def seal(self) -> None:
        """Nothing more is added: let go of objects that were only looked at."""
        self._seen = {}

    @contextmanager
    def shown(self, refuse: Callable[[HeldTensor], None]) -> Iterator[None]:
        """All objects have these contents inside, and afterwards again what they have now.

        Args:
            refuse: raises for a tensor whose values of then are not known.
        """
        with untracked():
            then: dict[int, Tensor] = {}
            for held in self.tensors.values():
                if held.copy is None and held.is_changed():
                    refuse(held)
                then[id(held)] = held.shown()
        now = [(contents, *contents.read()) for contents, _, _ in self._contents]
        try:
            for contents, keys, values in self._contents:
                contents.write(keys, [_shown(value, then) for value in values])
            yield
        finally:
            for contents, keys, values in now:
                contents.write(keys, values)

    def _hold(self, values: Sequence[Any], names: Sequence[str]) -> list[Any]:
        """The values, with tensors held; and remember the contents of everything below, breadth first."""
        queue: deque[tuple[Any, str]] = deque()
        held = [self._look(value, name, queue) for value, name in zip(values, names, strict=True)]
        while queue and self._left > 0:
            value, name = queue.popleft()
            self._left -= 1
            for contents in _contents_of(value):
                keys, inside = contents.read()
                if len(inside) <= _MOST:
                    inside = [self._look(element, name, queue) for element in inside]
                self._contents.append((contents, keys, inside))
        return held

    def _look(self, value: Any, name: str, queue: deque[tuple[Any, str]]) -> Any:
        if type(value) in _PLAIN or isinstance(value, _OPAQUE):
            return value
        if isinstance(value, Tensor):
            return self._held(value, name)
        if isinstance(value, (tuple, frozenset)):
            inside = [self._look(element, name, queue) for element in value] if len(value) <= _MOST else []
            if isinstance(value, tuple) and any(map(_is_without_graph, inside)):
                return _HeldTuple(type(value), inside)
            return value
        if id(value) not in self._seen:
            self._seen[id(value)] = value
            queue.append((value, name))
        return value

    def _held(self, tensor: Tensor, name: str) -> HeldTensor:
        if (held := self.tensors.get(id(tensor))) is None:
            self._seen[id(tensor)] = tensor
            # What shows a weight is the engine's memory, which changes as it comes and goes.
            counts = not tensor.is_inference() and not isinstance(tensor._base, nn.Parameter)
            version = tensor._version if counts else None
            graph = tensor.grad_fn is not None
            value = tensor.detach().requires_grad_() if graph else tensor
            held = self.tensors[id(tensor)] = HeldTensor(value, version, name, graph)
        return held


def _is_without_graph(value: Any) -> bool:
    return type(value) is _HeldTuple or (type(value) is HeldTensor and value.without_graph)


def _shown(value: Any, then: dict[int, Tensor]) -> Any:
    if type(value) is HeldTensor:
        return then[id(value)]
    if type(value) is _HeldTuple:
        inside = [_shown(element, then) for element in value.inside]
        return value.kind._make(inside) if hasattr(value.kind, "_make") else value.kind(inside)
    return value


def _contents_of(value: Any) -> list[_Contents]:
    """All ways to look into an object; none if it is not ours to touch."""
    if isinstance(value, torch.Generator):
        return [_TorchState(value)]
    if type(value) is random.Random:
        return [_RandomState(value)]
    kind = type(value)
    found: list[_Contents] = []
    if any(base.__module__.partition(".")[0] in _FOREIGN for base in kind.__mro__):
        return found
    if isinstance(value, dict):
        found.append(_Mapping(value))
    elif isinstance(value, list):
        found.append(_List(value))
    elif isinstance(value, bytearray):
        found.append(_Contents(value))
    elif isinstance(value, (set, deque)):
        found.append(_Elements(value))
    root = kind.__module__.partition(".")[0]
    if kind is not SimpleNamespace and (root in sys.stdlib_module_names or root == "builtins"):
        return found
    names: Mapping[str, Any] | None = getattr(value, "__dict__", None)
    if type(names) is dict:
        found.append(_Mapping(names))
    if _slots_of(kind):
        found.append(_Slots(value))
    return found


def _slots_of(kind: type) -> list[Any]:
    return [
        slot
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for slot in vars(base).values()
        if isinstance(slot, MemberDescriptorType)
    ]
