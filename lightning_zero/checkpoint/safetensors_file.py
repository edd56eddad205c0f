"""The layout of a safetensors file: a JSON header with every tensor's place, then the elements."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from lightning_zero.checkpoint.typed_json import dtype_name

__all__ = ["SAFETENSORS_DTYPES", "SafetensorsFile", "TensorSpec"]

_ALIGNMENT = 8
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

_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


class TensorSpec(NamedTuple):
    """A contiguous tensor without its elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsFile:
    """Where everything lies in a file of these tensors.

    Args:
        tensors: by name. Those of wide dtypes come first in the file, so that every element is aligned; otherwise the
            order is kept.
        metadata: text by name, for readers.

    Raises:
        ValueError: if a dtype has no name in this format, naming the tensor.

    Attributes:
        head: the first bytes of the file.
        offsets: of every tensor's first byte in the file, in the order of the file.
        nbytes: size of the whole file.
    """

    def __init__(self, tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> None:
        header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        begins: dict[str, int] = {}
        end = 0
        for name, spec in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
            if spec.dtype not in _NAMES:
                raise ValueError(f"'{name}' is of {dtype_name(spec.dtype)}, which a safetensors file cannot hold")
            begins[name], end = end, end + spec.nbytes
            header[name] = {
                "dtype": _NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [begins[name], end],
            }
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self.head = len(text).to_bytes(8, "little") + text
        self.offsets = {name: len(self.head) + begin for name, begin in begins.items()}
        self.nbytes = len(self.head) + end
