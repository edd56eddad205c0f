"""Memory that the other ranks on this host can read: one file without a name per rank, mapped by all of them.

[Note: nothing is left behind]
The file is anonymous (``memfd_create``): it has no name in any folder, it counts against no limit of ``/dev/shm``, and
its pages go back to the system with the last process that has it open or mapped, however that process ends. Its size is
sealed, so that no rank can take pages away that another is reading. It is as large as the machine's memory could ever
need, which costs nothing: pages exist once they are written to.

[Note: forked processes]
Memory that ranks share would be shared with a forked process too, and what a DataLoader's worker writes to a weight
would be the rank's own weight. So a forked process maps the file anew, at the same addresses, as one that keeps what it
writes to itself. What it has not written to shows what its rank has there now, not what it had at the fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import weakref
from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero._torch import untracked

__all__ = ["Heap", "PeerHeap", "heap_nbytes"]

_ADDRESSES = 2**45  # of the 2**47 bytes that a process can map: what the heaps of all ranks may take together
_FIXED_UNRESERVED = 0x10 | 0x4000  # MAP_FIXED and MAP_NORESERVE of Linux
_HUGE_NBYTES = 4 << 20  # from here on, ask for huge pages, where the system gives them to shared memory


def heap_nbytes(world_size: int) -> int:
    """Bytes of address space of each rank's heap; the same on every rank of a host."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(2 * memory, _ADDRESSES // world_size) // mmap.PAGESIZE * mmap.PAGESIZE


class Heap:
    """This rank's memory that the others can read.

    Args:
        world_size: ranks on this host.
        label: the first bytes of the file, by which the others know that they got the right one.

    Raises:
        OSError: if the system has no such files, or no address space left.
    """

    def __init__(self, world_size: int, label: bytes) -> None:
        self.nbytes = heap_nbytes(world_size)
        self.file = os.memfd_create("lightning_zero", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.file, self.nbytes)
            fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self._memory = mmap.mmap(self.file, self.nbytes)
        except BaseException:
            os.close(self.file)
            raise
        with contextlib.suppress(OSError, AttributeError):
            self._memory.madvise(mmap.MADV_DONTDUMP)  # a core dump would list all of it
        self._memory[: len(label)] = label
        self._start = ctypes.addressof(ctypes.c_ubyte.from_buffer(self._memory))
        self._end = mmap.PAGESIZE
        self._free: list[tuple[int, int]] = []  # (offset, nbytes), ascending, never adjacent
        self._pages = _Pages(self._start)
        _MAPPED[self._start] = _Mapped(self.nbytes, self.file)
        weakref.finalize(self._memory, _unmapped, self._start).atexit = False

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zero-filled memory, 1-D, page-aligned; its pages go back to the system with the last tensor that shows any.

        Raises:
            MemoryError: if the heap has no range left that is long enough.
        """
        nbytes = numel * dtype.itemsize
        if not nbytes:
            with untracked():
                return torch.empty(0, dtype=dtype)
        padded = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        offset = self._take(padded)
        if padded >= _HUGE_NBYTES:
            with contextlib.suppress(OSError, AttributeError):  # only ever advice
                self._memory.madvise(mmap.MADV_HUGEPAGE, offset, padded)
        owner = (ctypes.c_ubyte * nbytes).from_buffer(self._memory, offset)
        # The tensor holds the array and the array the mapping.
        release = weakref.finalize(owner, self._pages.give_back, self._memory, offset, padded)
        release.atexit = False  # the end of the process does it
        with untracked():
            return torch.frombuffer(owner, dtype=dtype)

    def offset(self, tensor: Tensor) -> int | None:
        """Where in the file a contiguous tensor lies; ``None`` if it lies in other memory."""
        offset = tensor.data_ptr() - self._start
        return offset if 0 < offset < self.nbytes else None

    @property
    def used_nbytes(self) -> int:
        """Bytes handed out and not given back."""
        self._collect()
        return self._end - mmap.PAGESIZE - sum(nbytes for _, nbytes in self._free)

    def close(self) -> None:
        """Take no more pages away: a rank that is behind may still be reading what this one has let go of.

        Memory that was handed out stays valid; all of it goes with its last tensor.
        """
        self._pages.closed = True

    def _take(self, nbytes: int) -> int:
        self._collect()
        for index, (offset, free) in enumerate(self._free):
            if free >= nbytes:
                self._free[index : index + 1] = [(offset + nbytes, free - nbytes)] if free > nbytes else []
                return offset
        if self._end + nbytes > self.nbytes:
            raise MemoryError(f"{nbytes} bytes of memory shared with the other ranks: {self.nbytes} are all there is.")
        offset, self._end = self._end, self._end + nbytes
        return offset

    def _collect(self) -> None:
        """Join what was given back since the last time with what is free."""
        if not self._pages.returned:
            return
        while self._pages.returned:
            self._free.append(self._pages.returned.popleft())
        joined: list[tuple[int, int]] = []
        for offset, nbytes in sorted(self._free):
            if joined and sum(joined[-1]) == offset:
                joined[-1] = (joined[-1][0], joined[-1][1] + nbytes)
            else:
                joined.append((offset, nbytes))
        self._free = joined


class PeerHeap:
    """Another rank's memory, to be read.

    Args:
        file: its descriptor. Closed here.
        nbytes: its size.
        label: what it has to begin with.

    Raises:
        OSError: if it cannot be mapped.
        ValueError: if it is another file.
    """

    def __init__(self, file: int, nbytes: int, label: bytes) -> None:
        try:
            self._memory = mmap.mmap(file, nbytes)
        finally:
            os.close(file)
        with contextlib.suppress(OSError, AttributeError):
            self._memory.madvise(mmap.MADV_DONTDUMP)
        if self._memory[: len(label)] != label:
            raise ValueError("the memory that was handed over is not that of the rank it came from")

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """1-D, to be read only. A new tensor each time: what it shows is not this rank's memory to count."""
        return torch.frombuffer(self._memory, dtype=dtype, count=numel, offset=offset)


