"""A tensor of a checkpoint that is still on disk, and the reading of its elements from where they lie in files.

[Note: Ranges of boxes]

Elements are asked for as a range of the flattened tensor, and stored as boxes whose elements lie one after the other.
In both the order is that of the coordinates. So the elements of a box that are in the range are a range of the box,
and one piece of its file, whatever the shapes are: only they are read, once. Where they go is one range too if the box
is whole rows, and otherwise the pieces of [Note: Boxes], each a strided view of the destination.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_zero._torch import make_wrapper_subclass, tree_map_only, untracked
from lightning_zero.checkpoint.format.dcp import BoxItem, StoredBox
from lightning_zero.checkpoint.format.flat_shard import Box, FlatShard, boxes, elements_before, is_range, linear
from lightning_zero.checkpoint.format.record import TensorItem
from lightning_zero.checkpoint.format.torch_file import archive_entries, describe_tensor, load_torch, start_of
from lightning_zero.checkpoint.storage.files import PIECE_NBYTES, Files, Window, memory_nbytes, open_range
from lightning_zero.errors import CheckpointError
from lightning_zero.offload.host import OffloadedTensor, bytes_of, pieces, view_of

__all__ = ["Source", "StoredTensor", "find_elements", "read_slices", "whole"]


class StoredTensor(Tensor):
    """A tensor of a checkpoint that is still on disk: shape and dtype, and no memory.

    Loading reads its elements where they go: ``read_slices`` into slices, ``parameter.copy_(stored)`` into all of a
    parameter. Other code, such as a user's ``on_load_checkpoint``, computes with it and writes to it as to any tensor.
    The first such use loads it; from then on it is that memory, also for handles detached from it. Only its shape
    cannot be changed in place.

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
        """The whole tensor, in memory that belongs to this handle from now on; ``CheckpointError`` as of ``read``."""
        if not self._memory:
            self._memory.append(self.read())
        return self._memory[0]

    def read(self) -> Tensor:
        """The whole tensor, in host memory of its own; for the errors see ``whole``."""
        return whole(self)

    def read_into(self, destination: Tensor, start: int) -> None:
        """Read a range of the flattened elements.

        Args:
            destination: 1-D, on any device or in a file, of any dtype: the elements are cast to it. Written.
            start: the flattened element that ``destination[0]`` gets.

        Raises:
            ValueError: if the range is not inside the tensor.
            CheckpointError: if the file was cut off or removed. Checksums are not looked at here.
            OffloadError: if the destination is in a file, and cannot be written.
        """
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
                    stored.read_into(destination.detach().view(-1), 0)
                except CheckpointError as error:
                    stored.failure = error
                    raise
                return destination
        owners: dict[int, StoredTensor] = {}

        def loaded(stored: StoredTensor) -> Tensor:
            if torch.Tag.inplace_view in func.tags:
                raise TypeError(f"{func}: the shape of {stored} cannot be changed in place; use `.clone()` first.")
            return owners.setdefault(id(stored.load()), stored).load()

        args, kwargs = tree_map_only(StoredTensor, loaded, (args, kwargs or {}))
        found = func(*args, **kwargs)
        for stored in owners.values():
            if stored.load().shape != stored.shape:
                raise TypeError(f"{func} gave {stored} the shape {tuple(stored.load().shape)}; use a tensor that fits.")
        return tree_map_only(Tensor, lambda tensor: owners.get(id(tensor), tensor), found)

    @property
    def data(self) -> Tensor:
        """A detached handle."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if (value.shape, value.dtype) != (self.shape, self.dtype):
            raise TypeError(f"{tuple(value.shape)} {value.dtype} cannot be the data of {self}.")
        self._memory = [value.load() if isinstance(value, StoredTensor) else value.detach()]

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

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredTensor:
        """A handle of its own; what is only on disk stays there."""
        copied = StoredTensor(self._source, self.key, self._item, [memory.clone() for memory in self._memory])
        if isinstance(self, torch.nn.Parameter):  # which is an attribute, for a class of tensors
            copied._is_param = True
        memo[id(self)] = copied.requires_grad_(self.requires_grad)
        return copied

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StoredTensor('{self.key}', {tuple(self.shape)}, {self.dtype})"


_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


def whole(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor that is on disk, or in memory, in host memory of its own. Of floating-point ones ``dtype`` is another.

    ``CheckpointError`` if the file is damaged, or there is no memory for what it claims.
    """
    dtype = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    with untracked():
        found = _new_tensor(tensor.shape, dtype, f"The tensor '{getattr(tensor, 'key', '')}'")
        read_slices([(tensor, 0, found.view(-1))])
    return found


