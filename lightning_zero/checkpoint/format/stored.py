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
import zipfile
from collections.abc import Sequence
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_zero._torch import make_wrapper_subclass, tree_map_only, untracked
from lightning_zero.checkpoint.format.claims import new_tensor
from lightning_zero.checkpoint.format.dcp import BoxItem, StoredBox, StoredBytes
from lightning_zero.checkpoint.format.flat_shard import Box, boxes, elements_before, is_range, linear
from lightning_zero.checkpoint.format.record import Chunk, TensorItem
from lightning_zero.checkpoint.format.torch_file import describe_tensor, load_torch, start_of
from lightning_zero.checkpoint.storage.files import PIECE_NBYTES, Files, Window, open_range
from lightning_zero.errors import CheckpointError
from lightning_zero.storage.file_tensor import FileTensor, aliased, pieces
from lightning_zero.storage.host import bytes_of, view_of

__all__ = ["Source", "StoredTensor", "find_elements", "read_chunk"]


class Elements(Protocol):
    """Where the elements of tensors come from: files, or what is computed from other tensors."""

    def read_elements(self, key: str, item: TensorItem, destination: Tensor, start: int) -> None:
        """Fill a 1-D tensor on any device with the flattened elements of another from ``start`` on, cast to its dtype.

        The range is inside the tensor. ``key`` is for messages; ``CheckpointError`` if the file is damaged.
        """


