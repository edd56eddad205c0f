"""Where in a ``torch.save`` archive the elements of a single plain tensor lie. Nothing is unpickled.

[Note: Reading an archive without loading it]

The archive is a zip file without compression, of which three entries matter: ``data.pkl`` describes the tensor,
``byteorder`` says how its elements are written, ``data/0`` is the elements. The description is a pickle. Its few
instructions are followed here on names instead of objects, so that nothing is called, and the outcome is compared with
the one that a contiguous tensor has. Whatever is different is left to ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import math
import pickletools
import struct
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from lightning_zero.checkpoint.format.typed_json import dtype_name

__all__ = ["Elements", "find_elements"]

Read = Callable[[int, int], bytes]  # (offset in the archive, bytes) -> the bytes

_DIRECTORY_END = b"PK\x05\x06"
_DIRECTORY_END_64 = b"PK\x06\x06"
_LOCATOR_64 = b"PK\x06\x07"
_ENTRY = b"PK\x01\x02"
_HEADER = b"PK\x03\x04"
_END_NBYTES = 1024  # at either end of the archive of one tensor: the description, or the directory of some 700 bytes
_MAX_DIRECTORY_NBYTES = 1 << 16
_MAX_DESCRIPTION_NBYTES = 1 << 14
_FULL = 0xFFFFFFFF  # in a 4-byte field: the number is in the zip64 extra field

_STORAGES = {
    torch.float64: "DoubleStorage",
    torch.float32: "FloatStorage",
    torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage",
    torch.int64: "LongStorage",
    torch.int32: "IntStorage",
    torch.int16: "ShortStorage",
    torch.int8: "CharStorage",
    torch.uint8: "ByteStorage",
    torch.bool: "BoolStorage",
    torch.complex64: "ComplexFloatStorage",
    torch.complex128: "ComplexDoubleStorage",
}


class Elements(NamedTuple):
    """The first byte of the elements in the archive, and their checksum if the writer computed one."""

    offset: int
    crc32: int | None


class _Entry(NamedTuple):
    header: int  # offset of its local header
    nbytes: int
    crc32: int


class _Unknown(Exception):
    """The archive is built in another way."""


def find_elements(read: Read, nbytes: int, dtype: torch.dtype, sizes: tuple[int, ...]) -> Elements | None:
    """Look for the elements of a contiguous tensor. See [Note: Reading an archive without loading it].

    Args:
        read: reads a range of the archive; called once or twice for what torch writes.
        nbytes: of the archive.
        dtype: that the tensor must have.
        sizes: that the tensor must have.

    Returns:
        Their place, or ``None`` if the archive does not hold exactly such a tensor in the usual way.
    """
    try:
        archive = _Archive(read, nbytes)
        entries = archive.entries()
        data = entries["data/0"]
        if data.nbytes != math.prod(sizes) * dtype.itemsize:
            return None
        if "byteorder" in entries and archive.content(entries["byteorder"]) != sys.byteorder.encode():
            return None
        if _follow(archive.content(entries["data.pkl"])) not in _expected(dtype, sizes):
            return None
        return Elements(archive.start(data), data.crc32 or None)  # torch writes 0 when told to compute none
    except (_Unknown, KeyError, ValueError, IndexError, TypeError, struct.error):
        return None


class _Archive:
    """A zip file of which the two ends are read once: all but the elements lies there."""

    def __init__(self, read: Read, nbytes: int) -> None:
        self._read = read
        self._nbytes = nbytes
        whole = nbytes <= 2 * _END_NBYTES
        self._head = read(0, nbytes if whole else _END_NBYTES)
        self._tail_start = 0 if whole else nbytes - _END_NBYTES
        self._tail = self._head if whole else read(self._tail_start, _END_NBYTES)

    def entries(self) -> dict[str, _Entry]:
        """The directory, with names inside of the archive's one folder."""
        tail = self._tail
        end = tail.rfind(_DIRECTORY_END)
        count, size, start = struct.unpack_from("<HII", tail, end + 10)
        if end < 0 or end < 20:
            raise _Unknown
        if tail[end - 20 : end - 16] == _LOCATOR_64:
            (end_64,) = struct.unpack_from("<Q", tail, end - 20 + 8)
            record = self._part(end_64, 56)
            if record[:4] != _DIRECTORY_END_64:
                raise _Unknown
            count, size, start = struct.unpack_from("<QQQ", record, 32)
        if size > _MAX_DIRECTORY_NBYTES:
            raise _Unknown
        directory = self._part(start, size)
        entries: dict[str, _Entry] = {}
        position = 0
        for _ in range(count):
            entry, name, position = _entry(directory, position)
            inside = name.partition("/")[2]
            if inside in entries:
                raise _Unknown
            entries[inside] = entry
        return entries

    def start(self, entry: _Entry) -> int:
        """Where an entry's bytes begin."""
        header = self._part(entry.header, 30)
        name_length, extra_length = struct.unpack_from("<HH", header, 26)
        start: int = entry.header + 30 + name_length + extra_length
        if header[:4] != _HEADER or start + entry.nbytes > self._nbytes:
            raise _Unknown
        return start

    def content(self, entry: _Entry) -> bytes:
        """The bytes of a small entry."""
        if entry.nbytes > _MAX_DESCRIPTION_NBYTES:
            raise _Unknown
        return self._part(self.start(entry), entry.nbytes)

    def _part(self, start: int, count: int) -> bytes:
        """A range, from what was read already if it is there."""
        if start + count > self._nbytes:
            raise _Unknown
        if start + count <= len(self._head):
            return self._head[start : start + count]
        if start >= self._tail_start:
            return self._tail[start - self._tail_start : start - self._tail_start + count]
        return self._read(start, count)


