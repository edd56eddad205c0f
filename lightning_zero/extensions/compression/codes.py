"""Rows of numbers as bytes and back: blocks of 64 with a scale each, see ``collectives``.

A row of codes is the integers of all its blocks and then their scales, in float32. Torch's operators give the same bits
on every device, and take some blocks at a time, so that what is in between takes little memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_zero.config import RoundedFormat as Format

__all__ = ["BLOCK", "Format", "compress", "decompress", "format_nbytes"]

BLOCK = 64
_WIDTH = {"bfloat16": 128, "int8": 64, "int4": 32}  # bytes of a block, without its scale
_LARGEST = {"int8": 127, "int4": 7}
_CHUNK = {True: 2**15, False: 2**22}  # elements at a time, by whether that is on the CPU: there a cache holds them
_SMALLEST = torch.finfo(torch.float32).tiny


def format_nbytes(kind: Format, numel: int) -> int:
    """Bytes of so many elements, a multiple of 64, with their scales."""
    return numel // BLOCK * (_WIDTH[kind] + 4 * (kind in _LARGEST))


def compress(kind: Format, values: Tensor, codes: Tensor, residual: Tensor | None = None) -> None:
    """Write rows of a multiple of 64 elements to bytes: as many rows, uint8, of ``format_nbytes`` each.

    ``residual``: 1-D, of as many elements, in float32, to be added before; holds what was lost after. See
    [Note: error feedback] in ``collectives``.
    """
    if kind == "bfloat16" and residual is None:
        codes.view(torch.bfloat16).copy_(values)
        return
    for blocks, integers, scales, *fed in _chunks(kind, values, codes, residual):
        if fed:
            busy, lost = blocks.any(-1, keepdim=True), fed[0]
            exact = (lost * busy).add_(blocks)
        else:
            exact = blocks.float()
        if kind == "bfloat16":
            integers.view(torch.bfloat16).copy_(exact)
        else:
            _round(kind, exact, integers, scales)
        if fed:
            _restore(kind, integers, scales, arrives := torch.empty_like(blocks))
            exact -= arrives
            torch.where(busy & exact.isfinite(), exact, lost, out=lost)


def decompress(kind: Format, codes: Tensor, values: Tensor) -> None:
    """Write what was compressed to a tensor of the same shape as it was of, of any dtype."""
    if kind == "bfloat16":
        values.copy_(codes.view(torch.bfloat16))
        return
    for blocks, integers, scales in _chunks(kind, values, codes):
        _restore(kind, integers, scales, blocks)


def _round(kind: Format, exact: Tensor, integers: Tensor, scales: Tensor) -> None:
    largest = exact.new_full((), _LARGEST[kind])  # by a number CUDA does not divide: it multiplies by 1 / 127
    scale = torch.amax(exact.abs(), -1, keepdim=True).div_(largest).clamp_min_(_SMALLEST)
    scales.copy_(scale)
    whole = exact.div(scale).round_()
    if kind == "int8":
        integers.copy_(whole.to(torch.int8).view(torch.uint8))
    else:  # halves of a block side by side, each integer above zero
        low, high = whole.add_(8).to(torch.uint8).chunk(2, -1)
        integers.copy_(high << 4 | low)


def _restore(kind: Format, integers: Tensor, scales: Tensor, blocks: Tensor) -> None:
    if kind == "bfloat16":
        blocks.copy_(integers.view(torch.bfloat16))
    elif kind == "int8":
        blocks.copy_(integers.view(torch.int8) * scales)
    else:
        halves = torch.cat([integers & 15, integers >> 4], -1).view(torch.int8)
        blocks.copy_((halves - 8) * scales)


def _chunks(
    kind: Format, values: Tensor, codes: Tensor, residual: Tensor | None = None
) -> Iterator[tuple[Tensor, ...]]:
    """Some blocks, their integers and scales, and what was lost of them if that is given, each with a row for a block.

    Of all rows, and on the CPU of one row after the other.
    """
    count, on_cpu = values.shape[-1] // BLOCK, values.device.type == "cpu"
    if not count:
        return
    integers, scales = codes.tensor_split([count * _WIDTH[kind]], -1)
    whole = [values, integers, scales.view(torch.float32), *([] if residual is None else [residual.view(values.shape)])]
    pieces = [tensor.unflatten(-1, (count, tensor.shape[-1] // count)) for tensor in whole]
    one_by_one = on_cpu and values.dim() > 1
    size = _CHUNK[on_cpu] // (BLOCK if one_by_one else values.numel() // count)
    for row in zip(*pieces, strict=True) if one_by_one else [pieces]:
        yield from zip(*(piece.split(max(1, size), -2) for piece in row), strict=True)
