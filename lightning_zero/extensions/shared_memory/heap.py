"""Memory that the other ranks on this host can read: one file without a name per rank, mapped by all of them.

[Note: nothing is left behind]
The file is anonymous (``memfd_create``): it has no name in any folder, it counts against no limit of ``/dev/shm``, and
its pages go back to the system with the last process that has it open or mapped, however that process ends. Its size is
sealed, so that no rank can take pages away that another is reading. It is as large as the machine's memory could ever
need, which costs nothing: pages exist once they are written to.

[Note: forked processes]
Memory that ranks share would be shared with a forked process too, and what a DataLoader's worker writes to a weight
would be the rank's own weight. So a forked process maps the file anew, at the same addresses, as one that keeps what it
writes to itself. What it has not written to would show what its rank has there now, not what it had at the fork. What
user code may read (``freeze``) is therefore copied before the fork to memory that is not shared, which the forked
process moves to the addresses of the original. That is what the system does with ordinary memory, but at once: a copy
of the weights for all workers of a loader, for as long as they live.

[Note: pages of 2 MiB]
A page of 4 KiB costs half a microsecond and more when it is first written to, and again when it is given back, and
what holds one unit at a time is given back in every step. Linux has huge pages for shared memory too, but its
administrators have to ask for them (``shmem_enabled``, which is off as it comes), unless a process collapses a range at
once, from Linux 6.1 on: 100 MiB then take 5 ms instead of 60, and 1 ms instead of 20 to give back. That takes ranges
that begin at multiples of 2 MiB both in the file and in the address space, and a page that is there in each.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_zero._torch import untracked

__all__ = ["Heap", "PeerHeap"]

_ADDRESSES = 2**45  # of the 2**47 bytes that a process can map: what the heaps of all ranks may take together
_FIXED_UNRESERVED = 0x10 | 0x4000  # MAP_FIXED and MAP_NORESERVE of Linux
_HUGE_NBYTES = 2 << 20  # of a huge page: see [Note: pages of 2 MiB]
_COLLAPSE = 25  # MADV_COLLAPSE of Linux


class Heap:
    """This rank's memory that the others can read; ``label`` are its first bytes, by which they know the right file.

    A tensor keeps the heap and its mapping until the last view of it is gone; then its pages go back to the system. An
    ``OSError`` if the system has no such files, or no address space left.
    """

    def __init__(self, world_size: int, label: bytes) -> None:
        installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self.nbytes = min(2 * installed, _ADDRESSES // world_size) // _HUGE_NBYTES * _HUGE_NBYTES
        self.file = os.memfd_create("lightning_zero", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.file).atexit = False
        os.ftruncate(self.file, self.nbytes + _HUGE_NBYTES)
        fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self._memory = _Mapping(self.file, self.nbytes)
        self._memory.bytes[: len(label)] = label
        self._end = mmap.PAGESIZE
        self._free: list[tuple[int, int]] = []  # (offset, nbytes), ascending
        self._returned: deque[tuple[int, int]] = deque()  # by finalizers, which may run in the middle of anything
        self._taking = threading.Lock()
        self._closed = False
        self._forked = False
        # What forked processes are to see, by who has frozen it, and by offset and length.
        self._frozen: weakref.WeakKeyDictionary[object, dict[tuple[int, int], _Copy]] = weakref.WeakKeyDictionary()
        self._collapses = True
        _HEAPS.add(self)

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zero-filled memory, 1-D, page-aligned. A ``MemoryError`` if the heap has no range left of that length."""
        nbytes = numel * dtype.itemsize
        if not nbytes:
            with untracked():
                return torch.empty(0, dtype=dtype)
        padded = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._taking:
            offset = self._take(padded, _HUGE_NBYTES if padded >= _HUGE_NBYTES else mmap.PAGESIZE)
        if padded >= _HUGE_NBYTES:
            with contextlib.suppress(OSError, AttributeError):  # only ever advice, which some systems wait for
                self._memory.madvise(mmap.MADV_HUGEPAGE, offset, padded)
        self._collapse(offset, padded)
        owner = (ctypes.c_ubyte * nbytes).from_buffer(self._memory.bytes, offset)  # held by the tensor
        weakref.finalize(owner, self._give_back, offset, padded).atexit = False  # the end of the process does it
        with untracked():
            return torch.frombuffer(owner, dtype=dtype)

    def offset(self, tensor: Tensor) -> int:
        """Where in the file a contiguous tensor lies; 0 if it lies in other memory."""
        offset = tensor.data_ptr() - self._memory.start
        return offset if 0 < offset < self.nbytes else 0

    def freeze(self, owner: object, memory: Iterable[Tensor]) -> None:
        """Have processes that are forked from now on see what an owner's tensors hold now, of those that lie here.

        Costs a copy of them, or only a look where nothing has changed since the last one. With no tensors, the copy is
        given back: processes that were forked before have it for themselves.
        """
        before, frozen = self._frozen.pop(owner, {}), dict[tuple[int, int], _Copy]()
        for tensor in memory:
            if offset := self.offset(tensor):
                place = offset, -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
                copy, start = before.get(place), self._memory.start + offset
                frozen[place] = copy if copy is not None and copy.equals(start) else _Copy(start, place[1])
        if frozen:
            self._frozen[owner] = frozen

    @property
    def used_nbytes(self) -> int:
        """Bytes handed out and not given back."""
        with self._taking:
            self._collect()
            return self._end - mmap.PAGESIZE - sum(nbytes for _, nbytes in self._free)

    def close(self) -> None:
        """Take no more pages away: a rank that is behind may still be reading what this one has let go of."""
        self._closed = True

    def keep_writes_to_itself(self) -> None:
        """In a forked process: see [Note: forked processes]."""
        if not self._forked:
            flags = mmap.MAP_PRIVATE | _FIXED_UNRESERVED
            _MMAP(self._memory.start, self.nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, self.file, 0)
            for (offset, _), copy in (each for frozen in self._frozen.values() for each in frozen.items()):
                copy.move_to(self._memory.start + offset)
            self._frozen.clear()
            self._forked, self._collapses = True, False  # collapsing gives pages to the file, the rank's

    def _take(self, nbytes: int, alignment: int) -> int:
        self._collect()
        for index, (begin, free) in enumerate(self._free):
            offset, end = -(-begin // alignment) * alignment, begin + free
            if offset + nbytes <= end:
                left = [(begin, offset - begin), (offset + nbytes, end - offset - nbytes)]
                self._free[index : index + 1] = [part for part in left if part[1]]
                return offset
        offset = -(-self._end // alignment) * alignment
        if offset + nbytes > self.nbytes:
            raise MemoryError(f"{nbytes} bytes of memory shared with the other ranks: {self.nbytes} are all there is.")
        if offset > self._end:
            self._free.append((self._end, offset - self._end))
        self._end = offset + nbytes
        return offset

    def _collapse(self, offset: int, nbytes: int) -> None:
        """Have huge pages where nothing is that anybody needs. See [Note: pages of 2 MiB]."""
        begin, end = -(-offset // _HUGE_NBYTES) * _HUGE_NBYTES, (offset + nbytes) // _HUGE_NBYTES * _HUGE_NBYTES
        if begin >= end or not self._collapses:
            return
        for place in range(begin, end, _HUGE_NBYTES):
            self._memory.bytes[place] = 0
        try:
            self._memory.madvise(_COLLAPSE, begin, end - begin)
        except OSError as error:  # an older system, or none are left: it would look for them each time
            self._collapses = error.errno == errno.EAGAIN

    def _give_back(self, offset: int, nbytes: int) -> None:
        if self._closed or self._forked:  # in a forked process the pages are still the parent's
            return
        try:
            self._memory.madvise(mmap.MADV_REMOVE, offset, nbytes)
        except (OSError, ValueError):  # locked, or a system that can not: the next one to get them expects zeros
            ctypes.memset(self._memory.start + offset, 0, nbytes)
        self._returned.append((offset, nbytes))

    def _collect(self) -> None:
        """Join what was given back since the last time with what is free."""
        if not self._returned:
            return
        while self._returned:
            self._free.append(self._returned.popleft())
        joined: list[tuple[int, int]] = []
        for offset, nbytes in sorted(self._free):
            if joined and sum(joined[-1]) == offset:
                joined[-1] = (joined[-1][0], joined[-1][1] + nbytes)
            else:
                joined.append((offset, nbytes))
        self._free = joined


class PeerHeap:
    """Another rank's memory, to be read: a ``ValueError`` if the file does not begin with its label."""

    def __init__(self, file: int, nbytes: int, label: bytes) -> None:
        self._memory = _Mapping(file, nbytes)
        if self._memory.bytes[: len(label)] != label:
            raise ValueError("the memory that was opened is not that of the rank it should belong to")

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """1-D, to be read only. A new tensor each time: what it shows is not this rank's memory to count."""
        return torch.frombuffer(self._memory.bytes, dtype=dtype, count=numel, offset=offset)


class _Mapping:
    """The first ``nbytes`` of a file that has a huge page more, at an address where huge pages may begin.

    What it maps stays as long as a view of ``bytes`` is left.
    """

    def __init__(self, file: int, nbytes: int) -> None:
        self._memory = mmap.mmap(file, nbytes + _HUGE_NBYTES)
        begin = ctypes.addressof(ctypes.c_ubyte.from_buffer(self._memory))
        self.start = -(-begin // _HUGE_NBYTES) * _HUGE_NBYTES
        self._skipped = self.start - begin
        flags = mmap.MAP_SHARED | _FIXED_UNRESERVED
        if _MMAP(self.start, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, file, 0) != self.start:
            raise OSError(ctypes.get_errno(), "no mapping at an address of a huge page")
        self.bytes = memoryview(self._memory)[self._skipped : self._skipped + nbytes]
        with contextlib.suppress(OSError, AttributeError):
            self._memory.madvise(mmap.MADV_DONTDUMP)  # a core dump would list all of it

    def madvise(self, advice: int, offset: int, nbytes: int) -> None:
        self._memory.madvise(advice, self._skipped + offset, nbytes)


class _Copy:
    """A copy of whole pages, in memory of this process alone."""

    def __init__(self, start: int, nbytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.start, self.nbytes = _MMAP(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0), nbytes
        if self.start == _FAILED:
            raise OSError(ctypes.get_errno(), f"no memory for a copy of {nbytes} bytes of weights for a forked process")
        self._end = weakref.finalize(self, _MUNMAP, self.start, nbytes)
        self._end.atexit = False
        ctypes.memmove(self.start, start, nbytes)

    def equals(self, start: int) -> bool:
        """Whether there are the same bytes from an address on."""
        return not _MEMCMP(self.start, start, self.nbytes)

    def move_to(self, start: int) -> None:
        """Have it in the place of what is at an address, for good."""
        if _MREMAP(self.start, self.nbytes, self.nbytes, _MAYMOVE_FIXED, start) != start:
            raise OSError(ctypes.get_errno(), "a copy of weights could not be moved to where they are")
        self._end.detach()


def _of_libc(name: str, result: Any, *arguments: Any) -> Any:
    call = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if call is not None:  # other systems lack some, and the files that this needs
        call.restype, call.argtypes = result, arguments
    return call


_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_FAILED = ctypes.c_void_p(-1).value
_MAYMOVE_FIXED = 1 | 2  # MREMAP_MAYMOVE and MREMAP_FIXED of Linux
# Now: a forked process should load nothing.
_MMAP = _of_libc("mmap", _POINTER, _POINTER, _SIZE, _INT, _INT, _INT, ctypes.c_ssize_t)
_MREMAP = _of_libc("mremap", _POINTER, _POINTER, _SIZE, _SIZE, _INT, _POINTER)
_MUNMAP = _of_libc("munmap", _INT, _POINTER, _SIZE)
_MEMCMP = _of_libc("memcmp", _INT, _POINTER, _POINTER, _SIZE)
_HEAPS: weakref.WeakSet[Heap] = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: list(map(Heap.keep_writes_to_itself, list(_HEAPS))))