class StoredTensor(Tensor):
    """A tensor of a checkpoint that is still on disk.

    It has the shape and dtype that were saved, and no memory. ``read_into`` and ``read`` get its elements; so does any
    computation with it, which gives ordinary tensors, so that code which rearranges a checkpoint before it is loaded
    (``torch.cat``, ``.float()``) works. None of these keep the elements.

    What makes a difference between elements and a copy of them (a view, as of slicing, a write in place, an address)
    loads the tensor first, once: its memory then belongs to the handle and to those detached from it, and is what all
    reading gets from now on. Only its shape cannot be changed in place.

    It is read from ``source``, which needs ``item`` to find it; ``key`` is its name there, for messages.
    """

    key: str  # under which it is stored
    _source: Elements
    _item: TensorItem
    _memory: list[Tensor]  # of one once it is loaded; shared with detached handles

    @staticmethod
    def __new__(cls, source: Elements, key: str, item: TensorItem) -> StoredTensor:
        stored: StoredTensor = make_wrapper_subclass(
            cls, torch.Size(item.shape), dtype=item.dtype, device=torch.device("cpu"), requires_grad=False
        )
        stored._source, stored._item, stored.key = source, item, key
        stored._memory = []
        return stored

    @property
    def memory(self) -> Tensor | None:
        """What it was loaded into, if it was."""
        return self._memory[0] if self._memory else None

    def load(self) -> Tensor:
        """The whole tensor, in memory that belongs to this handle from now on: writing to it is writing to the handle.

        ``CheckpointError`` if the file is damaged.
        """
        if not self._memory:
            self._memory.append(self.read())
        return self._memory[0]

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
        if destination.dim() != 1 or start < 0 or start + destination.numel() > self.numel():
            raise ValueError(
                f"Elements {start} to {start + destination.numel()} of '{self.key}' with shape {tuple(self.shape)} "
                f"cannot be read into a tensor of shape {tuple(destination.shape)}."
            )
        with untracked():
            if self.memory is not None:
                destination.copy_(self.memory.reshape(-1)[start : start + destination.numel()])
            elif not isinstance(destination, FileTensor):
                self._source.read_elements(self.key, self._item, destination, start)
            else:  # a piece at a time: sources write to memory of any stride, which a file has not
                for begin, piece in pieces(destination.numel(), destination.dtype, PIECE_NBYTES):
                    self._source.read_elements(self.key, self._item, piece, start + begin)
                    destination.write(piece, begin)

    def read(self) -> Tensor:
        """The whole tensor, in host memory of its own.

        ``CheckpointError`` if the file is damaged, or there is no memory for what it claims.
        """
        with untracked():
            whole = new_tensor(self.shape, self.dtype, f"The tensor '{self.key}'")
            self.read_into(whole.view(-1), 0)
        return whole

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute with what is read from disk; a detached or aliased handle stays a handle."""
        kwargs = kwargs or {}
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            alias = StoredTensor(args[0]._source, args[0].key, args[0]._item)
            alias._memory = args[0]._memory
            return alias
        handles = [*chain(*aliased(cls, func, args, kwargs))]
        if handles and torch.Tag.inplace_view in func.tags:
            raise TypeError(f"{func}: the shape of {handles[0]} cannot be changed in place; use `.clone()` first.")
        owners = {id(handle.load()): handle for handle in handles}
        args, kwargs = tree_map_only(StoredTensor, _elements, (args, kwargs))
        found = func(*args, **kwargs)
        for handle in handles:
            if handle.load().shape != handle.shape:
                raise TypeError(f"{func} gave {handle} the shape {tuple(handle.load().shape)}; use a tensor that fits.")
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
        """Its memory. Asked for a tensor's own, torch would hand out an address that leads nowhere."""
        return self.load().__dlpack__(**options)

    def share_memory_(self) -> StoredTensor:
        """Move its memory to where other processes can reach it."""
        self.load().share_memory_()
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy as the ordinary tensor."""
        return _elements(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredTensor:
        """A handle of its own; what is only on disk stays there."""
        copied = StoredTensor(self._source, self.key, self._item)
        copied._memory = [memory.clone() for memory in self._memory]
        if isinstance(self, torch.nn.Parameter):  # which is an attribute, for a class of tensors
            copied._is_param = True
        memo[id(self)] = copied.requires_grad_(self.requires_grad)
        return copied

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StoredTensor('{self.key}', {tuple(self.shape)}, {self.dtype})"


def _elements(stored: StoredTensor) -> Tensor:
    """To compute with; what has to be read is not kept."""
    return stored.read() if stored.memory is None else stored.memory


# -------------------------------------------------------------------------------------------------------------- reading

_MAX_DIRECTORY_NBYTES = 1 << 17  # of an archive of one tensor: some 700 bytes, and what zip readers look through


class Source:
    """Reads the elements of tensors in the files of a folder: only what is asked for, once.

    A tensor lies in chunks of raw memory, or in boxes, a ``torch.save`` archive each. See [Note: Ranges of boxes].
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        # By all that a description is checked against: another tensor may claim the same archive.
        self._chunks: dict[tuple[StoredBytes, int, torch.dtype, Sequence[int]], Chunk | None] = {}
        self._last: tuple[tuple[StoredBytes, torch.dtype, Sequence[int]], Tensor] | None = None

    def read_elements(self, key: str, item: TensorItem, destination: Tensor, start: int) -> None:
        """See ``Elements``."""
        end = start + destination.numel()
        with untracked():
            for chunk in item.chunks:
                first, last = max(start, chunk.start), min(end, chunk.start + chunk.numel)
                if first < last:
                    part = destination[first - start : last - start]
                    read_chunk(self._files, key, chunk, item.dtype, first, part)
            if isinstance(item, BoxItem):
                for stored in item.boxes:
                    first, last = (elements_before(item.shape, stored.box, place) for place in (start, end))
                    if first < last:
                        self._read_box(key, item, stored, (first, last), destination, start)

    def _read_box(
        self, key: str, item: BoxItem, stored: StoredBox, part: tuple[int, int], destination: Tensor, start: int
    ) -> None:
        first, last = part
        chunk = self._locate(item, stored)
        if chunk is None:
            place = (stored.archive, item.dtype, stored.box.sizes)
            known = self._last  # what is read in pieces must not be loaded for each of them
            loaded = known[1] if known is not None and known[0] == place else self._load(key, item, stored)
            self._last = None if last == loaded.numel() else (place, loaded)
            _scatter(item.shape, stored.box, first, loaded[first:last], destination, start)
        elif is_range(item.shape, stored.box):
            begin = chunk.start + first
            target = destination[begin - start : begin - start + last - first]
            read_chunk(self._files, key, chunk, item.dtype, begin, target)
        else:
            for begin, piece in pieces(last - first, item.dtype, PIECE_NBYTES):
                read_chunk(self._files, key, chunk, item.dtype, chunk.start + first + begin, piece)
                _scatter(item.shape, stored.box, first + begin, piece, destination, start)

    def _locate(self, item: BoxItem, stored: StoredBox) -> Chunk | None:
        """The elements of a box as raw memory; ``None`` if they do not lie so in the file.

        Its ``start`` is the flattened element the box starts with: it is a chunk of the tensor only if the box is
        whole rows.
        """
        archive, sizes = stored.archive, stored.box.sizes
        start = linear(item.shape, stored.box.offsets)
        place = (archive, start, item.dtype, sizes)
        if place not in self._chunks:

            def read_into(offset: int, memory: memoryview) -> None:
                self._files.read_into(archive.file, archive.offset + offset, memory)

            window = Window(read_into, archive.nbytes, _MAX_DIRECTORY_NBYTES)
            found = find_elements(window, archive.nbytes, item.dtype, sizes)
            self._chunks[place] = found and Chunk(
                start, math.prod(sizes), archive.file, archive.offset + found[0], found[1]
            )
        return self._chunks[place]

    def _load(self, key: str, item: BoxItem, stored: StoredBox) -> Tensor:
        """The elements of a box, flattened, of an archive that is built in another way.

        ``CheckpointError`` if it does not hold that tensor, or what could run code.
        """
        archive = stored.archive
        where = f"a part of '{key}' in '{self._files.name}/{archive.file}'"
        file = open_range(self._files, *archive)
        loaded = load_torch(file, where, True, "it is no tensor that can be used anyway")
        if not isinstance(loaded, Tensor) or (loaded.dtype, tuple(loaded.shape)) != (item.dtype, stored.box.sizes):
            what = f"{loaded.dtype} {tuple(loaded.shape)}" if isinstance(loaded, Tensor) else type(loaded).__name__
            raise CheckpointError(
                f"Instead of {where} with {item.dtype} {stored.box.sizes}, {what} lies at byte {archive.offset}: the "
                "file belongs to another checkpoint or another rank."
            )
        return loaded.detach().reshape(-1)


