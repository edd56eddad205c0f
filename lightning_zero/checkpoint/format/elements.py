"""Elements of a tensor from where they lie in files: as raw memory, or in the boxes that DCP stored it in.

[Note: Ranges of boxes]

Elements are asked for as a range of the flattened tensor, and stored as boxes whose elements lie one after the other.
In both the order is that of the coordinates. So the elements of a box that are in the range are a range of the box,
and one piece of its file, whatever the shapes are: only they are read, once. Where they go is one range too if the box
is whole rows, and otherwise the pieces of [Note: Boxes], each a strided view of the destination.
"""

from __future__ import annotations

import ctypes
import io
import itertools
import math
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero._torch import untracked
from lightning_zero.checkpoint.format.dcp import StoredBox, StoredBytes
from lightning_zero.checkpoint.format.flat_shard import Box, boxes
from lightning_zero.checkpoint.format.record import Chunk, TensorItem
from lightning_zero.checkpoint.format.torch_file import describe_tensor, load_torch, start_of
from lightning_zero.checkpoint.format.typed_json import check_stored
from lightning_zero.checkpoint.storage.files import PIECE_NBYTES, Files, Window, read_bytes
from lightning_zero.errors import CheckpointError

__all__ = ["BoxItem", "BoxSource", "ChunkSource", "memory_of", "read_chunk"]


class ChunkSource:
    """Tensors whose chunks are known. Reads the bytes that are asked for, once.

    Args:
        files: where they lie.
    """

    def __init__(self, files: Files) -> None:
        self._files = files

    def read_elements(self, key: str, item: TensorItem, destination: Tensor, start: int) -> None:
        end = start + destination.numel()
        with untracked():
            for chunk in item.chunks:
                first, last = max(start, chunk.start), min(end, chunk.start + chunk.numel)
                if first < last:
                    part = destination[first - start : last - start]
                    read_chunk(self._files, key, chunk, item.dtype, first, part)


def read_chunk(files: Files, key: str, chunk: Chunk, dtype: torch.dtype, first: int, destination: Tensor) -> None:
    """Read elements of one chunk, in pieces.

    Args:
        files: where it lies.
        key: the tensor's name, for messages.
        chunk: where its elements lie.
        dtype: of what is stored.
        first: the element of the flattened tensor, inside the chunk, that ``destination[0]`` gets.
        destination: 1-D, not beyond the chunk, on any device, of any dtype. Written.

    Checksums are not looked at: with them the same bytes took half as long again. ``verify`` is there for that.

    Raises:
        ValueError: if the range is not inside the chunk.
        CheckpointError: if the file ends before.
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
        memory = memory_of(target)
        files.read_into(chunk.file, chunk.offset + (first - chunk.start + begin) * dtype.itemsize, memory)
        if buffer is not None:
            part.copy_(target)


def memory_of(tensor: Tensor) -> memoryview:
    """A contiguous host tensor's bytes, to be written to. The tensor must outlive it."""
    array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")


_MAX_DIRECTORY_NBYTES = 1 << 17  # of an archive of one tensor: some 700 bytes, and what zip readers look through


@dataclass(frozen=True)
class BoxItem(TensorItem):
    """A tensor in boxes, which tile it exactly. It has no chunks.

    Raises:
        ValueError: if they do not, or no tensor can be like that.
    """

    boxes: tuple[StoredBox, ...] = ()

    def __post_init__(self) -> None:
        check_stored(self.dtype, self.shape)
        if not _tile(self.shape, [stored.box for stored in self.boxes]):
            raise ValueError(f"elements of shape {self.shape} are stored nowhere or twice")


