"""Memory for offloaded tensors: on the host, page-aligned, and page-locked where copies shall overlap.

A tier beyond host memory is an extension's. Its tensors are ``OffloadedTensor``, which the rest of the package reads
and writes without knowing where they are.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_zero._torch import untracked
from lightning_zero.comm.streams import runs_beside

__all__ = [
    "PAGE_NBYTES",
    "PIECE_NBYTES",
    "HostMemory",
    "OffloadedTensor",
    "bytes_of",
    "host_memory",
    "in_memory",
    "is_on_host",
    "new_memory",
    "padded_nbytes",
    "pieces",
    "view_of",
]

PAGE_NBYTES = 4096  # alignment of memory, and of everything that goes to or comes from a disk
PIECE_NBYTES = 1 << 20  # what passes through memory at once where neither side is in memory
_HUGE_NBYTES = 4 << 20  # from here on, ask for huge pages: fewer faults, and less work to pin for direct input/output
# MADV_WIPEONFORK. Not MADV_DONTFORK: a forked process still has the objects that unmap the memory when they are freed,
# and would unmap whatever it has at that address by then.
_WIPE_ON_FORK = 18 if sys.platform == "linux" else None


class OffloadedTensor(Tensor):
    """A tensor without memory: it stands for elements in a tier beyond host memory.

    An extension defines what it is. ``copy_`` from and to it moves the elements, in pieces; views that are a range of
    them stay handles. Code that needs memory asks for ``in_memory``.
    """

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for handles on the same elements in the same shape."""
        raise NotImplementedError

    def read(self) -> Tensor:
        """All elements, in host memory of their own. Raises ``OffloadError`` if they cannot be read."""
        raise NotImplementedError


def in_memory(tensor: Tensor) -> Tensor:
    """The tensor itself, or what is read of one that has no memory."""
    return tensor.read() if isinstance(tensor, OffloadedTensor) else tensor


def new_memory(numel: int, dtype: torch.dtype) -> Tensor:
    """Host memory, 1-D: a mapping of its own, which files are read into directly, if it is large enough for that."""
    with untracked():
        if numel * dtype.itemsize < PIECE_NBYTES:
            return torch.empty(numel, dtype=dtype)
        return host_memory(numel * dtype.itemsize, locked=False).view(dtype)


def pieces(numel: int, dtype: torch.dtype, nbytes: int = PIECE_NBYTES) -> Iterator[tuple[int, Tensor]]:
    """Where pieces of ``numel`` elements start, and host memory for each, the same for all: at most ``nbytes``."""
    piece = new_memory(min(numel, nbytes // dtype.itemsize), dtype)
    for start in range(0, numel, max(1, piece.numel())):
        yield start, piece[: numel - start]


def padded_nbytes(nbytes: int) -> int:
    """``nbytes`` rounded up to whole pages."""
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


def bytes_of(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor: 1-D, ``torch.uint8``."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))  # one element may be contiguous with any stride
    return flat.view(torch.uint8)


def is_on_host(tensor: Tensor) -> bool:
    """Whether a tensor lies in host memory."""
    return tensor.device.type == "cpu"


def view_of(memory: Tensor) -> memoryview:
    """The bytes of a 1-D, contiguous uint8 tensor on the host, for system calls. ``memory`` must outlive them.

    By address, because a tensor that once was an array can never be resized again, and it may be the user's.
    """
    return memoryview((ctypes.c_ubyte * memory.numel()).from_address(memory.data_ptr())).cast("B")


def host_memory(nbytes: int, locked: bool, *, inherited: bool = True) -> Tensor:
    """Zero-filled bytes on the host, at a whole page, given back to the system with the last tensor that shows any.

    They are mapped and then registered, because torch's own page-locked allocator rounds up to a power of two and keeps
    what is freed. ``locked`` are page-locked, if there is a CUDA device and the system lets us. Forked processes find
    zeros in what is not ``inherited``, where the system can do that. A ``MemoryError`` if the system has not that much.
    """
    memory, owner = _allocate(nbytes, inherited)
    if locked and owner is not None:
        _lock(owner)
    return memory


class HostMemory:
    """The host memory of one engine, of which at most ``pin_nbytes`` (``None``: all) are page-locked, for CUDA only."""

    def __init__(self, device: torch.device, pin_nbytes: int | None) -> None:
        self._device = device
        self._pin_nbytes = pin_nbytes
        self._unlock: list[weakref.finalize[Any, Any]] = []
        self.nbytes = 0
        self.locked_nbytes = 0

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zero-filled, page-aligned, 1-D. Counted until ``release``, whoever still uses it."""
        memory, owner = _allocate(numel * dtype.itemsize, inherited=True)
        padded = padded_nbytes(memory.nbytes)
        within = self._pin_nbytes is None or self.locked_nbytes + padded <= self._pin_nbytes
        lockable = within and owner is not None and runs_beside(self._device)
        if lockable and (unlock := _lock(owner)) is not None:
            self._unlock.append(unlock)
            self.locked_nbytes += padded
        self.nbytes += padded
        with untracked():
            return memory.view(dtype)

    def release(self) -> None:
        """Unlock and forget everything. Tensors that are still in use stay valid, as ordinary memory."""
        if self._unlock:
            torch.cuda.synchronize(self._device)  # copies from and to it may be on their way
        for unlock in self._unlock:
            unlock()
        self._unlock.clear()
        self.nbytes = self.locked_nbytes = 0


def _allocate(nbytes: int, inherited: bool) -> tuple[Tensor, Any]:
    """Bytes, and what lives exactly as long as they do, views of them included; ``None`` of none."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8), None
    try:
        mapped = mmap.mmap(-1, padded_nbytes(nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{nbytes} bytes of host memory: {error.strerror}.") from error
    advice = [(getattr(mmap, "MADV_HUGEPAGE", None), nbytes >= _HUGE_NBYTES), (_WIPE_ON_FORK, not inherited)]
    for name, wanted in advice:
        if wanted and name is not None:
            with contextlib.suppress(OSError):  # only ever advice
                mapped.madvise(name)
    # The tensor holds this array and the array the mapping, and its weak references are called before it lets go: what
    # was registered is unregistered while it is still mapped.
    owner = (ctypes.c_ubyte * nbytes).from_buffer(mapped)
    with untracked():
        return torch.frombuffer(owner, dtype=torch.uint8), owner


def _lock(owner: Any) -> weakref.finalize[Any, Any] | None:
    """Page-lock an array's memory as long as it lives. ``None`` where that is not possible: copies do not overlap."""
    if not torch.cuda.is_available():
        return None
    runtime = torch.cuda.cudart()
    address = ctypes.addressof(owner)
    if int(runtime.cudaHostRegister(address, len(owner), 0)) != 0:
        with contextlib.suppress(RuntimeError):  # the next launch, whosever it is, would report this error as its own
            torch.zeros(1, device="cuda")
        return None
    unlock = weakref.finalize(owner, runtime.cudaHostUnregister, address)
    unlock.atexit = False  # the end of the process does it, in an order that is safe
    return unlock
