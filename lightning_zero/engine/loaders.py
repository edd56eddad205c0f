"""``from_pretrained`` builds on meta for itself: it fills every tensor from files, and recording would only disturb it.

It skips initialisation on meta, marks what it has loaded, and initialises the rest. Told that meta tensors are on the
CPU it would take everything for initialised; with recorded draws, a new head would begin with other random numbers than
without a recorder.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch

from lightning_zero._torch import DEVICE_CONTEXT_BEGINS

__all__ = ["Loaders", "loader_above"]


def loader_above(frame: FrameType | None) -> FrameType | None:
    """The innermost ``from_pretrained`` that ``frame`` is or was called by."""
    while frame is not None and frame.f_code.co_name != "from_pretrained":
        frame = frame.f_back
    return frame


class Loaders:
    """The calls of ``from_pretrained`` on the stack that have entered ``torch.device("meta")`` themselves.

    One that runs inside of the user's own ``torch.device("meta")`` is not among them: its tensors are recorded.
    """

    def __init__(self) -> None:
        self._frames: set[int] = set()

    def look_at(self, func: Any, args: tuple[Any, ...], caller: FrameType | None) -> None:
        """See whether a Python call, made in ``caller``, enters ``torch.device("meta")`` in a loader."""
        if func is not torch.device or torch.device(*args).type != "meta":
            return
        while caller is not None and caller.f_code.co_name == "__torch_function__":
            caller = caller.f_back
        if caller is not None and caller.f_code is DEVICE_CONTEXT_BEGINS:
            loader = loader_above(caller)
            if loader is not None:
                self._frames.add(id(loader))

    def run(self) -> bool:
        """Whether the code that asks was called by one of them."""
        if not self._frames:
            return False
        frame = loader_above(sys._getframe(1))
        while frame is not None:
            if id(frame) in self._frames:
                return True
            frame = loader_above(frame.f_back)
        self._frames.clear()  # they have all returned
        return False
