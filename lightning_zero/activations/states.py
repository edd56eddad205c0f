"""State as it was when a forward began, for running that forward once more without a trace.

[Note: state and a second forward]
A second forward must see what the first one saw: the vectors of a spectral norm, a codebook, a counter that decides,
the hidden state of the last call, what the parent has set, what a cache held, whether the module is training. And it
must leave nothing behind: running statistics would move twice, a counter count twice, a cache hold everything twice. So
it runs with the attributes, buffers and argument objects of then, and afterwards all have again what they had before.

An object keeps its identity, and its contents are exchanged: whoever shares it (two attributes, a cache that all layers
are given) sees them too. What a forward reaches from the contents of then was all written down then, or is its own; so
nothing is left of it once the contents of now are put back. A tensor stands for itself if it was not changed in place,
and one with a graph is held without it: else a chain of graphs would grow over steps.

Small buffers and tensor attributes are copied, always. A large one (a mask) is copied at the first call, and later only
if it was seen to change; if it changes for the first time later, the second forward is refused. So it is for a tensor
that is reached through containers or arguments, of any size, if it is changed in place. Two tensors of one module that
share memory do not share it in their copies.

Seen are lists, dicts, sets, deques and bytearrays, with their subclasses; attributes and slots of ordinary objects; the
state of ``torch.Generator`` and ``random.Random``; and all that is reached from there. Not seen: modules that are no
submodules, scripted ones, and objects of torch, Lightning and the standard library; what is behind iterators, closures,
global variables and extension types (NumPy arrays and generators); what is in containers of more than ``_MOST``
elements, or further away than ``_MOST`` objects; in-place changes that versions do not count (``.data``, raw kernels),
in tensors that are not copied.
"""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_zero._torch import untracked

__all__ = ["CallStates", "HeldTensor", "Key"]

Key = tuple[int, str]
"""The id of a module, and the name of a tensor that it has."""

_MOST = 4096
_SMALL_NBYTES = 64 << 10
# Torch's own names, of which only ``training`` is state, and where forwards are wrapped.
_NOT_STATE = frozenset(vars(nn.Module())) - {"training"} | {"forward", "_compiled_call_impl"}
_PLAIN = frozenset([bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size])
_OPAQUE = (nn.Module, nn.Parameter, type, ModuleType, FunctionType, MethodType, BuiltinFunctionType)
_FOREIGN = frozenset(["torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_zero"])
_ADD: dict[Any, Any] = {list: list.extend, set: set.update, deque: deque.extend}


@dataclass(eq=False)
class HeldTensor:
    """A tensor of then, found ``where`` (for people): itself, or if it had a graph, a leaf with the same memory; what
    it counted (``None``: it counts nothing); and its values, if they are kept."""

    value: Tensor
    version: int | None
    where: str
    without_graph: bool
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
    """A tuple of then with tensors in it; itself only if none of them had a graph."""

    kind: type[tuple[Any, ...]]
    inside: list[Any]
    itself: tuple[Any, ...] | None

    def shown(self, then: dict[int, Tensor]) -> tuple[Any, ...]:
        inside = [_shown(element, then) for element in self.inside]
        if self.itself is not None and all(one is other for one, other in zip(inside, self.itself, strict=True)):
            return self.itself
        return self.kind._make(inside) if hasattr(self.kind, "_make") else self.kind(inside)


class _Contents(NamedTuple):
    """Of one object: ``read`` gives what stays as it is (keys, a random state) and the values, ``write`` takes both.

    Always through the base class: the object's own class may do more than that when it is asked or changes.
    """

    read: Callable[[], tuple[Any, list[Any]]]
    write: Callable[[Any, list[Any]], object]


class CallStates:
    """What modules hold just before a call, and the objects among its arguments (leaves; tensors among them are left to
    the caller). ``constant`` are large tensors that the last forward left alone; ``settle`` adds to it."""

    def __init__(self, modules: Sequence[nn.Module], arguments: Sequence[Any], constant: set[Key]) -> None:
        self._constant = constant
        self._tensors: dict[int, HeldTensor] = {}  # by identity of the tensor
        self._contents: list[tuple[_Contents, Any, list[Any]]] = []
        self._large: list[tuple[Key, HeldTensor]] = []
        self._seen: dict[int, Any] = {}  # objects, alive as long as their identities are in use here
        self._left = _MOST
        with untracked():
            for module in modules:
                self._add_names(module, vars(module), _NOT_STATE, "Attribute")
                if isinstance(module._buffers, dict):  # not of a scripted module
                    self._add_names(module, module._buffers, (), "Buffer")
            objects = [argument for argument in arguments if not isinstance(argument, Tensor)]
            self._hold(objects, [f"An argument of class {type(value).__name__}" for value in objects])
        self._seen = {}

    def settle(self) -> None:
        """Learn from the forward, which is over, and give up copies of large tensors that did not change."""
        with untracked():
            for key, held in self._large:
                if held.is_changed() or (held.copy is not None and not _has_same_values(held.copy, held.value)):
                    self._constant.discard(key)
                else:
                    self._constant.add(key)
                    held.copy = None

    @contextmanager
    def shown(self, refuse: Callable[[HeldTensor], None]) -> Iterator[None]:
        """All objects have these contents inside, and afterwards again what they have now. ``refuse`` raises for a
        tensor whose values of then are not known."""
        with untracked():
            then: dict[int, Tensor] = {}
            for held in self._tensors.values():
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

    def _add_names(self, module: nn.Module, names: dict[str, Any], without: Collection[str], what: str) -> None:
        """A module's namespace and all that is reached from it; copies of the tensors that are its own values."""
        contents = _names_of(names, without)
        keys, values = contents.read()
        held = self._hold(values, [f"{what} '{key}' of a {type(module).__name__}" for key in keys])
        self._contents.append((contents, keys, held))
        for name, tensor in zip(keys, held, strict=True):
            if type(tensor) is not HeldTensor:
                continue
            key = (id(module), name)
            large = tensor.value.numel() * tensor.value.element_size() > _SMALL_NBYTES
            if large:
                self._large.append((key, tensor))
            if tensor.copy is None and not (large and key in self._constant):
                tensor.copy = tensor.value.detach().clone()

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
            if isinstance(value, tuple) and any(type(element) in (HeldTensor, _HeldTuple) for element in inside):
                return _HeldTuple(type(value), inside, None if any(map(_lacks_graph, inside)) else value)
            return value
        if id(value) not in self._seen:
            self._seen[id(value)] = value
            queue.append((value, name))
        return value

    def _held(self, tensor: Tensor, name: str) -> HeldTensor:
        if (held := self._tensors.get(id(tensor))) is None:
            self._seen[id(tensor)] = tensor
            # What shows a weight is the engine's memory, which changes as it comes and goes.
            counts = not tensor.is_inference() and not isinstance(tensor._base, nn.Parameter)
            graph = tensor.grad_fn is not None
            value = tensor.detach().requires_grad_() if graph else tensor
            held = HeldTensor(value, tensor._version if counts else None, name, graph)
            self._tensors[id(tensor)] = held
        return held


