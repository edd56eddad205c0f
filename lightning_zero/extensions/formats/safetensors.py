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

import torch

from lightning_zero.checkpoint.format.record import Chunk, Opened, TensorItem
from lightning_zero.checkpoint.format.stored import Source, StoredTensor
from lightning_zero.checkpoint.format.typed_json import strict_json
from lightning_zero.checkpoint.storage.files import Files, read_bytes
from lightning_zero.errors import CheckpointError

__all__ = ["DAMAGES", "SAFETENSORS_DTYPES", "open_safetensors", "read_safetensors"]

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
    items: dict[str, TensorItem] = {}
    try:
        if sys.byteorder != "little":
            raise ValueError("its elements are little-endian, this machine is not")
        length = int.from_bytes(read_bytes(files, name, 0, 8), "little") if nbytes >= 8 else nbytes
        if length > min(nbytes - 8, 100_000_000):  # as the reference implementation
            raise ValueError(f"its header should have {length} bytes, the whole file has {nbytes}")
        header = read_bytes(files, name, 8, length)
        entries = strict_json(header)
        entries.pop("__metadata__", None)
        end = 8 + length
        for key, entry in sorted(entries.items(), key=lambda pair: pair[1]["data_offsets"]):
            first, last = (8 + length + offset for offset in entry["data_offsets"])
            dtype, shape = SAFETENSORS_DTYPES.get(entry["dtype"]), tuple(entry["shape"])
            if dtype is None:
                raise ValueError(f"'{key}' has the dtype {entry['dtype']!r}, which is not known here")
            chunk = Chunk(0, (last - first) // dtype.itemsize, name, first, None)
            items[key] = TensorItem((), dtype, shape, (chunk,) if chunk.numel else ())
            if first != end or last - first != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"'{key}' lies at bytes {first} to {last}, and what is before it ends at {end}")
            end = last
        if end != nbytes:
            raise ValueError(f"its tensors end at byte {end}, the file has {nbytes}")
    except DAMAGES as error:
        raise CheckpointError(
            f"'{files.name}/{name}' is cut off, damaged or no safetensors file: {type(error).__name__}: {error}."
        ) from error
    return header, {key: items[key] for key in entries}


SAFETENSORS_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "BF16": torch.bfloat16,
    "C64": torch.complex64,
    **{f"U{bits}": getattr(torch, f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{f"I{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"F{bits}": getattr(torch, f"float{bits}") for bits in (16, 32, 64)},
}
"""Every dtype by its name in the format."""
