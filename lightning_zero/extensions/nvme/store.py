"""The files of one rank on a disk, in a folder of its own beside what earlier runs have left, as a tier of memory.

[Note: whose folder is it?]
A folder belongs to the process that created it, under a name that nobody else can have chosen, and is removed by that
process alone, at the end of its run. A process that was killed leaves its folder behind. Nothing in it can be used
again (it is half of an optimizer step), but deleting what another process may be using is worse than a full disk: it is
only reported. Its owner holds a lock on ``owner.json`` as long as it lives, which the kernel releases however it ends,
and which shows through containers and network file systems where a process number means nothing. Where there are no
locks, number and start time of the process decide, on its own host.

[Note: strangers]
Others may write to the directory, too, and what looks like a run's folder may be anything. A name that no run would
give is none of our business, links are not followed, a page is read of an owner's file if that is a file, and what it
says is not repeated if it is no time. Nothing there is an error. Only the folder that was made is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import socket
import stat
import time
import warnings
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_zero._torch import untracked
from lightning_zero.comm.streams import Event, Streams, runs_beside
from lightning_zero.config import Tier
from lightning_zero.errors import OffloadError
from lightning_zero.extensions.nvme.files import (
    DataFile,
    FileSystem,
    FileTensor,
    PageChecksums,
    Region,
    amount,
    fill_from,
)
from lightning_zero.extensions.nvme.pipeline import BufferPool, Pipeline, Workers
from lightning_zero.offload.host import PAGE_NBYTES, host_memory, padded_nbytes
from lightning_zero.offload.transfers import MemoryTiers

__all__ = ["WINDOW_ALIGNMENT", "FileTiers", "Leftover", "NvmeStore", "RunFolder", "find_leftovers"]

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
            warnings.warn(
                "Runs that did not end normally have left offloaded files behind. They cannot be used again; delete "
                "them yourself if nothing uses them:\n  " + "\n  ".join(lines),
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
            self._file = DataFile(self._folder.path / _DATA, rank, self._system, staging)
        except BaseException:
            self._folder.remove()
            raise
        self._pipeline = Pipeline(self.pool, self._workers, self._file.check_alive)
        self._closing = weakref.finalize(self, _close, self._workers, self._file, self._folder)
        self.check_alive = self._file.check_alive

    @property
    def folder(self) -> str:
        """Where the file is."""
        return str(self._folder.path)

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
        """As for ``MemoryTiers``; the folder goes, and the file lives on without a name."""
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


# The folder

_DATA = "data"
"""The name of the file that a run puts into its folder."""

_OWNER = "owner.json"
_PREFIX = "lightning_zero-"
_NAME = re.compile(re.escape(_PREFIX) + r"(?P<host>[A-Za-z0-9._]+)-(?P<pid>[0-9]{1,9})-[0-9a-f]{12}-rank[0-9]{1,9}")
_WHEN, _TIME = "%Y-%m-%d %H:%M:%S %z", re.compile("[0-9: +-]{10,30}")
_LATEST = 1e11  # seconds that any system can tell the date of
_SETTLING_SECONDS = 60.0  # how long a folder without an owner's file may be one that is just being made or removed


@dataclass(frozen=True)
class Leftover:
    """A folder that a run left behind."""

    path: Path
    nbytes: int | None  # on disk, if that can be read
    when: str  # it was created, or last changed
    owner: str  # in words
    dead: bool  # whether that process is known to have ended

    def __str__(self) -> str:
        size = "unknown size" if self.nbytes is None else amount(self.nbytes)
        state = "which has ended" if self.dead else "of which nothing is known"
        return f"{self.path} ({size}, {self.when}, {self.owner}, {state})"


class RunFolder:
    """A new folder for this process in an existing directory: see [Note: whose folder is it?]."""

    def __init__(self, parent: str, rank: int, world_size: int) -> None:
        host, pid = _host(), os.getpid()
        self._rank = rank
        self.pid = pid
        self._lock: int | None = None
        self._made: tuple[int, int] | None = None  # its device and number
        self.path = Path(os.path.abspath(parent)) / f"{_PREFIX}{host}-{pid}-{secrets.token_hex(6)}-rank{rank}"
        owner = {"host": host, "pid": pid, "started": _started(pid), "rank": rank, "world_size": world_size}
        try:
            self.path.mkdir(mode=0o700)
            self._made = _identity(self.path)
            self._sign(owner | {"when": time.strftime(_WHEN)})
        except BaseException as error:
            self.remove()
            if not isinstance(error, OSError):
                raise
            raise OffloadError(
                f"Rank {rank}: the folder for offloaded files '{self.path}' cannot be created: {error.strerror}."
            ) from error

    def remove(self) -> str | None:
        """Remove the folder with what this package put into it; in a forked process, and the second time, nothing.

        Returns why it is still there, if it is.
        """
        if os.getpid() != self.pid:
            return None
        reason, there = "", _identity(self.path)
        ours = there is not None and there == self._made
        for name in (_DATA, f"{_OWNER}.new", _OWNER) if ours else ():
            try:
                self.path.joinpath(name).unlink(missing_ok=True)
            except OSError as error:
                reason = reason or str(error.strerror)
        lock, self._lock = self._lock, None
        if lock is not None:
            with contextlib.suppress(OSError):
                os.close(lock)
        try:
            if ours:
                self.path.rmdir()
            elif there and self._made:
                reason = "another one is in its place"
        except FileNotFoundError:
            reason = ""
        except OSError as error:
            reason = reason or str(error.strerror)
        left = f"Rank {self._rank}: the offloaded files in '{self.path}' were not removed: {reason}."
        return left if reason else None

    def _sign(self, owner: dict[str, Any]) -> None:
        """Write the owner's file, locked before anybody can see it."""
        new = self.path / f"{_OWNER}.new"
        self._lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # not offered here
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(self._lock, json.dumps(owner).encode())
        new.rename(self.path / _OWNER)


