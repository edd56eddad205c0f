"""Optimizers that allocate state in their constructor (Adagrad) must not allocate it at full size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["ConstantState"]

_aten = torch.ops.aten
_FILL = {
    _aten.zeros_like.default: 0.0,
    _aten.ones_like.default: 1.0,
    _aten.empty_like.default: 0.0,
}


class ConstantState(TorchDispatchMode):
    """While active, ``zeros_like``, ``ones_like``, ``empty_like`` and ``full_like`` of a placeholder give one element,
    expanded to the placeholder's shape. Attaching the optimizer turns it into this rank's slice.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        like = args[0] if args else None
        if isinstance(like, Tensor) and like.numel() > 1 and not any(like.stride()):
            fill = args[1] if func is _aten.full_like.default else _FILL.get(func)
            if fill is not None:
                dtype = options.get("dtype") or like.dtype
                device = options.get("device") or like.device
                return torch.full((), fill, dtype=dtype, device=device).expand(like.shape)
        return func(*args, **options)