def read_slices(wanted: Iterable[tuple[Any, int, Tensor]]) -> None:
    """Fill slices of tensors, wherever these are: on disk, sharded in memory, or whole in memory.

    Each is a tensor, the place of the slice in its flattened elements, and the slice: 1-D, on any device or in a file,
    of any dtype. A FlatShard is this rank's slice already. For the errors see ``StoredTensor.read_into``.
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
            memory = tensor
            if isinstance(tensor, StoredTensor):
                memory = tensor._memory[0] if tensor._memory else None
            if memory is not None:
                destination.copy_(memory.detach().reshape(-1)[start : start + numel])
            elif not isinstance(destination, OffloadedTensor):
                tensor._source.read_elements(tensor.key, tensor._item, destination, start)
            else:  # a piece at a time: sources write to memory
                for begin, piece in pieces(numel, destination.dtype, PIECE_NBYTES):
                    tensor._source.read_elements(tensor.key, tensor._item, piece, start + begin)
                    destination[begin : begin + piece.numel()].copy_(piece)


# -------------------------------------------------------------------------------------------------------------- reading

_MAX_DIRECTORY_NBYTES = 1 << 17  # of an archive of one tensor: some 700 bytes, and what zip readers look through


class Source:
    """Reads the elements of tensors in the files of a folder: only what is asked for, once.

    A tensor lies in chunks of raw memory, or in boxes, a ``torch.save`` archive each. See [Note: Ranges of boxes].
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        # By all that a description is checked against: another tensor may claim the same archive.
        self._begins: dict[tuple[StoredBox, torch.dtype], int | None] = {}
        self._last: tuple[tuple[StoredBox, torch.dtype], Tensor] | None = None

    def read_elements(self, key: str, item: TensorItem, destination: Tensor, start: int) -> None:
        """Fill a 1-D tensor on any device with the flattened elements of another from ``start`` on, cast to its dtype.

        The range is inside the tensor. ``key`` is for messages; ``CheckpointError`` if the file is damaged.
        """
        end = start + destination.numel()
        for chunk in item.chunks:
            first, last = max(start, chunk.start), min(end, chunk.start + chunk.numel)
            if first < last:
                offset = chunk.offset + (first - chunk.start) * item.dtype.itemsize
                self._read(chunk.file, offset, item.dtype, destination[first - start : last - start])
        if isinstance(item, BoxItem):
            for stored in item.boxes:
                first, last = (elements_before(item.shape, stored.box, place) for place in (start, end))
                if first < last:
                    self._read_box(key, item, stored, (first, last), destination, start)

    def _read_box(
        self, key: str, item: BoxItem, stored: StoredBox, part: tuple[int, int], destination: Tensor, start: int
    ) -> None:
        """Read a range of a box's elements to their places in the destination."""
        (first, last), (box, archive), dtype = part, stored, item.dtype
        begin = self._begin(stored, dtype)
        if begin is None:
            known = self._last  # what is read in pieces must not be loaded for each of them
            same = known is not None and known[0] == (stored, dtype)
            loaded = known[1] if known is not None and same else self._load(key, dtype, stored)
            self._last = None if last == loaded.numel() else ((stored, dtype), loaded)
            _scatter(item.shape, box, first, loaded[first:last], destination, start)
        elif is_range(item.shape, box):
            place = linear(item.shape, box.offsets) + first - start
            self._read(archive.file, begin + first * dtype.itemsize, dtype, destination[place : place + last - first])
        else:
            for before, piece in pieces(last - first, dtype, PIECE_NBYTES):
                self._read(archive.file, begin + (first + before) * dtype.itemsize, dtype, piece)
                _scatter(item.shape, box, first + before, piece, destination, start)

    def _begin(self, stored: StoredBox, dtype: torch.dtype) -> int | None:
        """Where in its file the elements of a box begin as raw memory; ``None`` if they do not lie so in it."""
        if (stored, dtype) not in self._begins:
            archive = stored.archive

            def read_into(offset: int, memory: memoryview) -> None:
                self._files.read_into(archive.file, archive.offset + offset, memory)

            window = Window(read_into, archive.nbytes, _MAX_DIRECTORY_NBYTES)
            found = find_elements(window, archive.nbytes, dtype, stored.box.sizes)
            self._begins[stored, dtype] = None if found is None else archive.offset + found
        return self._begins[stored, dtype]

    def _load(self, key: str, dtype: torch.dtype, stored: StoredBox) -> Tensor:
        """The elements of a box, flattened, of an archive that is built in another way.

        ``CheckpointError`` if it does not hold that tensor, or what could run code.
        """
        archive, sizes = stored.archive, stored.box.sizes
        where = f"a part of '{key}' in '{self._files.name}/{archive.file}'"
        loaded = load_torch(open_range(self._files, *archive), where, True)
        if not isinstance(loaded, Tensor) or (loaded.dtype, tuple(loaded.shape)) != (dtype, sizes):
            what = f"{loaded.dtype} {tuple(loaded.shape)}" if isinstance(loaded, Tensor) else type(loaded).__name__
            raise CheckpointError(
                f"Instead of {where} with {dtype} {sizes}, {what} lies at byte {archive.offset}: the file belongs to "
                "another checkpoint or another rank."
            )
        return loaded.detach().reshape(-1)

    def _read(self, file: str, offset: int, dtype: torch.dtype, destination: Tensor) -> None:
        """Fill a 1-D tensor with what lies in a file, in pieces; ``CheckpointError`` if it ends before.

        Checksums are not looked at: with them the same bytes took half as long again. ``verify`` is there for that.
        """
        direct = destination.device.type == "cpu" and destination.dtype == dtype and destination.is_contiguous()
        direct = direct and type(destination) is Tensor
        step = max(1, PIECE_NBYTES // dtype.itemsize)
        buffer = destination if direct else torch.empty(min(step, destination.numel()), dtype=dtype)
        for begin in range(0, destination.numel(), step):
            part = destination[begin : begin + step]
            target = part if direct else buffer[: part.numel()]
            self._files.read_into(file, offset + begin * dtype.itemsize, view_of(bytes_of(target)))
            if not direct:
                part.copy_(target)


def _new_tensor(shape: Any, dtype: torch.dtype, what: str) -> Tensor:
    """Memory on the host for a tensor that a file says it has; ``CheckpointError`` if there cannot be so much."""
    tensor = torch.empty(shape, dtype=dtype, device="meta")
    try:
        if tensor.nbytes > memory_nbytes():
            raise MemoryError(f"this machine has {memory_nbytes()}")
        return torch.empty(shape, dtype=dtype, device="cpu")
    except (RuntimeError, MemoryError) as error:
        raise CheckpointError(
            f"{what} claims {tensor.nbytes} bytes of memory, which cannot be had: {error}. Read the part of it that is "
            "needed, or look at the file with `lightning-zero inspect`."
        ) from error


def find_elements(file: Any, nbytes: int, dtype: torch.dtype, sizes: tuple[int, ...]) -> int | None:
    """Where in a ``torch.save`` archive the elements of such a contiguous tensor begin.

    Nothing is unpickled: the description must be, byte for byte, the one that such a tensor has. Whatever is different
    (another layout, age or machine) gives ``None`` and is left to ``torch.load(weights_only=True)``. ``file`` is the
    archive, of ``nbytes``, as a file that reads no more at once than a directory may have.
    """
    try:
        entries = archive_entries(file)
        data, start = entries["data/0"], start_of(file, entries["data/0"])
        if data.file_size != math.prod(sizes) * dtype.itemsize or start + data.file_size > nbytes:
            return None
        for name, content in (("data.pkl", describe_tensor(dtype, sizes)), ("byteorder", sys.byteorder.encode())):
            if name in entries or name == "data.pkl":
                file.seek(start_of(file, entries[name]))
                if entries[name].file_size != len(content) or file.read(len(content)) != content:
                    return None
        return start
    except CheckpointError:
        raise
    except Exception:  # a damaged archive can raise anything
        return None


def _scatter(shape: Sequence[int], box: Box, first: int, values: Tensor, destination: Tensor, start: int) -> None:
    """Put a range of a box's elements, from its element ``first``, where they belong in the destination."""
    strides = [math.prod(shape[dim + 1 :]) * destination.stride(0) for dim in range(len(shape))]
    position = 0
    for part in boxes(box.sizes, first, first + values.numel()):
        offsets = [outer + inner for outer, inner in zip(box.offsets, part.offsets, strict=True)]
        numel = math.prod(part.sizes)
        place = destination.storage_offset() + (linear(shape, offsets) - start) * destination.stride(0)
        view = destination.as_strided(part.sizes, strides, place)
        view.copy_(values[position : position + numel].view(part.sizes))
        position += numel
