"""State of elementwise optimizers: which of it is this rank's slice, and where that is kept."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero._torch import TorchDispatchMode, untracked
from lightning_zero.offload.host import in_memory
from lightning_zero.plan.layout import ALIGNMENT
from lightning_zero.shards.slice import Slice

__all__ = ["SCALARS", "ConstantState", "Kind", "StateHomes", "copied", "covers", "is_like"]
__all__ += ["extent", "grain", "shape_of"]


SCALARS = frozenset({"step", "eta", "mu", "mu_product"})
"""Scalar states of the elementwise optimizers; only matters for 0-d parameters, where shape cannot tell."""

_OF_BLOCKS = frozenset({"exp_avg_scales", "exp_avg_sq_scales"})


def grain(key: str) -> int:
    """How many elements of a parameter one of a state stands for: 1, or as many as no rank ever has a part of."""
    return ALIGNMENT if key in _OF_BLOCKS else 1


def extent(key: str, numel: int) -> int:
    """How many elements a state has for so many of a parameter, or for those before a place where it may be cut."""
    return -(-numel // grain(key))


def shape_of(key: str, shape: Sequence[int]) -> tuple[int, ...]:
    """What shape a state has that is cut as a parameter of ``shape`` is."""
    return tuple(shape) if grain(key) == 1 else (extent(key, math.prod(shape)),)


def covers(key: str, value: Any, numel: int) -> bool:
    """Whether a state value is that of ``numel`` elements of a parameter, rather than a scalar."""
    return isinstance(value, Tensor) and value.dim() == 1 and value.numel() == extent(key, numel)


def is_like(key: str, value: Any, shape: Sequence[int]) -> bool:
    """Whether state of a whole parameter is cut as the parameter is."""
    own = isinstance(value, Tensor) and tuple(value.shape) == shape_of(key, shape)
    return own and (value.dim() > 0 or key not in SCALARS)


def copied(value: Any) -> Any:
    """A scalar state that can be changed without changing ``value``."""
    return value.detach().clone() if isinstance(value, Tensor) else value


class Kind(NamedTuple):
    """One tensor of state that an optimizer keeps of each parameter: its key, and its dtype."""

    key: str
    dtype: torch.dtype


class StateHomes:
    """Where the state of one optimizer is: in memory, beside the masters. An extension keeps it elsewhere."""

    def slice_for(self, entry: Slice, key: str, dtype: torch.dtype) -> Tensor:
        """1-D, the elements of the parameter that are here: what to write its state to. Any content."""
        with untracked():
            return torch.empty(extent(key, entry.place.numel), dtype=dtype, device=entry.device)

    def put(self, entry: Slice, key: str, value: Tensor) -> Tensor:
        """Bring a slice of state that was loaded where it belongs; itself if it is there already."""
        return in_memory(value)

    def release(self) -> None:
        """Let another optimizer of the same run use the room: this one's state is given up."""

    def adopt(self, entry: Slice, state: MutableMapping[str, Any]) -> dict[str, Any]:
        """State that was made for a whole parameter, cut to this rank's slice and put in its place. ``state`` is
        emptied, so that nothing is kept twice."""
        adopted: dict[str, Any] = {}
        with untracked():
            for key in list(state):
                value = state.pop(key)
                if is_like(key, value, entry.spec.shape):
                    value = self._cut(entry, key, value)
                elif isinstance(value, Tensor) and entry.flat.rest.offloaded:
                    value = value.detach().to(entry.device)
                adopted[key] = value
        return adopted

    def _cut(self, entry: Slice, key: str, value: Tensor) -> Tensor:
        place = self.slice_for(entry, key, value.dtype)
        if value.numel() <= 1 or any(value.stride()):
            place.copy_(entry.of(value, grain(key)))
        else:  # one element stands for all
            place.fill_(value[(0,) * value.dim()].item())
        return place


_aten = torch.ops.aten
_FILL = {_aten.zeros_like.default: 0.0, _aten.ones_like.default: 1.0, _aten.empty_like.default: 0.0}


class ConstantState(TorchDispatchMode):
    """For optimizers that make state in their constructor (Adagrad), which must not be made at full size.

    While active, ``zeros_like``, ``ones_like``, ``empty_like`` and ``full_like`` of a placeholder give one element,
    expanded to the placeholder's shape. Attaching the optimizer turns it into this rank's slice.
    """

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
