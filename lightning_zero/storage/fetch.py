"""Bringing the shards that units are gathered from closer, before their gather is due."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_zero._torch import untracked
from lightning_zero.comm.streams import Event, Streams
from lightning_zero.storage.file_tensor import FileTensor, fill_from
from lightning_zero.storage.host import HostMemory, padded_nbytes

__all__ = ["Fetcher"]


@dataclass(eq=False)
class _Buffer:
    """Memory for one unit's shards on their way.

    Attributes:
        memory: 1-D, bytes: on the host for files, on the device for host memory.
        places: bytes of the shards in it that were not asked for yet, by the identity of their source.
        job: reads files into it.
        event: device-side, behind the copies into it; then behind the last use of it.
    """

    memory: Tensor
    places: dict[int, Tensor] = field(default_factory=dict)
    job: Future[None] | None = None
    event: Event = None


class Fetcher:
    """Fetches shards from where they rest into the memory that is gathered.

    Files are read by a thread of their own into host buffers; host memory is copied into device buffers on the transfer
    stream. Where the device is the CPU, host memory is close enough.

    Args:
        device: where the engine computes.
        streams: its streams.
        memory: where host buffers are taken from.
    """

    def __init__(self, device: torch.device, streams: Streams, memory: HostMemory) -> None:
        self._device = device
        self._streams = streams
        self._memory = memory
        self._count, self._nbytes = 0, 0
        self.active = True
        """Whether anything is fetched ahead. Not between runs, which would leave a thread and buffers behind."""
        self._direct: Event = None  # behind the last copy straight out of host memory
        self._buffers: list[_Buffer] = []
        self._reader: ThreadPoolExecutor | None = None

    @property
    def reserved_nbytes(self) -> int:
        """Memory that all buffers take together, in a run that fetches ahead."""
        return self._count * padded_nbytes(self._nbytes)

    def reserve(self, units: int, nbytes: int) -> None:
        """Say how much may be fetched ahead. Memory for it is taken with the first use.

        Args:
            units: how many units.
            nbytes: of the largest unit's shards that rest elsewhere; each is rounded up to whole pages.
        """
        self.close()
        self._count, self._nbytes = units, nbytes

    def ahead(self, sources: Sequence[Tensor]) -> None:
        """Begin to fetch a unit's shards. They must not change before ``fetch`` or ``forget``."""
        wanted = [source for source in sources if self.active and self._is_far(source)]
        if not wanted or any(id(source) in buffer.places for source in wanted for buffer in self._buffers):
            return
        buffer = self._free_buffer(wanted)
        if buffer is None:
            return
        start = 0
        for source in wanted:
            nbytes = source.numel() * source.dtype.itemsize
            buffer.places[id(source)] = buffer.memory[start : start + nbytes].view(source.dtype)
            start += padded_nbytes(nbytes)
        targets = [(source, buffer.places[id(source)]) for source in wanted]
        if not isinstance(wanted[0], FileTensor):
            with untracked(), self._streams.transferring(buffer.event):
                for source, place in targets:
                    place.copy_(source, non_blocking=True)
                buffer.event = self._streams.mark()
            return
        event = buffer.event

        def read() -> None:
            if event is not None:
                event.synchronize()
            with untracked():
                for source, place in targets:
                    fill_from(place, source)

        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, thread_name_prefix="lightning_zero-fetch")
        buffer.job = self._reader.submit(read)

    def fetch(self, source: Tensor, destination: Tensor) -> None:
        """Fill ``destination`` on the current stream.

        Args:
            source: 1-D, wherever it rests.
            destination: 1-D on the device, as many elements of the same dtype.

        Raises:
            OffloadError: if a file could not be read.
        """
        buffer = next((buffer for buffer in self._buffers if id(source) in buffer.places), None)
        with untracked():
            if buffer is None:
                if isinstance(source, FileTensor):
                    fill_from(destination, source)
                else:
                    destination.copy_(source, non_blocking=True)
                    self._direct = self._streams.mark()
                return
            place = buffer.places.pop(id(source))
            if buffer.job is not None:
                buffer.job.result()
            else:
                self._streams.wait(buffer.event)
            destination.copy_(place, non_blocking=True)
            buffer.event = self._streams.mark()

    def settle(self) -> None:
        """Wait on the host until nothing reads host memory any more: it is about to be written."""
        for event in (self._direct, *(buffer.event for buffer in self._buffers)):
            if event is not None:
                event.synchronize()
        self._direct = None

    def forget(self) -> None:
        """Drop what was fetched ahead: it is void, or nobody will ask for it."""
        for buffer in self._buffers:
            if buffer.job is not None:
                buffer.job.exception()
            buffer.places.clear()

    def close(self) -> None:
        """Forget, free the buffers and end the thread. May be called again; a later fetch starts anew."""
        self.forget()
        self.settle()
        self._buffers.clear()
        if self._reader is not None:
            self._reader.shutdown(wait=True)
            self._reader = None

    def _is_far(self, source: Tensor) -> bool:
        return isinstance(source, FileTensor) or source.device != self._device

    def _free_buffer(self, wanted: Sequence[Tensor]) -> _Buffer | None:
        """One that nothing is in which somebody may still ask for; ``None`` if there is none, or it is too small."""
        needed = sum(padded_nbytes(source.numel() * source.dtype.itemsize) for source in wanted)
        if needed > padded_nbytes(self._nbytes):
            return None
        buffer = next((buffer for buffer in self._buffers if not buffer.places), None)
        if buffer is None and len(self._buffers) < self._count:
            nbytes = padded_nbytes(self._nbytes)
            if isinstance(wanted[0], FileTensor):
                memory = self._memory.allocate(nbytes, torch.uint8)
            else:
                with untracked():
                    memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            buffer = _Buffer(memory)
            self._buffers.append(buffer)
        if buffer is not None:
            buffer.job = None
        return buffer
