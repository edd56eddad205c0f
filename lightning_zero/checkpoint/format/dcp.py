"""``.metadata``, the pickle that is the index of a stock ``torch.distributed.checkpoint`` directory, read safely.

[Note: A pickle that calls nothing]

Unpickling calls what the file names. Here it can only name the classes that DCP writes, each by its exact name, and
gets an empty stand-in for each: a class that lives as long as this one reading and can do nothing but hold attributes.
So not even the values of an attribute of a class of torch can be changed from a file, which the names alone would not
prevent. What comes out is then checked field by field.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from lightning_zero.checkpoint.format.flat_shard import Box
from lightning_zero.checkpoint.format.typed_json import DTYPES

__all__ = ["Index", "StoredBox", "StoredBytes", "StoredShape", "parse_metadata"]

_METADATA = "torch.distributed.checkpoint.metadata"
_CLASSES = {
    (_METADATA, "Metadata"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}
_TUPLES = {
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # its name in Python 3.13
}
_DTYPES = {("torch", name): dtype for name, dtype in DTYPES.items()}
_PUTS = {"PUT", "BINPUT", "LONG_BINPUT"}  # an array is made as long as the number says
_FORBIDDEN = {"BYTEARRAY8", "NEXT_BUFFER", "READONLY_BUFFER", "EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID"}
_STRIDED = ("torch.strided",)  # what the stand-in of `_get_layout` makes of it


class StoredBytes(NamedTuple):
    """A range of a file."""

    file: str
    offset: int
    nbytes: int


class StoredBox(NamedTuple):
    """A box of a tensor and the ``torch.save`` archive it lies in."""

    box: Box
    archive: StoredBytes


@dataclass(frozen=True)
class StoredShape:
    """A tensor; its boxes have elements and are in bounds."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[StoredBox, ...]


@dataclass(frozen=True)
class Index:
    """What is in the directory.

    Attributes:
        items: a tensor, or the archive of any other value, by DCP name.
        paths: the way to each in the dictionary that was saved, where the writer recorded it.
    """

    items: Mapping[str, StoredShape | StoredBytes]
    paths: Mapping[str, tuple[Any, ...]]


def parse_metadata(data: bytes) -> Index:
    """Read and check the content of ``.metadata``. See [Note: A pickle that calls nothing].

    Raises:
        ValueError: with the reason, if it names what DCP does not write or is not what DCP writes.
    """
    try:
        _check_opcodes(data)
        unpickler = _Unpickler(io.BytesIO(data))
        loaded = unpickler.load()
    except _Refused as error:
        raise ValueError(str(error)) from None
    except Exception as error:  # a damaged pickle can raise anything
        raise ValueError(f"it is damaged: {type(error).__name__}: {error}") from error
    try:
        return _index(loaded, unpickler.stand_in)
    except (AttributeError, TypeError, KeyError) as error:
        raise ValueError(f"it is not what torch.distributed.checkpoint writes: {error!r}") from error


class _Refused(Exception):
    """A name that is not on the list, or an opcode."""


def _check_opcodes(data: bytes) -> None:
    """Refuse what takes memory or objects that the file does not contain, which the unpickler would do at once."""
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in _FORBIDDEN or (opcode.name in _PUTS and int(argument or 0) >= len(data)):
            raise _Refused(f"it holds {opcode.name} {argument}, which torch.distributed.checkpoint does not write")


