"""Which dtype a parameter is computed in, and which its gradient is reduced in."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_zero.plan.flat import ParameterSpec


@dataclass(frozen=True, kw_only=True)
class DtypeRules:
    """Mixed precision as data.

    Attributes:
        param_dtype: compute dtype of floating parameters other than float64; None: each parameter's own.
        reduce_dtype: reduction dtype of their gradients; None: each parameter's own dtype, so that 16-bit compute
            over float32 masters reduces in float32.
        keep: names of parameters that are computed in their own dtype whatever ``param_dtype`` says.

    Raises:
        ValueError: if a dtype is not a floating one.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    keep: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for setting, dtype in (("param_dtype", self.param_dtype), ("reduce_dtype", self.reduce_dtype)):
            if dtype is not None and not dtype.is_floating_point:
                raise ValueError(f"{setting} must be a floating dtype, got {dtype}.")

    def compute(self, spec: ParameterSpec) -> torch.dtype:
        """The dtype of the buffer that the module computes with."""
        if self.param_dtype is None or not _may_narrow(spec) or spec.name in self.keep:
            return spec.dtype
        return self.param_dtype

    def reduce(self, spec: ParameterSpec) -> torch.dtype:
        """The dtype of the gradient bucket; the compute dtype for a frozen parameter, which has none."""
        if not spec.trainable:
            return self.compute(spec)
        if self.reduce_dtype is None or not _may_narrow(spec):
            return spec.dtype
        return self.reduce_dtype

    def group(self, spec: ParameterSpec) -> tuple[torch.dtype, torch.dtype, bool]:
        """Parameters of one group, ``(dtype, compute dtype, trainable)``, may share a flat buffer."""
        return spec.dtype, self.compute(spec), spec.trainable


def _may_narrow(spec: ParameterSpec) -> bool:
    """Whether mixed precision concerns a parameter. Whoever asks for float64 wants it; autocast leaves it alone too."""
    return spec.dtype.is_floating_point and spec.dtype is not torch.float64
