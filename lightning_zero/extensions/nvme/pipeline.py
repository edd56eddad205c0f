"""Read ahead, work, write behind: what is on a disk passes through a bounded pool of memory, window by window.

[Note: Interrupts]
Ctrl-C raises in the main thread between any two instructions, also inside ``threading.Condition``. So the threads and
their user share nothing but two queues written in C, which an interrupt leaves whole, and jobs that say themselves
whether they were begun and are over. A job that an interrupt kept out of the queue is put there when things are
settled.
That is why they are no ``ThreadPoolExecutor``, which also waits at the end of the process for a disk that hangs.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

from torch import Tensor

from lightning_zero.errors import OffloadError
from lightning_zero.extensions.nvme.files import FileTensor
from lightning_zero.offload.host import PAGE_NBYTES, padded_nbytes

__all__ = ["BufferPool", "Job", "Pipeline", "Request", "Workers"]

_TRANSFER_NBYTES = 4 << 20  # most that one system call moves: long enough to be worth one, short enough to share out
_JOIN_SECONDS = 60.0  # how long a transfer that is under way may take before its thread is left alone


@dataclass(eq=False)
class Job:
    """One transfer, which ``move`` does."""

    move: Callable[[], None]
    done: bool = False
    error: BaseException | None = None
    _begun: threading.Lock = field(default_factory=threading.Lock)

    def claim(self) -> bool:
        """Whether the caller is the one to do it."""
        return self._begun.acquire(blocking=False)


class Workers:
    """A few threads and the queue they work off, first in, first out.

    The threads start with the first job. They know the queues only, so that whoever owns this object can be freed
    without a word to them. One thread at a time submits and waits.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._count = threads
        self._name = name
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._over: SimpleQueue[None] = SimpleQueue()  # one for each job that is
        self._jobs: list[Job] = []  # what may not be over
        self._threads: list[threading.Thread] = []

    def submit(self, jobs: Sequence[Job]) -> None:
        """Have jobs done, in any order."""
        for index in range(self._count if jobs and not self._threads else 0):
            # Daemons: the end of the process must not wait for them before whoever owns them could close them.
            name = f"{self._name}-{index}"
            thread = threading.Thread(target=_work, args=(self._queue, self._over), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()
        self._jobs = [*(job for job in self._jobs if not job.done), *jobs]
        for job in jobs:
            self._queue.put(job)

    def wait(self, ready: Callable[[], bool]) -> None:
        """Wait until ``ready()``, which is asked whenever a job is over. Interruptible."""
        while not self._over.empty():  # of jobs that nobody waited for
            self._over.get()
        while not ready():
            self._over.get()

    def settle(self) -> None:
        """Wait until all jobs are over."""
        for job in self._jobs:
            if not job.done:
                self._queue.put(job)
        self.wait(lambda: all(job.done for job in self._jobs))

    def end(self) -> bool:
        """End the threads after what is under way; the next job starts others. Whether all of them have ended."""
        for job in self._jobs:
            if job.claim():
                job.done = True
        for _ in self._threads:
            self._queue.put(None)
        deadline = time.monotonic() + _JOIN_SECONDS
        # One of the threads may itself be freeing the owner; and an interrupt may have come before one was started.
        others = [t for t in self._threads if t is not threading.current_thread() and t.ident is not None]
        for thread in others:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._threads = [thread for thread in others if thread.is_alive()]
        self._jobs = [job for job in self._jobs if not job.done]
        return not self._threads


def _work(queue: SimpleQueue[Job | None], over: SimpleQueue[None]) -> None:
    while (job := queue.get()) is not None:
        if not job.claim():
            continue
        try:
            job.move()
        except BaseException as error:
            job.error = error
        job.done = True
        over.put(None)
        del job  # and with it the memory it moved


class BufferPool:
    """A ring of memory, of whole pages: what is taken first is given back first, so that it never falls to pieces."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self.nbytes = memory.numel()
        self._taken: deque[tuple[int, int]] = deque()  # begin and end

    def take(self, nbytes: int) -> Tensor | None:
        """A piece of memory, of whole pages, or nothing if there is no room at the moment."""
        if not 0 < nbytes <= self.nbytes or nbytes % PAGE_NBYTES:
            raise ValueError(f"{nbytes} bytes cannot be taken from a pool of {self.nbytes}.")
        begin = 0
        if self._taken:
            (first, _), (last_begin, begin) = self._taken[0], self._taken[-1]
            end = self.nbytes if last_begin >= first else first  # taken pieces lie in one row, or go round
            if begin + nbytes > end:
                if last_begin < first or nbytes > first:
                    return None
                begin = 0
        self._taken.append((begin, begin + nbytes))
        return self._memory[begin : begin + nbytes]

    def give_back(self) -> None:
        """Give back the piece that was taken first of those still taken."""
        self._taken.popleft()

    def clear(self) -> None:
        """Give back everything."""
        self._taken.clear()


@dataclass
class Request:
    """One window: ``numel`` elements of each of its parts, and a ``tag`` for ``work``.

    A part is a 1-D tensor; whether the buffer holds its elements when ``work`` begins (otherwise it holds anything);
    and whether what ``work`` leaves there goes to the file. What is written begins and ends at pages of the file, or
    ends with its region.
    """

    numel: int
    regions: Sequence[tuple[FileTensor, bool, bool]]
    tag: Any = None


class _Span(NamedTuple):
    """A part's pages in the file, from ``begin`` to ``end``, and in its window's memory; all in bytes."""

    tensor: FileTensor
    read: bool
    write: bool
    begin: int
    end: int
    head: int  # before the first element
    place: int  # of the first page in the window's memory


@dataclass(eq=False)
class _Window:
    """A window under way: its reads start with it, its writes after its work."""

    request: Request
    spans: list[_Span]
    memory: Tensor
    reads: list[Job] = field(default_factory=list)
    writes: list[Job] = field(default_factory=list)
    worked: bool = False

    def buffers(self) -> list[Tensor]:
        """One 1-D tensor for each part, in order."""
        found = []
        for span in self.spans:
            first, dtype = span.place + span.head, span.tensor.dtype
            found.append(self.memory[first : first + self.request.numel * dtype.itemsize].view(dtype))
        return found


Work = Callable[[Request, list[Tensor]], None]


class Pipeline:
    """Brings windows of files through a pool of memory: reads some ahead of the work, and writes behind it."""

    def __init__(self, pool: BufferPool, workers: Workers) -> None:
        self._pool = pool
        self._workers = workers
        self._under_way: deque[_Window] = deque()
        self._running = False
        self._abandoned = False

    def run(self, requests: Iterable[Request], work: Work) -> None:
        """Have ``work`` done on every window, in order, in the caller's thread.

        All that is written is in the files when this returns. Until then nobody else may use the elements of these
        requests, of which no two may have some in common. Requests are taken one by one, some of them ahead of their
        work, which gets one 1-D tensor for each part, valid until ``work`` returns.

        Whatever is raised, by a disk, ``requests`` or ``work``, nothing is under way any more then, and what windows
        before have done is written, unless that failed.
        """
        if self._running or self._abandoned:
            why = "was interrupted while it waited for a disk" if self._abandoned else "is running already"
            raise OffloadError(f"This pipeline {why}: it cannot run.")
        try:
            self._running = True
            self._run(iter(requests), work)
        except BaseException:
            self._settle()
            raise
        finally:
            self._running = False

    def _run(self, requests: Iterator[Request], work: Work) -> None:
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
            if not waiting:  # there is no room
                self._finish_first()
            elif self._is_read(waiting[0], or_room=following is not None):
                self._work(waiting.popleft(), work)
        while self._under_way:
            self._finish_first()

    def _work(self, window: _Window, work: Work) -> None:
        _raise_failed(window.reads)
        work(window.request, window.buffers())
        window.writes = [job for span in window.spans if span.write for job in self._jobs(window, span, write=True)]
        window.worked = True
        self._workers.submit(window.writes)

    def _next(self, requests: Iterator[Request]) -> tuple[Request, list[_Span], int] | None:
        """The next request, where its parts lie, and how much memory it takes."""
        request = next(requests, None)
        if request is None:
            return None
        spans: list[_Span] = []
        place = 0
        for part in request.regions:
            spans.append(_span(request.numel, *part, place))
            place += spans[-1].end - spans[-1].begin
        return request, spans, max(place, PAGE_NBYTES)

    def _begin(self, request: Request, spans: list[_Span], nbytes: int) -> _Window | None:
        """Start to read a window, if there is room."""
        memory = self._pool.take(nbytes)
        if memory is None:
            return None
        window = _Window(request, spans, memory)
        self._under_way.append(window)
        window.reads = [job for span in spans if span.read for job in self._jobs(window, span, write=False)]
        self._workers.submit(window.reads)
        return window

    def _jobs(self, window: _Window, span: _Span, write: bool) -> list[Job]:
        region = span.tensor.region
        move = region.write if write else region.read
        jobs = []
        for begin in range(span.begin, span.end, _TRANSFER_NBYTES):
            nbytes = min(_TRANSFER_NBYTES, span.end - begin)
            place = span.place + begin - span.begin
            memory = window.memory[place : place + nbytes]
            jobs.append(Job(partial(move, memory, begin)))
        return jobs

    def _is_read(self, window: _Window, or_room: bool) -> bool:
        """Wait until a window is read, or, if that is of use, until another one can be begun. Whether it is read."""
        self._workers.wait(lambda: _over(window.reads) or (or_room and self._first_is_over()))
        return _over(window.reads)

    def _first_is_over(self) -> bool:
        """Whether the window that was begun first is written."""
        first = self._under_way[0]
        return first.worked and _over(first.writes)

    def _finish_first(self) -> None:
        """Wait for the window that was begun first, and give back its memory."""
        window = self._under_way[0]
        self._workers.wait(self._first_is_over)
        _raise_failed(window.writes)
        self._under_way.popleft()
        self._pool.give_back()

    def _settle(self) -> None:
        """After an error: nothing is under way and all memory is given back.

        A second interrupt ends this too. Then threads may still be at it, and the memory is never used again.
        """
        self._abandoned = True
        self._workers.settle()
        self._under_way.clear()
        self._pool.clear()
        self._abandoned = False


def _span(numel: int, tensor: FileTensor, read: bool, write: bool, place: int) -> _Span:
    region = tensor.region
    if tensor.dim() != 1 or tensor.numel() != numel:
        raise ValueError(f"A window of {numel} elements cannot take {tensor} of shape {tuple(tensor.shape)}.")
    begin = region.offset + tensor.start * tensor.dtype.itemsize
    end = begin + tensor.numel() * tensor.dtype.itemsize
    first = begin - begin % PAGE_NBYTES
    last = padded_nbytes(end)
    whole = begin == first and (end == last or tensor.start + numel == region.numel)
    if write and not whole:
        raise ValueError(
            f"{tensor} cannot be written by a window: elements beside it are on the same pages. Cut windows at "
            f"multiples of {PAGE_NBYTES} elements of the region."
        )
    return _Span(tensor, read, write, first, last, begin - first, place)


def _over(jobs: Sequence[Job]) -> bool:
    return all(job.done for job in jobs)


def _raise_failed(jobs: Sequence[Job]) -> None:
    for job in jobs:
        if job.error is not None:
            raise job.error
