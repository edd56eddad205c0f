"""What the engine is doing, for whoever observes it: spans of time, each with a phase, a unit and bytes.

Without observers a span costs a fraction of a microsecond and leaves no trace.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch.autograd.profiler import record_function

from lightning_zero._torch import profiler_runs

__all__ = ["Phase", "Span", "Spans"]


class Phase(str, Enum):
    """What a span of time is spent on.

    ``GATHER``, ``REDUCE`` and ``PUBLISH`` only issue a collective; the ``WAIT_...`` that follows waits for it. On a
    device all are short on the host: they place work, or a wait, on the current stream.
    """

    FORWARD = "forward"  # a unit computes
    BACKWARD = "backward"  # a unit computes gradients
    GATHER = "gather"  # a unit's parameters are asked for
    WAIT_GATHER = "wait for gather"
    REDUCE = "reduce"  # a bucket of gradients is sent off
    WAIT_REDUCE = "wait for reduce"  # its averages, or its memory, are needed
    STEP = "step"  # an optimizer updates masters
    PUBLISH = "publish"  # updated masters of replicated parameters are sent off
    WAIT_PUBLISH = "wait for publish"
    BUFFERS = "buffers"  # rank 0's buffers are sent to all ranks
    AGREE = "agree"  # the hosts compare where they are
    OFFLOAD = "offload"  # the host waits for memory of its own or for files


@dataclass(frozen=True, eq=False)
class Span:
    """One stretch of time: its phase, the unit or optimizer it is for, and bytes of the flat buffers that travel."""

    phase: Phase
    unit: str = ""
    nbytes: int = 0


_NOTHING = nullcontext()


class Spans:
    """Tells ``observers``, and a torch profiler while one records, what an engine spends its time on.

    An observer has ``begin(span)`` and ``end(span)``, which run on the engine's thread and must neither issue
    collectives nor wait for a device. Each ``begin`` is followed by one ``end``, after an error too; spans overlap.
    """

    def __init__(self) -> None:
        self.observers: list[Any] = []
        self.heard = False
        """Whether anybody observed when the running forward, backward or step began."""
        # Those who saw a span begin see it end, whoever comes or goes in between.
        self._open: dict[Span, tuple[tuple[Any, ...], record_function | None]] = {}

    def listen(self) -> None:
        """Update ``heard``: at the beginning of what has many spans."""
        self.heard = bool(self.observers) or profiler_runs()

    def of(self, phase: Phase, unit: str = "", nbytes: int = 0) -> AbstractContextManager[Any]:
        """A span that begins now and ends with the block of code. Arguments as for ``Span``."""
        if not self.observers and not profiler_runs():
            return _NOTHING
        context = ExitStack()
        context.callback(self.end, self.begin(phase, unit, nbytes))
        return context

    def begin(self, phase: Phase, unit: str = "", nbytes: int = 0) -> Span | None:
        """Begin a span that ends in another call: what ``end`` needs, ``None`` without observers."""
        profiled = profiler_runs()
        if not self.observers and not profiled:
            return None
        span = Span(phase, unit, nbytes)
        recorded = record_function(f"zero: {phase.value} {unit}".rstrip()) if profiled else None
        self._open[span] = observers, _ = tuple(self.observers), recorded
        if recorded is not None:
            recorded.__enter__()
        for observer in observers:
            observer.begin(span)
        return span

    def end(self, span: Span | None) -> None:
        """End a span; nothing if nobody observed when it began, or if it has ended."""
        observers, recorded = self._open.pop(span, ((), None)) if span is not None else ((), None)
        for observer in observers:
            observer.end(span)
        if recorded is not None:
            recorded.__exit__(None, None, None)

    def stop(self, phase: Phase) -> None:
        """End what was begun of a phase of which there is one span at a time."""
        for span in [span for span in self._open if span.phase is phase] if self._open else ():
            self.end(span)

    def abandon(self) -> None:
        """End what an error left open, the innermost first."""
        for span in reversed(list(self._open)):
            self.end(span)
