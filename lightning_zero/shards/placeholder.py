"""What a partitioned parameter shows while its unit is not computing.

[Note: the write-protected NaN]
A placeholder is one NaN element expanded to the parameter's shape: shape, ``ndim`` and ``numel()`` are true, reading
gives NaN, and memory is one element per dtype. Its storage refuses writes, because ``zero_()`` would otherwise turn
every placeholder into a plausible zero and a fused CPU optimizer would write ``numel()`` elements into one. A storage
resized to zero instead would let a read crash the interpreter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_zero._torch import forbid_writes, storage_key, untracked
from lightning_zero.storage.file_tensor import FileTensor

__all__ = ["Placeholders"]


class Placeholders:
    """One write-protected sentinel per dtype and device."""

    def __init__(self) -> None:
        self._sentinels: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._keys: set[int] = set()

    def like(self, parameter: Tensor, device: torch.device) -> Tensor:
        """A placeholder of ``parameter``'s shape and dtype on ``device``."""
        key = (parameter.dtype, device)
        if key not in self._sentinels:
            with untracked():
                value: float | int = 0
                if parameter.dtype.is_floating_point or parameter.dtype.is_complex:
                    value = float("nan")
                elif parameter.dtype is not torch.bool:
                    value = torch.iinfo(parameter.dtype).min
                sentinel = torch.full((), value, dtype=parameter.dtype, device=device)
            if device.type != "meta":
                forbid_writes(sentinel)
            self._sentinels[key] = sentinel
            self._keys.add(storage_key(sentinel))
        with untracked():
            return self._sentinels[key].expand(parameter.shape)

    def holds(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is a placeholder (or a view of one)."""
        return not isinstance(tensor, FileTensor) and storage_key(tensor) in self._keys
