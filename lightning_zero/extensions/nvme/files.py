"""One file on a disk, read and written in whole pages, and tensors whose elements are in it.

[Note: why pages, and why sums]
Windows are cut anew with every set of optimizers, and checkpoints and units that are fetched read other ranges. All of
them move whole pages, so that a checksum for each page fits all of them, and nothing more has to be read for it.
A page is 8 rows of 64 numbers of 64 bits. Its checksum is the sum of the 64 columns' sums, each plus its upper half, so
that upper bits count as much as lower ones, and times an odd number of its own. Every single bit that is changed gives
another one. Two in a page keep it in one of 9000 cases, damage at large in next to none. Torch takes less than half of
the time for that which zlib takes for CRC-32s (7.9 against 2.9 GB/s on one core), and does not hold Python's lock.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_zero._torch import make_wrapper_subclass, storage_key, tree_leaves, tree_map_only, untracked
from lightning_zero.errors import OffloadError, readable_size
from lightning_zero.offload.host import (
    PAGE_NBYTES,
    PIECE_NBYTES,
    OffloadedTensor,
    bytes_of,
    host_memory,
    in_memory,
    is_on_host,
    new_memory,
    padded_nbytes,
    pieces,
    view_of,
)

__all__ = ["DataFile", "FileSystem", "FileTensor", "PageChecksums", "Region", "fill_from"]

_CURE = "The last checkpoint is intact: mend the cause and resume from it."
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_OFFERED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
_PATIENCE = 3  # answers in a row that bring a transfer no page further
_COLUMNS = 64
_PAGES = 62  # at once: torch would share 2**15 numbers or more out among threads, which are busy with the step
_UNKNOWN = 0x5DEECE66D  # no page is held to this
with untracked():
    _WEIGHTS = 2 * torch.randint(2**62, (_COLUMNS,), generator=torch.Generator().manual_seed(0), device="cpu") + 1


class FileSystem:
    """The system calls that offload makes, in one place so that a test can have them fail. Each raises ``OSError``."""

    open = staticmethod(os.open)
    close = staticmethod(os.close)

    def preadv(self, descriptor: int, memory: memoryview, offset: int) -> int:
        return os.preadv(descriptor, [memory], offset)

    def pwritev(self, descriptor: int, memory: memoryview, offset: int) -> int:
        return os.pwritev(descriptor, [memory], offset)

    def fallocate(self, descriptor: int, offset: int, nbytes: int) -> None:
        """After it, writing there needs no more space."""
        if not hasattr(os, "posix_fallocate"):
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        os.posix_fallocate(descriptor, offset, nbytes)

    def free_nbytes(self, path: Path) -> int:
        """What an ordinary user may still write."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize


