"""The part of a file that holds the elements of one tensor."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from torch import Tensor, dtype

from lightning_zero._torch import untracked
from lightning_zero.storage.files import DataFile
from lightning_zero.storage.host import PAGE_NBYTES, bytes_of, padded_nbytes

__all__ = ["Region", "Staging"]


class Staging:
    """A piece of aligned memory that one thread at a time reads and writes through.

    Args:
        memory: 1-D, bytes, whole pages.
    """

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """How much memory that is."""
        return self._memory.numel()

    def __enter__(self) -> Tensor:
        self._lock.acquire()
        return self._memory

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@dataclass(frozen=True, eq=False)
class Region:
    """Elements in a file, side by side.

    What does not consist of whole pages, or is not in aligned host memory of the same dtype, goes through the staging
    memory piece by piece. Other elements on the first and on the last page are kept.

    Attributes:
        file: where they are.
        staging: see above.
        offset: of the first element, in bytes; whole pages.
        numel: elements. The file holds whole pages of them.
        dtype: theirs.
        what: they are, for messages.
    """

    file: DataFile
    staging: Staging
    offset: int
    numel: int
    dtype: dtype
    what: str

    @property
    def end(self) -> int:
        """Where its last page ends in the file, in bytes."""
        return self.offset + padded_nbytes(self.numel * self.dtype.itemsize)

    def read_into(self, destination: Tensor, start: int) -> None:
        """Read elements.

        Args:
            destination: 1-D, on any device, of any dtype: the elements are cast to it. Written.
            start: the element that ``destination[0]`` gets. The range is inside the region.

        Raises:
            OffloadError: if they cannot be read.
        """
        self.file.check_usable()  # before the lock, which a forked process may have inherited as held
        size, begin = self.dtype.itemsize, self.offset + start * self.dtype.itemsize
        end = begin + destination.numel() * size
        direct = self._direct_nbytes(destination, begin)
        if direct:
            self.file.read(bytes_of(destination)[:direct], begin, self.what)
        at = begin + direct
        while at < end:
            page = at - at % PAGE_NBYTES
            with self.staging as memory, untracked():
                piece = memory[: min(memory.numel(), padded_nbytes(end - page))]
                self.file.read(piece, page, self.what)
                until = min(end, page + piece.numel())
                elements = piece[at - page : until - page].view(self.dtype)
                destination[(at - begin) // size : (until - begin) // size].copy_(elements)
            at = until

    def write_from(self, values: Tensor, start: int) -> None:
        """Write elements; see ``read_into``.

        Args:
            values: 1-D, on any device, of any dtype: they are cast to the region's.
            start: the element that ``values[0]`` becomes. The range is inside the region.

        Raises:
            OffloadError: if they cannot be written.
        """
        self.file.check_usable()
        size, begin = self.dtype.itemsize, self.offset + start * self.dtype.itemsize
        end = begin + values.numel() * size
        direct = self._direct_nbytes(values, begin)
        if direct:
            self.file.write(bytes_of(values)[:direct], begin, self.what)
        at = begin + direct
        while at < end:
            page = at - at % PAGE_NBYTES
            with self.staging as memory, untracked():
                piece = memory[: min(memory.numel(), padded_nbytes(end - page))]
                until = min(end, page + piece.numel())
                self._read_edges(piece, page, at, until)
                elements = piece[at - page : until - page].view(self.dtype)
                elements.copy_(values[(at - begin) // size : (until - begin) // size])
                self.file.write(piece, page, self.what)
            at = until

    def _direct_nbytes(self, tensor: Tensor, begin: int) -> int:
        """How many bytes, from the first, can be moved between ``tensor`` and the file as they are."""
        same = tensor.device.type == "cpu" and tensor.dtype == self.dtype and tensor.is_contiguous()
        if not same or not tensor.numel() or tensor.is_conj() or tensor.is_neg():
            return 0
        alignment = self.file.alignment
        if begin % alignment or tensor.data_ptr() % alignment:
            return 0
        return tensor.nbytes - tensor.nbytes % alignment

    def _read_edges(self, piece: Tensor, page: int, at: int, until: int) -> None:
        """Fill the first and the last page of ``piece`` from the file where not all of them will be overwritten.

        What lies behind the last element of the region, on its last page, does not matter.
        """
        if at > page:
            self.file.read(piece[:PAGE_NBYTES], page, self.what)
        last = until - until % PAGE_NBYTES
        whole = until % PAGE_NBYTES == 0 or until == self.offset + self.numel * self.dtype.itemsize
        if not whole and not (at > page and last == page):
            self.file.read(piece[last - page :], last, self.what)
