"""The same by torch's operators, on any device; what is in between takes memory there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from lightning_zero.config import RoundedFormat as Format

__all__ = ["BLOCK", "Format", "compress", "decompress"]

BLOCK = 64
_LARGEST = {"int8": 127, "int4": 7}
_CHUNK = 2**15  # elements at a time on the CPU: what is in between stays in a core's cache
_SMALLEST = torch.finfo(torch.float32).tiny


def compress(kind: Format, values: Tensor, codes: Tensor, residual: Tensor | None = None) -> None:
    """See ``codes.compress``."""
    if residual is not None:
        for row, code, lost in _at_once(values, codes, residual.view(values.shape)):
            _compress_fed(kind, row, code, lost)
        return
    if kind == "bfloat16":
        codes.view(torch.bfloat16).copy_(values)
        return
    for blocks, integers, scales in _chunks(values, codes):
        exact = blocks.float()
        largest = exact.new_full((), _LARGEST[kind])  # by a number CUDA does not divide: it multiplies by 1 / 127
        scale = torch.amax(exact.abs(), -1, keepdim=True).div_(largest).clamp_min_(_SMALLEST)
        scales.copy_(scale)
        whole = exact.div(scale).round_()
        if kind == "int8":
            integers.copy_(whole.to(torch.int8).view(torch.uint8))
        else:  # halves of a block side by side, each integer above zero
            low, high = whole.add_(8).to(torch.uint8).chunk(2, -1)
            integers.copy_(high << 4 | low)


def _compress_fed(kind: Format, values: Tensor, codes: Tensor, residual: Tensor) -> None:
    blocks, lost = values.view(-1, BLOCK), residual.view(-1, BLOCK)
    busy = blocks.any(1, keepdim=True)
    exact = (lost * busy).add_(blocks)
    compress(kind, exact.view(values.shape), codes)
    decompress(kind, codes, arrives := torch.empty_like(values))
    exact -= arrives.view_as(exact)
    torch.where(busy & exact.isfinite(), exact, lost, out=lost)


def decompress(kind: Format, codes: Tensor, values: Tensor) -> None:
    """See ``codes.decompress``."""
    if kind == "bfloat16":
        values.copy_(codes.view(torch.bfloat16))
        return
    for blocks, integers, scales in _chunks(values, codes):
        if kind == "int8":
            blocks.copy_(integers.view(torch.int8) * scales)
        else:
            halves = torch.cat([integers & 15, integers >> 4], -1).view(torch.int8)
            blocks.copy_((halves - 8) * scales)


def _chunks(values: Tensor, codes: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Some blocks, their integers and their scales at a time, each with a row for a block."""
    for row, code in _at_once(values, codes):
        count = row.shape[-1] // BLOCK
        blocks = row.unflatten(-1, (count, BLOCK))
        integers, scales = code.tensor_split([code.shape[-1] - count * 4], -1)
        pieces = blocks, integers.unflatten(-1, (count, -1)), scales.view(torch.float32).unsqueeze(-1)
        size = count if values.device.type != "cpu" else _CHUNK // BLOCK
        yield from zip(*(piece.split(size, -2) for piece in pieces), strict=True)


def _at_once(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Rows that are computed at once: all of them, and on the CPU one after the other, which takes less memory."""
    return [tensors] if tensors[0].dim() == 1 or tensors[0].device.type != "cpu" else zip(*tensors, strict=True)
