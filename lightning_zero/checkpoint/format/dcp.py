"""The index of a ``torch.distributed.checkpoint`` directory, ``.metadata``, and the boxes that its data files hold.

[Note: A pickle that calls nothing]

Unpickling calls what the file names. Here it can only name the classes that DCP writes, each by its exact name, and
gets an empty stand-in for each: a class that lives as long as this one reading and can do nothing but hold attributes.
So not even the values of an attribute of a class of torch can be changed from a file, which the names alone would not
prevent. What comes out is then checked field by field.

[Note: Boxes]

A shard is a contiguous range of a flattened parameter, but DCP stores boxes (an offset and a size per dimension). A
range is at most ``2 n - 1`` boxes of an n-dimensional parameter: the rest of a row, whole rows, the beginning of a
row, and the same again inside each partial row. Elements 5 to 16 of shape (5, 4):

    .  .  .  .
    .  a  a  a      box a: offset (1, 1), size (1, 3)
    b  b  b  b      box b: offset (2, 0), size (2, 4)
    b  b  b  b
    c  .  .  .      box c: offset (4, 0), size (1, 1)

The concatenation of the boxes, each flattened, is the range again: a box is a piece of the slice's own memory.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import mul
from typing import Any

import torch

from lightning_zero.checkpoint.format.record import (
    BlobItem,
    Box,
    Item,
    Split,
    StoredBox,
    StoredBytes,
    TensorItem,
    stored_path,
)
from lightning_zero.checkpoint.format.typed_json import DTYPES

__all__ = [
    "archives",
    "boxes",
    "linear",
    "overlap",
    "parse_metadata",
    "part_boxes",
    "tile",
    "write_metadata",
]


def boxes(shape: Sequence[int], start: int, end: int) -> list[Box]:
    """Cover elements ``start`` to ``end`` (exclusive) of the flattened ``shape``. See [Note: Boxes].

    Returns:
        Non-empty boxes in the order of the range; at most ``max(1, 2 * len(shape) - 1)`` of them, none for an empty
        range.
    """
    shape, found = tuple(shape), []
    rows = _rows(shape)
    while start < end and shape:  # the largest that begins here
        dim = 0
        while start % (row := rows[dim]) or start + row > end:
            dim += 1
        offsets = tuple([start // row % size for row, size in zip(rows, shape, strict=True)])
        count = min((end - start) // row, shape[dim] - offsets[dim])
        found.append(Box(offsets, (*(1,) * dim, count, *shape[dim + 1 :])))
        start += count * row
    return found if shape or start >= end else [Box((), ())]


def part_boxes(shape: Sequence[int], split: Split | None, start: int, end: int) -> list[Box]:
    """``boxes``, of a range of one of the parts that a tensor is ``split`` into: see ``record.Split``."""
    if split is None or start >= end:
        return boxes(shape, start, end)
    dim, parts = split
    numel, size = math.prod(shape) // parts, shape[dim] // parts
    number = start // numel
    found = boxes((*shape[:dim], size, *shape[dim + 1 :]), start - number * numel, end - number * numel)
    return [Box((*at[:dim], at[dim] + number * size, *at[dim + 1 :]), sizes) for at, sizes in found]


@lru_cache(maxsize=1024)
def _rows(shape: tuple[int, ...]) -> list[int]:
    """How many elements one step in each dimension passes."""
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def linear(shape: Sequence[int], offsets: Sequence[int]) -> int:
    """The place of an element in the flattened tensor."""
    return sum(map(mul, offsets, _rows(tuple(shape))))


def overlap(one: Box, other: Box) -> Box | None:
    """The elements that two boxes of a tensor have in common, if there are any."""
    offsets = tuple(map(max, one.offsets, other.offsets))
    sizes = tuple(
        min(a + m, b + n) - offset
        for offset, a, m, b, n in zip(offsets, one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )
    return Box(offsets, sizes) if min(sizes, default=1) > 0 else None


def tile(shape: Sequence[int], parts: Sequence[Box]) -> bool:
    """Whether boxes in a tensor cover every element once: as ranges, or as a grid, which is all that DCP makes."""
    numels = [math.prod(box.sizes) for box in parts]
    ranges = [(linear(shape, box.offsets), numel) for box, numel in zip(parts, numels, strict=True)]
    if all(boxes(shape, start, start + numel) == [box] for box, (start, numel) in zip(parts, ranges, strict=True)):
        return _side_by_side(ranges, math.prod(shape))
    edges = [{(box.offsets[dim], box.sizes[dim]) for box in parts} for dim in range(len(shape))]
    is_grid = len(set(parts)) == len(parts) == math.prod(map(len, edges))
    return is_grid and all(_side_by_side(found, size) for found, size in zip(edges, shape, strict=True))


def _side_by_side(ranges: Iterable[tuple[int, int]], size: int) -> bool:
    """Whether ranges (start, length) follow each other from 0 to ``size``."""
    end = 0
    for start, length in sorted(ranges):
        if start != end:
            return False
        end += length
    return end == size


def archives(items: Mapping[str, TensorItem | BlobItem]) -> Iterator[tuple[str, StoredBytes]]:
    """The name of every box and value, and where its archive lies."""
    for name, item in items.items():
        if isinstance(item, BlobItem):
            yield name, StoredBytes(item.file, item.offset, item.nbytes)
        else:
            yield from ((name, stored.archive) for stored in item.boxes)


# -------------------------------------------------------------------------------------------------------------- reading

_METADATA = "torch.distributed.checkpoint.metadata"
_KNOWN = {("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch.serialization", "_get_layout")}
_KNOWN |= {("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")}  # its name in Python 3.13
_KNOWN |= {(_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "ChunkStorageMetadata")}
_KNOWN |= {(_METADATA, name) for name in ("TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties")}
_KNOWN |= {_ENCODING := (_METADATA, "_MEM_FORMAT_ENCODING")}


def parse_metadata(data: bytes) -> dict[str, TensorItem | BlobItem]:
    """What is in the directory, by DCP name: tensors, and the archives of other values, of a type that nobody knows.

    Reads and checks the content of ``.metadata``: see [Note: A pickle that calls nothing]. ``ValueError`` with the
    reason if it is not what DCP writes. The order and the paths are those of the dictionary that was saved, where the
    writer recorded them.
    """
    try:
        return _index(_Unpickler(io.BytesIO(data)).load())
    except _Refused:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise ValueError(f"it is damaged: {type(error).__name__}: {error}") from error


class _Refused(ValueError):
    """What must not be in an index, or does not fit together."""


class _StandIn:
    """Base of the empty classes, which no file can name."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        """Take attributes over; of tensors' properties the state is dtype, layout and what does not matter."""
        self.__dict__.update(state if isinstance(state, dict) else zip(("dtype", "layout"), state, strict=False))