class BoxSource:
    """Tensors stored as boxes, a ``torch.save`` archive each. See [Note: Ranges of boxes].

    Args:
        files: where they lie.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        # By all that a description is checked against: another tensor may claim the same archive.
        self._chunks: dict[tuple[StoredBytes, int, torch.dtype, Sequence[int]], Chunk | None] = {}
        self._last: tuple[tuple[StoredBytes, torch.dtype, Sequence[int]], Tensor] | None = None

    def read_elements(self, key: str, item: TensorItem, destination: Tensor, start: int) -> None:
        if not isinstance(item, BoxItem):
            raise TypeError(f"'{key}' is not stored in boxes")
        end = start + destination.numel()
        with untracked():
            for stored in item.boxes:
                first = _elements_before(item.shape, stored.box, start)
                last = _elements_before(item.shape, stored.box, end)
                if first < last:
                    self._read(key, item, stored, (first, last), destination, start)

    def locate(self, key: str, item: BoxItem, stored: StoredBox) -> Chunk | None:
        """The elements of a box as raw memory; ``None`` if they do not lie so in the file.

        Its ``start`` is the flattened element the box starts with: it is a chunk of the tensor only if the box is
        whole rows.
        """
        archive = stored.archive
        start = _linear(item.shape, stored.box.offsets)
        place = (archive, start, item.dtype, stored.box.sizes)
        if place not in self._chunks:

            def read_into(offset: int, memory: memoryview) -> None:
                self._files.read_into(archive.file, archive.offset + offset, memory)

            window = Window(read_into, archive.nbytes, _MAX_DIRECTORY_NBYTES)
            found = find_elements(window, archive.nbytes, item.dtype, stored.box.sizes)
            numel = math.prod(stored.box.sizes)
            self._chunks[place] = found and Chunk(
                start, numel, archive.file, archive.offset + found.offset, found.crc32
            )
        return self._chunks[place]

    def load(self, key: str, item: BoxItem, stored: StoredBox) -> Tensor:
        """The elements of a box, flattened, of an archive that is built in another way.

        Raises:
            CheckpointError: if it does not hold that tensor, or what could run code.
        """
        archive = stored.archive
        where = f"a part of '{key}' in '{self._files.name}/{archive.file}'"
        data = read_bytes(self._files, archive.file, archive.offset, archive.nbytes)
        loaded = load_torch(io.BytesIO(data), where, True, "it is no tensor that can be used anyway")
        if not isinstance(loaded, Tensor) or (loaded.dtype, tuple(loaded.shape)) != (item.dtype, stored.box.sizes):
            what = f"{loaded.dtype} {tuple(loaded.shape)}" if isinstance(loaded, Tensor) else type(loaded).__name__
            raise CheckpointError(
                f"Instead of {where} with {item.dtype} {stored.box.sizes}, {what} lies at byte {archive.offset}: the "
                "file belongs to another checkpoint or another rank."
            )
        return loaded.detach().reshape(-1)

    def _read(
        self,
        key: str,
        item: BoxItem,
        stored: StoredBox,
        part: tuple[int, int],
        destination: Tensor,
        start: int,
    ) -> None:
        """Read elements of one box."""
        first, last = part
        chunk = self.locate(key, item, stored)
        if chunk is None:
            place = (stored.archive, item.dtype, stored.box.sizes)
            known = self._last  # what is read in pieces must not be loaded for each of them
            loaded = known[1] if known is not None and known[0] == place else self.load(key, item, stored)
            self._last = None if last == loaded.numel() else (place, loaded)
            _scatter(item.shape, stored.box, first, loaded[first:last], destination, start)
        elif _is_range(item.shape, stored.box):
            begin = chunk.start + first
            target = destination[begin - start : begin - start + last - first]
            read_chunk(self._files, key, chunk, item.dtype, begin, target)
        else:
            step = max(1, PIECE_NBYTES // item.dtype.itemsize)
            buffer = torch.empty(min(step, last - first), dtype=item.dtype)
            for begin in range(first, last, step):
                piece = buffer[: min(step, last - begin)]
                memory = memory_of(piece)
                self._files.read_into(chunk.file, chunk.offset + begin * item.dtype.itemsize, memory)
                _scatter(item.shape, stored.box, begin, piece, destination, start)


class Elements(NamedTuple):
    """The first byte of the elements in an archive, and their checksum if the writer computed one."""

    offset: int
    crc32: int | None


def find_elements(file: Any, nbytes: int, dtype: torch.dtype, sizes: tuple[int, ...]) -> Elements | None:
    """Where in a ``torch.save`` archive the elements of a contiguous tensor lie.

    Nothing is unpickled: the description must be, byte for byte, the one that such a tensor has. Whatever is different
    (another layout, age or machine) gives ``None`` and is left to ``torch.load(weights_only=True)``.

    Args:
        file: the archive, as a file that reads no more at once than a directory may have.
        nbytes: of the archive.
        dtype: that the tensor must have.
        sizes: that the tensor must have.
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
        return Elements(start, data.CRC or None)  # torch writes 0 when told to compute none
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
        place = destination.storage_offset() + (_linear(shape, offsets) - start) * destination.stride(0)
        view = destination.as_strided(part.sizes, strides, place)
        view.copy_(values[position : position + numel].view(part.sizes))
        position += numel


def _linear(shape: Sequence[int], offsets: Sequence[int]) -> int:
    return sum(offset * math.prod(shape[dim + 1 :]) for dim, offset in enumerate(offsets))


def _elements_before(shape: Sequence[int], box: Box, end: int) -> int:
    """How many elements of a box come before element ``end`` of the flattened tensor."""
    if end >= math.prod(shape):
        return math.prod(box.sizes)
    count = 0
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        row, end = divmod(end, math.prod(shape[dim + 1 :]))
        inner = math.prod(box.sizes[dim + 1 :])
        if row < offset:
            return count
        if row >= offset + size:
            return count + size * inner
        count += (row - offset) * inner
    return count


def _is_range(shape: Sequence[int], box: Box) -> bool:
    """Whether a box is a range of the flattened tensor."""
    partial = next((dim for dim, size in enumerate(box.sizes) if size != 1), len(shape))
    return tuple(box.sizes[partial + 1 :]) == tuple(shape[partial + 1 :])


def _tile(shape: Sequence[int], parts: Sequence[Box]) -> bool:
    """Whether boxes cover every element once: as ranges, or as the cells of a grid, which is all that DCP makes."""
    if sum(math.prod(box.sizes) for box in parts) != math.prod(shape):
        return False
    if all(_is_range(shape, box) for box in parts):
        end = 0
        for begin, numel in sorted((_linear(shape, box.offsets), math.prod(box.sizes)) for box in parts):
            if begin != end:
                return False
            end += numel
        return True
    cuts = [[*sorted({box.offsets[dim] for box in parts}), size] for dim, size in enumerate(shape)]
    if math.prod(len(cut) - 1 for cut in cuts) != len(parts):
        return False
    cells = set(itertools.product(*(itertools.pairwise(cut) for cut in cuts)))
    ends = [[offset + size for offset, size in zip(box.offsets, box.sizes, strict=True)] for box in parts]
    return cells == {tuple(zip(box.offsets, end, strict=True)) for box, end in zip(parts, ends, strict=True)}
