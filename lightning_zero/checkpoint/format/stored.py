"""A tensor of a checkpoint that is still on disk, and the reading of its elements from where they lie in files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from operator import add, sub
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lightning_zero._torch import make_wrapper_subclass, tree_map_only, untracked
from lightning_zero.checkpoint.format.dcp import boxes, linear, overlap, part_boxes
from lightning_zero.checkpoint.format.record import Box, Chunk, FlatShard, StoredBox, TensorItem
from lightning_zero.checkpoint.format.torch_file import load_torch
from lightning_zero.checkpoint.storage.files import PIECE_NBYTES, Files, memory_nbytes, open_range
from lightning_zero.errors import CheckpointError
from lightning_zero.offload.host import OffloadedTensor, bytes_of, pieces, view_of

__all__ = ["Source", "StoredTensor", "read_slices", "whole"]


class StoredTensor(Tensor):
    """A tensor of a checkpoint that is still on disk: shape and dtype, and no memory.

    Loading reads its elements where they go: ``read_slices`` into slices, ``parameter.copy_(stored)`` into all of a
    parameter. Other code, such as a user's ``on_load_checkpoint``, computes with it and writes to it as to any tensor.
    The first such use loads it; from then on it is that memory, also for handles detached from it. It cannot be
    given other memory or another shape.

    ``source`` reads it, and needs ``item`` to find it: what has a method ``read_elements``, as ``Source`` does.
    ``key`` is its name there, for messages.
    """

    key: str  # under which it is stored
    failure: CheckpointError | None  # why ``parameter.copy_(stored)`` failed, which `load_state_dict` makes a text of
    _source: Any
    _item: TensorItem
    _memory: list[Tensor]  # of one once it is loaded; shared with detached handles

    @staticmethod
    def __new__(cls, source: Any, key: str, item: TensorItem, memory: list[Tensor] | None = None) -> StoredTensor:
        stored: StoredTensor = make_wrapper_subclass(
            cls, torch.Size(item.shape), dtype=item.dtype, device=torch.device("cpu"), requires_grad=False
        )
        stored._source, stored._item, stored.key, stored.failure = source, item, key, None
        stored._memory = [] if memory is None else memory
        return stored

    @property
    def memory(self) -> Tensor | None:
        """What it was loaded into, if it was."""
        return self._memory[0] if self._memory else None

    def load(self) -> Tensor:
        """The whole tensor, in memory that belongs to this handle from now on; ``CheckpointError`` as of ``whole``."""
        if not self._memory:
            self._memory.append(whole(self))
        return self._memory[0]

    def read(self) -> Tensor:
        """The whole tensor, in host memory of its own; for the errors see ``whole``."""
        return whole(self)

    def part(self, dim: int, start: int, size: int) -> StoredTensor:
        """Some rows of a dimension of it, which are read when they are needed."""
        offsets, sizes = [0] * self.dim(), list(self.shape)
        offsets[dim], sizes[dim] = start, size
        if type(self._source) is Source and self.memory is None:
            item: TensorItem = PartItem((), self.dtype, tuple(sizes), (), whole=self._item, offsets=tuple(offsets))
            return StoredTensor(self._source, self.key, item)

        def read_elements(key: str, item: TensorItem, destination: Tensor, begin: int) -> None:
            found = whole(self).narrow(dim, start, size).reshape(-1)
            destination.copy_(found[begin : begin + destination.numel()])

        chunks = (Chunk(0, math.prod(sizes), self.key, 0, None),) if math.prod(sizes) else ()
        item = TensorItem((), self.dtype, tuple(sizes), chunks)
        return StoredTensor(SimpleNamespace(read_elements=read_elements), self.key, item)

    def read_into(self, destination: Tensor, start: int) -> None:
        """Fill a 1-D tensor with the flattened elements from ``start`` on; see ``read_slices``."""
        read_slices([(self, start, destination)])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Read into what is copied to; load for everything else. A detached or aliased handle stays a handle."""
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return StoredTensor(args[0]._source, args[0].key, args[0]._item, args[0]._memory)
        if func is torch.ops.aten.copy_.default and type(args[0]) in _PLAIN and args[0].shape == args[1].shape:
            destination, stored = args[:2]
            if destination.is_contiguous():
                try:
                    read_slices([(stored, 0, destination.detach().view(-1))])
                except CheckpointError as error:
                    stored.failure = error
                    raise
                return destination
        written = args[0] if torch.Tag.inplace_view in func.tags else (kwargs or {}).get("out")
        if isinstance(written, StoredTensor):
            raise TypeError(f"{func}: {written} cannot get another shape in place; use `.clone()` first.")
        args, kwargs = tree_map_only(StoredTensor, StoredTensor.load, (args, kwargs or {}))
        return func(*args, **kwargs)

    @property
    def data(self) -> Tensor:
        """A detached handle. To write elements use ``copy_``."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        raise TypeError(f"{self} cannot get other data: use `copy_`, or put another tensor in its place.")

    def data_ptr(self) -> int:
        return self.load().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.load().untyped_storage()

    def numpy(self, *, force: bool = False) -> Any:
        return self.load().numpy(force=force)

    def __dlpack__(self, **options: Any) -> Any:
        return self.load().__dlpack__(**options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy as the ordinary tensor."""
        return (self.read() if self.memory is None else self.memory).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = self.read().requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StoredTensor('{self.key}', {tuple(self.shape)}, {self.dtype})"


