"""Where shards rest: the device, host memory, and the files of one rank on a disk, in a folder of its own."""

from __future__ import annotations

import contextlib
import os
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from lightning_zero._torch import untracked
from lightning_zero.comm.streams import Streams, runs_beside
from lightning_zero.config import Tier
from lightning_zero.errors import OffloadError
from lightning_zero.storage.file_tensor import FileTensor
from lightning_zero.storage.files import DataFile, FileSystem, PageChecksums, Region, amount
from lightning_zero.storage.folder import DATA, RunFolder, find_leftovers
from lightning_zero.storage.host import PAGE_NBYTES, BufferPool, HostMemory, host_memory, padded_nbytes
from lightning_zero.storage.pipeline import Pipeline, Workers
from lightning_zero.storage.transfers import Fetcher, Transfers

__all__ = ["WINDOW_ALIGNMENT", "MemoryTiers", "NvmeStore"]

WINDOW_ALIGNMENT = 4096
"""Windows are cut at multiples of so many elements: whole pages, for elements of any size."""

_WINDOWS = 8  # windows in the pool: one at work, the others being read and written
_MOST_STAGING_NBYTES = 4 << 20
_MOST_WINDOW_NBYTES = 64 << 20  # larger ones only make the first read and the last write longer
_REPORTED = 20  # leftovers, in one message


