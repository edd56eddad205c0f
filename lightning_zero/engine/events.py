"""What the engine is doing, told to whoever listens: spans of time, each with a phase, a unit and bytes.

Nobody listens by default, and then a span costs a fraction of a microsecond and leaves no trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from torch.autograd.profiler import record_function

from lightning_zero._torch import profiler_runs

__all__ = ["Phase", "Span", "SpanObserver", "Spans"]


class Phase(str, Enum):
    """What a span of time is spent on.

    The spans of ``GATHER``, ``REDUCE`` and ``PUBLISH`` only issue a collective; what it keeps others waiting for is in
    the ``WAIT_...`` that follows. On a device all of them are short on the host: between begin and end they place work,
    or a wait, on the current stream.
    """

    FORWARD = "forward"  # a unit computes; its parameters are there
    BACKWARD = "backward"  # a unit computes gradients
    GATHER = "gather"  # a unit's parameters are asked for
    WAIT_GATHER = "wait for gather"  # a unit's parameters are needed and not there yet
    REDUCE = "reduce"  # a bucket of gradients is sent off
    WAIT_REDUCE = "wait for reduce"  # its averages, or its memory, are needed
    STEP = "step"  # an optimizer updates masters
    PUBLISH = "publish"  # updated masters of replicated parameters are sent off
    WAIT_PUBLISH = "wait for publish"  # they are needed and not there yet
    BUFFERS = "buffers"  # rank 0's buffers are sent to all ranks, and waited for
    AGREE = "agree"  # the hosts tell each other where they are
    OFFLOAD = "offload"  # the host waits for what rests in host memory or on disk


@dataclass(frozen=True, eq=False)
class Span:
    """One stretch of time. Spans are told apart by identity.

    Args:
        phase: what it is spent on.
        unit: for whom: a unit's name, an optimizer's label, or nothing.
        nbytes: bytes of the flat buffers that it is about, padding included; 0 where none travel.
    """

    phase: Phase
    unit: str = ""
    nbytes: int = 0


class SpanObserver(Protocol):
    """Is told of every span of an engine, on the thread that runs it: backward is autograd's own on a device.

    Must not issue collectives, nor wait for a device. Every ``begin`` is followed by one ``end``, after an error too;
    spans overlap, and need not end in reverse order.
    """

    def begin(self, span: Span) -> None:
        """It starts now."""

    def end(self, span: Span) -> None:
        """It is over."""


_NOTHING = nullcontext()


class Spans:
    """Everything an engine tells about its time: to ``observers``, and to a torch profiler while one records."""

    def __init__(self) -> None:
        self.observers: list[SpanObserver] = []
        self.heard = False
        """Whether anybody listened when the running forward, backward or step began."""
        # Who was told of the beginning is told of the end, whoever comes or goes in between.
        self._open: dict[Span, tuple[tuple[SpanObserver, ...], record_function | None]] = {}

    def listen(self) -> None:
        """Note in ``heard`` whether anybody listens now: at the beginning of what has many spans."""
        self.heard = bool(self.observers) or profiler_runs()

    def of(self, phase: Phase, unit: str = "", nbytes: int = 0) -> AbstractContextManager[None]:
        """A span around a block of code. Arguments as for ``Span``."""
        if self.observers or profiler_runs():
            return self._around(phase, unit, nbytes)
        return _NOTHING

    def begin(self, phase: Phase, unit: str = "", nbytes: int = 0) -> Span | None:
        """Begin a span that ends in another call: what ``end`` needs, ``None`` if nobody listens."""
        if not self.observers and not profiler_runs():
            return None
        span = Span(phase, unit, nbytes)
        recorded = record_function(f"zero: {phase.value} {unit}".rstrip()) if profiler_runs() else None
        observers = tuple(self.observers)
        self._open[span] = (observers, recorded)
        if recorded is not None:
            recorded.__enter__()
        for observer in observers:
            observer.begin(span)
        return span

    def end(self, span: Span | None) -> None:
        """End a span; nothing if nobody listened when it began, or if it has ended."""
        if span is None:
            return
        observers, recorded = self._open.pop(span, ((), None))
        for observer in observers:
            observer.end(span)
        if recorded is not None:
            recorded.__exit__(None, None, None)

    def abandon(self) -> None:
        """End what an error left open, the innermost first."""
        for span in reversed(list(self._open)):
            self.end(span)

    @contextmanager
    def _around(self, phase: Phase, unit: str, nbytes: int) -> Iterator[None]:
        span = self.begin(phase, unit, nbytes)
        try:
            yield
        finally:
            self.end(span)
