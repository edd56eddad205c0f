"""Stores whose disk does what a test wants."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lightning_zero.extensions.nvme import FileTensor
from lightning_zero.extensions.nvme.files import FileSystem
from lightning_zero.extensions.nvme.store import NvmeStore

CPU = torch.device("cpu")
NAMES = {"direct": True, "buffered": False}


@dataclass
class Call:
    """One read or write that is about to be made."""

    kind: str
    nbytes: int
    offset: int
    thread: str


@dataclass
class Disk(FileSystem):
    """A real file system, asked before every call.

    Attributes:
        direct: whether it lets the page cache be left out.
        before: is called before every read and write. What it returns is the most bytes that are moved; what it raises
            is the answer.
        full: whether nothing more can be reserved.
        reserves: whether it offers ``fallocate``.
        free: bytes that it claims are free.
    """

    direct: bool = True
    before: Callable[[Call], int | None] | None = None
    full: bool = False
    reserves: bool = True
    free: int | None = None
    calls: list[Call] = field(default_factory=list)

    def open(self, path: Path, flags: int, mode: int) -> int:
        if flags & os.O_DIRECT and not self.direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().open(path, flags, mode)

    def preadv(self, descriptor: int, memory: memoryview, offset: int) -> int:
        return super().preadv(descriptor, memory[: self._asked("read", len(memory), offset)], offset)

    def pwritev(self, descriptor: int, memory: memoryview, offset: int) -> int:
        return super().pwritev(descriptor, memory[: self._asked("write", len(memory), offset)], offset)

    def fallocate(self, descriptor: int, offset: int, nbytes: int) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if not self.reserves:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        super().fallocate(descriptor, offset, nbytes)

    def free_nbytes(self, path: Path) -> int:
        return super().free_nbytes(path) if self.free is None else self.free

    def _asked(self, kind: str, nbytes: int, offset: int) -> int:
        call = Call(kind, nbytes, offset, threading.current_thread().name)
        self.calls.append(call)
        most = self.before(call) if self.before is not None else None
        return nbytes if most is None else min(nbytes, most)


def fail(kind: str, code: int) -> Callable[[Call], None]:
    """Every call of that kind fails."""

    def before(call: Call) -> None:
        if call.kind == kind:
            raise OSError(code, os.strerror(code))

    return before


@contextmanager
def store(path: Path, system: FileSystem | None = None, *, kib: int = 1024, threads: int = 2) -> Iterator[NvmeStore]:
    """A store that is closed, and has left nothing."""
    opened = NvmeStore(str(path), rank=3, buffer_nbytes=kib << 10, io_threads=threads, device=CPU, system=system)
    try:
        yield opened
    finally:
        opened.close()
        assert not io_threads()


def data_of(opened: NvmeStore) -> Path:
    """A path to a store's file, which has no name of its own."""
    return Path(f"/proc/self/fd/{opened._file._descriptor}")


def flip(resting: FileTensor, element: int, bit: int = 0) -> None:
    """Change one bit of an element, as a disk does that does not keep what it was given."""
    place = resting.region.offset + (resting.start + element) * resting.dtype.itemsize
    with open(f"/proc/self/fd/{resting.region.file._descriptor}", "r+b") as opened:
        opened.seek(place)
        (byte,) = opened.read(1)
        opened.seek(place)
        opened.write(bytes([byte ^ (1 << bit)]))
        opened.flush()
        os.fsync(opened.fileno())


def io_threads() -> list[str]:
    """The names of the threads that read and write, in this process."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("lightning_zero-offload")]
