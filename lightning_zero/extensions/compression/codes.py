"""Rows of numbers as bytes and back: blocks of 64 with a scale each, see ``collectives``.

``operators`` does it everywhere, with torch's operators; ``kernels`` on GPUs, with Triton's, to the same bits.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_zero.extensions.compression import operators
from lightning_zero.extensions.compression.operators import BLOCK, Format

__all__ = ["BLOCK", "Format", "compress", "decompress", "format_nbytes"]


def format_nbytes(kind: Format, numel: int) -> int:
    """Bytes of so many elements, a multiple of 64, with their scales."""
    if kind == "bfloat16":
        return 2 * numel
    return numel // (2 if kind == "int4" else 1) + numel // BLOCK * 4


def compress(kind: Format, values: Tensor, codes: Tensor, residual: Tensor | None = None) -> None:
    """Write rows of a multiple of 64 elements to bytes: as many rows, uint8, of ``format_nbytes`` each.

    ``residual``: 1-D, of as many elements, in float32, to be added before; holds what was lost after. See
    [Note: error feedback] in ``collectives``.
    """
    if (kernels := _kernels_for(kind, values)) is not None:
        kernels.compress(kind, values, codes, residual)
    else:
        operators.compress(kind, values, codes, residual)


def decompress(kind: Format, codes: Tensor, values: Tensor) -> None:
    """Write what was compressed to a tensor of the same shape as it was of, of any dtype."""
    if (kernels := _kernels_for(kind, values)) is not None:
        kernels.decompress(kind, codes, values)
    else:
        operators.decompress(kind, codes, values)


def _kernels_for(kind: Format, values: Tensor) -> Any:
    """Triton's for such tensors; ``None``: torch's operators do it, to a bfloat16 with one kernel of theirs."""
    if kind == "bfloat16" or not values.is_cuda or not values.is_contiguous():
        return None
    return _kernels(kind, values.dtype, values.device)


@cache
def _kernels(kind: Format, dtype: torch.dtype, device: torch.device) -> Any:
    """Those of ``kernels``, if they run here and give the operators' bits. The host waits once, to see that."""
    try:
        from lightning_zero.extensions.compression import kernels

        same = _agree(kernels, kind, dtype, device)
        trouble = "" if same else "they give other bits than torch's operators"
    except ImportError:  # there is no Triton
        return None
    except Exception as error:  # whatever a compiler, a driver or a missing C compiler says
        trouble = f"{type(error).__name__}: {error}"
    if trouble:
        warnings.warn(f"Triton's kernels are not used to round {dtype} to {kind}: {trouble}", stacklevel=2)
        return None
    return kernels


def _agree(kernels: Any, kind: Format, dtype: torch.dtype, device: torch.device) -> bool:
    values, found = torch.linspace(-3.1, 4, 5 * BLOCK, device=device).to(dtype), []
    values[:BLOCK], values[BLOCK] = 0, torch.inf
    for rounds, returns in ((operators.compress, operators.decompress), (kernels.compress, kernels.decompress)):
        codes = torch.empty(format_nbytes(kind, values.numel()), dtype=torch.uint8, device=device)
        back, residual = torch.empty_like(values), torch.linspace(-1e-3, 1e-3, values.numel(), device=device)
        rounds(kind, values, codes, residual)
        returns(kind, codes, back)
        found.append([codes, residual, back.nan_to_num(7.0)])
    return all(map(torch.equal, *found))
