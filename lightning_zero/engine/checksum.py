"""A number that stands for a tensor's bits, to find out cheaply whether ranks hold the same."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_zero._torch import untracked

__all__ = ["checksum"]

_PIECE_NUMEL = 2**20  # what is looked at together: bounds the memory that this takes to some 24 MiB
_BITS = 2**63 - 1
_PLACE, _FIRST, _SECOND = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB  # odd, no pattern in their bits


def checksum(tensor: Tensor) -> int:
    """63 bits that depend on every bit of a tensor's elements and on their order.

    Args:
        tensor: any shape, dtype, device and strides. Bits count: -0.0 is not 0.0, and NaNs with other payloads differ.

    Returns:
        At least 0, below 2**63; the same for the same elements on any device. Shape and dtype are not in it.

    One synchronisation of the host for each tensor. Tensors that differ have the same number once in 2**63, unless
    somebody constructs them.
    """
    with untracked(), torch._C.DisableTorchFunction():
        if tensor.layout is not torch.strided:
            tensor = tensor.to_dense()
        total = torch.zeros((), dtype=torch.int64, device=tensor.device)
        place = 1  # so that a 0 at the first place counts
        for piece in _pieces(tensor.detach()):
            words = _words(piece)
            mixed = torch.arange(place, place + words.numel(), device=words.device).mul_(_PLACE).add_(words)
            place += words.numel()
            # Not linear, or two flipped signs would take each other away.
            mixed.mul_(_FIRST).bitwise_xor_((mixed >> 32).bitwise_and_(2**32 - 1))
            mixed.mul_(_SECOND).bitwise_xor_((mixed >> 29).bitwise_and_(2**35 - 1))
            total += mixed.sum()
        return int(total.item()) & _BITS


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """1-D, contiguous, at most ``_PIECE_NUMEL`` elements each; together the elements in logical order."""
    if tensor.is_contiguous():
        yield from tensor.view(-1).split(_PIECE_NUMEL)
    elif tensor.numel() <= _PIECE_NUMEL:
        yield tensor.reshape(-1)
    elif tensor.shape[0] == 1:
        yield from _pieces(tensor[0])
    else:
        rows = max(1, _PIECE_NUMEL * tensor.shape[0] // tensor.numel())
        for part in tensor.split(rows):
            yield from _pieces(part)


def _words(piece: Tensor) -> Tensor:
    """The bits of each element as int64, those of the widest elements in two."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}
    plain = piece.resolve_conj().resolve_neg()
    return plain.view(integers.get(plain.element_size(), torch.int64)).to(torch.int64)