def _entry(directory: bytes, position: int) -> tuple[_Entry, str, int]:
    fields = struct.unpack_from("<4s6H3I5H2I", directory, position)
    magic, _, _, flags, method, _, _, crc32, compressed, nbytes, name_length, extra_length, comment_length = fields[:13]
    header = fields[-1]
    if magic != _ENTRY or method != 0 or flags & 1:
        raise _Unknown
    name_end = position + 46 + name_length
    name = directory[position + 46 : name_end].decode()
    wide = _zip64(directory[name_end : name_end + extra_length], (nbytes, compressed, header).count(_FULL))
    nbytes, compressed, header = (wide.pop(0) if value == _FULL else value for value in (nbytes, compressed, header))
    if compressed != nbytes:
        raise _Unknown
    return _Entry(header, nbytes, crc32), name, name_end + extra_length + comment_length


def _zip64(extra: bytes, count: int) -> list[int]:
    """The 8-byte numbers of the zip64 extra field."""
    position = 0
    while count and position + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, position)
        if kind == 1:
            return list(struct.unpack_from(f"<{count}Q", extra, position + 4))
        position += 4 + length
    return []


def _expected(dtype: torch.dtype, sizes: tuple[int, ...]) -> list[Any]:
    """What following the description of a contiguous tensor gives: two forms, by age of the dtype."""
    numel = math.prod(sizes)
    strides = tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))
    hooks = ("call", ("name", "collections OrderedDict"), ())
    layout = (0, sizes, strides, False, hooks)
    name, count = ("name", "torch.storage UntypedStorage"), numel * dtype.itemsize
    storage = ("persistent", ("storage", name, "0", "cpu", count))
    rebuild = ("name", "torch._utils _rebuild_tensor_v3")
    found: list[Any] = [("call", rebuild, (storage, *layout, ("name", f"torch {dtype_name(dtype)}")))]
    if dtype in _STORAGES:
        storage = ("persistent", ("storage", ("name", f"torch {_STORAGES[dtype]}"), "0", "cpu", numel))
        found.append(("call", ("name", "torch._utils _rebuild_tensor_v2"), (storage, *layout)))
    return found


_MARK = object()


def _follow(description: bytes) -> Any:
    """What a pickle would build, with tuples in place of names, calls and storages."""
    stack: list[Any] = []
    for opcode, argument, _ in pickletools.genops(description):
        name = opcode.name
        if name in ("PROTO", "BINPUT", "LONG_BINPUT", "MEMOIZE", "FRAME"):
            continue
        if name == "STOP":
            break
        if name == "MARK":
            stack.append(_MARK)
        elif name == "GLOBAL":
            stack.append(("name", argument))
        elif name in _LITERALS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _TUPLE_SIZES:
            stack[len(stack) - _TUPLE_SIZES[name] :] = [tuple(stack[len(stack) - _TUPLE_SIZES[name] :])]
        elif name == "TUPLE":
            mark = len(stack) - 1 - stack[::-1].index(_MARK)
            stack[mark:] = [tuple(stack[mark + 1 :])]
        elif name == "BINPERSID":
            stack.append(("persistent", stack.pop()))
        elif name == "REDUCE":
            arguments = stack.pop()
            stack.append(("call", stack.pop(), arguments))
        else:
            raise _Unknown
    (outcome,) = stack
    return outcome


_LITERALS = {"BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE"}
_CONSTANTS: dict[str, Any] = {"NEWFALSE": False, "NEWTRUE": True, "EMPTY_TUPLE": ()}
_TUPLE_SIZES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
