"""Copies between device and host that nobody waits for until their result is needed.

On CUDA a copy runs on the transfer stream, and what has to be computed on the host for it (adding to a gradient that is
there already, a cast) on one worker thread. On the CPU, where device and host are both memory, the worker thread does
all of it, so that the order of things is the same and as real.

[Note: who may touch what, when]
Until a transfer is *ordered* its device memory must not be written; until it is *waited for* its host memory must not
be written, and not be read if it is the target. Ordering never holds the host up on CUDA.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_zero._torch import untracked
from lightning_zero.comm.streams import Event, Streams
from lightning_zero.storage.host import HostMemory

__all__ = ["Copy", "Transfer", "Transfers"]


class Ready(Protocol):
    """Something that produces the source of a copy."""

    def wait(self) -> None:
        """Order everything issued from now on behind it."""


class Copy(NamedTuple):
    """One tensor's way.

    Attributes:
        source: 1-D.
        target: 1-D, as many elements, of any dtype.
        add: whether the elements are added to the target instead of replacing it.
    """

    source: Tensor
    target: Tensor
    add: bool = False


class Transfer:
    """Copies under way.

    Args:
        streams: of the device.
        jobs: what the worker thread does for it. A result is the event behind the device's part, if there is one.
        event: the same, where it is known already.
    """

    def __init__(self, streams: Streams, jobs: Sequence[Future[Event]], event: Event = None) -> None:
        self._streams = streams
        self._jobs = jobs
        self._event = event

    def order(self) -> None:
        """Let everything issued from now on see the target, and overwrite the source, if they are on the device."""
        if self._event is None:
            for job in self._jobs:
                self._event = job.result()
        self._streams.wait(self._event)

    def wait(self) -> None:
        """Wait on the host until all is done.

        Raises:
            Exception: whatever went wrong on the way.
        """
        for job in self._jobs:
            self._event = job.result() or self._event
        if self._event is not None:
            self._event.synchronize()


@dataclass(eq=False)
class _Staging:
    """A page-locked buffer.

    Attributes:
        buffer: 1-D, bytes.
        used: what uses up what was copied into it.
        event: behind the last copy out of it.
    """

    buffer: Tensor
    used: Future[Event] | None = None
    event: Event = None


class Transfers:
    """Moves shards between the device and the host for one engine.

    Args:
        device: where the engine computes.
        streams: its streams.
        memory: where staging buffers are taken from.
    """

    def __init__(self, device: torch.device, streams: Streams, memory: HostMemory) -> None:
        self._device = device
        self._streams = streams
        self._memory = memory
        self._worker: ThreadPoolExecutor | None = None
        self._jobs: deque[Future[Event]] = deque()
        self._landing: list[_Staging] = []
        self._sending: list[_Staging] = []
        self._turn = 0
        self._latest: Event = None  # behind all copies issued so far: they share a stream

    def reserve(self, buffers: int, out_nbytes: int, back_nbytes: int) -> None:
        """Take memory for copies that the host has to compute for. Nothing on the CPU, which computes in place.

        Args:
            buffers: how many for each direction: one is filled while another is used up.
            out_nbytes: of the largest gradient shard that comes to the host.
            back_nbytes: of what is cast at a time on its way to the device.
        """
        if self._device.type != "cpu":
            self.settle()
            make = self._memory.allocate
            self._landing = [_Staging(make(out_nbytes, torch.uint8)) for _ in range(buffers)]
            self._sending = [_Staging(make(back_nbytes, torch.uint8)) for _ in range(buffers)]

    @property
    def reserved_nbytes(self) -> int:
        """Host memory that ``reserve`` has taken."""
        return sum(staging.buffer.nbytes for staging in (*self._landing, *self._sending))

    def out(self, copies: Sequence[Copy], ready: Ready | None = None) -> Transfer:
        """Start to bring device memory to the host.

        Args:
            copies: from the device to the host.
            ready: what still produces the sources; ``None``: all that was issued so far.
        """
        if self._device.type == "cpu":
            if ready is not None:
                ready.wait()
            return Transfer(self._streams, [self._submit(lambda: _run(copies))])
        # Not behind what is already issued: the host runs ahead, and that may be all of the backward.
        begun = self._streams.mark() if ready is None else self._streams.nothing()
        with untracked(), self._streams.transferring(begun):
            if ready is not None:
                ready.wait()  # on the transfer stream: the one that computes goes on
            jobs = [self._bring(copy) for copy in copies]
            self._latest = event = self._streams.mark()
        return Transfer(self._streams, [job for job in jobs if job is not None], event)

    def back(self, copies: Sequence[Copy]) -> Transfer:
        """Start to bring host memory to the device. Casts happen on the host, so that fewer bytes travel.

        Args:
            copies: from the host to the device, or to other host memory; none adds.
        """
        if self._device.type == "cpu":
            return Transfer(self._streams, [self._submit(lambda: _run(copies))])
        begun = self._streams.mark()  # behind all that reads the targets so far

        def send() -> Event:
            with untracked(), self._streams.transferring(begun):
                for copy in copies:
                    self._send(copy)
                self._latest = event = self._streams.mark()
                return event

        return Transfer(self._streams, [self._submit(send)])

    def settle(self) -> None:
        """Wait for all that was started; what went wrong is the business of whoever waits for that transfer."""
        while self._jobs:
            self._jobs.popleft().exception()
        if self._latest is not None:
            self._latest.synchronize()
            self._latest = None

    def close(self) -> None:
        """Settle, and end the worker thread. May be called again; a later transfer starts a new one."""
        self.settle()
        if self._worker is not None:
            self._worker.shutdown(wait=True)
            self._worker = None

    # ----------------------------------------------------------------- private

    def _submit(self, job: Callable[[], Event]) -> Future[Event]:
        if self._worker is None:
            # With as many threads as torch gives to any: to set another number here would set it for all to come.
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="lightning_zero-transfer")
        while self._jobs and self._jobs[0].done():
            self._jobs.popleft()
        future = self._worker.submit(job)
        self._jobs.append(future)
        return future

    def _bring(self, copy: Copy) -> Future[Event] | None:
        """CUDA, on the transfer stream: to the target itself, or through staging where the host has to compute."""
        source, target, add = copy
        if not add and source.dtype == target.dtype:
            target.copy_(source, non_blocking=True)
            return None
        self._turn = (self._turn + 1) % len(self._landing)
        staging = self._landing[self._turn]
        if staging.used is not None:
            staging.used.result()
        landed = staging.buffer[: source.nbytes].view(source.dtype)
        landed.copy_(source, non_blocking=True)
        event = self._streams.mark()

        def finish() -> Event:
            event.synchronize()
            return _run([Copy(landed, target, add)])

        staging.used = self._submit(finish)
        return staging.used

    def _send(self, copy: Copy) -> None:
        """CUDA, on the transfer stream, by the worker thread: a cast goes piece by piece through page-locked memory."""
        source, target, _ = copy
        if source.dtype == target.dtype or target.device.type == "cpu":
            target.copy_(source, non_blocking=True)
            return
        most = self._sending[0].buffer.numel() // target.dtype.itemsize
        for turn, start in enumerate(range(0, source.numel(), most)):
            staging = self._sending[turn % len(self._sending)]
            if staging.event is not None:
                staging.event.synchronize()
            numel = min(most, source.numel() - start)
            cast = staging.buffer[: numel * target.dtype.itemsize].view(target.dtype)
            cast.copy_(source.narrow(0, start, numel))
            target.narrow(0, start, numel).copy_(cast, non_blocking=True)
            staging.event = self._streams.mark()


def _run(copies: Sequence[Copy]) -> Event:
    with untracked():
        for source, target, add in copies:
            if add:
                target.add_(source)
            else:
                target.copy_(source)
    return None
