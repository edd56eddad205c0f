"""The one way in which gradients are added up: in rank order, whatever carried them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["RankOrderSum"]

_CHUNK_NBYTES = 2**19  # summed apart and written over this rank's own: few calls, and still in a core's cache


class RankOrderSum:
    """Averages one tensor per rank: ``((first + second) + third + ...) / divisor``, each step rounded to the dtype.

    Args:
        rank: this rank, whose tensor may be the result's memory.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._scratch: dict[torch.dtype, Tensor] = {}

    @property
    def buffers(self) -> Sequence[Tensor]:
        """Memory that is kept: of each dtype one chunk, on ranks above 1 that sum in place."""
        return tuple(self._scratch.values())

    def into(self, result: Tensor, pieces: Sequence[Tensor], divisor: int) -> None:
        """Write the average.

        Args:
            result: 1-D. May be the memory of ``pieces[rank]``, and of no other one.
            pieces: at least two, in rank order, of as many elements and the same dtype. Read.
            divisor: 1 where they have been divided before.
        """
        # What is there has not been added yet, so that the first ones must not be written over it.
        apart = self._rank > 1 and pieces[self._rank].data_ptr() == result.data_ptr()
        size = _CHUNK_NBYTES // result.itemsize if apart else max(1, result.numel())
        for total, first, second, *others in zip(result.split(size), *(p.split(size) for p in pieces), strict=True):
            target = self._chunk(result.dtype, min(size, result.numel()), total.numel()) if apart else total
            torch.add(first, second, out=target)
            for rank, other in enumerate(others, 2):
                if apart and rank == self._rank:
                    target = torch.add(target, other, out=total)
                else:
                    target.add_(other)
            if divisor & (divisor - 1):
                total.div_(divisor)
            elif divisor != 1:
                total.mul_(1 / divisor)  # exact for a power of two, hence the same bits, and faster

    def _chunk(self, dtype: torch.dtype, most: int, numel: int) -> Tensor:
        scratch = self._scratch.get(dtype)
        if scratch is None or scratch.numel() < most:
            with torch.inference_mode(False):
                scratch = self._scratch[dtype] = torch.empty(most, dtype=dtype)
        return scratch.narrow(0, 0, numel)