def read_chunk(files: Files, key: str, chunk: Chunk, dtype: torch.dtype, first: int, destination: Tensor) -> None:
    """Read elements of one chunk, in pieces, from ``first`` of the flattened tensor, which ``destination[0]`` gets.

    Checksums are not looked at: with them the same bytes took half as long again. ``verify`` is there for that. A
    ``ValueError`` if the range is not inside the chunk, a ``CheckpointError`` if the file ends before.
    """
    if first < chunk.start or first + destination.numel() > chunk.start + chunk.numel:
        raise ValueError(
            f"Elements {first} to {first + destination.numel()} of '{key}' are not in the part of '{chunk.file}' with "
            f"{chunk.start} to {chunk.start + chunk.numel}."
        )
    direct = destination.device.type == "cpu" and destination.dtype == dtype and destination.is_contiguous()
    direct = direct and type(destination) is Tensor
    step = max(1, PIECE_NBYTES // dtype.itemsize)
    buffer = None if direct else torch.empty(min(step, destination.numel()), dtype=dtype)
    for begin in range(0, destination.numel(), step):
        part = destination[begin : begin + step]
        target = part if buffer is None else buffer[: part.numel()]
        offset = chunk.offset + (first - chunk.start + begin) * dtype.itemsize
        files.read_into(chunk.file, offset, view_of(bytes_of(target)))
        if buffer is not None:
            part.copy_(target)


def find_elements(file: Any, nbytes: int, dtype: torch.dtype, sizes: tuple[int, ...]) -> tuple[int, int | None] | None:
    """Where in a ``torch.save`` archive the elements of such a contiguous tensor begin, and their checksum if known.

    Nothing is unpickled: the description must be, byte for byte, the one that such a tensor has. Whatever is different
    (another layout, age or machine) gives ``None`` and is left to ``torch.load(weights_only=True)``. ``file`` is the
    archive, of ``nbytes``, as a file that reads no more at once than a directory may have.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            listed = archive.infolist()
        entries = {entry.filename.partition("/")[2]: entry for entry in listed}
        if len(entries) != len(listed) or any(entry.compress_type or entry.flag_bits & 1 for entry in listed):
            return None
        data, start = entries["data/0"], start_of(file, entries["data/0"])
        if data.file_size != math.prod(sizes) * dtype.itemsize or start + data.file_size > nbytes:
            return None
        expected = {"data.pkl": describe_tensor(dtype, sizes), "byteorder": sys.byteorder.encode()}
        for name, content in expected.items():
            if name not in entries and name != "data.pkl":
                continue
            file.seek(start_of(file, entries[name]))
            if entries[name].file_size != len(content) or file.read(len(content)) != content:
                return None
        return start, data.CRC or None  # torch writes 0 when told to compute none
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
