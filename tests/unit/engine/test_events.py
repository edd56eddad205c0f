"""Spans: what is told to whom, and nothing where nobody listens."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lightning_zero.engine.events import Phase, Span, Spans


class Listener:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Phase, str, int]] = []

    def begin(self, span: Span) -> None:
        self.heard.append(("begin", span.phase, span.unit, span.nbytes))

    def end(self, span: Span) -> None:
        self.heard.append(("end", span.phase, span.unit, span.nbytes))


def test_nobody_listens() -> None:
    spans = Spans()

    spans.listen()
    assert not spans.heard
    assert spans.of(Phase.GATHER, "a", 1) is spans.of(Phase.STEP)  # one shared context, which does nothing
    assert spans.begin(Phase.GATHER, "a", 1) is None
    spans.end(None)
    with spans.of(Phase.GATHER):
        pass


def test_a_listener_is_told_of_both_ends() -> None:
    spans, listener = Spans(), Listener()
    spans.observers.append(listener)

    with spans.of(Phase.GATHER, "a", 12):
        span = spans.begin(Phase.FORWARD, "b")
    spans.end(span)
    spans.end(span)  # has ended

    gather, forward = (Phase.GATHER, "a", 12), (Phase.FORWARD, "b", 0)
    assert listener.heard == [("begin", *gather), ("begin", *forward), ("end", *gather), ("end", *forward)]
    spans.listen()
    assert spans.heard


def test_the_end_is_told_after_an_error() -> None:
    spans, listener = Spans(), Listener()
    spans.observers.append(listener)

    with pytest.raises(ArithmeticError), spans.of(Phase.STEP):
        raise ArithmeticError

    assert [what for what, *_ in listener.heard] == ["begin", "end"]


@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")  # torch 2.11, once
def test_a_profiler_shows_ranges() -> None:
    spans = Spans()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        spans.listen()
        assert spans.heard
        span = spans.begin(Phase.FORWARD, "layers.0")
        with spans.of(Phase.WAIT_GATHER, "layers.1"):
            torch.zeros(1)
        spans.end(span)
        spans.end(spans.begin(Phase.STEP))
    names = {event.key for event in profiler.key_averages()}

    assert {"zero: forward layers.0", "zero: wait for gather layers.1", "zero: step"} <= names
    spans.listen()
    assert not spans.heard