class _Unpickler(pickle._Unpickler):  # in Python: a damaged number in a file does not become memory
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._known: dict[tuple[str, str], Any] = {("torch", name): dtype for name, dtype in DTYPES.items()}
        self._known |= {key: type(key[1], (_StandIn,), {}) for key in _KNOWN}
        self._known["torch", "Size"] = lambda items=(): tuple(items)
        self._known["builtins", "getattr"] = self._member

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._known:
            raise _Refused(
                f"it names {module}.{name}, which does not belong into a checkpoint's index: the file was not written "
                "by torch.distributed.checkpoint alone, and loading it could run code"
            )
        return self._known[module, name]

    def _member(self, kind: Any, name: Any) -> Any:
        """How Python 3.11.0 to 3.11.3 write a member of an enum; anything else is refused, and nothing is looked up."""
        return kind(name) if kind is self._known[_ENCODING] else self.find_class("builtins", "getattr of another class")


def _index(loaded: Any) -> dict[str, TensorItem | BlobItem]:
    if type(loaded).__name__ != "Metadata":
        raise _Refused(f"it holds a {type(loaded).__name__}")
    places: dict[Any, StoredBytes] = {}
    for key, info in loaded.storage_data.items():
        if getattr(info, "transform_descriptors", None):
            raise _Refused(
                f"'{key.fqn}' was written through {info.transform_descriptors}: only plain bytes can be read"
            )
        if not re.fullmatch(r"(?!\.\.?$)[^/\\\0]+", info.relative_path):
            raise _Refused(f"'{key.fqn}' lies in the file {info.relative_path!r}, which is not a plain file name")
        place = StoredBytes(info.relative_path, *_sizes((info.offset, info.length)))
        places[key.fqn, getattr(key, "offset", None)] = place  # no offset: of a value
    items: dict[str, TensorItem | BlobItem] = {}
    entries, paths = loaded.state_dict_metadata, getattr(loaded, "planner_data", None) or {}
    for name in dict.fromkeys([*(name for name in paths if name in entries), *entries.keys()]):
        path, entry = paths.get(name, (name,)), entries[name]
        if type(path) is not tuple or not path or any(type(part) not in (str, int) for part in (*path, name)):
            raise _Refused(f"it holds {reprlib.repr(path)} instead of a path")
        if type(entry).__name__ == "BytesStorageMetadata":
            items[name] = BlobItem(path, "", *places[name, None])
        else:
            items[name] = _tensor(name, path, entry, places)
    return items


