"""Memory for full parameters and full gradients: few byte buffers, allocated once, used by one unit at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_zero._torch import storage_key, untracked
from lightning_zero.comm.streams import Event
from lightning_zero.plan import ALIGNMENT, FlatLayout

__all__ = ["Slot", "carve"]


def carve(buffer: Tensor, layouts: Sequence[FlatLayout], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Flat buffers of several layouts, one after the other in a byte buffer.

    Args:
        buffer: 1-D uint8, at least as large as all layouts together.
        layouts: what to place, in order. Their sizes are multiples of ``ALIGNMENT`` elements.
        dtypes: element type of each.

    Returns:
        1-D views of ``buffer``, ``layout.numel`` elements each.
    """
    views, start = [], 0
    for layout, dtype in zip(layouts, dtypes, strict=True):
        start = -(-start // (ALIGNMENT * dtype.itemsize)) * ALIGNMENT * dtype.itemsize
        nbytes = layout.numel * dtype.itemsize
        views.append(buffer.narrow(0, start, nbytes).view(dtype))
        start += nbytes
    return views


@dataclass(eq=False)
class Slot:
    """A byte buffer that holds one unit at a time.

    Args:
        buffer: 1-D uint8, owned by the slot for the life of the engine.
        owner: what is in it now (a unit), or ``None``.
        pins: how many users forbid that another unit takes it.
        free: device-side event after which the memory may be overwritten.
    """

    buffer: Tensor
    owner: Any = None
    pins: int = 0
    free: Event = None
    key: int = field(init=False)

    def __post_init__(self) -> None:
        self.key = storage_key(self.buffer)

    @classmethod
    def allocate(cls, nbytes: int, device: torch.device) -> Slot:
        """A slot with fresh memory of ``nbytes`` bytes on ``device``."""
        with untracked():
            return cls(torch.empty(nbytes, dtype=torch.uint8, device=device))