def _foreign(module: str, name: str) -> _Refused:
    return _Refused(
        f"it names {module}.{name}, which does not belong into a checkpoint's index: the file was not written by "
        "torch.distributed.checkpoint alone, and loading it could run code"
    )


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._made: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _DTYPES:
            return _DTYPES[module, name]
        if (module, name) == ("torch", "Size"):
            return self._make((module, name), _tuple)
        if (module, name) in _TUPLES:
            return self._make((module, name), _arguments)
        if (module, name) in _CLASSES:
            return self.stand_in(name)
        if (module, name) == (_METADATA, "TensorProperties"):
            return self._make((module, name), lambda: type(name, (), {"__setstate__": _set_properties}))
        if (module, name) == ("builtins", "getattr"):
            return self._member
        raise _foreign(module, name)

    def _member(self, kind: Any, name: Any) -> tuple[Any, ...]:
        """How Python 3.11.0 to 3.11.3 write a member of an enum; anything else is refused, and nothing is read."""
        if kind is not self._made.get((_METADATA, "_MEM_FORMAT_ENCODING")):
            raise _foreign("builtins", "getattr")
        return (name,)

    def stand_in(self, name: str) -> Any:
        """The empty class for one of DCP's classes."""
        return self._make(("", name), lambda: type(name, (), {}))

    def _make(self, key: tuple[str, str], make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def _tuple() -> Callable[..., tuple[Any, ...]]:
    def size(items: Any = ()) -> tuple[Any, ...]:
        return tuple(items)

    return size


def _arguments() -> Callable[..., tuple[Any, ...]]:
    def arguments(*values: Any) -> tuple[Any, ...]:
        return values

    return arguments


def _set_properties(properties: Any, state: tuple[Any, ...]) -> None:
    properties.dtype, properties.layout, *_ = state


def _index(loaded: Any, kind: Callable[[str], Any]) -> Index:
    if type(loaded) is not kind("Metadata"):
        raise ValueError(f"it holds a {type(loaded).__name__}")
    places: dict[str, dict[Any, StoredBytes]] = {}
    for key, info in _mapping(loaded.storage_data).items():
        offset = getattr(key, "offset", None)  # a default that is not written
        places.setdefault(_text(key.fqn), {})[None if offset is None else _sizes(offset)] = _stored_bytes(key.fqn, info)
    items: dict[str, StoredShape | StoredBytes] = {}
    for name, entry in _mapping(loaded.state_dict_metadata).items():
        found = places.get(_text(name), {})
        if type(entry) is kind("BytesStorageMetadata"):
            if None not in found:
                raise ValueError(f"it does not say where '{name}' lies")
            items[name] = found[None]
        elif type(entry) is kind("TensorStorageMetadata"):
            items[name] = _tensor(name, entry, found)
        else:
            raise ValueError(f"'{name}' is a {type(entry).__name__}")
    paths = getattr(loaded, "planner_data", None) or {}
    return Index(items, {_text(name): _path(path) for name, path in _mapping(paths).items()})


def _tensor(name: str, entry: Any, found: Mapping[Any, StoredBytes]) -> StoredShape:
    shape, dtype = _sizes(entry.size), entry.properties.dtype
    if not isinstance(dtype, torch.dtype) or entry.properties.layout != _STRIDED:
        raise ValueError(f"'{name}' is not a plain tensor: dtype {dtype}, layout {entry.properties.layout}")
    boxes = []
    for chunk in entry.chunks:
        box = Box(_sizes(chunk.offsets), _sizes(chunk.sizes))
        fits = len(box.offsets) == len(box.sizes) == len(shape) and all(
            offset + size <= total for offset, size, total in zip(box.offsets, box.sizes, shape, strict=True)
        )
        if not fits:
            raise ValueError(f"of '{name}' with shape {shape}, a part has {box}")
        if 0 in box.sizes:
            continue
        place = found.get(box.offsets, found.get(None) if len(entry.chunks) == 1 else None)
        if place is None:
            raise ValueError(f"it does not say where the part of '{name}' at {box.offsets} lies")
        boxes.append(StoredBox(box, place))
    return StoredShape(dtype, shape, tuple(boxes))


def _stored_bytes(name: str, info: Any) -> StoredBytes:
    if getattr(info, "transform_descriptors", None):
        raise ValueError(f"'{name}' was written through {info.transform_descriptors}: only plain bytes can be read")
    file = _text(info.relative_path)
    if file in ("", ".", "..") or "/" in file or "\\" in file or "\0" in file:
        raise ValueError(f"'{name}' lies in the file {file!r}, which is not a plain file name")
    offset, nbytes = _sizes((info.offset, info.length))
    return StoredBytes(file, offset, nbytes)


def _mapping(value: Any) -> Mapping[Any, Any]:
    if type(value) is not dict:
        raise ValueError(f"it holds a {type(value).__name__} instead of a dictionary")
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    if type(value) is not tuple or any(type(size) is not int or size < 0 for size in value):
        raise ValueError(f"it holds {reprlib.repr(value)} instead of sizes")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"it holds {reprlib.repr(value)} instead of a name")
    return value


def _path(value: Any) -> tuple[Any, ...]:
    if type(value) is not tuple or not value or any(type(part) not in (str, int) for part in value):
        raise ValueError(f"it holds {reprlib.repr(value)} instead of a path")
    return value
