"""Elements of a tensor: ranges of them, and numbers that stand for their bits, to compare ranks cheaply."""

from __future__ import annotations

import hashlib
import numbers
from typing import Any

import torch
from torch import Tensor

from lightning_zero._torch import no_functions, untracked

__all__ = ["checksum", "fingerprint", "flat_range"]


_PIECE_NUMEL = 2**18  # what is looked at together, a multiple of 8; this takes at most 6 MiB for it
_BITS = 2**63 - 1
_PLACE, _FIRST, _SECOND = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB  # odd, no pattern in their bits


def checksum(tensor: Tensor) -> int:
    """63 bits that depend on every bit of a tensor's elements and on their order, and on nothing else.

    -0.0 is not 0.0, and NaNs with other payloads differ. The host is synchronised once for each tensor.
    """
    with untracked(), no_functions():
        if tensor.layout is not torch.strided:
            tensor = tensor.to_dense()
        tensor = tensor.detach()
        total = torch.full((), tensor.numel() * tensor.element_size(), dtype=torch.int64, device=tensor.device)
        for start in range(0, tensor.numel(), _PIECE_NUMEL):
            words = _words(flat_range(tensor, start, min(_PIECE_NUMEL, tensor.numel() - start)))
            place = start * tensor.element_size() // 8
            mixed = torch.arange(place + 1, place + 1 + len(words), device=words.device).mul_(_PLACE).add_(words)
            # Not linear, or two flipped signs would take each other away.
            mixed.mul_(_FIRST).bitwise_xor_((mixed >> 32).bitwise_and_(2**32 - 1))
            mixed.mul_(_SECOND).bitwise_xor_((mixed >> 29).bitwise_and_(2**35 - 1))
            total += mixed.sum()
        return int(total.item()) & _BITS


def fingerprint(*parts: Any) -> int:
    """63 bits that stand for some values, the same on every rank that passes the same.

    Of tensors bits, shape and dtype count; of objects that are no numbers, strings, indices, or tuples, lists and dicts
    of these, only the type.
    """
    return int.from_bytes(hashlib.blake2b(_text(parts).encode(), digest_size=8).digest(), "little") & _BITS


def _words(piece: Tensor) -> Tensor:
    """The bits of a contiguous piece as int64, whole words of them."""
    size = piece.element_size()
    piece = piece.resolve_conj().resolve_neg()
    missing = -piece.numel() * size % 8 // size
    if missing:
        piece = torch.cat([piece, piece.new_zeros(missing)])
    elif piece.storage_offset() * size % 8:
        piece = piece.clone()
    return piece.view(torch.int64)


def _text(part: Any) -> str:
    if isinstance(part, Tensor):
        return f"{checksum(part)} {tuple(part.shape)} {part.dtype}"
    if isinstance(part, tuple | list):
        return f"[{'; '.join(map(_text, part))}]"
    if isinstance(part, dict):
        return _text(sorted(part.items()))
    if isinstance(part, slice):
        return _text(("slice", part.start, part.stop, part.step))
    if part is None or part is Ellipsis or isinstance(part, str | numbers.Number | torch.dtype):
        return repr(part)
    return type(part).__qualname__


def flat_range(tensor: Tensor, start: int, numel: int) -> Tensor:
    """``tensor.reshape(-1)[start : start + numel]``: a view where the elements lie in a row, else a copy of no more."""
    if tensor.is_contiguous():
        return tensor.view(-1)[start : start + numel]
    if tensor.dim() == 1:
        return tensor[start : start + numel].contiguous()
    row = tensor.numel() // tensor.shape[0] if tensor.shape[0] else 0
    if not row or not numel:
        return tensor.new_empty(0)
    first, last = start // row, (start + numel - 1) // row
    if first == last:
        return flat_range(tensor[first], start - first * row, numel)
    head = flat_range(tensor[first], start - first * row, (first + 1) * row - start)
    tail = flat_range(tensor[last], 0, start + numel - last * row)
    return torch.cat([head, tensor[first + 1 : last].reshape(-1), tail])
