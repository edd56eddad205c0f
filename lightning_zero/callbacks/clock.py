"""Who the time of a step belongs to, without waiting for a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from lightning_zero.engine.events import Span

__all__ = ["OTHER", "PhaseClock", "Timeline"]

OTHER = "other"
"""Time of a step in no span of the engine: data on their way, the user's hooks, other callbacks."""

Mark = Any  # seconds on the host (float), or a torch.cuda.Event


class Timeline:
    """The marks of one step.

    Args:
        marks: in order, each with the phase that the time from there to the next one belongs to.
        end: where the last one ends.
    """

    def __init__(self, marks: list[tuple[Mark, str]], end: Mark) -> None:
        self._marks = marks
        self._end = end

    @property
    def ready(self) -> bool:
        """Whether ``seconds`` would not have to wait."""
        return isinstance(self._end, float) or bool(self._end.query())

    def wait(self) -> None:
        """Wait on the host until the device has got there."""
        if not isinstance(self._end, float):
            self._end.synchronize()

    def seconds(self) -> dict[str, float]:
        """By phase; they add up to the step."""
        found: dict[str, float] = {}
        ends = [mark for mark, _ in self._marks[1:]] + [self._end]
        for (begin, phase), end in zip(self._marks, ends, strict=True):
            found[phase] = found.get(phase, 0.0) + _between(begin, end)
        return found


def _between(begin: Mark, end: Mark) -> float:
    if isinstance(begin, float):
        return float(end - begin)
    return float(begin.elapsed_time(end)) / 1000


class PhaseClock:
    """Observes spans; at each moment time belongs to the one that began last among those that have not ended.

    On CUDA a mark is an event on the stream that was current at ``start``: time is what that stream spent there, read
    when the device has got past it.

    Args:
        device: where the engine computes.
        now: seconds on the host, where that is the clock.
    """

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._open: list[Span] = []
        self._marks: list[tuple[Mark, str]] = []
        self._mark: Callable[[], Mark] = now

    def start(self) -> None:
        """A step begins."""
        if self._device.type == "cuda":
            self._stream = torch.cuda.current_stream(self._device)
            self._mark = self._event
        self._open.clear()
        self._marks = [(self._mark(), OTHER)]

    def stop(self) -> Timeline:
        """It has ended."""
        self._open.clear()
        timeline = Timeline(self._marks, self._mark())
        self._marks = []
        return timeline

    def begin(self, span: Span) -> None:
        """See ``SpanObserver``."""
        self._open.append(span)
        self._turn()

    def end(self, span: Span) -> None:
        """See ``SpanObserver``. A span that was open before the step began is not known here."""
        if span in self._open:
            self._open.remove(span)
            self._turn()

    def _turn(self) -> None:
        self._marks.append((self._mark(), self._open[-1].phase.name.lower() if self._open else OTHER))

    def _event(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event
