"""``zero.json``: the record that makes a directory a checkpoint, and the only file our own loading interprets.

[Note: The directory]

    zero.json           this record, written last
    .metadata           torch.distributed.checkpoint's own index, for other readers
    meta.pt             Lightning's file: what of the checkpoint is not sharded, for other readers
    meta.bin            tensors of ``meta.pt`` too large for JSON, as raw bytes; only if there are any
    __{rank}_0.distcp   one ``torch.save`` archive per box or value that the rank owns

Behind a URL names carry the id of the save (``__0_0-<id>.distcp``, ``meta-<id>.pt``), and neither ``.metadata`` nor
``meta.pt`` is listed; see [Note: Publishing without rename] in ``destination.py``.

``zero.json`` is ``{"format", "version", "sha256", "content"}``. The digest is over the compact JSON text of the
content:

    byteorder, world_size, writer, plan      where it comes from; nothing but ``byteorder`` matters to loading
    files    name -> [size in bytes, crc32 or null]; zero.json itself excluded
    items    DCP name -> what is stored under it, one of
               {"path", "dtype", "shape", "chunks": [[start, numel, file, offset, crc32 or null], ...]}
               {"path", "value": typed JSON}
               {"path", "type", "blob": [file, offset, nbytes]}     a torch.save archive of anything else
    meta     typed JSON of the rest of the checkpoint dictionary

A chunk is a range of the flattened tensor (elements) that lies uncompressed at a byte offset of a file: every box of
a flat slice is one. ``file`` counts in the order of ``files``. A path is the way from the checkpoint dictionary to
the value: strings are keys, numbers are places in a list, ``{"key": typed JSON}`` are other keys.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import reprlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from lightning_zero.checkpoint.format.typed_json import DTYPES, Decoder, Encoder, check_stored, dtype_name, strict_json

__all__ = ["BlobItem", "Chunk", "FileEntry", "Index", "Item", "RECORD_FILE", "Record", "TensorItem", "ValueItem"]

RECORD_FILE = "zero.json"
METADATA_FILE = ".metadata"
META_FILE = "meta.pt"
META_TENSORS_FILE = "meta.bin"

_FORMAT = "lightning_zero"
_VERSION = 1
_FILE_NAME = re.compile(r"[A-Za-z0-9_.\-]+")


class Index(int):
    """A place in a list, on a path; an ordinary ``int`` there is the key of a dictionary."""


class Chunk(NamedTuple):
    """Elements ``start`` to ``start + numel`` of a flattened tensor, at byte ``offset`` of a file."""

    start: int
    numel: int
    file: str
    offset: int
    crc32: int | None


class FileEntry(NamedTuple):
    """Size in bytes and checksum; ``None`` where it was not computed."""

    nbytes: int
    crc32: int | None


@dataclass(frozen=True)
class TensorItem:
    """A tensor; its chunks are sorted and tile the flattened elements exactly."""

    path: tuple[Any, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    def __post_init__(self) -> None:
        check_stored(self.dtype, self.shape)
        end = 0
        for chunk in self.chunks:
            if type(chunk.start) is not int or type(chunk.numel) is not int or not _is_crc32(chunk.crc32):
                raise ValueError(f"it has the part {chunk}")
            if chunk.start != end or chunk.numel <= 0:
                raise ValueError(f"elements {end} to {chunk.start} are stored nowhere or twice")
            end += chunk.numel
        if end != math.prod(self.shape):
            raise ValueError(f"{end} of the {math.prod(self.shape)} elements of shape {self.shape} are stored")


@dataclass(frozen=True)
class ValueItem:
    """A value as typed JSON."""

    path: tuple[Any, ...]
    value: Any


@dataclass(frozen=True)
class BlobItem:
    """A value that typed JSON cannot express, as a ``torch.save`` archive."""

    path: tuple[Any, ...]
    type: str
    file: str
    offset: int
    nbytes: int


Item = TensorItem | ValueItem | BlobItem


@dataclass(frozen=True)
class Record:
    """The content of ``zero.json``. See [Note: The directory].

    Making one raises ``ValueError`` if a chunk or a blob lies outside the files that the record lists, a file name is
    none, or what tells where it comes from is of another type.
    """

    files: Mapping[str, FileEntry]
    items: Mapping[str, Item]
    meta: Any
    plan: Any = None
    world_size: int = 1
    writer: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, entry in self.files.items():
            if not _FILE_NAME.fullmatch(name) or name in (".", "..", RECORD_FILE):
                raise ValueError(f"it lists the file {name!r}, which is not a plain file name")
            if type(entry.nbytes) is not int or not _is_crc32(entry.crc32):
                raise ValueError(f"it lists the file {name!r} with {entry}")
        if type(self.world_size) is not int or self.world_size < 1:
            raise ValueError(f"it has the world size {self.world_size!r}")
        if not isinstance(self.writer, Mapping) or not all(isinstance(value, str) for value in self.writer.values()):
            raise ValueError(f"it was written by {self.writer!r}")
        for key, item in self.items.items():
            if isinstance(item, TensorItem):
                for chunk in item.chunks:
                    self._check_range(key, chunk.file, chunk.offset, chunk.numel * item.dtype.itemsize)
            elif isinstance(item, BlobItem):
                self._check_range(key, item.file, item.offset, item.nbytes)
        # The same elements may have several names, but not be read as more than there are.
        tensors = {
            (item.dtype, item.shape, item.chunks) for item in self.items.values() if isinstance(item, TensorItem)
        }
        claimed = sum(math.prod(shape) * dtype.itemsize for dtype, shape, _ in tensors)
        if claimed > (held := sum(entry.nbytes for entry in self.files.values())):
            raise ValueError(f"its tensors claim {claimed} bytes, its files have {held}")

    def _check_range(self, key: str, file: str, offset: int, nbytes: int) -> None:
        if file not in self.files:
            raise ValueError(f"'{key}' lies in {file!r}, which is not among the listed files")
        if type(offset) is not int or type(nbytes) is not int or offset < 0 or nbytes < 0:
            raise ValueError(f"'{key}' lies at byte {offset!r} of '{file}'")
        if offset + nbytes > self.files[file].nbytes:
            raise ValueError(f"'{key}' ends at byte {offset + nbytes} of '{file}', which has {self.files[file].nbytes}")

    def to_bytes(self) -> bytes:
        """The file's content."""
        numbers = {name: number for number, name in enumerate(self.files)}
        content = {
            "byteorder": sys.byteorder,
            "world_size": self.world_size,
            "writer": dict(self.writer),
            "plan": self.plan,
            "files": {name: list(entry) for name, entry in self.files.items()},
            "items": {key: _item_to_json(item, numbers) for key, item in self.items.items()},
            "meta": self.meta,
        }
        text = _compact(content)
        digest = hashlib.sha256(text.encode()).hexdigest()
        head = _compact({"format": _FORMAT, "version": _VERSION, "sha256": digest})
        return f'{head[:-1]},\n"content":{text}}}\n'.encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Record:
        """Read and check a file; ``ValueError`` if it is damaged, of another version or byte order, or not ours."""
        content = _checked_content(data)
        try:
            files = {name: FileEntry(*entry) for name, entry in content["files"].items()}
            names = list(files)
            items = {key: _item_from_json(key, item, names) for key, item in content["items"].items()}
            return cls(files, items, *(content[key] for key in ("meta", "plan", "world_size", "writer")))
        except (KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
            raise ValueError(f"its content is not what this version writes: {error!r}") from error


def _is_crc32(value: Any) -> bool:
    return value is None or (type(value) is int and 0 <= value < 1 << 32)


def _checked_content(data: bytes) -> dict[str, Any]:
    try:
        whole = strict_json(data)
    except ValueError as error:
        raise ValueError(f"it is damaged or cut off: {error}") from error
    if not isinstance(whole, dict) or whole.get("format") != _FORMAT:
        raise ValueError("it was not written by lightning_zero")
    content = whole.get("content")
    if whole.get("version") != _VERSION:
        writer = content.get("writer") if isinstance(content, dict) else None
        raise ValueError(
            f"it has format version {whole.get('version')!r} (written by {writer}), this lightning_zero reads version "
            f"{_VERSION}: load it with the version that wrote it, or a newer one"
        )
    if not isinstance(content, dict) or hashlib.sha256(_compact(content).encode()).hexdigest() != whole.get("sha256"):
        raise ValueError("its content does not match its checksum: the file was damaged or edited")
    if content.get("byteorder") != sys.byteorder:
        raise ValueError(
            f"it was written on a {content.get('byteorder')}-endian machine, this one is {sys.byteorder}-endian"
        )
    return content


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _item_to_json(item: Item, numbers: Mapping[str, int]) -> dict[str, Any]:
    path = [_path_to_json(part) for part in item.path]
    if isinstance(item, ValueItem):
        return {"path": path, "value": item.value}
    if isinstance(item, BlobItem):
        return {"path": path, "type": item.type, "blob": [numbers[item.file], item.offset, item.nbytes]}
    chunks = [[c.start, c.numel, numbers[c.file], c.offset, c.crc32] for c in item.chunks]
    return {"path": path, "dtype": dtype_name(item.dtype), "shape": list(item.shape), "chunks": chunks}


def _item_from_json(key: str, item: Mapping[str, Any], names: Sequence[str]) -> Item:
    if type(item["path"]) is not list:
        raise ValueError(f"'{key}' has the path {reprlib.repr(item['path'])}")
    path = tuple(_path_from_json(part) for part in item["path"])
    if "value" in item:
        return ValueItem(path, item["value"])
    if "blob" in item:
        number, offset, nbytes = item["blob"]
        return BlobItem(path, str(item["type"]), _name(names, number), offset, nbytes)
    if item["dtype"] not in DTYPES:
        raise ValueError(f"'{key}' has the dtype {item['dtype']!r}, which this torch does not know")
    chunks = tuple(
        Chunk(start, numel, _name(names, number), offset, crc) for start, numel, number, offset, crc in item["chunks"]
    )
    try:
        return TensorItem(path, DTYPES[item["dtype"]], tuple(item["shape"]), chunks)
    except ValueError as error:
        raise ValueError(f"of '{key}', {error}") from error


def _name(names: Sequence[str], number: Any) -> str:
    if type(number) is not int or not 0 <= number < len(names):
        raise ValueError(f"it counts {len(names)} files, of which there is no number {reprlib.repr(number)}")
    return names[number]


def _path_to_json(part: Any) -> Any:
    if type(part) is Index:
        return int(part)
    return part if type(part) is str else {"key": Encoder(strict=True).encode(part)}


def _path_from_json(part: Any) -> Any:
    if type(part) is int:
        return Index(part)
    key = part if type(part) is str else Decoder().decode(part["key"])
    hash(key)  # the key of a dictionary; otherwise a TypeError
    return key
