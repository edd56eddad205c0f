"""Side streams for the wire on CUDA, and nothing at all on the CPU, behind one interface.

A tensor that crosses streams travels with an event. No ``record_stream``, which lets the allocator decide by what the
device has come to, so that a host that runs ahead takes more and more memory: a buffer that goes back to the allocator
has its own stream wait for whoever used it (``hand_back``), and the others live as long as the engine.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

__all__ = ["Event", "Streams", "runs_beside"]

Event = Any  # torch.cuda.Event, or None where work is ordered by the host

_NOTHING = nullcontext()
_KINDS = ("cuda",)


def runs_beside(device: torch.device) -> bool:
    """Whether work on a device runs beside the host's own, so that streams and events have to order it."""
    return device.type in _KINDS


class Streams:
    """The gather, the reduce and the transfer stream of one device.

    Args:
        device: where the engine computes. Anything but CUDA gets null streams: work is then ordered by the host alone.
        one_order: gathers and reductions share a stream, so that the device runs them as the host has issued them.
        cuda: what makes streams and events.
    """

    def __init__(self, device: torch.device, one_order: bool = False, cuda: Any = torch.cuda) -> None:
        self.device = device
        self.beside = runs_beside(device)
        """Whether anything runs beside the host's own work. If not, there is nothing to be ordered."""
        self._cuda = cuda
        self._streams = []
        if self.beside:
            gather, transfer = self._urgent(), cuda.Stream(device)
            self._streams = [gather, gather if one_order else self._urgent(), transfer]

    def apart(self) -> Streams:
        """The same, for a wire all of whose work is on one more stream."""
        found = copy.copy(self)
        if self.beside:
            found._streams = [self._urgent()] * 2 + self._streams[2:]
        return found

    def _urgent(self) -> Any:
        """A stream whose kernels begin before those that wait in others, where the device has priorities.

        Else a gather that was issued early waits behind the matrix products issued before it, until all of their blocks
        have begun. All wires have the same: nccl begins kernels in the host's order, and a late one holds up the rest.
        """
        priorities = getattr(self._cuda.Stream, "priority_range", lambda: (0, 0))()  # the least one, and the greatest
        return self._cuda.Stream(self.device, **({"priority": -1} if min(priorities) < 0 else {}))

    def gathering(self, after: Event = None) -> AbstractContextManager[None]:
        """Issue the work inside on the gather stream, after ``after`` (default: all work issued so far)."""
        return self._on(self._streams[0], after) if self.beside else _NOTHING

    def reducing(self, after: Event = None) -> AbstractContextManager[None]:
        """Issue the work inside on the reduce stream, after ``after`` (default: all work issued so far)."""
        return self._on(self._streams[1], after) if self.beside else _NOTHING

    def transferring(self, after: Event = None) -> AbstractContextManager[None]:
        """Issue the copies inside on the stream between host and device, after ``after`` (default: all work so far)."""
        return self._on(self._streams[2], after) if self.beside else _NOTHING

    def enter_thread(self) -> None:
        """Begin a thread that will issue work: it has the first device otherwise, and every rank would open a context
        there when it goes back to that from a stream."""
        if self.beside:
            self._cuda.set_device(self.device)

    def mark(self) -> Event:
        """An event behind all work issued so far on the current stream (``None`` on the CPU).

        A new one each time: whoever holds an event means what it was recorded behind. One from a pool, recorded anew
        while a slot or a transfer still holds it, would stand for other work, and nothing would tell. ``blocking`` is
        about hosts that wait, and nothing to streams: such a host leaves its core to others.
        """
        if not self.beside:
            return None
        event = self._cuda.Event(blocking=True)
        event.record(self._cuda.current_stream(self.device))
        return event

    def nothing(self) -> Event:
        """An event behind no work at all: for a copy that something else tells when to begin."""
        return self._cuda.Event() if self.beside else None

    def current(self) -> Any:
        """The stream that work is issued on, and that memory taken now belongs to (``None`` on the CPU)."""
        return self._cuda.current_stream(self.device) if self.beside else None

    def hand_back(self, home: Any, after: Event = None) -> None:
        """Let the stream ``home``, whose memory the allocator gets back, go on only behind ``after`` and behind all
        work of the current stream so far: the next to have that memory is on it. The host does not wait."""
        if home is None:
            return
        if after is not None:
            home.wait_event(after)
        if (current := self.current()) != home:
            home.wait_stream(current)

    def wait(self, event: Event) -> None:
        """Let the current stream continue only after ``event``; the host does not wait."""
        if event is not None:
            self._cuda.current_stream(self.device).wait_event(event)

    @contextmanager
    def _on(self, stream: Any, after: Event) -> Iterator[None]:
        if after is not None:
            stream.wait_event(after)
        else:
            stream.wait_stream(self._cuda.current_stream(self.device))
        with self._cuda.stream(stream):
            yield
