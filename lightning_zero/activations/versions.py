"""Autograd's own check for in-place changes, where other saved-tensor hooks have switched it off.

Torch's activation checkpointing keeps no versions: a forward that changes a tensor after saving it (``h = x.exp(); y =
f(h); h.mul_(2)``), which plain torch refuses, would be run again up to some point, and backward would read whatever is
in the memory then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_zero._torch import (
    Pack,
    Unpack,
    disable_dynamo,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    top_saved_tensor_hooks,
    version_probe,
)

__all__ = ["VersionCheck", "check_version"]


def check_version(probe: Tensor, version: int, dtype: torch.dtype, shape: torch.Size) -> None:
    """Refuse a saved tensor that was changed.

    Args:
        probe: counts its changes.
        version: what it counted when the tensor was saved.
        dtype: of the tensor, for the message.
        shape: likewise.

    Raises:
        RuntimeError: beginning as torch's own message does.
    """
    if probe._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a "
            f"{dtype} tensor of shape {list(shape)} was saved at version {version} and is now at version "
            f"{probe._version}. Change a copy of it instead (y = y + x, not y += x)."
        )


class _Checked(NamedTuple):
    packed: Any
    unpack: Unpack
    probe: Tensor | None
    version: int
    dtype: torch.dtype
    shape: torch.Size


class VersionCheck:
    """Hands everything on to the pair of hooks that was active before, and looks at versions itself."""

    def __init__(self) -> None:
        self._outer: list[tuple[Pack, Unpack]] = []
        # Permanent objects that Dynamo does not trace.
        self._pack_hook = disable_dynamo(self._pack)
        self._unpack_hook = disable_dynamo(self._unpack)

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Check what is saved inside, on this thread. Nests."""
        outer = top_saved_tensor_hooks()
        if outer is None:  # torch checks
            yield
            return
        self._outer.append(outer)
        push_saved_tensor_hooks(self._pack_hook, self._unpack_hook)
        try:
            yield
        finally:
            pop_saved_tensor_hooks()
            self._outer.pop()

    def _pack(self, tensor: Tensor) -> Any:
        pack, unpack = self._outer[-1]
        packed = pack(tensor)
        counts = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
        probe = version_probe(tensor) if counts else None
        return _Checked(packed, unpack, probe, tensor._version if counts else 0, tensor.dtype, tensor.shape)

    def _unpack(self, packed: _Checked) -> Tensor:
        if packed.probe is not None:
            check_version(packed.probe, packed.version, packed.dtype, packed.shape)
        tensor: Tensor = packed.unpack(packed.packed)
        return tensor