class DataFile:
    """A file of whole pages that grows, and is read and written from any thread. Its errors are ``OffloadError``.

    It is created in ``folder``, for this user only, and loses its name at once: nobody else can open it, and the system
    frees its space when this process closes it or ends, however that ends. It goes past the page cache where the file
    system takes that (``direct``): what is offloaded then takes no memory but the buffers. Everything that is read or
    written then has to be aligned, in memory and in the file; one thread at a time does so for other elements through
    ``staging``, whole pages.
    """

    def __init__(self, folder: str, rank: int, system: FileSystem, staging: Tensor) -> None:
        self.folder = Path(folder).absolute()
        self.name = f"lightning_zero-rank{rank}-{secrets.token_hex(8)}"
        """Unlike that of any other file, although it is no longer in the folder."""
        self.nbytes = 0
        self.staging, self.staging_lock = staging, threading.Lock()
        self._rank = rank
        self._system = system
        self._pid = os.getpid()
        self._growing = threading.Lock()
        self._lock = threading.RLock()  # of the next three; a store may be freed, and closed, wherever memory is taken
        self._descriptor = -1
        self._users = 0
        self._closed = False
        self.direct = False
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    @property
    def is_ours(self) -> bool:
        """Whether this process made it; one that was forked from it did not."""
        return os.getpid() == self._pid

    def read(self, memory: Tensor, offset: int, what: str) -> None:
        """Fill ``memory``, 1-D bytes on the host, from ``offset`` in the file, in bytes; ``what`` is for messages."""
        self._move(self._system.preadv, memory, offset, f"reading {what}")

    def write(self, memory: Tensor, offset: int, what: str) -> None:
        """Write ``memory`` to the file; see ``read``."""
        self._move(self._system.pwritev, memory, offset, f"writing {what}")

    def grow(self, nbytes: int, what: str) -> int:
        """Reserve whole pages at the end of the file, which read as zeros, so that no later write runs out of space.

        Returns where they begin, in bytes. ``what`` goes there, for messages.
        """
        self.check_usable()
        with self._growing:
            offset = self.nbytes
            if not nbytes:  # which the system refuses
                return offset
            try:
                with self._in_use() as descriptor:
                    self._system.fallocate(descriptor, offset, nbytes)
            except OSError as error:
                if error.errno not in _NOT_OFFERED:
                    raise OffloadError(
                        f"Rank {self._rank}: {readable_size(nbytes)} for {what}, beside {readable_size(self.nbytes)} "
                        f"there already, cannot be reserved in '{self.folder}': {error.strerror or error}"
                        f"{self._free(error)}. Free some space, or take another path."
                    ) from error
                zeros = host_memory(min(nbytes, PIECE_NBYTES), locked=False)
                for start in range(0, nbytes, zeros.numel()):
                    self.write(zeros[: nbytes - start], offset + start, what)
            self.nbytes = offset + nbytes
            return offset

    def check_usable(self) -> None:
        """Raise unless this process may use the file. Takes no lock, which a forked process could have found held."""
        if self._closed:
            raise OffloadError(f"Rank {self._rank}: its file in '{self.folder}' was closed: the run has ended.")
        if not self.is_ours:
            raise OffloadError(
                f"Rank {self._rank}: its file in '{self.folder}' belongs to process {self._pid}; a process forked from "
                "it cannot use what is offloaded. Read it before forking."
            )

    def close(self) -> None:
        """Close the file, as soon as no thread is reading or writing. The second time, and after a fork, nothing."""
        if not self.is_ours:
            return
        with self._lock:
            self._closed = True
            self._close_unused()

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[int]:
        """The descriptor, which stays open, and the same file's, as long as this lasts."""
        self.check_usable()
        with self._lock:
            self.check_usable()
            self._users += 1
        try:
            yield self._descriptor
        finally:
            with self._lock:
                self._users -= 1
                self._close_unused()

    def _close_unused(self) -> None:
        if self._closed and not self._users and self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            with contextlib.suppress(OSError):
                self._system.close(descriptor)

    def _open(self) -> None:
        path, flags = self.folder / self.name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            self._descriptor = self._system.open(path, flags, 0o600)
            try:
                page = host_memory(PAGE_NBYTES, locked=False)
                self.write(page, 0, "a first page")
                if flag := getattr(os, "O_DIRECT", 0):
                    self.direct = self._takes_direct(path, flag, page)
            finally:
                path.unlink()
        except OSError as error:
            raise OffloadError(
                f"Rank {self._rank}: a file cannot be created in '{self.folder}': {error.strerror}."
            ) from error

    def _takes_direct(self, path: Path, flag: int, page: Tensor) -> bool:
        """Open the file again past the page cache, and keep that if a page really goes there and comes back."""
        buffered = self._descriptor
        try:
            self._descriptor = self._system.open(path, os.O_RDWR | os.O_CLOEXEC | flag, 0o600)
        except OSError:
            return False
        works = False
        with contextlib.suppress(OffloadError):
            self.write(page.fill_(1), 0, "a first page")
            self.read(page.fill_(2), 0, "a first page")
            came_back = bool((page == 1).all())
            self.write(page.zero_(), 0, "a first page")
            works = came_back
        unused, self._descriptor = (buffered, self._descriptor) if works else (self._descriptor, buffered)
        self._system.close(unused)
        if not works:
            self.write(page.zero_(), 0, "a first page")
        return works

    def _move(self, call: Callable[[int, memoryview, int], int], memory: Tensor, offset: int, doing: str) -> None:
        nbytes = memory.numel()
        view = view_of(memory)
        done = stalled = 0
        with self._in_use() as descriptor:
            while done < nbytes:
                try:
                    count = call(descriptor, view[done:], offset + done)
                except OSError as error:
                    raise OffloadError(
                        f"Rank {self._rank}: {doing} ({nbytes - done} bytes at byte {offset + done} of its file in "
                        f"'{self.folder}') failed: {error.strerror or error}{self._free(error)}. {_CURE}"
                    ) from error
                # Past the page cache only whole pages can be asked for: the part of one is asked for again.
                moved = count if done + count == nbytes else count - count % PAGE_NBYTES
                stalled = 0 if moved else stalled + 1
                if not count or stalled >= _PATIENCE:
                    raise OffloadError(
                        f"Rank {self._rank}: {doing} gave {done + count} of {nbytes} bytes at byte {offset} of its "
                        f"file in '{self.folder}': the file was cut off, or the disk is failing. {_CURE}"
                    )
                done += moved
                self.check_usable()  # closed meanwhile: do not go on for long

    def _free(self, error: OSError) -> str:
        """How much space there is, if there was not enough of it."""
        if error.errno not in _FULL:
            return ""
        try:
            return f" ({readable_size(self._system.free_nbytes(self.folder))} free)"
        except OSError as unknown:
            return f" (an unknown number of bytes free: {unknown.strerror})"

    def damaged(self, what: str, where: str) -> OffloadError:
        """The error for ``what`` was read there, and is not what was written."""
        return OffloadError(
            f"Rank {self._rank}: {what} in '{self.folder}' differs from what was written: {where}. The disk, its cable "
            "or the memory is faulty. The last checkpoint is intact: resume from it, on another disk."
        )


