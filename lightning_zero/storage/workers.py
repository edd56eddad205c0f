"""Threads that read and write, and the memory that they read and write through.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

from torch import Tensor

from lightning_zero.storage.host import PAGE_NBYTES

__all__ = ["BufferPool", "Job", "Meter", "Workers"]

_JOIN_SECONDS = 60.0  # how long a transfer that is under way may take before its thread is left alone


@dataclass
class Meter:
    """How many bytes were moved in one direction, and for how long at least one transfer was under way."""

    nbytes: int = 0
    seconds: float = 0.0
    _active: int = field(default=0, repr=False)
    _since: float = field(default=0.0, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def begin(self) -> None:
        """One more transfer."""
        with self._lock:
            if not self._active:
                self._since = time.perf_counter()
            self._active += 1

    def end(self, nbytes: int) -> None:
        """One less."""
        with self._lock:
            self._active -= 1
            self.nbytes += nbytes
            if not self._active:
                self.seconds += time.perf_counter() - self._since


@dataclass(eq=False)
class Job:
    """One transfer, which ``move`` does. If ``droppable``, it need not be done after an error."""

    move: Callable[[], None]
    nbytes: int
    meter: Meter
    droppable: bool
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
        self._closed = False

    def submit(self, jobs: Sequence[Job]) -> None:
        """Have jobs done, in any order."""
        if self._closed:
            raise RuntimeError("These threads have ended. This is an error in lightning_zero itself.")
        if jobs and not self._threads:
            self._start()
        self._jobs = [job for job in self._jobs if not job.done]
        self._jobs.extend(jobs)
        for job in jobs:
            self._queue.put(job)

    def wait(self, ready: Callable[[], bool]) -> None:
        """Wait until ``ready()``, which is asked whenever a job is over. Interruptible."""
        while not self._over.empty():  # of jobs that nobody waited for
            self._over.get()
        while not ready():
            self._over.get()

    def settle(self) -> None:
        """Drop what may be dropped and was not begun, and wait until all other jobs are over."""
        for job in self._jobs:
            if job.droppable and job.claim():
                job.done = True
            elif not job.done:
                self._queue.put(job)
        self.wait(lambda: all(job.done for job in self._jobs))

    def close(self) -> bool:
        """End the threads after what is under way, for good. Whether all of them have ended."""
        self._closed = True
        return self.pause()

    def pause(self) -> bool:
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

    def _start(self) -> None:
        for index in range(self._count):
            # Daemons: the end of the process must not wait for them before whoever owns them could close them.
            thread = threading.Thread(
                target=_work, args=(self._queue, self._over), name=f"{self._name}-{index}", daemon=True
            )
            self._threads.append(thread)
            thread.start()


def _work(queue: SimpleQueue[Job | None], over: SimpleQueue[None]) -> None:
    while (job := queue.get()) is not None:
        if not job.claim():
            continue
        job.meter.begin()
        try:
            job.move()
        except BaseException as error:
            job.error = error
        job.meter.end(0 if job.error else job.nbytes)
        job.done = True
        over.put(None)
        del job  # and with it the memory it moved


class BufferPool:
    """A ring of memory, of whole pages: what is taken first is given back first, so that it never falls to pieces."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self.nbytes = memory.numel()
        self._taken: deque[tuple[int, int]] = deque()  # begin and end

    @property
    def empty(self) -> bool:
        """Whether the memory was given up."""
        return not self._memory.numel()

    @property
    def taken(self) -> int:
        """How many pieces are taken."""
        return len(self._taken)

    def take(self, nbytes: int) -> Tensor | None:
        """A piece of memory, of whole pages, or nothing if there is no room at the moment.

        Raises:
            ValueError: if it would never fit, or is not whole pages, one at least.
        """
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

    def release(self) -> None:
        """Give the memory up between runs. Nothing may be taken before ``refill``."""
        self.clear()
        self._memory = self._memory.new_empty(0)

    def refill(self, memory: Tensor) -> None:
        """Have memory again: 1-D, ``nbytes`` bytes."""
        self._memory = memory
