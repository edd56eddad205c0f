"""Memory for what is gathered and for gradients: buffers that are taken, given back, and used again.

[Note: who holds a buffer]
User code may keep a tensor that lies in a buffer: a view of a weight, its ``detach()``, the ``.grad`` that a hook has
seen. The system counts the tensors of each storage, and how many of them are the engine's own is known. So a buffer
in which there is any other tensor is never used again: whoever has it keeps the values of that moment, and nobody ever
reads another unit's weights. What autograd saves of weights is a note, not a tensor (``engine.guard``), so that a
graph holds no buffer.

[Note: places]
The plan says how many buffers there are, of which sizes, and which units share one: its slots. Each is a *place* here,
and the pool keeps one buffer for each place. If that one is in use, or somebody else holds it, the pool makes another,
which replaces it or goes when it is given back. On an accelerator buffers stay, but for those of the largest units of
a place, and large ones for gradients: see [Note: what passes] in ``plan.plan``. On a CPU they go between steps
(``trim``), because there the memory is everybody's.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from lightning_zero._torch import (
    WeakStorage,
    bytes_of,
    held_in_python,
    outside_of_transforms,
    storage_key,
    untracked,
    users_of,
)
from lightning_zero.comm import Collectives
from lightning_zero.comm.streams import Event, Streams
from lightning_zero.errors import some
from lightning_zero.plan.layout import FlatLayout
from lightning_zero.plan.plan import IDLE_NBYTES, KEPT_NBYTES, Plan, kept_nbytes, pack
from lightning_zero.shards.slice import views_of

__all__ = ["Buffer", "BufferPool", "FlatBuffer", "Form"]

T = TypeVar("T")

_MOMENT_SECONDS = 0.02
_LOOKS = 3  # at who has old weights, to warn of it: each takes a while


class FlatBuffer(NamedTuple):
    """A layout's full, flat buffer, with views of its parameters and of the gaps between them."""

    flat: Tensor
    views: list[Tensor]
    gaps: list[Tensor]

    @classmethod
    def of(cls, flat: Tensor, layout: FlatLayout) -> FlatBuffer:
        """That of a layout in ``flat``: 1-D, all its elements."""
        with untracked():
            gaps = [flat.narrow(0, start, end - start) for start, end in layout.gaps()]
        return cls(flat, views_of(flat, layout), gaps)


Form = Callable[[Tensor], tuple[tuple[list[FlatBuffer], list[Tensor]], int]]
"""What cuts a buffer's memory for layouts: into their flat buffers, and the views of all parameters; and how many
tensors these are."""


def _cut(layouts: Sequence[FlatLayout], dtypes: Sequence[torch.dtype], memory: Tensor) -> Any:
    starts, _ = pack([(layout.numel, dtype) for layout, dtype in zip(layouts, dtypes, strict=True)])
    rooms: list[FlatBuffer] = []
    for start, layout, dtype in zip(starts, layouts, dtypes, strict=True):
        with untracked():
            flat = memory.narrow(0, start, layout.numel * dtype.itemsize).view(dtype)
        rooms.append(FlatBuffer.of(flat, layout))
    views = [view for room in rooms for view in room.views]
    return (rooms, views), len(views) + sum(1 + len(room.gaps) for room in rooms)


class Buffer:
    """Bytes for one unit at a time.

    Args:
        pool: has made it.
        memory: 1-D uint8, with a storage of its own.
        place: what it was taken for.
        home: the stream that its memory belongs to.
    """

    __slots__ = ("free", "home", "key", "made", "memory", "own", "place", "pool", "unit", "version", "views")

    def __init__(self, pool: BufferPool, memory: Tensor, place: Hashable, home: Any = None) -> None:
        self.pool = pool
        self.memory = memory
        self.place = place
        self.home = home
        self.key = storage_key(memory)
        self.unit: Any = None  # whose weights are, or were, in it
        self.version = -1  # and of which version
        self.views: list[Tensor] = []  # which its parameters show
        self.free: Event = None  # behind this, the memory may be overwritten; ``None``: behind all work so far
        self.made: dict[Any, Any] = {}  # tensors in it that are kept, by what they are
        self.own = users_of(self.key)  # tensors in it that are the engine's

    @property
    def shared(self) -> bool:
        """Whether anybody else has a tensor in this memory. Only while no parameter shows it."""
        return users_of(self.key) > self.own

    def keep(self, key: Any, make: Callable[[Tensor], tuple[T, int]]) -> T:
        """What ``make`` makes of the memory, once for each ``key``; it says how many tensors in it are kept."""
        if key not in self.made:
            with outside_of_transforms():
                self.made[key], count = make(self.memory)
            self.own += count
        made: T = self.made[key]
        return made


