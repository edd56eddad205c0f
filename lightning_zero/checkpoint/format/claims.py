"""What a file claims to hold, compared with what is there, before memory is taken or time is spent.

[Note: What a pickle asks for]

A pickle is a program for a stack machine. One of a kilobyte can put a tuple twice into the next, sixty times over, and
use the last as a key: its hash takes 2^60 steps. It can ask for an array of any length, or for a storage that the file
has no bytes for. So the program is followed first, with two numbers in place of each value: how many values it would be
with all that it shares written out, and how deep they lie in one another. What is added to a list after the list went
into something else is not counted there: no hash and no copy into a tuple sees it, which is what unpickling does. What
looks through a structure afterwards has to know by itself where it has been.
"""

from __future__ import annotations

import os
import pickletools
import struct
import zipfile
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero.checkpoint.format.items import tensors_in
from lightning_zero.checkpoint.storage.files import MAX_INDEX_NBYTES, memory_nbytes
from lightning_zero.errors import CheckpointError

__all__ = [
    "END",
    "END_64",
    "LOCATOR_64",
    "START_NBYTES",
    "ZIP",
    "archive_entries",
    "check_expanded",
    "check_torch_file",
    "follow",
    "new_tensor",
    "refuse_other_kinds",
]

ZIP = b"PK\x03\x04"  # what an archive begins with
_PICKLE = b"\x80"  # what one begins with, and with it what torch wrote until version 1.6
END = struct.Struct("<4sHHHHIIH")
LOCATOR_64 = struct.Struct("<4sIQI")
END_64 = struct.Struct("<4sQHHIIQQQQ")
_PICKLES = 5  # of the format until torch 1.6: a mark, a version, the machine, the object, and the storages' keys
_EXPANDED_NBYTES = 1 << 28
START_NBYTES = 256  # that tell kinds of files apart


def refuse_other_kinds(start: bytes, where: str) -> None:
    """``CheckpointError`` for a file that is no checkpoint at all, by its first ``START_NBYTES``: empty, or a text."""
    lines = start.decode("utf-8", "ignore").split("\n")
    if not start:
        kind = "the file is empty"
    elif lines[0].startswith("version https://git-lfs"):
        kind = "it is a pointer of Git LFS, which stands for the file. Get the file with `git lfs pull`"
    elif b"\0" not in start and all(line.replace("\t", " ").rstrip("\r").isprintable() for line in lines):
        kind = f"it is a text file, which begins with {lines[0][:40]!r}"
    else:
        return
    raise CheckpointError(f"{where} is no checkpoint: {kind}.")


def new_tensor(shape: Any, dtype: torch.dtype, what: str) -> Tensor:
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


def archive_entries(file: IO[bytes]) -> dict[str, zipfile.ZipInfo]:
    """The entries of an archive of ``torch.save``, by name without the archive's own.

    ``ValueError`` if it is built in another way, so that two readers could see two things in it, if entries are
    compressed, or if they are larger than the archive.
    """
    nbytes = file.seek(0, os.SEEK_END)
    ends = END.size + LOCATOR_64.size + END_64.size
    file.seek(max(0, nbytes - ends))
    tail = file.read(ends)
    if len(tail) < END.size:
        raise ValueError(f"{nbytes} bytes are no archive")
    mark, *_, count, size, begin, comment = END.unpack(tail[-END.size :])
    end = nbytes - END.size
    if len(tail) == ends and tail[END_64.size :].startswith(b"PK\x06\x07"):
        _, _, place, _ = LOCATOR_64.unpack(tail[END_64.size : -END.size])
        mark_64, *_, count, size, begin = END_64.unpack(tail[: END_64.size])
        end = nbytes - ends
        mark = mark if (mark_64, place) == (b"PK\x06\x06", end) else b""
    if mark != b"PK\x05\x06" or comment or begin + size != end or size > MAX_INDEX_NBYTES:
        raise ValueError("its directory is not at its end, as torch.save puts it")
    with zipfile.ZipFile(file) as archive:
        listed = archive.infolist()
    entries = {entry.filename.partition("/")[2]: entry for entry in listed}
    if len({name.lower() for name in entries}) != len(listed) or len(listed) != count:
        raise ValueError("two of its entries have the same name, or more are counted than there are")
    for entry in listed:
        if entry.compress_type or entry.flag_bits & 1 or entry.compress_size != entry.file_size:
            raise ValueError(f"its entry '{entry.filename}' is compressed or encrypted, which torch.save does not do")
    if sum(entry.file_size for entry in listed) > nbytes:
        raise ValueError(f"its entries have {sum(entry.file_size for entry in listed)} bytes, it has {nbytes}")
    return entries


