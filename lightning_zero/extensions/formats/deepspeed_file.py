"""A file of ``torch.save`` with objects of any class in it, read without running their code: DeepSpeed's."""

from __future__ import annotations

import io
import math
import pickle
import zlib
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_zero.checkpoint.format.claims import archive_entries, check_expanded, check_torch_file
from lightning_zero.checkpoint.format.record import Chunk, TensorItem
from lightning_zero.checkpoint.format.stored import Source, StoredTensor
from lightning_zero.checkpoint.format.torch_file import start_of
from lightning_zero.checkpoint.format.typed_json import DTYPES
from lightning_zero.checkpoint.storage.files import Files, open_range
from lightning_zero.errors import CheckpointError, shortened

__all__ = ["DeepSpeedFile", "Unknown", "UnknownType"]

_NBYTES = 1 << 12  # read at once


class UnknownType(type):
    """The class of classes that are not known."""


class Unknown(metaclass=UnknownType):
    """Takes anything, and does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    __setstate__ = __setitem__ = append = extend = add = __init__


class DeepSpeedFile(pickle.Unpickler):
    """A file of ``torch.save``: its content, with a ``StoredTensor`` for each tensor, and a digest."""

    def __init__(self, files: Files, source: Source, name: str, expected: type = dict) -> None:
        self.name, self.where, self.source = name, f"'{files.name}/{name}'", source
        self._file = open_range(files, name, 0, files.size(name), buffer_nbytes=_NBYTES)
        self._known: dict[str, Any] = {f"torch.{name}": dtype for name, dtype in DTYPES.items()}
        self._known |= {f"{kind.__module__}.{kind.__qualname__}": kind for kind in (OrderedDict, Counter, complex)}
        self._known["torch.Size"] = lambda sizes=(): tuple(sizes)
        self._known["torch._utils._rebuild_parameter"] = lambda data, *_: data
        self._known["torch._tensor._rebuild_from_type_v2"] = lambda rebuild, _kind, parts, _state: rebuild(*parts)
        self._known |= {f"torch._utils._rebuild_tensor_{version}": self._tensor for version in ("v2", "v3")}
        for allowed in torch.serialization.get_safe_globals():  # by the user
            kind, text = allowed if isinstance(allowed, tuple) else (allowed, "")
            self._known.setdefault(text or f"{kind.__module__}.{kind.__qualname__}", kind)
        try:
            check_torch_file(self._file, mapped=True)
            self._entries = archive_entries(self._file)
            self._file.seek(start_of(self._file, self._entries["data.pkl"]))
            super().__init__(io.BytesIO(self._file.read(self._entries["data.pkl"].file_size)))
            self.content = self.load()
            self.digest = zlib.crc32(repr([(e.file_size, e.CRC) for e in self._entries.values()]).encode())
        except Exception as error:  # what is damaged or forged can raise anything
            raise self.unusable(f"{type(error).__name__}: {error}") from error
        self.get(kind=expected)

    def unusable(self, why: str) -> CheckpointError:
        """What to raise if the file is not what it should be."""
        return CheckpointError(
            f"{self.where} cannot be used: {shortened(why)}. It is damaged, or of a DeepSpeed of another layout: "
            "use an earlier save, or the `zero_to_fp32.py` that DeepSpeed puts beside it."
        )

    def get(self, *path: Any, kind: type | tuple[type, ...] = dict) -> Any:
        """A part of the content, of a kind; ``CheckpointError`` if there is none."""
        value = self.content
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if not isinstance(value, kind):
            raise self.unusable(f"`{'.'.join(map(str, path))}` in it is a {type(value).__name__}")
        return value

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("torch") and name.endswith("Storage"):  # of a persistent id
            return name
        text = f"{module.replace('__builtin__', 'builtins')}.{name}"
        return self._known.get(text) or self._known.setdefault(text, UnknownType(name, (Unknown,), {"origin": text}))

    def persistent_load(self, reference: Any) -> tuple[torch.dtype, int, int]:
        _, kind, key, _, numel = reference[:5]
        dtype = torch.uint8 if kind == "UntypedStorage" else torch.serialization.StorageType(kind).dtype
        return dtype, start_of(self._file, self._entries[f"data/{key}"]), numel * dtype.itemsize

    def _tensor(self, storage: Any, start: int, shape: Sequence[int], stride: Sequence[int], *more: Any) -> Tensor:
        """In place of torch's functions that make a tensor; ``ValueError`` if it claims more than its storage holds."""
        held, offset, nbytes = storage
        dtype = more[2] if len(more) > 2 else held
        span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if math.prod(shape) else 0
        if min(start, span, *stride, 0) < 0 or (start + span) * dtype.itemsize > nbytes:
            raise ValueError(f"a tensor of shape {tuple(shape)} claims more than its {nbytes} bytes")
        chunks = (Chunk(0, span, self.name, offset + start * dtype.itemsize, None),) if span else ()
        if torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device="meta").is_contiguous():
            return StoredTensor(self.source, self.name, TensorItem((), dtype, tuple(shape), chunks))
        flat = StoredTensor(self.source, self.name, TensorItem((), dtype, (span,), chunks)).read()
        check_expanded([strided := flat.as_strided(tuple(shape), tuple(stride))])
        return strided.contiguous()
