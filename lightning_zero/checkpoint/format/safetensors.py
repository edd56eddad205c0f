"""Weights in a safetensors file.

[Note: The safetensors format]

    8 bytes    length of the header, little-endian
    header     JSON: name -> {"dtype", "shape", "data_offsets": [first, end]}, and "__metadata__" with strings
    data       the elements of every tensor, little-endian, without gaps or overlaps; offsets count from here
"""

from __future__ import annotations

import math
import sys
import zlib
from typing import Any

import torch

from lightning_zero.checkpoint.format.record import Chunk, Opened, TensorItem
from lightning_zero.checkpoint.format.stored import Source, StoredTensor
from lightning_zero.checkpoint.format.torch_file import refuse_other_kinds
from lightning_zero.checkpoint.format.typed_json import check_stored, strict_json
from lightning_zero.checkpoint.storage.files import Files, read_bytes
from lightning_zero.errors import CheckpointError

__all__ = ["DAMAGES", "SAFETENSORS_DTYPES", "open_safetensors", "read_safetensors"]

_MAX_HEADER_NBYTES = 100_000_000  # as the reference implementation
DAMAGES = (ValueError, KeyError, TypeError, AttributeError, RecursionError)  # what a forged file raises


def read_safetensors(files: Files, name: str) -> Opened:
    """What is in one file, with a StoredTensor by name; ``CheckpointError`` if it is no whole file of the format.

    See [Note: The safetensors format].
    """
    header, items = open_safetensors(files, name)
    source = Source(files)
    state = {key: StoredTensor(source, key, item) for key, item in items.items()}
    return Opened({"state_dict": state}, zlib.crc32(header))


def open_safetensors(files: Files, name: str) -> tuple[bytes, dict[str, TensorItem]]:
    """A file's header, and the tensors it describes."""
    nbytes = files.size(name)
    refuse_other_kinds(files, name)
    try:
        if sys.byteorder != "little":
            raise ValueError("its elements are little-endian, this machine is not")
        length = int.from_bytes(read_bytes(files, name, 0, 8), "little") if nbytes >= 8 else nbytes
        if length > min(nbytes - 8, _MAX_HEADER_NBYTES):
            raise ValueError(f"its header should have {length} bytes, the whole file has {nbytes}")
        header = read_bytes(files, name, 8, length)
        entries = strict_json(header)
        if not isinstance(entries, dict):
            raise ValueError(f"its header is a {type(entries).__name__}")
        entries.pop("__metadata__", None)
        items = {key: _item(key, entry, name, 8 + length) for key, entry in entries.items()}
        end = 8 + length
        for key, chunk in sorted(
            ((key, chunk) for key, item in items.items() for chunk in item.chunks), key=lambda pair: pair[1].offset
        ):
            if chunk.offset != end:
                raise ValueError(f"'{key}' begins at byte {chunk.offset}, where what is before it ends at byte {end}")
            end += chunk.numel * items[key].dtype.itemsize
        if end != nbytes:
            raise ValueError(f"its tensors end at byte {end}, the file has {nbytes}")
    except DAMAGES as error:
        raise CheckpointError(
            f"'{files.name}/{name}' is cut off, damaged or no safetensors file: {type(error).__name__}: {error}."
        ) from error
    return header, items


def _item(key: str, entry: dict[str, Any], name: str, data: int) -> TensorItem:
    dtype = SAFETENSORS_DTYPES.get(entry["dtype"])
    if dtype is None:
        raise ValueError(f"'{key}' has the dtype {entry['dtype']!r}")
    shape = tuple(entry["shape"])
    first, end = entry["data_offsets"]
    try:
        check_stored(dtype, shape)
    except ValueError as error:
        raise ValueError(f"of '{key}', {error}") from error
    if any(type(number) is not int or number < 0 for number in (first, end)):
        raise ValueError(f"'{key}' lies at {first!r} to {end!r}")
    numel = math.prod(shape)
    if end - first != numel * dtype.itemsize:
        raise ValueError(f"'{key}' has {end - first} bytes, {numel} elements of {dtype} would have another number")
    return TensorItem((), dtype, shape, (Chunk(0, numel, name, data + first, None),) if numel else ())


SAFETENSORS_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""Every dtype by its name in the format."""
