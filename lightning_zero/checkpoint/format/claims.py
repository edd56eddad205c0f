"""What a file claims to hold, compared with what is there, before memory is taken or time is spent."""

from __future__ import annotations

import os
import struct
import zipfile
from typing import IO, Any

import torch
from torch import Tensor

from lightning_zero.checkpoint.format.items import tensors_in
from lightning_zero.checkpoint.format.pickled import Asked, follow
from lightning_zero.checkpoint.storage.ranges import MAX_INDEX_NBYTES, memory_nbytes
from lightning_zero.errors import CheckpointError

__all__ = ["ZIP", "archive_entries", "check_expanded", "check_torch_file", "new_tensor"]

ZIP = b"PK\x03\x04"  # what an archive begins with
_END = struct.Struct("<4sHHHHIIH")
_LOCATOR_64 = struct.Struct("<4sIQI")
_END_64 = struct.Struct("<4sQHHIIQQQQ")
_PICKLES = 5  # of the format until torch 1.6: a mark, a version, the machine, the object, and the storages' keys
_EXPANDED_NBYTES = 1 << 28


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

    Raises:
        ValueError: if it is built in another way, so that two readers could see two things in it, if entries are
            compressed, or if they are larger than the archive.
    """
    nbytes = file.seek(0, os.SEEK_END)
    ends = _END.size + _LOCATOR_64.size + _END_64.size
    file.seek(max(0, nbytes - ends))
    tail = file.read(ends)
    if len(tail) < _END.size:
        raise ValueError(f"{nbytes} bytes are no archive")
    mark, *_, count, size, begin, comment = _END.unpack(tail[-_END.size :])
    end = nbytes - _END.size
    if len(tail) == ends and tail[_END_64.size :].startswith(b"PK\x06\x07"):
        _, _, place, _ = _LOCATOR_64.unpack(tail[_END_64.size : -_END.size])
        mark_64, *_, count, size, begin = _END_64.unpack(tail[: _END_64.size])
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
    if file.read(len(ZIP)) != ZIP:
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