def check_torch_file(file: IO[bytes], *, mapped: bool = False) -> None:
    """``ValueError`` if ``torch.load(weights_only=True)`` would take memory or time for what is not in a torch file.

    One that is not mapped has to fit into the memory of this machine.
    """
    nbytes = file.seek(0, os.SEEK_END)
    file.seek(0)
    if (start := file.read(len(ZIP))) != ZIP:
        if start[:1] != _PICKLE:
            raise ValueError(f"no file of torch begins with {start!r}")
        file.seek(0)
        pickles = [follow(file, min(nbytes, MAX_INDEX_NBYTES)) for _ in range(_PICKLES)]
        _check_calls(pickles)
        rest = min(nbytes - file.tell(), memory_nbytes())
        if (claimed := _claimed(pickles[3])) > rest:
            raise ValueError(f"its tensors claim {claimed} bytes where there are {rest}")
        return
    entries = archive_entries(file)
    described = entries.get("data.pkl")
    if described is None:
        raise ValueError("it has no entry 'data.pkl'")
    if described.file_size > MAX_INDEX_NBYTES:
        raise ValueError(f"what describes its tensors has {described.file_size} bytes")
    if not described.CRC:  # torch was told to compute none
        described.CRC = None  # type: ignore[assignment]
    with zipfile.ZipFile(file) as archive:
        asked = follow(archive.read(described), described.file_size)
    _check_calls([asked])
    if (claimed := _claimed(asked)) > memory_nbytes() and not mapped:
        raise ValueError(f"its tensors claim {claimed} bytes, this machine has {memory_nbytes()}")
    for storage in asked.storages:
        wanted, entry = _storage_nbytes(storage), entries.get(f"data/{storage[2]}")
        if entry is None or wanted > entry.file_size:
            raise ValueError(f"a tensor claims {wanted} bytes of 'data/{str(storage[2])[:40]}', which has not so many")


def _claimed(asked: Asked) -> int:
    """Bytes of all storages."""
    sizes = [(_storage_nbytes(storage), str(storage[2])) for storage in asked.storages]
    return sum({key: nbytes for nbytes, key in sizes}.values())


def _storage_nbytes(storage: Any) -> int:
    """Of what a persistent id asks for: ``("storage", class, key, device, number of elements, ...)``."""
    if type(storage) is not tuple or len(storage) < 5 or type(storage[4]) is not int or storage[4] < 0:
        raise ValueError("it names a storage in another way than torch.save")
    try:
        dtype = torch.serialization.StorageType(str(storage[1]).rpartition(" ")[2]).dtype
    except KeyError:  # of bytes, or of no kind, which torch refuses
        return int(storage[4])
    return int(storage[4] * dtype.itemsize)


def _check_calls(pickles: list[Asked]) -> None:
    """Refuse to make an array or a tensor of a length that is written down, with nothing to fill it."""
    for function, arguments in (call for asked in pickles for call in asked.calls):
        name, parts = str(function), arguments if type(arguments) is tuple else (0,)
        is_array = name in ("builtins bytearray", "__builtin__ bytearray") and any(type(part) is int for part in parts)
        is_tensor = name.startswith("torch") and name.endswith(("Tensor", "Storage"))
        if is_array or (is_tensor and any(type(part) is not str for part in parts)):
            raise ValueError(f"it makes a {name.replace(' ', '.')} out of {str(arguments)[:40]}, without its elements")


def check_expanded(loaded: Any) -> None:
    """``ValueError`` if tensors claim far more elements than their storages hold, as with strides of 0.

    A little is usual: a buffer that was expanded is saved as what it was expanded from.
    """
    beyond = 0
    for tensor in tensors_in(loaded):
        if tensor.layout is torch.strided and (tensor.device.type == "cpu" or tensor.is_meta):
            held = 0 if tensor.is_meta else tensor.untyped_storage().nbytes()
            beyond += max(0, tensor.numel() * tensor.dtype.itemsize - held)
            if beyond > _EXPANDED_NBYTES:
                raise ValueError(f"a tensor claims the shape {tuple(tensor.shape)}, for which its storage is too small")


# ------------------------------------------------------------------------------------------------------------- pickles

_MAX_DEPTH = 256
_MAX_STACK = 1 << 20  # of values that wait to be put into another, which pickling does for each thousand
_MAX_SHARING, _MANY = 16, 1 << 20  # a value may be that many times as many as there are instructions, or that many

