"""One bounded piece of host memory that windows pass through, first in, first out."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from torch import Tensor

from lightning_zero.storage.host import PAGE_NBYTES

__all__ = ["BufferPool"]


@dataclass(frozen=True)
class _Taken:
    begin: int
    end: int


class BufferPool:
    """A ring of memory: what is taken first is given back first, so that it never falls to pieces.

    Args:
        memory: 1-D, bytes, whole pages.
    """

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._nbytes = memory.numel()
        self._taken: deque[_Taken] = deque()

    @property
    def nbytes(self) -> int:
        """Bytes in all: the most that can be taken at once."""
        return self._nbytes

    @property
    def empty(self) -> bool:
        """Whether the memory was given up."""
        return not self._memory.numel()

    @property
    def taken(self) -> int:
        """How many pieces are taken."""
        return len(self._taken)

    def take(self, nbytes: int) -> Tensor | None:
        """A piece of memory, or nothing if there is no room at the moment.

        Args:
            nbytes: whole pages, one at least, at most ``self.nbytes``.

        Raises:
            ValueError: if it would never fit, or is not whole pages, one at least.
        """
        if not 0 < nbytes <= self.nbytes or nbytes % PAGE_NBYTES:
            raise ValueError(f"{nbytes} bytes cannot be taken from a pool of {self.nbytes}.")
        begin = self._place(nbytes)
        if begin is None:
            return None
        self._taken.append(_Taken(begin, begin + nbytes))
        return self._memory[begin : begin + nbytes]

    def give_back(self) -> None:
        """Give back the piece that was taken first of those still taken."""
        self._taken.popleft()

    def clear(self) -> None:
        """Give back everything."""
        self._taken.clear()

    def release(self) -> None:
        """Give the memory up between runs. Nothing may be taken before ``refill``."""
        self._taken.clear()
        self._memory = self._memory.new_empty(0)

    def refill(self, memory: Tensor) -> None:
        """Have memory again: 1-D, ``nbytes`` bytes."""
        self._memory = memory

    def _place(self, nbytes: int) -> int | None:
        """Behind the last piece, or at the beginning again."""
        if not self._taken:
            return 0
        first, last = self._taken[0].begin, self._taken[-1].end
        if self._taken[-1].begin >= first:  # taken pieces lie in one row
            if last + nbytes <= self.nbytes:
                return last
            return 0 if nbytes <= first else None
        return last if last + nbytes <= first else None
