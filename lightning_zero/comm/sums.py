"""The order in which gradients are summed: that of a tree over the ranks, whoever does it and wherever they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["PairwiseSum", "divide"]

_CHUNK_NBYTES = 2**19  # summed at a time where that takes memory: few calls, and still in a core's cache


def divide(total: Tensor, divisor: int) -> None:
    """Make a sum an average, in place."""
    if divisor & (divisor - 1):
        total.div_(divisor)
    elif divisor != 1:
        total.mul_(1 / divisor)  # exact for a power of two, hence the same bits, and faster


class PairwiseSum:
    """Averages one tensor per rank: neighbours first, then pairs of neighbours, and so on, each rounded to the dtype.

    ``(0 + 1) + (2 + 3)``; of other numbers than powers of two the last ones are fewer: ``(0 + 1) + 2``. So hosts with
    a power of two of ranks in a row may sum theirs first, and no bit changes.
    """

    def __init__(self) -> None:
        self._scratch: dict[tuple[torch.dtype, int], Tensor] = {}

    @property
    def buffers(self) -> Sequence[Tensor]:
        """Memory that is kept: of each dtype the largest chunk for each time that ranks can be halved, none for two."""
        return tuple(self._scratch.values())

    def into(self, result: Tensor, pieces: Sequence[Tensor], divisor: int, spare: bool = False) -> None:
        """Write the average of at least two 1-D tensors, in rank order; a divisor of 1 where they were divided before.

        ``result`` may be the memory of one of them. ``spare``: all of them may be written over, and no memory is kept.
        """
        if len(pieces) == 2:
            torch.add(*pieces, out=result)
            divide(result, divisor)
            return
        size = max(1, result.numel() if spare else _CHUNK_NBYTES // result.itemsize)
        for total, *parts in zip(result.split(size), *(piece.split(size) for piece in pieces), strict=True):
            self._add(parts, spare, 0, total)
            divide(total, divisor)

    def _add(self, parts: Sequence[Tensor], spare: bool, level: int, out: Tensor | None = None) -> Tensor:
        """The sum of some. Until the last addition nothing is written to ``out``, which may be one of them."""
        half = 1 << (len(parts) - 1).bit_length() - 1
        left = parts[0] if half == 1 else self._add(parts[:half], spare, level)
        right = parts[-1] if half == len(parts) - 1 else self._add(parts[half:], spare, level + 1)
        if out is None:
            out = left if spare else self._chunk(left.dtype, level, left.numel())
        return torch.add(left, right, out=out)

    def _chunk(self, dtype: torch.dtype, level: int, numel: int) -> Tensor:
        scratch = self._scratch.get((dtype, level))
        if scratch is None or scratch.numel() < numel:
            with torch.inference_mode(False):
                scratch = self._scratch[dtype, level] = torch.empty(numel, dtype=dtype)
        return scratch.narrow(0, 0, numel)