class _Pages:
    """Pages of a heap that go back to the system.

    Args:
        start: the heap's address.

    Attributes:
        returned: ranges that may be handed out again; by finalizers, which may run in the middle of anything.
        closed: whether pages stay now.
    """

    def __init__(self, start: int) -> None:
        self.returned: deque[tuple[int, int]] = deque()
        self.closed = False
        self._start = start
        self._owner = os.getpid()

    def give_back(self, memory: mmap.mmap, offset: int, nbytes: int) -> None:
        if self.closed or os.getpid() != self._owner:  # in a forked process the pages are still the parent's
            return
        try:
            memory.madvise(mmap.MADV_REMOVE, offset, nbytes)
        except (OSError, ValueError):  # locked, or a system that can not: the next one to get them expects zeros
            ctypes.memset(self._start + offset, 0, nbytes)
        self.returned.append((offset, nbytes))


class _Mapped(NamedTuple):
    nbytes: int
    file: int
    private: bool = False  # this process was forked from the one that shares it


_MAPPED: dict[int, _Mapped] = {}  # this process's heaps by address


def _unmapped(start: int) -> None:
    os.close(_MAPPED.pop(start).file)


def _libc_mmap() -> Any:
    call = ctypes.CDLL(None, use_errno=True).mmap
    number = ctypes.c_int
    call.restype = ctypes.c_void_p
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, number, number, number, ctypes.c_ssize_t]
    return call


_MMAP = _libc_mmap()  # now: a forked process should load nothing


def _keep_writes_to_itself() -> None:
    """See [Note: forked processes]."""
    for start, mapped in _MAPPED.items():
        if not mapped.private:
            flags = mmap.MAP_PRIVATE | _FIXED_UNRESERVED
            _MMAP(start, mapped.nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, mapped.file, 0)
            _MAPPED[start] = mapped._replace(private=True)


os.register_at_fork(after_in_child=_keep_writes_to_itself)