_PUTS = {"PUT", "BINPUT", "LONG_BINPUT"}
_GETS = {"GET", "BINGET", "LONG_BINGET"}
_CHANGES = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"}
_CALLS = {"REDUCE", "NEWOBJ"}  # those that torch knows
_FORBIDDEN = {"BYTEARRAY8", "NEXT_BUFFER", "READONLY_BUFFER", "EXT1", "EXT2", "EXT4", "PERSID"}


class _Effect(NamedTuple):
    """What an opcode takes from the stack beside all above the last mark, and whether it leaves a value there."""

    below: int
    to_mark: bool
    leaves: bool


_EFFECTS: dict[str, _Effect] = {}
for _opcode in pickletools.opcodes:
    _taken = [item.name for item in _opcode.stack_before]
    _below = _taken.index("mark") if "mark" in _taken else len(_taken)
    _EFFECTS[_opcode.name] = _Effect(_below, "mark" in _taken, bool(_opcode.stack_after))
_ATOMS = {name for name, effect in _EFFECTS.items() if effect == (0, False, True)}
_ATOMS -= {"EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET", "MARK", *_GETS}
_ATOM = (1, 0, None)


class Asked(NamedTuple):
    """What a pickle asks for: persistent ids, and what is called, each as (``"module name"``, arguments).

    Numbers, texts, names and tuples of them are given as they are, anything else as ``None``.
    """

    storages: list[Any]
    calls: list[tuple[Any, Any]]


def follow(data: bytes | IO[bytes], nbytes: int, *, max_depth: int = _MAX_DEPTH, values: bool = True) -> Asked:
    """Follow one pickle of at most ``nbytes`` to its end. See [Note: What a pickle asks for].

    Without ``values`` nothing is remembered of what it asks for. ``ValueError`` if a value in it is too deep, or too
    large with what it shares written out, if it asks for memory that it does not fill, or if it is none.
    """
    asked = Asked([], [])
    # A value is its number of values, its depth, and what it is: itself, or parts of it.
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}
    count = 0
    for opcode, argument, position in pickletools.genops(data):
        name, count = opcode.name, count + 1
        if name in _FORBIDDEN or (name in _PUTS and int(argument or 0) >= nbytes) or (position or 0) > nbytes:
            raise ValueError(f"it holds {name} {str(argument)[:40]} at byte {position}, which no checkpoint needs")
        try:
            if name in _ATOMS:
                stack.append((1, 0, argument) if values else _ATOM)
            elif name in _GETS:
                stack.append(memo[argument])
            elif name in _PUTS or name == "MEMOIZE":
                memo[len(memo) if argument is None else argument] = stack[-1]
            elif name == "MARK":
                marks.append(len(stack))
            elif name == "DUP":
                stack.append(stack[-1])
            elif name == "POP" and marks and marks[-1] == len(stack):
                marks.pop()
            else:
                number, depth = _do(name, stack, marks, asked if values else None)
                if number > _MANY and number > _MAX_SHARING * count:
                    raise ValueError(f"it holds the same values in one another until they are {number}")
                if depth > max_depth:
                    raise ValueError(f"it holds values in one another more than {max_depth} deep")
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"it is damaged: {name} at byte {position} cannot be done") from error
        if len(stack) > _MAX_STACK:
            raise ValueError(f"it holds over {_MAX_STACK} values that go nowhere")
    return asked


def _do(name: str, stack: list[Any], marks: list[int], asked: Asked | None) -> tuple[int, int]:
    """One instruction that takes values and leaves none, a changed one, or a new one: its number and depth."""
    effect = _EFFECTS[name]
    begin = (marks.pop() if effect.to_mark else len(stack)) - effect.below
    if begin < (marks[-1] if marks else 0):
        raise IndexError(name)
    taken = stack[begin:]
    del stack[begin:]
    if not effect.leaves:
        return 0, 0
    value: Any = taken.pop(0) if name in _CHANGES else [1, 0, None]
    number, depth = 0, value[1]
    for part in taken:
        number += part[0]
        if part[1] >= depth:
            depth = part[1] + 1
    value[0] += number
    value[1] = depth
    stack.append(value)
    if asked is None:
        return value[0], depth
    if name == "STACK_GLOBAL":
        value[2] = " ".join(str(part[2]) for part in taken)
    elif name.startswith("TUPLE"):
        value[2] = taken
    elif name == "BINPERSID":
        asked.storages.append(_plain(taken[0]))
    elif name in _CALLS:
        asked.calls.append((_plain(taken[0]), _plain(taken[1])))
    return value[0], depth


def _plain(value: Any, depth: int = 2) -> Any:
    """A value, as far as it is made of numbers, texts, names and tuples."""
    parts = value[2]
    if type(parts) is not list:
        return parts
    return tuple(_plain(part, depth - 1) for part in parts) if depth else None