class PageChecksums:
    """Of ``nbytes`` bytes, which are zeros at first. Threads may use it at the same time for different pages."""

    def __init__(self, nbytes: int) -> None:
        with untracked():
            self._sums = torch.zeros(padded_nbytes(nbytes) // PAGE_NBYTES, dtype=torch.int64, device="cpu")

    @contextlib.contextmanager
    def writing(self, memory: Tensor, offset: int) -> Iterator[None]:
        """While ``memory``, 1-D bytes of whole pages, is written. If that fails, nobody knows what is there."""
        with untracked():
            sums = self._sums_of(memory)
            expected = self._expected(memory, offset).fill_(_UNKNOWN)
            yield
            expected.copy_(sums)

    def damaged(self, memory: Tensor, offset: int) -> list[int]:
        """Where pages begin that were read into ``memory`` and are not as they were written."""
        with untracked():
            sums, expected = self._sums_of(memory), self._expected(memory, offset)
            if torch.equal(sums, expected):
                return []
            wrong = (sums != expected) & (expected != _UNKNOWN)
            return [offset + PAGE_NBYTES * page for page in wrong.nonzero().flatten().tolist()]

    def _expected(self, memory: Tensor, offset: int) -> Tensor:
        return self._sums.narrow(0, offset // PAGE_NBYTES, memory.numel() // PAGE_NBYTES)

    def _sums_of(self, memory: Tensor) -> Tensor:
        pages = memory.view(torch.int64).view(-1, PAGE_NBYTES // 8 // _COLUMNS, _COLUMNS)
        sums = torch.empty(len(pages), dtype=torch.int64, device="cpu")
        for some, sums_of_some in zip(pages.split(8 * _PAGES), sums.split(8 * _PAGES), strict=True):
            columns = torch.empty(len(some), _COLUMNS, dtype=torch.int64, device="cpu")
            for few, columns_of_few in zip(some.split(_PAGES), columns.split(_PAGES), strict=True):
                torch.sum(few, 1, out=columns_of_few)
            torch.sum(columns.add_(columns >> 32).mul_(_WEIGHTS), 1, out=sums_of_some)
        return sums


@dataclass(frozen=True, eq=False)
class Region:
    """Elements in a file, side by side.

    What does not consist of whole pages, or is not in aligned host memory of the same dtype, goes through the staging
    memory piece by piece. Other elements on the first and on the last page are kept.
    """

    file: DataFile
    offset: int  # of the first element, in bytes; whole pages
    numel: int  # elements; the file holds whole pages of them
    dtype: torch.dtype
    what: str  # they are, for messages
    checksums: PageChecksums | None = None  # of its pages, which are then always moved as a whole

    def read(self, memory: Tensor, offset: int) -> None:
        """Fill ``memory``, 1-D bytes on the host, from ``offset`` in the file, in bytes; whole pages of the region.

        An ``OffloadError`` if they cannot be read, or are not what was written.
        """
        self.file.read(memory, offset, self.what)
        if self.checksums is not None and (wrong := self.checksums.damaged(memory, offset - self.offset)):
            size, pages = self.dtype.itemsize, memory.numel() // PAGE_NBYTES
            begin = (offset - self.offset) // size
            end = min(self.numel, begin + memory.numel() // size)
            raise self.file.damaged(
                f"{self.what} (the window of elements {begin} to {end}, at byte {offset})",
                f"{len(wrong)} of {pages} pages have another checksum, first the one at byte {self.offset + wrong[0]}",
            )

    def write(self, memory: Tensor, offset: int) -> None:
        """Write ``memory`` to the file; see ``read``."""
        if self.checksums is None:
            self.file.write(memory, offset, self.what)
            return
        with self.checksums.writing(memory, offset - self.offset):
            self.file.write(memory, offset, self.what)

    def move(self, tensor: Tensor, start: int, write: bool) -> None:
        """Read elements into a 1-D tensor, on any device, of any dtype, or write them from it; both cast.

        ``start`` is the element that ``tensor[0]`` gets or becomes; the range is inside the region.
        """
        self.file.check_usable()  # before the lock, which a forked process may have inherited as held
        move = self.write if write else self.read
        size, begin = self.dtype.itemsize, self.offset + start * self.dtype.itemsize
        end = begin + tensor.numel() * size
        direct = self._direct_nbytes(tensor, begin)
        if direct:
            move(bytes_of(tensor)[:direct], begin)
        at = begin + direct
        while at < end:
            page = at - at % PAGE_NBYTES
            with self.file.staging_lock, untracked():
                piece = self.file.staging[: min(self.file.staging.numel(), padded_nbytes(end - page))]
                until = min(end, page + piece.numel())
                elements = piece[at - page : until - page].view(self.dtype)
                outside = tensor[(at - begin) // size : (until - begin) // size]
                if write:
                    self._read_edges(piece, page, at, until)
                    elements.copy_(outside)
                    move(piece, page)
                else:
                    move(piece, page)
                    outside.copy_(elements)
            at = until

    def _direct_nbytes(self, tensor: Tensor, begin: int) -> int:
        """How many bytes, from the first, can be moved between ``tensor`` and the file as they are."""
        same = is_on_host(tensor) and tensor.dtype == self.dtype and tensor.is_contiguous()
        if not same or not tensor.numel() or tensor.is_conj() or tensor.is_neg():
            return 0
        if begin % PAGE_NBYTES or tensor.data_ptr() % PAGE_NBYTES:
            return 0
        return tensor.nbytes - tensor.nbytes % PAGE_NBYTES

    def _read_edges(self, piece: Tensor, page: int, at: int, until: int) -> None:
        """Fill the first and the last page of ``piece`` from the file where not all of them will be overwritten.

        What lies behind the last element of the region, on its last page, does not matter.
        """
        if at > page:
            self.read(piece[:PAGE_NBYTES], page)
        last = until - until % PAGE_NBYTES
        whole = until % PAGE_NBYTES == 0 or until == self.offset + self.numel * self.dtype.itemsize
        if not whole and not (at > page and last == page):
            self.read(piece[last - page :], last)


class FileTensor(OffloadedTensor):
    """A tensor whose elements, in this shape, rest in a region of a file from ``start`` on.

    It has a shape and a dtype, and no memory. Views of it that are a range of its elements (slices of the first
    dimension, other shapes) are handles on the same elements. ``copy_``, ``fill_`` and ``zero_`` write to the file in
    pieces, and ``copy_`` from it into an ordinary tensor reads in pieces. Whatever else computes with it reads it first
    and gives ordinary tensors. What would write in place otherwise, or need an address, or a view that is no range, is
    refused.

    Nothing is kept in memory, so two threads must not write to the same elements at a time.
    """

    region: Region  # which may hold other elements as well
    start: int

    @staticmethod
    def __new__(cls, region: Region, start: int, shape: torch.Size) -> FileTensor:
        resting: FileTensor = make_wrapper_subclass(
            cls, shape, dtype=region.dtype, device=torch.device("cpu"), requires_grad=False
        )
        if start < 0 or start + resting.numel() > region.numel:
            raise ValueError(
                f"Elements {start} to {start + resting.numel()} are not inside {region.what}, which has {region.numel}."
            )
        resting.region, resting.start = region, start
        return resting

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for handles that show the same elements in the same shape, whether or not one of them still exists."""
        where = (self.region.file.name, self.region.offset, self.start)
        return (*where, tuple(self.shape), self.dtype)

    def part(self, start: int, numel: int) -> FileTensor:
        """A range of the flattened elements, 1-D. A ``ValueError`` if it is not inside."""
        if start < 0 or numel < 0 or start + numel > self.numel():
            raise ValueError(f"Elements {start} to {start + numel} are not inside {self}.")
        return FileTensor(self.region, self.start + start, torch.Size((numel,)))

    def read(self) -> Tensor:
        """All elements, in host memory of their own. An ``OffloadError`` if they cannot be read."""
        whole = new_memory(self.numel(), self.dtype)
        fill_from(whole, self.part(0, self.numel()))
        return whole.view(self.shape)

    def write(self, values: Tensor, start: int = 0) -> None:
        """Write a range of the flattened elements, in pieces, from a 1-D tensor, cast to their dtype.

        A ``ValueError`` if they are not inside, an ``OffloadError`` if they cannot be written.
        """
        fill_from(self.part(start, values.numel()), values)

    def fill(self, value: Any) -> None:
        """Give every element the same value, in pieces."""
        for start, piece in pieces(self.numel(), self.dtype):
            self.write(piece.fill_(value), start)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        aten = torch.ops.aten
        if func is aten.copy_.default:
            return _copy(args[0], args[1])
        if func in (aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default):
            args[0].fill(0 if len(args) == 1 else args[1].item() if isinstance(args[1], Tensor) else args[1])
            return args[0]
        arguments = func._schema.arguments
        values = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
        for argument in arguments:  # those that the result shows, or that are written to
            handles = [leaf for leaf in tree_leaves(values.get(argument.name)) if isinstance(leaf, cls)]
            if handles and argument.alias_info is not None:
                if argument.alias_info.is_write:
                    _refuse(handles[0], f"is not changed by {func}", "Change what `read()` gives, and `write()` that.")
                return _view(func, handles[0], args, kwargs)
        args, kwargs = tree_map_only(FileTensor, FileTensor.read, (args, kwargs))
        return func(*args, **kwargs)

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        _refuse(self, "cannot show other data", "Write to it with `write()` or `copy_()`.")

    def data_ptr(self) -> int:
        _refuse(self, "has no address", "Use `read()`.")

    def untyped_storage(self) -> torch.UntypedStorage:
        _refuse(self, "has no storage", "Use `read()`, or `identity` to compare.")

    def __dlpack__(self, **options: Any) -> Any:
        """Refused: torch's own would crash the interpreter, for a tensor without memory."""
        _refuse(self, "shares no memory with another library", "Use `read()`.")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as an ordinary tensor."""
        return self.read().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """An ordinary tensor: a copy does not see later writes, and nobody counted on more room in the file."""
        copied: Tensor = self.read()
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, requires_grad=self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"FileTensor({self.region.what}, elements {self.start} to {self.start + self.numel()}, {self.dtype})"


def fill_from(destination: Tensor, source: Tensor) -> None:
    """``destination.copy_(source)`` of 1-D tensors, wherever they rest, in pieces where one of them rests in a file."""
    if destination.dim() != 1 or destination.shape != source.shape:
        raise ValueError(f"Shape {tuple(destination.shape)} cannot be filled from shape {tuple(source.shape)}.")
    if not isinstance(source, FileTensor):
        if isinstance(destination, FileTensor):
            destination.region.move(source.detach(), destination.start, write=True)
        else:
            with untracked():
                destination.copy_(source)
    elif not isinstance(destination, FileTensor):
        source.region.move(destination.detach(), source.start, write=False)
    elif destination.identity != source.identity:
        for start, piece in pieces(source.numel(), source.dtype):
            source.region.move(piece, source.start + start, write=False)
            destination.write(piece, start)


def _copy(target: Tensor, source: Tensor) -> Tensor:
    """``target.copy_(source)``: at least one of them rests."""
    if source.shape != target.shape:
        source = in_memory(source).expand(target.shape)
    if isinstance(target, FileTensor) or (isinstance(source, FileTensor) and target.is_contiguous()):
        target_elements, source_elements = (
            tensor.part(0, tensor.numel()) if isinstance(tensor, FileTensor) else tensor.reshape(-1)
            for tensor in (target, source)
        )
        fill_from(target_elements, source_elements)
    else:
        with untracked():
            target.copy_(in_memory(source))
    return target


def _view(func: Any, handle: FileTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``func`` shows of ``handle``, as handles: torch says which elements those are."""
    meta = torch.empty(handle.shape, dtype=handle.dtype, device="meta")
    args, kwargs = tree_map_only(FileTensor, lambda _: meta, (args, kwargs))
    shown = func(*args, **kwargs)

    def resting(view: Tensor) -> FileTensor:
        if storage_key(view) != storage_key(meta) or view.dtype != handle.dtype:
            raise TypeError(f"{func}: {handle} cannot be shown like this. Use `read()` first.")
        if not view.is_contiguous():
            raise TypeError(
                f"{func}: {handle} can only be shown in ranges of its elements. Use `read()`, and `write()` to "
                "change it."
            )
        return FileTensor(handle.region, handle.start + int(view.storage_offset()), view.shape)

    return tree_map_only(Tensor, resting, shown)


def _refuse(handle: FileTensor, why: str, instead: str) -> NoReturn:
    raise TypeError(f"{handle} rests in a file and {why}. {instead}")