class BufferPool:
    """The buffers of one engine.

    Args:
        wire: what they travel by.
        device: where they are.
        streams: of that device.
        plan: which places there are.
    """

    def __init__(self, wire: Collectives, device: torch.device, streams: Streams, plan: Plan) -> None:
        self._wire = wire
        self._device = device
        self._streams = streams
        needs, keep = plan.needs(), kept_nbytes if streams.beside else max
        self.sizes: dict[Hashable, int] = {place: keep(of_units.values()) for place, of_units in needs.items()}
        """Bytes of the buffer that is kept for each place."""
        self._passing: dict[tuple[Hashable, int], int] = {
            (place, unit): nbytes
            for place, of_units in needs.items()
            for unit, nbytes in of_units.items()
            if nbytes > self.sizes[place]
        }
        self._forms: dict[Hashable, Form] = {}  # by what they depend on
        self.forms = [self.form(unit.layouts, [part.compute_dtype for part in unit.layouts]) for unit in plan.units]
        """For full parameters, by unit."""
        self._idle: dict[Hashable, Buffer] = {}
        self._looks = _LOOKS
        self._left: list[tuple[Any, WeakStorage]] = []  # whose weights are where others have tensors
        self.used: dict[int, Buffer] = {}
        """Buffers that were taken, by the key of their storage."""

    def form(self, layouts: Sequence[FlatLayout], dtypes: Sequence[torch.dtype]) -> Form:
        """Lays layouts into a buffer, each of its dtype: the same for units that are alike, which share its tensors."""
        shapes = [tuple(spec.shape for spec in layout.parameters) for layout in layouts]
        key = (*zip(dtypes, shapes, [(layout.offsets, layout.numel) for layout in layouts], strict=True),)
        return self._forms.setdefault(key, partial(_cut, layouts, dtypes))

    def take(self, place: Hashable, unit: int, lent: bool = False) -> Buffer:
        """A buffer for a unit in a place. ``lent``: the other ranks read what is in it before it is reduced."""
        nbytes = self._passing.get((place, unit)) or self.sizes[place]
        buffer = self._idle.pop(place, None)
        if buffer is not None and (users_of(buffer.key) > buffer.own or buffer.memory.numel() != nbytes):
            self._leave(buffer)
            buffer = None
        if buffer is None:
            with untracked(), outside_of_transforms():
                memory = self._wire.lend(nbytes, gathered=not lent)
                if memory is None:
                    memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            buffer = Buffer(self, memory, place, self._streams.current())
        self.used[buffer.key] = buffer
        return buffer

    def give(self, buffer: Buffer, last: bool = False) -> None:
        """Let others take a buffer, if the pool keeps one of its size for its place and has none.

        ``last``: nobody takes one before the next backward.
        """
        if self.used.pop(buffer.key, None) is None:
            return
        nbytes = buffer.memory.numel()
        passes = nbytes > self.sizes[buffer.place] or (last and self._streams.beside and nbytes >= IDLE_NBYTES)
        if passes or self._idle.setdefault(buffer.place, buffer) is not buffer:
            self._leave(buffer)

    def drop(self, buffer: Buffer) -> None:
        """Let go of a buffer for good: no other unit has it next, or an error may have left a transfer to it."""
        self.used.pop(buffer.key, None)
        self._streams.hand_back(buffer.home, buffer.free)

    def trim(self) -> None:
        """Let go of idle buffers, but for small ones. One rank alone rarely needs those of gradients."""
        for buffer in list(self._idle.values()):
            if buffer.memory.numel() >= KEPT_NBYTES or (buffer.unit is None and self._wire.world_size == 1):
                self._leave(self._idle.pop(buffer.place))

    def warn_of_kept(self, units: Container[Any]) -> None:
        """Warn of tensors of the user's that show weights of these units, which have just got other values."""
        kept = self._kept_of(units) if self._looks else []
        if not kept:
            return
        self._looks -= 1
        time.sleep(_MOMENT_SECONDS)  # another thread may hold a frame of ours for a moment, with what stands there
        for unit, memory in kept:
            names = {unit.name_at(alias.storage_offset() * alias.element_size()) for alias in held_in_python(memory)}
            if names:  # a graph alone says itself that its weights have changed
                self._looks = 0
                warnings.warn(
                    f"A tensor that shares memory with {some(map(repr, sorted(names)))} (a view, `detach()` or `data`) "
                    "was kept while the weight got new values. Under DDP such a tensor follows its weight; here it "
                    "keeps the old values. Clone it where it is created, or read the weight again, in a step or "
                    "inside of `full_parameters`.",
                    stacklevel=2,
                )

    def _kept_of(self, units: Container[Any]) -> list[tuple[Any, Tensor]]:
        """Memory in which others have tensors, and where the weights of one of these ``units`` are, with the unit.

        The pool lets go of it, so that nobody but them has tensors there (a frame that has one counts, so this is a
        function of its own), and asks once only.
        """
        for buffer in [buffer for buffer in self._idle.values() if buffer.unit in units and buffer.shared]:
            self._leave(self._idle.pop(buffer.place))
        kept = [(unit, storage) for unit, weak in self._left if unit in units and (storage := weak.lock()) is not None]
        self._left = [(unit, weak) for unit, weak in self._left if unit not in units and weak.lock() is not None]
        return [(unit, bytes_of(storage)) for unit, storage in kept]

    def _leave(self, buffer: Buffer) -> None:
        """Leave a buffer to whoever has a tensor there; nobody: to the allocator."""
        if buffer.unit is not None and buffer.shared:
            self._left.append((buffer.unit, WeakStorage(buffer.memory)))
        self._streams.hand_back(buffer.home, buffer.free)

    def __iter__(self) -> Iterator[Buffer]:
        """Every buffer that there is."""
        yield from self.used.values()
        yield from self._idle.values()
