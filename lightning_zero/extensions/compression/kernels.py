"""The same to integers on a GPU, by Triton: one kernel each way, and no memory in between.

Imported late and only where Triton is, which comes with torch's builds for CUDA.

[Note: the same bits]
A rank may round with Triton and another one with torch's operators, so the kernels give the operators' bits. Every
operation is one that IEEE 754 rounds in one way: division is ``div_rn``, because a plain one is approximate, a product
and a sum are not contracted (``enable_fp_fusion=False``), and what hardware may do in several ways is spelled out. A
number becomes an integer by adding and taking away ``_MAGIC``; the largest magnitude is found among bits, whose order
is that of numbers with NaN above all; and what goes to bfloat16 has its bits before it is cast.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["compress", "decompress"]

_MAGIC = tl.constexpr(1.5 * 2**23)  # what is added to it loses its fraction, to the nearest even integer
_SMALLEST = tl.constexpr(torch.finfo(torch.float32).tiny)
_LARGEST_FINITE = tl.constexpr(torch.finfo(torch.float32).max)
_BLOCKS = 32  # of a program


def compress(kind: str, values: Tensor, codes: Tensor, residual: Tensor | None) -> None:
    """As ``codes.compress``, for contiguous tensors of a device. Stream: the current one."""
    _run(_compress, kind, values, codes, values if residual is None else residual, FED=residual is not None)


def decompress(kind: str, codes: Tensor, values: Tensor) -> None:
    """As ``codes.decompress``, likewise."""
    _run(_decompress, kind, values, codes)


def _run(kernel: Any, kind: str, values: Tensor, codes: Tensor, *others: Tensor, **settings: bool) -> None:
    count = values.shape[-1] // 64
    grid = triton.cdiv(count, _BLOCKS), values.shape[:-1].numel()
    settings |= {"INT4": kind == "int4", "enable_fp_fusion": False}
    with torch.cuda.device_of(values):  # Triton launches on the current one
        kernel[grid](values, codes, codes.view(torch.float32), *others, count, BLOCKS=_BLOCKS, **settings)


@triton.jit
def _places(count, INT4: tl.constexpr, BLOCKS: tl.constexpr):
    """Of a program's blocks: their first halves' elements and bytes, their scales, in float32, and whether they exist.

    A row of codes is the integers of all its blocks and then their scales.
    """
    WIDTH: tl.constexpr = 32 if INT4 else 64
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)[:, None].to(tl.int64)
    before = tl.program_id(1).to(tl.int64) * count
    place = tl.arange(0, 32)[None, :]
    scales = (before * (WIDTH + 4) + count * WIDTH) // 4 + block
    return (before + block) * 64 + place, before * (WIDTH + 4) + block * WIDTH + place, scales, block < count


@triton.jit
def _loaded(pointers, there):
    """Elements, those of a bfloat16 as the same numbers in float32."""
    found = tl.load(pointers, mask=there, other=0.0)
    if found.dtype == tl.bfloat16:
        found = (found.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return found


@triton.jit
def _magnitude(values):
    """The bits of the largest one of each row."""
    return tl.max(tl.abs(values).to(tl.int32, bitcast=True), 1, keep_dims=True)


@triton.jit
def _integers(exact, scale, ZERO: tl.constexpr):
    """What stands for elements, above ZERO; 0 for NaN, as torch casts it."""
    whole = (tl.div_rn(exact, scale) + _MAGIC) - _MAGIC
    return tl.where(whole == whole, whole + ZERO, 0.0).to(tl.int32)


@triton.jit
def _arrived(integers, scale, dtype: tl.constexpr):
    """What integers stand for."""
    values = integers.to(tl.float32) * scale
    if dtype == tl.bfloat16:
        bits = values.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        values = tl.where(values == values, nearest.to(tl.float32, bitcast=True), values)
    return values.to(dtype)


@triton.jit
def _lost(exact, arrived, kept, busy):
    """What does not arrive of some elements; where there is nothing, or nothing finite, what was kept before."""
    lost = (exact - arrived).to(tl.float32)
    return tl.where(busy & (tl.abs(lost) <= _LARGEST_FINITE), lost, kept)


@triton.jit
def _compress(values, codes, scales, residual, count, FED: tl.constexpr, INT4: tl.constexpr, BLOCKS: tl.constexpr):
    ZERO: tl.constexpr = 8 if INT4 else 0
    elements, integers, at, there = _places(count, INT4, BLOCKS)
    low, high = _loaded(values + elements, there), _loaded(values + elements + 32, there)  # halves of blocks
    if FED:
        busy = tl.max(((low != 0) | (high != 0)).to(tl.int32), 1, keep_dims=True) > 0
        low_kept, high_kept = _loaded(residual + elements, there), _loaded(residual + elements + 32, there)
        low, high = tl.where(busy, low_kept, 0.0) + low, tl.where(busy, high_kept, 0.0) + high
    low, high = low.to(tl.float32), high.to(tl.float32)
    magnitude = tl.maximum(_magnitude(low), _magnitude(high)).to(tl.float32, bitcast=True)
    scale = tl.div_rn(magnitude, tl.full(magnitude.shape, 7 if INT4 else 127, tl.float32))
    scale = tl.where(scale < _SMALLEST, _SMALLEST, scale)
    tl.store(scales + at, scale, mask=there)
    low_integers, high_integers = _integers(low, scale, ZERO), _integers(high, scale, ZERO)
    if INT4:  # halves side by side in a byte
        tl.store(codes + integers, ((high_integers << 4) | low_integers).to(tl.uint8), mask=there)
    else:
        tl.store(codes + integers, (low_integers & 255).to(tl.uint8), mask=there)
        tl.store(codes + integers + 32, (high_integers & 255).to(tl.uint8), mask=there)
    if FED:
        low_arrived = _arrived(low_integers - ZERO, scale, values.dtype.element_ty)
        high_arrived = _arrived(high_integers - ZERO, scale, values.dtype.element_ty)
        tl.store(residual + elements, _lost(low, low_arrived, low_kept, busy), mask=there)
        tl.store(residual + elements + 32, _lost(high, high_arrived, high_kept, busy), mask=there)


@triton.jit
def _decompress(values, codes, scales, count, INT4: tl.constexpr, BLOCKS: tl.constexpr):
    elements, integers, at, there = _places(count, INT4, BLOCKS)
    scale = tl.load(scales + at, mask=there, other=0.0)
    low = tl.load(codes + integers, mask=there, other=0)
    if INT4:
        high = (low >> 4).to(tl.int32) - 8
        low = (low & 15).to(tl.int32) - 8
    else:
        high = tl.load(codes + integers + 32, mask=there, other=0).to(tl.int8, bitcast=True)
        low = low.to(tl.int8, bitcast=True)
    tl.store(values + elements, _arrived(low, scale, values.dtype.element_ty), mask=there)
    tl.store(values + elements + 32, _arrived(high, scale, values.dtype.element_ty), mask=there)