class NvmeStore:
    """A folder with one file in it, threads that read and write, and one pool of memory for all that passes through.

    Everything ends with ``close``, at the latest when this object is freed or the process ends normally. Handles do not
    keep it alive; using one afterwards is an error. ``path`` is an existing directory, ``buffer_nbytes`` are for all
    buffers together, with ``report`` it warns of what earlier runs have left (one rank for each host is enough), and
    with ``checksums`` reading something else than what was written is an ``OffloadError``.
    """

    def __init__(
        self,
        path: str,
        *,
        rank: int,
        world_size: int,
        buffer_nbytes: int,
        io_threads: int,
        device: torch.device,
        system: FileSystem | None = None,
        report: bool = True,
        checksums: bool = True,
    ) -> None:
        self.path = os.fspath(path)
        self._rank = rank
        self._checksums = checksums
        self._system = system or FileSystem()
        self.check_space(0)
        self.leftovers = find_leftovers(self.path)
        if report and self.leftovers:
            more = len(self.leftovers) - _REPORTED
            lines = [*map(str, self.leftovers[:_REPORTED]), *([f"and {more} more"] if more > 0 else [])]
            found = "\n".join(f"  {line}" for line in lines)
            warnings.warn(
                "Runs that did not end normally have left offloaded files behind. They cannot be used again; delete "
                f"them yourself if nothing uses them:\n{found}",
                stacklevel=2,
            )
        staging_nbytes = min(buffer_nbytes // 8, _MOST_STAGING_NBYTES) // PAGE_NBYTES * PAGE_NBYTES
        pool_nbytes = (buffer_nbytes - staging_nbytes) // PAGE_NBYTES * PAGE_NBYTES
        if staging_nbytes <= 0:
            raise ValueError(f"buffer_nbytes must be at least {8 * PAGE_NBYTES}, got {buffer_nbytes}.")
        self._locked = runs_beside(device)
        self._buffer_nbytes = pool_nbytes + staging_nbytes
        self.pool = BufferPool(host_memory(pool_nbytes, locked=self._locked, inherited=False))
        self._workers = Workers(io_threads, "lightning_zero-offload")
        staging = host_memory(staging_nbytes, locked=False, inherited=False)
        self._folder = RunFolder(self.path, rank, world_size)
        try:
            self._file = DataFile(self._folder.path / DATA, rank, self._system, staging)
        except BaseException:
            self._folder.remove()
            raise
        self._pipeline = Pipeline(self.pool, self._workers, self._file.check_alive)
        self._closing = weakref.finalize(self, _close, self._workers, self._file, self._folder)
        self.folder = str(self._folder.path)
        """Where the file is."""
        self.direct = self._file.direct
        """Whether the page cache is left out."""
        self.check_alive = self._file.check_alive

    @property
    def host_nbytes(self) -> int:
        """Bytes of memory for all buffers together, and for checksums: 8 for each page."""
        return self._buffer_nbytes + (self.nbytes_on_disk // PAGE_NBYTES * 8 if self._checksums else 0)

    @property
    def nbytes_on_disk(self) -> int:
        """Bytes reserved."""
        return self._file.nbytes

    def check_space(self, nbytes: int) -> None:
        """Raise unless ``nbytes`` more would fit into the path, of all ranks that share the disk together."""
        what = f"Rank {self._rank}: the offload path '{self.path}'"
        try:
            if not Path(self.path).is_dir():
                reason = "is not a directory" if os.path.lexists(self.path) else "does not exist"
                raise OffloadError(f"{what} {reason}. It must be an existing directory on a fast local disk.")
            if not os.access(self.path, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
                raise OffloadError(f"{what} is not writable for this user.")
            free = self._system.free_nbytes(Path(self.path))
        except OSError as error:
            raise OffloadError(f"{what} cannot be used: {error.strerror}.") from error
        if nbytes > free:
            raise OffloadError(
                f"{what} has too little space: {amount(nbytes)} are needed and {amount(free)} are free. Free some "
                "space, or take another path."
            )

    def allocate(self, numel: int, dtype: torch.dtype, what: str) -> FileTensor:
        """Reserve room for elements on the disk: 1-D, zeros. An ``OffloadError`` if there is not that much space."""
        nbytes = padded_nbytes(numel * dtype.itemsize)
        offset = self._file.grow(nbytes, what)
        region = Region(self._file, offset, numel, dtype, what, PageChecksums(nbytes) if self._checksums else None)
        return FileTensor(region, 0, torch.Size((numel,)))

    def pipeline(self) -> Pipeline:
        """What windows pass through; the same object every time. Ask for it before every run."""
        if self.pool.empty:
            self.pool.refill(host_memory(self.pool.nbytes, locked=self._locked, inherited=False))
        return self._pipeline

    def window_numel(self, itemsizes: Sequence[int]) -> int:
        """How many elements a window should have so that several fit into the pool: a multiple of ``WINDOW_ALIGNMENT``.

        ``itemsizes`` are those of the dtypes of its parts, in bytes.
        """
        least = max(1, sum(itemsizes)) * WINDOW_ALIGNMENT
        if least > self.pool.nbytes:
            raise OffloadError(
                f"Rank {self._rank}: the buffers have {self.pool.nbytes} bytes, and the smallest window takes {least}. "
                "Set a larger `buffer_mib`."
            )
        nbytes = min(self.pool.nbytes // _WINDOWS, _MOST_WINDOW_NBYTES)
        return max(1, nbytes // least) * WINDOW_ALIGNMENT

    def rest(self) -> None:
        """Leave no thread, no pool and no name on the disk between runs.

        What is in the file stays, and is there for later runs and for checkpoints after the last one: a removed file
        lives until it is closed, and the system frees its space then, however the process ends.
        """
        if os.getpid() == self._folder.pid:
            self._workers.pause()
            self.pool.release()
            self._file.nameless = True
            self._folder.remove()

    def close(self) -> None:
        """End the threads, remove the file and the folder, give back the memory. The second time, nothing.

        It may be called while another thread reads or writes, which then gets an error.
        """
        _close(self._workers, self._file, self._folder)
        self._closing.detach()


class MemoryTiers:
    """Memory by tier. At most ``pin_nbytes`` of host memory are page-locked (``None``: all of it)."""

    def __init__(
        self,
        device: torch.device,
        streams: Streams | None = None,
        pin_nbytes: int | None = None,
        store: NvmeStore | None = None,
    ) -> None:
        self.device = device
        self.streams = streams = streams or Streams(device)
        self.memory = HostMemory(device, pin_nbytes)
        self.store = store
        self.transfers = Transfers(streams, self.memory)
        self.fetcher = Fetcher(device, streams, self.memory)

    def allocate(self, tier: Tier, numel: int, dtype: torch.dtype, what: str) -> Tensor:
        """Memory for one shard, all zeros: 1-D; a ``FileTensor`` on disk. ``what`` it will hold is for messages."""
        if tier is Tier.DISK:
            if self.store is None:
                raise RuntimeError(f"There are no files for {what}. This is an error in lightning_zero itself.")
            return self.store.allocate(numel, dtype, what)
        if tier is Tier.HOST:
            return self.memory.allocate(numel, dtype)
        with untracked():
            return torch.zeros(numel, dtype=dtype, device=self.device)

    def settle(self) -> None:
        """Wait on the host until nothing reads or writes what rests there any more."""
        self.transfers.settle()
        self.fetcher.settle()

    def abandon(self) -> None:
        """Settle everything under way after an error in the middle of a step."""
        self.transfers.settle()
        self.fetcher.forget()

    def rest(self) -> None:
        """End threads, buffers, page-locking and names of files between runs; what rests, rests on.

        A later use starts threads and takes buffers again.
        """
        self.transfers.close()
        self.fetcher.close()
        self.fetcher.active = False
        if self.store is not None:
            self.store.rest()
        self.memory.unlock()

    def wake(self) -> None:
        """Page-lock again what ``rest`` has unlocked, and fetch ahead: a run begins."""
        self.memory.lock()
        self.fetcher.active = True

    def close(self) -> None:
        """Give everything up. May be called again."""
        self.rest()
        if self.store is not None:
            self.store.close()
        self.memory.release()


def _close(workers: Workers, file: DataFile, folder: RunFolder) -> None:
    """Whatever fails or interrupts, go on with the rest.

    Nothing in a process that was forked from the owner: it has no threads to end, and may have inherited held locks.
    """
    if os.getpid() != folder.pid:
        return
    try:
        file.close()  # what is under way stops at its next page
        ended = workers.close()
    finally:
        left = folder.remove()
    if not ended:
        left = left or "A thread that reads or writes offloaded files did not end: its disk does not answer."
    if left:
        with contextlib.suppress(Warning):  # where warnings are errors, the end of a run still is none
            warnings.warn(left, stacklevel=2)