_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


def whole(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor that is on disk, or in memory, in host memory of its own. Of floating-point ones ``dtype`` is another.

    ``CheckpointError`` if the file is damaged, or there is no memory for what it claims.
    """
    dtype = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    nbytes = tensor.numel() * dtype.itemsize
    with untracked():
        try:
            if nbytes > memory_nbytes():
                raise MemoryError(f"this machine has {memory_nbytes()}")
            found = torch.empty(tensor.shape, dtype=dtype)
        except (RuntimeError, MemoryError) as error:
            raise CheckpointError(
                f"The tensor '{getattr(tensor, 'key', '')}' claims {nbytes} bytes of memory, which cannot be had: "
                f"{error}. Read the part of it that is needed, or look at the file with `lightning-zero inspect`."
            ) from error
        read_slices([(tensor, 0, found.view(-1))])
    return found


def read_slices(wanted: Iterable[tuple[Any, int, Tensor]]) -> None:
    """Fill slices of tensors, wherever these are: on disk, sharded in memory, or whole in memory.

    Each is a tensor, the place of the slice in its flattened elements, and the slice: 1-D, on any device or in a file,
    of any dtype, to which the elements are cast. A FlatShard is this rank's slice already.

    Raises:
        ValueError: if a slice is not inside its tensor.
        CheckpointError: if a file was cut off or removed. Checksums are not looked at here.
        OffloadError: if a slice is in a file, and cannot be written.
    """
    with untracked():
        for tensor, start, destination in wanted:
            numel = destination.numel()
            if isinstance(tensor, FlatShard):
                destination.copy_(tensor.local)
                continue
            if destination.dim() != 1 or start < 0 or (start if numel else 0) + numel > tensor.numel():
                raise ValueError(
                    f"Elements {start} to {start + numel} of '{getattr(tensor, 'key', 'a tensor')}' with shape "
                    f"{tuple(tensor.shape)} cannot be read into a tensor of shape {tuple(destination.shape)}."
                )
            memory = tensor.memory if isinstance(tensor, StoredTensor) else tensor
            if memory is not None:
                destination.copy_(memory.detach().reshape(-1)[start : start + numel])
            elif not isinstance(destination, OffloadedTensor):
                tensor._source.read_elements(tensor.key, tensor._item, destination, start)
            else:  # a piece at a time: sources write to memory
                for begin, piece in pieces(numel, destination.dtype, PIECE_NBYTES):
                    tensor._source.read_elements(tensor.key, tensor._item, piece, start + begin)
                    destination[begin : begin + piece.numel()].copy_(piece)


@dataclass(frozen=True)
class PartItem(TensorItem):
    """A box of a tensor, by its first element. It has no chunks of its own."""

    whole: TensorItem | None = field(default=None, kw_only=True)
    offsets: tuple[int, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        """Nothing: the whole was looked at."""


class Source:
    """Reads the elements of tensors in the files of a folder.

    A tensor lies in chunks of raw memory, of which only what is asked for is read; or in boxes, a ``torch.save``
    archive each, which are loaded whole, as ``torch.distributed.checkpoint`` does. Checksums are not looked at: with
    them the same bytes took half as long again. ``verify`` is there for that.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self._box: tuple[Any, Any] = None, None  # the last that was loaded: slices are read in pieces

    def read_elements(self, key: str, item: TensorItem, destination: Tensor, start: int) -> None:
        """Fill a 1-D tensor on any device with the flattened elements of another from ``start`` on, cast to its dtype.

        The range is inside the tensor. ``key`` is for messages; ``CheckpointError`` if the file is damaged.
        """
        end = start + destination.numel()
        for chunk in item.chunks if item.split is None else ():
            first, last = max(start, chunk.start), min(end, chunk.start + chunk.numel)
            if first < last:
                offset = chunk.offset + (first - chunk.start) * item.dtype.itemsize
                self._read(chunk.file, offset, item.dtype, destination[first - start : last - start])
        if item.chunks and item.split is None:
            return
        shape, first_of = item.shape, (0,) * len(item.shape)
        wanted = boxes(shape, start, end)
        if isinstance(item, PartItem) and item.whole is not None:
            first_of, item = item.offsets, item.whole
            wanted = [Box(tuple(map(add, box.offsets, first_of)), box.sizes) for box in wanted]
        strides = [math.prod(shape[dim + 1 :]) * destination.stride(0) for dim in range(len(shape))]
        for box, load in self._boxes(key, item):
            for common in filter(None, (overlap(one, box) for one in wanted)):
                place = (linear(shape, tuple(map(sub, common.offsets, first_of))) - start) * destination.stride(0)
                target = destination.as_strided(common.sizes, strides, destination.storage_offset() + place)
                target.copy_(load(common))

    def _boxes(self, key: str, item: TensorItem) -> Iterator[tuple[Box, Callable[[Box], Tensor]]]:
        """The boxes that a tensor lies in, each with what reads a box in it."""
        if not item.chunks:
            yield from ((stored.box, partial(self._load_part, key, item.dtype, stored)) for stored in item.boxes)
        step = PIECE_NBYTES // item.dtype.itemsize  # of other columns than the wanted ones no more is in memory
        for chunk in item.chunks:
            offset, end = chunk.offset, chunk.start + chunk.numel
            for first in range(chunk.start, end, step):
                for box in part_boxes(item.shape, item.split, first, min(first + step, end)):
                    yield box, partial(self._read_part, chunk.file, offset, item.dtype, box)
                    offset += math.prod(box.sizes) * item.dtype.itemsize

    def _load_part(self, key: str, dtype: torch.dtype, stored: StoredBox, common: Box) -> Tensor:
        part = self._load(key, dtype, stored)
        for dim, (offset, size) in enumerate(zip(*common, strict=True)):
            part = part.narrow(dim, offset - stored.box.offsets[dim], size)
        return part

    def _read_part(self, file: str, offset: int, dtype: torch.dtype, box: Box, common: Box) -> Tensor:
        """A box of one that lies in a file as raw memory: of its first dimension only the rows that are needed."""
        if not common.sizes:
            part = torch.empty((), dtype=dtype)
        else:
            part = torch.empty((common.sizes[0], *box.sizes[1:]), dtype=dtype)
            offset += (common.offsets[0] - box.offsets[0]) * math.prod(box.sizes[1:]) * dtype.itemsize
        self._read(file, offset, dtype, part.view(-1))
        for dim, (at, size) in enumerate(zip(*common, strict=True)):
            part = part.narrow(dim, at - box.offsets[dim], size) if dim else part
        return part

    def _load(self, key: str, dtype: torch.dtype, stored: StoredBox) -> Tensor:
        """A box; ``CheckpointError`` if its archive does not hold that tensor, or what could run code."""
        known, found = self._box  # at once: another thread may read another box
        if known != (stored, dtype):
            self._box = found = None, None  # there need not be memory for two
            (file, offset, nbytes), sizes = stored.archive, stored.box.sizes
            where = f"a part of '{key}' in '{self._files.name}/{file}'"
            loaded = load_torch(open_range(self._files, file, offset, nbytes), where, True)
            if not isinstance(loaded, Tensor) or (loaded.dtype, tuple(loaded.shape)) != (dtype, sizes):
                what = f"{loaded.dtype} {tuple(loaded.shape)}" if isinstance(loaded, Tensor) else type(loaded).__name__
                raise CheckpointError(
                    f"Instead of {where} with {dtype} {sizes}, {what} lies at byte {offset}: the file belongs to "
                    "another checkpoint or another rank."
                )
            found = loaded.detach()
            self._box = (stored, dtype), found
        return found  # type: ignore[no-any-return]

    def _read(self, file: str, offset: int, dtype: torch.dtype, destination: Tensor) -> None:
        """Fill a 1-D tensor with what lies in a file, in pieces; ``CheckpointError`` if it ends before."""
        direct = type(destination) is Tensor and destination.device.type == "cpu" and destination.is_contiguous()
        direct = direct and destination.dtype == dtype
        step = max(1, PIECE_NBYTES // dtype.itemsize)
        buffer = destination if direct else torch.empty(min(step, destination.numel()), dtype=dtype)
        for begin in range(0, destination.numel(), step):
            part = destination[begin : begin + step]
            target = part if direct else buffer[: part.numel()]
            self._files.read_into(file, offset + begin * dtype.itemsize, view_of(bytes_of(target)))
            if not direct:
                part.copy_(target)
