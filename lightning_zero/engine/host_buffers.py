"""Host memory that is used over and over: page-locking takes far longer than a copy."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_zero.comm.streams import Event
from lightning_zero.offload.memory import PAGE_NBYTES, host_memory

__all__ = ["HostBuffer", "HostBuffers"]


@dataclass(eq=False)
class HostBuffer:
    """One buffer.

    Args:
        memory: 1-D uint8, page-aligned.
        busy: event behind the last device work that reads or writes it; ``None`` if there is none.
    """

    memory: Tensor
    busy: Event = None


class HostBuffers:
    """Buffers for one device, page-locked if it is a CUDA device.

    Idle ones are kept as long as all together do not hold more than has ever been in use at once, so that steps which
    are alike allocate nothing, and steps which differ do not add up.

    Args:
        device: where copies come from and go to.
    """

    def __init__(self, device: torch.device) -> None:
        self._locked = device.type == "cuda"
        self._idle: dict[int, list[HostBuffer]] = {}
        self._idle_nbytes = 0
        self._used_nbytes = 0
        self._most_nbytes = 0
        self._released = False
        # Buffers come back from garbage collection, at any time and on any thread: that only appends, which is atomic.
        self._returned: deque[HostBuffer] = deque()
        self._lock = threading.RLock()

    @property
    def nbytes(self) -> int:
        """Bytes held, in use or idle."""
        with self._lock:
            self._collect()
            return self._used_nbytes + self._idle_nbytes

    @property
    def used_nbytes(self) -> int:
        """Bytes in use."""
        with self._lock:
            self._collect()
            return self._used_nbytes

    def take(self, nbytes: int) -> HostBuffer:
        """A buffer of at least ``nbytes`` bytes, with whatever is in it.

        Raises:
            MemoryError: if the system has not that much.
        """
        size = _rounded(nbytes)
        with self._lock:
            self._collect()
            buffers = self._idle.get(size)
            if buffers:
                buffer = buffers.pop()
                self._idle_nbytes -= size
            else:
                self._shrink(max(self._most_nbytes, self._used_nbytes + size) - size)
                buffer = HostBuffer(host_memory(size, self._locked))
            self._used_nbytes += size
            self._most_nbytes = max(self._most_nbytes, self._used_nbytes)
            return buffer

    def give(self, buffer: HostBuffer) -> None:
        """Take a buffer back. The caller uses it no more, except for device work up to ``buffer.busy``."""
        self._returned.append(buffer)
        if self._released:
            self.release()

    def release(self) -> None:
        """Free what is idle, now and from now on. Buffers in use are freed when they come back."""
        with self._lock:
            self._released = True
            self._collect()
            self._shrink(0)

    def _collect(self) -> None:
        while self._returned:
            buffer = self._returned.popleft()
            size = buffer.memory.numel()
            self._used_nbytes -= size
            self._idle_nbytes += size
            self._idle.setdefault(size, []).append(buffer)

    def _shrink(self, most: int) -> None:
        """Free idle buffers, the oldest of their size first, until no more than ``most`` bytes are held."""
        for size in list(self._idle):
            buffers = self._idle[size]
            while buffers and self._used_nbytes + self._idle_nbytes > most:
                buffer = buffers.pop(0)
                self._idle_nbytes -= size
                if buffer.busy is not None:  # memory must not be unlocked while a copy runs
                    buffer.busy.synchronize()
            if not buffers:
                del self._idle[size]


def _rounded(nbytes: int) -> int:
    """Up to an eighth more, so that sizes that are nearly alike share buffers; whole pages."""
    step = max(PAGE_NBYTES, 1 << max(nbytes.bit_length() - 4, 0))
    return -(-nbytes // step) * step
