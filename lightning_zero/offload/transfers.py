"""Where shards stay between uses (``MemoryTiers``), and the copies between device and host.

Nobody waits for a copy until its result is needed. On CUDA a copy runs on the transfer stream, and what has to be
computed on the host for it (adding to a gradient that is there already, a cast) on one worker thread. On the CPU, where
device and host are both memory, the worker thread does all of it, so that the order of things is the same and as real.

[Note: who may touch what, when]
Until a transfer is *ordered* its device memory must not be written; until it is *waited for* its host memory must not
be written, and not be read if it is the target. Ordering never holds the host up on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_zero._torch import untracked
from lightning_zero.comm import Pending
from lightning_zero.comm.streams import Event, Streams
from lightning_zero.config import Tier
from lightning_zero.offload.host import HostMemory, is_on_host

__all__ = ["Copy", "MemoryTiers", "Transfer", "Transfers"]


class Copy(NamedTuple):
    """One tensor's way to another one of as many elements, of any dtype; both 1-D."""

    source: Tensor
    target: Tensor
    add: bool = False  # to the target, instead of replacing it


class Transfer:
    """Copies under way.

    A job is what the worker thread does for it, and results in the event behind the device's part, if there is one;
    ``event`` is the same, where it is known already.
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
        """Wait on the host until all is done. Raises whatever went wrong on the way."""
        for job in self._jobs:
            self._event = job.result() or self._event
        if self._event is not None:
            self._event.synchronize()


@dataclass(eq=False)
class _Staging:
    buffer: Tensor
    used: Future[Event] | None = None  # what uses up what was copied into it
    event: Event = None  # behind the last copy out of it


class Transfers:
    """Moves shards between the device and the host for one engine; staging buffers are of its host memory."""

    def __init__(self, streams: Streams, memory: HostMemory) -> None:
        self._streams = streams
        self._memory = memory
        self._worker: ThreadPoolExecutor | None = None
        self._last: Future[Event] | None = None  # job of the worker, which takes one after the other
        self._landing: list[_Staging] = []
        self._sending: list[_Staging] = []
        self._turn = 0
        self._latest: Event = None  # behind all copies issued so far: they share a stream

    def reserve(self, buffers: int, out_nbytes: int, back_nbytes: int) -> None:
        """Take memory for copies that the host has to compute for. Nothing on the CPU, which computes in place.

        For each direction there are so many buffers, one being filled while another is used up: for the largest
        gradient shard that comes to the host, and for what is cast at a time on its way to the device.
        """
        if self._streams.beside:
            self.settle()
            make = self._memory.allocate
            self._landing = [_Staging(make(out_nbytes, torch.uint8)) for _ in range(buffers)]
            self._sending = [_Staging(make(back_nbytes, torch.uint8)) for _ in range(buffers)]

    @property
    def beside(self) -> bool:
        """Whether the device has memory of its own, and is not the host itself."""
        return self._streams.beside

    @property
    def reserved_nbytes(self) -> int:
        """Host memory that ``reserve`` has taken."""
        return sum(staging.buffer.nbytes for staging in (*self._landing, *self._sending))

    def out(self, copies: Sequence[Copy], ready: Pending | None = None) -> Transfer:
        """Start to bring device memory to the host.

        ``ready`` still produces the sources, and orders behind it what is issued after its ``wait``; ``None``: all that
        was issued so far does.
        """
        if not self._streams.beside:
            if ready is not None:
                ready.wait()
            return Transfer(self._streams, [self._submit(partial(_run, list(copies)))])
        # Not behind what is already issued: the host runs ahead, and that may be all of the backward.
        begun = self._streams.mark() if ready is None else self._streams.nothing()
        with untracked(), self._streams.transferring(begun):
            if ready is not None:
                ready.wait()  # on the transfer stream: the one that computes goes on
            jobs = [self._bring(copy) for copy in copies]
            self._latest = event = self._streams.mark()
        return Transfer(self._streams, [job for job in jobs if job is not None], event)

    def back(self, copies: Sequence[Copy]) -> Transfer:
        """Start to bring host memory to the device, or to other host memory; no copy may add.

        Casts happen on the host, so that fewer bytes travel.
        """
        if not self._streams.beside:
            return Transfer(self._streams, [self._submit(partial(_run, list(copies)))])
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
        if self._last is not None:
            self._last.exception()
            self._last = None
        if self._latest is not None:
            self._latest.synchronize()
            self._latest = None

    def close(self) -> None:
        """Settle, and end the worker thread. May be called again; a later transfer starts a new one."""
        self.settle()
        if self._worker is not None:
            self._worker.shutdown(wait=True)
            self._worker = None

    def _submit(self, job: Callable[[], Event]) -> Future[Event]:
        if self._worker is None:
            # With as many threads as torch gives to any: to set another number here would set it for all to come.
            enter = self._streams.enter_thread
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="lightning_zero-transfer", initializer=enter)
        self._last = last = self._worker.submit(job)
        return last

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
        if source.dtype == target.dtype or is_on_host(target):
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


def _run(copies: list[Copy]) -> Event:
    """Leaves none of them: the thread has its job, and what that holds, for a moment longer than who waits for it."""
    with untracked():
        while copies:
            source, target, add = copies.pop(0)
            if add:
                target.add_(source)
            else:
                target.copy_(source)
    return None


class MemoryTiers:
    """Memory for the shards of one engine by tier: the device's and the host's.

    At most ``pin_nbytes`` of host memory are page-locked (``None``: all of it). A tier of an extension is a subclass,
    which may read ahead: host memory is close enough to be copied when a unit is gathered from it.
    """

    can_fail = False
    """Whether shards may turn out to be unreadable, so that the ranks have to agree on how it went."""

    def __init__(self, device: torch.device, streams: Streams | None = None, pin_nbytes: int | None = None) -> None:
        self.device = device
        self.streams = streams = streams or Streams(device)
        self.memory = HostMemory(device, pin_nbytes)
        self.transfers = Transfers(streams, self.memory)
        self._fetched: Event = None  # behind the last copy of ``fetch``

    @property
    def host_buffer_nbytes(self) -> int:
        """Host memory of buffers beside the shards."""
        return self.transfers.reserved_nbytes

    @property
    def disk_nbytes(self) -> int:
        """Bytes in files."""
        return 0

    def allocate(self, tier: Tier, numel: int, dtype: torch.dtype, what: str) -> Tensor:
        """Memory for one shard, all zeros: 1-D. ``what`` it will hold is for messages.

        Raises ``MemoryError`` or ``OffloadError`` if there is no room for it.
        """
        if tier is Tier.HOST:
            return self.memory.allocate(numel, dtype)
        with untracked():
            return torch.zeros(numel, dtype=dtype, device=self.device)

    def ahead(self, sources: Sequence[Tensor]) -> None:
        """The engine says which unit comes next: its shards must not change before ``fetch`` or ``forget``."""

    def fetch(self, source: Tensor, destination: Tensor) -> None:
        """Fill ``destination``, on the device, on the current stream from ``source``, wherever that is; both 1-D.

        Raises ``OffloadError`` if a file could not be read.
        """
        with untracked():
            destination.copy_(source, non_blocking=self.streams.beside)
        self._fetched = self.streams.mark()

    def forget(self) -> None:
        """Drop what was fetched ahead: it is void, or nobody will ask for it."""

    def settle(self) -> None:
        """Wait on the host until nothing reads or writes offloaded shards any more."""
        self.transfers.settle()
        if self._fetched is not None:
            self._fetched.synchronize()
            self._fetched = None

    def abandon(self) -> None:
        """Settle everything under way after an error in the middle of a step."""
        self.transfers.settle()
        self.forget()

    def rest(self) -> None:
        """End threads and give up their buffers between runs; the shards stay. A later use takes them again."""
        self.forget()
        self.transfers.close()
        self.settle()

    def wake(self) -> None:
        """Fetch ahead again: a run begins."""

    def close(self) -> None:
        """Give everything up. May be called again."""
        self.rest()
        self.memory.release()
