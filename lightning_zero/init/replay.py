"""One recorded operation and the memory it is replayed in. ``recorder.py`` decides what is recorded and replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from lightning_zero._torch import neg_view, storage_key

__all__ = ["GENERATOR", "META", "Operation", "Storage", "Window", "leaves", "map_leaves", "run_real"]

META: Final = torch.device("meta")


class _GeneratorMark:
    """Stands for a generator that the user passed: replay makes one with the recorded state."""


GENERATOR: Final = _GeneratorMark()

Memory = dict[int, torch.UntypedStorage]


def leaves(value: Any) -> Iterator[Any]:
    """Everything in nested lists, tuples and dicts, in order."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)
    else:
        yield value


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with ``function`` applied to everything in nested lists, tuples and dicts."""
    if isinstance(value, (list, tuple)):
        items = [map_leaves(function, item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {key: map_leaves(function, item) for key, item in value.items()}
    return function(value)


def run_real(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on real tensors, on the CPU where it was to run on meta, whatever autocast says here."""

    def on_cpu(leaf: Any) -> Any:
        return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == "meta" else leaf

    with torch.autocast("cpu", enabled=False):
        return function(*map_leaves(on_cpu, args), **map_leaves(on_cpu, kwargs))


@dataclass(frozen=True)
class Storage:
    """The memory that a meta tensor does not have.

    Attributes:
        memory: the meta storage; held so that its identity is not given to another one.
        nbytes: its size when it was first seen.
        foreign: it was not made by a recorded operation.
        writers: indices of the operations that make or change it, ascending.
    """

    memory: torch.UntypedStorage
    nbytes: int
    foreign: bool
    writers: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Window:
    """A tensor: how one storage of the record is looked at.

    Attributes:
        storage: index of the storage.
        offset: first element, in elements of ``dtype``.
        conj: the values are to be conjugated when read, likewise ``neg``.
    """

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool

    @classmethod
    def of(cls, tensor: Tensor, storage: int) -> Window:
        """The window that ``tensor`` is."""
        return cls(
            storage,
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def covers(self, nbytes: int) -> bool:
        """Whether each element of a storage of ``nbytes`` lies in this window exactly once."""
        expected = 1
        dimensions = zip(self.strides, self.shape, strict=True)
        for stride, size in sorted(pair for pair in dimensions if pair[1] != 1):
            if stride != expected:
                return False
            expected *= size
        return self.offset == 0 and expected * self.dtype.itemsize == nbytes

    def open(self, memory: Memory, storages: list[Storage]) -> Tensor:
        """A real tensor on ``memory``; what was never written is zero."""
        if self.storage not in memory:
            zeros = torch.zeros(storages[self.storage].nbytes, dtype=torch.uint8, device="cpu")
            memory[self.storage] = zeros.untyped_storage()
        tensor = torch.empty(0, dtype=self.dtype, device="cpu")
        tensor = tensor.set_(memory[self.storage], self.offset, self.shape, self.strides)
        tensor = tensor.conj() if self.conj else tensor
        return neg_view(tensor) if self.neg else tensor


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One recorded call.

    Attributes:
        function: an aten operation, or a Python function of tensors.
        args: its arguments, with ``Window`` for meta tensors and ``GENERATOR`` for a generator of the user's; likewise
            ``kwargs``.
        outputs: for each leaf of its result the window, if its storage was made by this call.
        reads: storages whose values from before the call matter to what ``writes`` holds afterwards.
        writes: storages it makes or changes.
        generator_state: of the generator it draws from, before the call; ``None`` if it draws nothing.
        default_dtype: torch's at the time of the call.
    """

    function: Callable[..., Any]
    args: Any
    kwargs: dict[str, Any]
    outputs: tuple[Window | None, ...]
    reads: frozenset[int]
    writes: frozenset[int]
    generator_state: Tensor | None
    default_dtype: torch.dtype

    @property
    def touches(self) -> frozenset[int]:
        """Storages it needs in memory."""
        return self.reads | self.writes

    def replay(self, memory: Memory, storages: list[Storage]) -> None:
        """Run the call on ``memory``. Overwrites the state of torch's CPU generator; the caller restores it."""

        def real(leaf: Any) -> Any:
            if isinstance(leaf, Window):
                return leaf.open(memory, storages)
            if leaf is GENERATOR and self.generator_state is not None:
                return torch.Generator().set_state(self.generator_state)
            return leaf

        if self.generator_state is not None:
            torch.default_generator.set_state(self.generator_state)
        args, kwargs = map_leaves(real, self.args), map_leaves(real, self.kwargs)
        with _default_dtype(self.default_dtype):
            result = run_real(self.function, args, kwargs)
        borrowed = {storage_key(leaf) for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf, window in zip(leaves(result), self.outputs, strict=False):
            if window is not None:
                _place(leaf, window, memory, storages, borrowed)


def _place(result: Tensor, window: Window, memory: Memory, storages: list[Storage], borrowed: set[int]) -> None:
    """Give a result its place: its own memory where that looks as recorded, a copy otherwise."""
    own = result.untyped_storage()
    if (
        window.storage not in memory
        and Window.of(result, window.storage) == window
        and own.nbytes() == storages[window.storage].nbytes
        and storage_key(result) not in borrowed
    ):
        memory[window.storage] = own
    else:
        window.open(memory, storages).copy_(result)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    if dtype == before:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
