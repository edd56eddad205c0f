"""The file of one rank on a disk, with what reads and writes it, as a tier of memory."""

from __future__ import annotations

import contextlib
import os
import warnings
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from lightning_zero._torch import untracked
from lightning_zero.comm.streams import Event, Streams, runs_beside
from lightning_zero.config import Tier
from lightning_zero.errors import OffloadError, readable_size
from lightning_zero.extensions.nvme.files import (
    DataFile,
    FileSystem,
    FileTensor,
    PageChecksums,
    Region,
    fill_from,
)
from lightning_zero.extensions.nvme.pipeline import BufferPool, Pipeline, Workers
from lightning_zero.offload.host import PAGE_NBYTES, host_memory, padded_nbytes
from lightning_zero.offload.transfers import MemoryTiers

__all__ = ["WINDOW_ALIGNMENT", "FileTiers", "NvmeStore"]

WINDOW_ALIGNMENT = 4096
"""Windows are cut at multiples of so many elements: whole pages, for elements of any size."""

_WINDOWS = 8  # windows in the pool: one at work, the others being read and written
_MOST_STAGING_NBYTES = 4 << 20
_MOST_WINDOW_NBYTES = 64 << 20  # larger ones only make the first read and the last write longer


class NvmeStore:
    """A file, threads that read and write it, and one pool of memory for all that passes through.

    Everything ends with ``close``, at the latest when this object is freed or the process ends. Handles do not keep it
    alive; using one afterwards is an error. ``path`` is an existing directory, ``buffer_nbytes`` are for all buffers
    together, and with ``checksums`` reading something else than what was written is an ``OffloadError``.
    """

    def __init__(
        self,
        path: str,
        *,
        rank: int,
        buffer_nbytes: int,
        io_threads: int,
        device: torch.device,
        system: FileSystem | None = None,
        checksums: bool = True,
    ) -> None:
        self.path = os.fspath(path)
        self._rank = rank
        self._checksums = checksums
        self._system = system or FileSystem()
        self.check_space(0)
        staging_nbytes = min(buffer_nbytes // 8, _MOST_STAGING_NBYTES) // PAGE_NBYTES * PAGE_NBYTES
        self.pool_nbytes = (buffer_nbytes - staging_nbytes) // PAGE_NBYTES * PAGE_NBYTES
        if staging_nbytes <= 0:
            raise ValueError(f"buffer_nbytes must be at least {8 * PAGE_NBYTES}, got {buffer_nbytes}.")
        self._locked = runs_beside(device)
        self._buffer_nbytes = self.pool_nbytes + staging_nbytes
        self._workers = Workers(io_threads, "lightning_zero-offload")
        self._pipeline: Pipeline | None = self._make_pipeline()
        staging = host_memory(staging_nbytes, locked=False, inherited=False)
        self._file = DataFile(self.path, rank, self._system, staging)
        self._closing = weakref.finalize(self, _close, self._workers, self._file)

    @property
    def direct(self) -> bool:
        """Whether the page cache is left out."""
        return self._file.direct

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
                f"{what} has too little space: {readable_size(nbytes)} are needed and {readable_size(free)} are free. "
                "Free some space, or take another path."
            )

    def allocate(self, numel: int, dtype: torch.dtype, what: str) -> FileTensor:
        """Reserve room for elements on the disk: 1-D, zeros. An ``OffloadError`` if there is not that much space."""
        nbytes = padded_nbytes(numel * dtype.itemsize)
        offset = self._file.grow(nbytes, what)
        region = Region(self._file, offset, numel, dtype, what, PageChecksums(nbytes) if self._checksums else None)
        return FileTensor(region, 0, torch.Size((numel,)))

    def pipeline(self) -> Pipeline:
        """What windows pass through. Ask for it before every run."""
        self._file.check_usable()
        self._pipeline = self._pipeline or self._make_pipeline()
        return self._pipeline

    def _make_pipeline(self) -> Pipeline:
        pool = BufferPool(host_memory(self.pool_nbytes, locked=self._locked, inherited=False))
        return Pipeline(pool, self._workers)

    def window_numel(self, itemsizes: Sequence[int]) -> int:
        """How many elements a window should have so that several fit into the pool: a multiple of ``WINDOW_ALIGNMENT``.

        ``itemsizes`` are those of the dtypes of its parts, in bytes.
        """
        least = max(1, sum(itemsizes)) * WINDOW_ALIGNMENT
        if least > self.pool_nbytes:
            raise OffloadError(
                f"Rank {self._rank}: the buffers have {self.pool_nbytes} bytes, and the smallest window takes {least}. "
                "Set a larger `buffer_mib`."
            )
        nbytes = min(self.pool_nbytes // _WINDOWS, _MOST_WINDOW_NBYTES)
        return max(1, nbytes // least) * WINDOW_ALIGNMENT

    def rest(self) -> None:
        """Leave no thread and no pool between runs. What is in the file stays, for later runs and for checkpoints after
        the last one."""
        if self._file.is_ours:
            self._workers.end()
            self._pipeline = None

    def close(self) -> None:
        """End the threads, close the file, which frees its space, give back the memory. The second time, nothing.

        It may be called while another thread reads or writes, which then gets an error.
        """
        _close(self._workers, self._file)
        self._closing.detach()


@dataclass(eq=False)
class _FetchBuffer:
    memory: Tensor
    places: dict[int, Tensor] = field(default_factory=dict)  # of shards not asked for yet, by identity of their source
    job: Future[None] | None = None  # fills it
    used: Event = None  # behind the last copy out of it


class FileTiers(MemoryTiers):
    """Memory by tier, with files of ``store`` as one more, out of which a thread reads shards ahead of their use."""

    can_fail = True

    def __init__(self, store: NvmeStore, device: torch.device, streams: Streams | None = None) -> None:
        super().__init__(device, streams)
        self.store = store
        self.reserved_nbytes = 0  # of host memory, by all buffers together, in a run
        self._nbytes = 0  # of each buffer
        self._active = True  # not between runs, where reading ahead would leave a thread and buffers behind
        self._buffers: list[_FetchBuffer] = []
        self._reader: ThreadPoolExecutor | None = None

    @property
    def host_buffer_nbytes(self) -> int:
        return super().host_buffer_nbytes + self.store.host_nbytes + self.reserved_nbytes

    @property
    def disk_nbytes(self) -> int:
        return self.store.nbytes_on_disk

    def allocate(self, tier: Tier, numel: int, dtype: torch.dtype, what: str) -> Tensor:
        """As for ``MemoryTiers``; a ``FileTensor`` on disk."""
        if tier is Tier.DISK:
            return self.store.allocate(numel, dtype, what)
        return super().allocate(tier, numel, dtype, what)

    def reserve(self, units: int, nbytes: int) -> None:
        """Read so many units ahead, whose shards take up to ``nbytes``, each in whole pages. Memory for them is taken
        with the first use."""
        self._nbytes = padded_nbytes(nbytes)
        self.reserved_nbytes = units * self._nbytes

    def ahead(self, sources: Sequence[Tensor]) -> None:
        wanted = [source for source in sources if self._active and isinstance(source, FileTensor)]
        sizes = [padded_nbytes(source.numel() * source.dtype.itemsize) for source in wanted]
        if not 0 < sum(sizes) <= self._nbytes:
            return
        if any(id(source) in buffer.places for source in wanted for buffer in self._buffers):
            return
        buffer = next((buffer for buffer in self._buffers if not buffer.places), None)
        if buffer is None and len(self._buffers) * self._nbytes < self.reserved_nbytes:
            buffer = _FetchBuffer(self.memory.allocate(self._nbytes, torch.uint8))
            self._buffers.append(buffer)
        if buffer is None:
            return
        for source, size, end in zip(wanted, sizes, accumulate(sizes), strict=True):
            buffer.places[id(source)] = buffer.memory[end - size : end].view(source.dtype)[: source.numel()]
        used, copies = buffer.used, [*zip(buffer.places.values(), wanted, strict=True)]

        def read() -> None:
            if used is not None:
                used.synchronize()
            with untracked():
                for place, source in copies:
                    fill_from(place, source)

        self._reader = self._reader or ThreadPoolExecutor(1, thread_name_prefix="lightning_zero-fetch")
        buffer.job = self._reader.submit(read)

    def fetch(self, source: Tensor, destination: Tensor) -> None:
        buffer = next((buffer for buffer in self._buffers if id(source) in buffer.places), None)
        if buffer is None or buffer.job is None:
            super().fetch(source, destination)
            return
        place = buffer.places.pop(id(source))
        buffer.job.result()
        super().fetch(place, destination)
        buffer.used = self._fetched

    def forget(self) -> None:
        for buffer in self._buffers:
            if buffer.job is not None:
                buffer.job.exception()
            buffer.places.clear()

    def rest(self) -> None:
        """As for ``MemoryTiers``; the file stays."""
        super().rest()
        self._active = False
        self._buffers.clear()
        if self._reader is not None:
            self._reader.shutdown(wait=True)
            self._reader = None
        self.store.rest()

    def wake(self) -> None:
        self._active = True

    def close(self) -> None:
        """Give everything up. May be called again."""
        super().close()
        self.store.close()


def _close(workers: Workers, file: DataFile) -> None:
    """Nothing in a forked process: it has no threads to end, and may have inherited held locks."""
    if not file.is_ours:
        return
    file.close()  # what is under way stops at its next page
    if not workers.end():
        with contextlib.suppress(Warning):  # where warnings are errors, the end of a run still is none
            left = "A thread that reads or writes offloaded files did not end: its disk does not answer."
            warnings.warn(left, stacklevel=2)
