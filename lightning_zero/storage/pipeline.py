"""Read ahead, work, write behind: what is on a disk passes through a bounded pool of memory, window by window."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from lightning_zero.errors import OffloadError
from lightning_zero.storage.file_tensor import FileTensor
from lightning_zero.storage.host import PAGE_NBYTES, padded_nbytes
from lightning_zero.storage.workers import BufferPool, Job, Meter, Workers

__all__ = ["Part", "Pipeline", "PipelineStats", "Request", "Waitable"]

_TRANSFER_NBYTES = 4 << 20  # most that one system call moves: long enough to be worth one, short enough to share out


class Waitable(Protocol):
    """Something that uses a buffer until it is waited for."""

    def wait(self) -> object:
        """Wait on the host until it is over."""


class Part(NamedTuple):
    """The elements of one tensor that a window needs.

    Attributes:
        tensor: 1-D, as many elements as the window has. What is written begins and ends at pages of the file, or ends
            with its region.
        read: whether the buffer holds its elements when ``work`` begins; otherwise it holds anything.
        write: whether what ``work`` leaves in the buffer goes to the file.
    """

    tensor: FileTensor
    read: bool
    write: bool


@dataclass
class Request:
    """One window.

    Attributes:
        numel: elements of each part.
        regions: its parts, as ``Part`` or plain tuples.
        tag: for ``work``.
    """

    numel: int
    regions: Sequence[Part | tuple[FileTensor, bool, bool]]
    tag: Any = None


@dataclass
class PipelineStats:
    """What runs have cost so far.

    Attributes:
        reads: bytes read, and how long at least one read was under way.
        writes: the same of writes.
        work_seconds: spent in ``work``.
        wait_seconds: that the caller's thread waited for reads, writes and what ``work`` returned.
        run_seconds: spent in ``run``.
    """

    reads: Meter = field(default_factory=Meter)
    writes: Meter = field(default_factory=Meter)
    work_seconds: float = 0.0
    wait_seconds: float = 0.0
    run_seconds: float = 0.0


class _Span(NamedTuple):
    """A part's pages in the file, from ``begin`` to ``end``, and in its window's memory; all in bytes."""

    part: Part
    begin: int
    end: int
    head: int  # before the first element
    place: int  # of the first page in the window's memory


@dataclass(eq=False)
class _Window:
    """A window under way: its reads start with it, its writes after its work, which has returned ``waits``."""

    request: Request
    spans: list[_Span]
    memory: Tensor
    reads: list[Job] = field(default_factory=list)
    writes: list[Job] = field(default_factory=list)
    worked: bool = False
    waits: Sequence[Waitable] = ()

    def buffers(self) -> list[Tensor]:
        """One 1-D tensor for each part, in order."""
        found = []
        for part, begin, end, head, place in self.spans:
            pages = self.memory[place : place + end - begin]
            dtype = part.tensor.dtype
            found.append(pages[head : head + self.request.numel * dtype.itemsize].view(dtype))
        return found


class Pipeline:
    """Brings windows of files through a pool of memory: reads some ahead of the work, and writes behind it.

    Args:
        pool: the memory. Used by one run at a time.
        workers: the threads that read and write.
        check_alive: raises if the files are gone; asked before every run.
    """

    def __init__(self, pool: BufferPool, workers: Workers, check_alive: Callable[[], None]) -> None:
        self._pool = pool
        self._workers = workers
        self._check_alive = check_alive
        self._under_way: deque[_Window] = deque()
        self._running = False
        self._abandoned = False
        self.stats = PipelineStats()

    def run(
        self,
        requests: Iterable[Request],
        work: Callable[[Request, list[Tensor]], Sequence[Waitable] | None],
    ) -> None:
        """Have ``work`` done on every window, in order, in the caller's thread.

        All that is written is in the files when this returns. Until then nobody else may use the elements of these
        requests. A window whose elements an earlier one still writes is read after that.

        Args:
            requests: taken one by one, some of them ahead of their work.
            work: gets a request and one 1-D tensor for each of its parts, of the part's dtype, valid until ``work``
                returns and what it has returned has been waited for.

        Raises:
            OffloadError: if something could not be read or written, or the files are gone.
            ValueError: if a window is larger than the pool, or what it writes are not whole pages.
            BaseException: whatever ``requests`` or ``work`` raises. In any case nothing is under way any more, and what
                windows before have done is written, unless that failed.
        """
        if self._running or self._abandoned:
            why = "was interrupted while it waited for a disk" if self._abandoned else "is running already"
            raise OffloadError(f"This pipeline {why}: it cannot run.")
        began = time.perf_counter()
        try:
            self._running = True
            self._check_alive()
            self._run(iter(requests), work)
        except BaseException:
            self._settle()
            raise
        finally:
            self._running = False
            self.stats.run_seconds += time.perf_counter() - began

    def _run(
        self, requests: Iterator[Request], work: Callable[[Request, list[Tensor]], Sequence[Waitable] | None]
    ) -> None:
        waiting: deque[_Window] = deque()  # for their work
        following = self._next(requests)
        while following is not None or waiting:
            while following is not None:
                if window := self._begin(*following):
                    waiting.append(window)
                    following = self._next(requests)
                elif self._first_is_over():
                    self._finish_first()
                else:
                    break
            if not waiting:  # there is no room, or what comes next is still being written
                self._finish_first()
            elif self._wait_for(waiting[0], or_room=following is not None):
                self._work(waiting.popleft(), work)
        while self._under_way:
            self._finish_first()

    def _work(self, window: _Window, work: Callable[[Request, list[Tensor]], Sequence[Waitable] | None]) -> None:
        _raise_failed(window.reads)
        began = time.perf_counter()
        try:
            window.waits = work(window.request, window.buffers()) or ()
        finally:
            self.stats.work_seconds += time.perf_counter() - began
        jobs = [job for span in window.spans if span.part.write for job in self._jobs(window, span, write=True)]
        window.writes, window.worked = jobs, True
        self._workers.submit(jobs)

    def _next(self, requests: Iterator[Request]) -> tuple[Request, list[_Span], int] | None:
        """The next request, where its parts lie, and how much memory it takes."""
        request = next(requests, None)
        if request is None:
            return None
        spans: list[_Span] = []
        place = 0
        for tensor, read, write in request.regions:
            span = _span(request, Part(tensor, read, write), place)
            spans.append(span)
            place += span.end - span.begin
        nbytes = max(place, PAGE_NBYTES)
        if nbytes > self._pool.nbytes:
            raise ValueError(
                f"A window of {request.numel} elements in {len(spans)} parts takes {nbytes} bytes; the pool has "
                f"{self._pool.nbytes}. Take smaller windows, or a larger `buffer_mib`."
            )
        return request, spans, nbytes

    def _begin(self, request: Request, spans: list[_Span], nbytes: int) -> _Window | None:
        """Start to read a window, if there is room and nothing of it is still to be written."""
        if any(_overlap(spans, window.spans) for window in self._under_way):
            return None
        memory = self._pool.take(nbytes)
        if memory is None:
            return None
        window = _Window(request, spans, memory)
        self._under_way.append(window)
        window.reads = [job for span in spans if span.part.read for job in self._jobs(window, span, write=False)]
        self._workers.submit(window.reads)
        return window

    def _jobs(self, window: _Window, span: _Span, write: bool) -> list[Job]:
        region = span.part.tensor.region
        move = region.file.write if write else region.file.read
        meter = self.stats.writes if write else self.stats.reads
        jobs = []
        for begin in range(span.begin, span.end, _TRANSFER_NBYTES):
            nbytes = min(_TRANSFER_NBYTES, span.end - begin)
            place = span.place + begin - span.begin
            memory = window.memory[place : place + nbytes]
            jobs.append(Job(partial(move, memory, begin, region.what), nbytes, meter, droppable=not write))
        return jobs

    def _wait_for(self, window: _Window, or_room: bool) -> bool:
        """Wait until a window is read, or, if that is of use, until another one can be begun. Whether it is read."""
        self._wait(lambda: _over(window.reads) or (or_room and self._first_is_over()))
        return _over(window.reads)

    def _first_is_over(self) -> bool:
        """Whether the window that was begun first is written. What its work has returned may go on."""
        first = self._under_way[0]
        return first.worked and _over(first.writes)

    def _finish_first(self) -> None:
        """Wait for the window that was begun first, and give back its memory."""
        window = self._under_way[0]
        self._wait(self._first_is_over)
        _raise_failed(window.writes)
        began = time.perf_counter()
        for wait in window.waits:
            wait.wait()
        self.stats.wait_seconds += time.perf_counter() - began
        self._under_way.popleft()
        self._pool.give_back()

    def _wait(self, ready: Callable[[], bool]) -> None:
        began = time.perf_counter()
        self._workers.wait(ready)
        self.stats.wait_seconds += time.perf_counter() - began

    def _settle(self) -> None:
        """After an error: nothing is under way and all memory is given back.

        A second interrupt ends this too. Then threads may still be at it, and the memory is never used again.
        """
        self._abandoned = True
        self._workers.settle()
        for window in self._under_way:
            for wait in window.waits:
                with contextlib.suppress(Exception):  # the first error is the one that is raised
                    wait.wait()
        self._under_way.clear()
        self._pool.clear()
        self._abandoned = False


def _span(request: Request, part: Part, place: int) -> _Span:
    tensor, region = part.tensor, part.tensor.region
    if tensor.dim() != 1 or tensor.numel() != request.numel:
        raise ValueError(f"A window of {request.numel} elements cannot take {tensor} of shape {tuple(tensor.shape)}.")
    begin = region.offset + tensor.start * tensor.dtype.itemsize
    end = begin + request.numel * tensor.dtype.itemsize
    first = begin - begin % PAGE_NBYTES
    last = padded_nbytes(end)
    whole = begin == first and (end == last or tensor.start + request.numel == region.numel)
    if part.write and not whole:
        raise ValueError(
            f"{tensor} cannot be written by a window: elements beside it are on the same pages. Cut windows at "
            f"multiples of {PAGE_NBYTES} elements of the region."
        )
    return _Span(part, first, last, begin - first, place)


def _overlap(spans: list[_Span], others: list[_Span]) -> bool:
    """Whether two windows share pages that one of them writes."""
    return any(
        (one.part.write or other.part.write)
        and one.part.tensor.region.file is other.part.tensor.region.file
        and one.begin < other.end
        and other.begin < one.end
        for one in spans
        for other in others
    )


def _over(jobs: Sequence[Job]) -> bool:
    return all(job.done for job in jobs)


def _raise_failed(jobs: Sequence[Job]) -> None:
    for job in jobs:
        if job.error is not None:
            raise job.error
