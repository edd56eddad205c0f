"""State of elementwise optimizers: what of it is this rank's slice of something, and what is one value for all."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_zero.optim.owned import OwnedParameter

__all__ = ["SCALARS", "constant_of", "covers", "has_slices"]

SCALARS = frozenset({"step", "eta", "mu", "mu_product"})
"""Scalar states of the elementwise optimizers; only matters for 0-d parameters, where shape cannot tell."""


def covers(value: Any, numel: int) -> bool:
    """Whether a state value is a slice of ``numel`` elements, rather than a scalar."""
    return isinstance(value, Tensor) and value.dim() == 1 and value.numel() == numel


def has_slices(key: str, value: Any, entry: OwnedParameter) -> bool:
    """Whether state that a constructor made for the whole parameter has an element for each of the parameter's."""
    if not isinstance(value, Tensor) or tuple(value.shape) != tuple(entry.shard.spec.shape):
        return False
    return value.dim() > 0 or key not in SCALARS


def constant_of(value: Tensor) -> float | None:
    """The one element that a tensor of more repeats, ``None`` if there are several in memory."""
    return value[(0,) * value.dim()].item() if value.numel() > 1 and not any(value.stride()) else None


def cut_out(value: Tensor, entry: OwnedParameter) -> Tensor:
    """1-D: this rank's slice of state of the parameter's shape; a view of ``value``."""
    numel = entry.slice.numel
    return value.detach().reshape(-1).narrow(0, entry.shard.start if numel else 0, numel)


def copied(value: Any) -> Any:
    """A scalar state that can be changed without changing ``value``."""
    return value.detach().clone() if isinstance(value, Tensor) else value