def find_leftovers(parent: str) -> list[Leftover]:
    """The folders in ``parent`` whose process has ended, or cannot be asked. What vanishes meanwhile is not counted."""
    names: list[str] = []
    found: list[Leftover] = []
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    for name in filter(None, map(_NAME.fullmatch, names)):
        with contextlib.suppress(OSError):
            if leftover := _leftover(Path(os.path.abspath(parent), name.string), name):
                found.append(leftover)
    return found


def _leftover(path: Path, name: re.Match[str]) -> Leftover | None:
    """What is known about a folder, unless its owner lives."""
    changed = path.lstat().st_mtime
    pid, host = int(name["pid"]), name["host"]
    owner, locked = _asked(path / _OWNER)
    if owner is None:
        if time.time() - changed < _SETTLING_SECONDS:
            return None
        path.lstat()  # it may just have been removed
        owner = {}
    ours = host == _host()
    if locked or (locked is None and ours and _lives(pid, owner.get("started"))):
        return None
    nbytes: int | None = None
    with contextlib.suppress(OSError):
        nbytes = sum(path.joinpath(file).lstat().st_blocks * 512 for file in (_DATA, _OWNER))
    when = owner.get("when")
    if not isinstance(when, str) or not _TIME.fullmatch(when):
        when = time.strftime(_WHEN, time.localtime(min(changed, _LATEST)))
    return Leftover(path, nbytes, when, f"process {pid} on {host}", dead=ours)


def _asked(path: Path) -> tuple[dict[str, Any] | None, bool | None]:
    """What an owner's file says, ``None`` if there is none; and whether its owner still holds the lock, if known."""
    # What takes its place meanwhile is neither followed nor waited for.
    flags = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return {}, None
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        return None, None
    except OSError:
        return {}, None
    try:
        locked: bool | None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: others ask at the same time
            locked = False
        except OSError as error:
            locked = True if isinstance(error, BlockingIOError) else None
        try:
            owner = json.loads(os.pread(descriptor, PAGE_NBYTES, 0))
        except (OSError, ValueError, RecursionError):
            owner = {}
        return owner if isinstance(owner, dict) else {}, locked
    finally:
        os.close(descriptor)


def _identity(path: Path) -> tuple[int, int] | None:
    """What tells a folder from every other one; ``None`` if there is none that can be looked at."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _lives(pid: int, started: Any) -> bool:
    """Whether that process of this host is running, and is not another one with the same number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # it is somebody else's
    now = _started(pid)
    return started is None or now is None or started == now


def _started(pid: int) -> int | None:
    """When a process started, in ticks since the system's start."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname()) or "localhost"