def _lacks_graph(value: Any) -> bool:
    return value.itself is None if type(value) is _HeldTuple else type(value) is HeldTensor and value.without_graph


def _shown(value: Any, then: dict[int, Tensor]) -> Any:
    if type(value) is HeldTensor:
        return then[id(value)]
    return value.shown(then) if type(value) is _HeldTuple else value


def _has_same_values(left: Tensor, right: Tensor) -> bool:
    """Whether nothing was written, ``.data`` included; waits for the device."""
    if type(right) is not Tensor or right.layout is not torch.strided or right.is_meta:
        return True
    return torch.equal(left, right)


def _contents_of(value: Any) -> list[_Contents]:
    """All ways to look into an object; none if it is not ours to touch."""
    kind: Any = type(value)
    if isinstance(value, torch.Generator):
        return [_state_of(value.get_state, value.set_state)]
    if kind is random.Random:
        return [_state_of(value.getstate, value.setstate)]
    if any(base.__module__.partition(".")[0] in _FOREIGN for base in kind.__mro__):
        return []
    found: list[_Contents] = []
    if isinstance(value, dict):
        found.append(_names_of(value))
    elif isinstance(value, bytearray):
        found.append(_state_of(partial(bytes, value), partial(bytearray.__setitem__, value, slice(None))))
    elif isinstance(value, (list, set, deque)):
        found.append(_elements_of(value))
    root = kind.__module__.partition(".")[0]
    if kind is not SimpleNamespace and (root in sys.stdlib_module_names or root == "builtins"):
        return found
    names: Any = getattr(value, "__dict__", None)
    if type(names) is dict:
        found.append(_names_of(names))
    members = [member for base in kind.__mro__ if "__slots__" in vars(base) for member in vars(base).values()]
    if slots := [member for member in members if isinstance(member, MemberDescriptorType)]:
        found.append(_slots_of(value, slots))
    return found


def _state_of(get: Callable[[], Any], put: Callable[[Any], object]) -> _Contents:
    return _Contents(lambda: (get(), []), lambda state, _: put(state))


def _elements_of(owner: Any) -> _Contents:
    base: Any = next(kind for kind in _ADD if isinstance(owner, kind))

    def write(_: Any, values: list[Any]) -> None:
        base.clear(owner)
        _ADD[base](owner, values)

    return _Contents(lambda: (None, list(base.__iter__(owner))), write)


def _names_of(owner: dict[Any, Any], without: Collection[str] = ()) -> _Contents:
    """Of a dict, all but some keys."""
    base: Any = OrderedDict if isinstance(owner, OrderedDict) else dict

    def find() -> dict[Any, Any]:
        return {key: value for key, value in base.items(owner) if key not in without}

    return _pairs_of(find, partial(base.__setitem__, owner), partial(base.__delitem__, owner))


def _slots_of(owner: Any, slots: Sequence[MemberDescriptorType]) -> _Contents:
    def find() -> dict[Any, Any]:
        found = {}
        for slot in slots:
            try:
                found[slot] = slot.__get__(owner)
            except AttributeError:
                continue
        return found

    return _pairs_of(find, lambda slot, value: slot.__set__(owner, value), lambda slot: slot.__delete__(owner))


def _pairs_of(
    find: Callable[[], dict[Any, Any]], put: Callable[[Any, Any], None], delete: Callable[[Any], None]
) -> _Contents:
    def read() -> tuple[Any, list[Any]]:
        found = find()
        return list(found), list(found.values())

    def write(keys: Any, values: list[Any]) -> None:
        before = list(find())
        if before != keys:  # their order counts
            for key in before:
                delete(key)
        for key, value in zip(keys, values, strict=True):
            put(key, value)

    return _Contents(read, write)