def _tensor(name: str, path: tuple[Any, ...], entry: Any, places: Mapping[Any, StoredBytes]) -> TensorItem:
    shape, dtype, layout = _sizes(entry.size), entry.properties.dtype, entry.properties.layout
    if not isinstance(dtype, torch.dtype) or layout.arguments != ("torch.strided",):
        raise _Refused(f"'{name}' is not a plain tensor: {reprlib.repr((dtype, layout.arguments))}")
    parts = []
    for chunk in entry.chunks:
        box = Box(_sizes(chunk.offsets), _sizes(chunk.sizes))
        if any(offset + size > total for offset, size, total in zip(*box, shape, strict=True)):
            raise _Refused(f"of '{name}' with shape {reprlib.repr(shape)}, a part has {reprlib.repr(box)}")
        if 0 in box.sizes:
            continue
        place = places.get((name, box.offsets), places.get((name, None)) if len(entry.chunks) == 1 else None)
        if place is None or math.prod(box.sizes) * dtype.itemsize > place.nbytes:
            held = "bytes that are nowhere" if place is None else f"more than the {place.nbytes} bytes that it lies in"
            raise _Refused(f"of '{name}', {box} claims {held}")
        parts.append(StoredBox(box, place))
    try:
        item = TensorItem(path, dtype, shape, boxes=tuple(parts))
        if not tile(shape, [stored.box for stored in parts]):  # what nobody wrote would be any memory
            raise ValueError(f"elements of shape {shape} are stored nowhere or twice")
        return item
    except ValueError as error:
        raise _Refused(f"of '{name}', {error}") from error


def _sizes(value: Any) -> tuple[int, ...]:
    if type(value) is not tuple or any(type(size) is not int or size < 0 for size in value):
        raise _Refused(f"it holds {reprlib.repr(value)} instead of sizes")
    return value


# -------------------------------------------------------------------------------------------------------------- writing


def write_metadata(items: Mapping[str, Item], archives: Mapping[str, StoredBytes], file: Any) -> None:
    """Write the content of ``.metadata``, for the readers of stock directories, to a file: what has a method ``write``.

    In small pieces, between which other threads get their turn. ``archives`` are those of the values that DCP knows.
    """
    # Takes longer to import than this package, and many trainings save nothing.
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # private: 2.11 to 2.15
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for name, item in items.items():
        if isinstance(item, TensorItem):
            chunks = []
            for number, (box, archive) in enumerate(item.boxes):
                chunks.append(ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)))
                places[MetadataIndex(name, box.offsets, number)] = _StorageInfo(*archive)
            entries[name] = TensorStorageMetadata(TensorProperties(dtype=item.dtype), torch.Size(item.shape), chunks)
        elif name in archives:
            entries[name] = BytesStorageMetadata()
            places[MetadataIndex(name)] = _StorageInfo(*archives[name])
    pickle.Pickler(file).dump(Metadata(entries, {name: stored_path(items[name].path) for name in entries}, places))
