"""What a step sends, and where its time goes."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_zero.analysis import CollectiveTraffic, Traffic, format_nbytes
from lightning_zero.analysis.traffic import expected_traffic
from lightning_zero.comm.collectives import CollectiveCall
from lightning_zero.engine import ZeroEngine
from lightning_zero.engine.events import Span
from lightning_zero.plan import Plan
from lightning_zero.trainer.monitors.steps import STEADY, StepMonitor, log, logging_step, strategy_of

__all__ = ["CommunicationMonitor"]

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


@dataclass
class _Measured:
    """One measured step.

    Args:
        step: on the logger's axis.
        timeline: when was what.
        sent: collectives by kind.
        expected: the same by plan; ``None`` where the plan has nothing to say.
    """

    step: int
    timeline: Timeline
    sent: dict[str, CollectiveTraffic]
    expected: dict[str, CollectiveTraffic] | None
    seconds: dict[str, float] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """In the loggers' words."""
        found: dict[str, float] = {}
        for kind, traffic in self.sent.items():
            found[f"zero/traffic/{kind}/calls"] = traffic.calls
            found[f"zero/traffic/{kind}/nbytes"] = traffic.nbytes
        for kind, traffic in (self.expected or {}).items():
            found[f"zero/traffic/{kind}/expected_calls"] = traffic.calls
            found[f"zero/traffic/{kind}/expected_nbytes"] = traffic.nbytes
            if traffic.nbytes:
                found[f"zero/traffic/{kind}/ratio"] = self.sent[kind].nbytes / traffic.nbytes
        for phase, seconds in self.seconds.items():
            found[f"zero/time/{phase}"] = seconds
        found["zero/time/total"] = sum(self.seconds.values())
        return found


@dataclass
class _Sums:
    """Of all measured steps. Their marks are not kept: a long run has many, and on CUDA each is an event.

    Args:
        count: of the steps.
        sent: collectives by kind.
        expected: the same by plan; of the steps that the plan has something to say about.
        predicted: how many these are.
        seconds: by phase.
    """

    count: int = 0
    sent: dict[str, CollectiveTraffic] = field(default_factory=dict)
    expected: dict[str, CollectiveTraffic] = field(default_factory=dict)
    predicted: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, found: _Measured) -> None:
        """One more step, whose times are known."""
        self.count += 1
        self.predicted += found.expected is not None
        for sums, parts in ((self.sent, found.sent), (self.expected, found.expected or {})):
            for kind, traffic in parts.items():
                sums[kind] = sums.get(kind, CollectiveTraffic()) + traffic
        for phase, seconds in found.seconds.items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds


class CommunicationMonitor(StepMonitor):
    """Logs collectives and bytes of a step next to what the plan says, and how long each phase took.

    The numbers are those of each rank itself, so a logger gets rank 0's. Bytes count whole flat buffers, as the plan
    does; of these a rank sends and receives the fraction (world size - 1) / world size. Times are exclusive: what a
    forward waits for is not in the forward, and all phases together are the step. On CUDA they are the compute
    stream's, read some steps later, so that nothing is waited for.

    A step that sends something else than the plan says is warned of, once. A step that validation interrupts, between
    two of its micro-steps, is left out.

    Args:
        every_n_steps: how often a step is measured and logged, beginning with the third; ``None``: the Trainer's
            ``log_every_n_steps``.
        summary: whether a table appears at the end of a fit, on rank 0; ``None``: where the Trainer has no logger.

    Raises:
        ValueError: if a setting is not usable.

    Example::

        Trainer(strategy="zero3", callbacks=[lightning_zero.CommunicationMonitor()])
    """

    def _forget(self) -> None:
        super()._forget()
        self._clock: PhaseClock | None = None
        self._sent: dict[str, CollectiveTraffic] = {}
        self._inside = False  # a step is running
        self._disturbed = False  # something was sent between the last step and this one, and may still be resident
        self._interrupted = False  # validation ran between two micro-steps of this step
        self._waiting: list[_Measured] = []  # whose device times are not there yet
        self._done = _Sums()
        self._warned = False

    def attach(self, trainer: pl.Trainer, engine: ZeroEngine) -> None:
        """Count collectives from now on."""
        self._clock = PhaseClock(engine.device)
        engine.collectives.observers.append(self._note)

    def detach(self, engine: ZeroEngine) -> None:
        """Leave no trace in the engine."""
        if self._note in engine.collectives.observers:
            engine.collectives.observers.remove(self._note)
        if self._clock in engine.spans.observers:
            engine.spans.observers.remove(self._clock)

    def begin(self, trainer: pl.Trainer, engine: ZeroEngine, measured: bool) -> None:
        """Count anew, and look at the clock if this step is measured."""
        self._sent = dict.fromkeys(_kinds(engine.plan), CollectiveTraffic())
        self._inside, self._interrupted = True, False
        if measured and self._clock is not None:
            self._clock.start()
            if self._clock not in engine.spans.observers:
                engine.spans.observers.append(self._clock)

    def end(self, trainer: pl.Trainer, engine: ZeroEngine, measured: bool, micro_steps: int) -> None:
        """Hold what was sent against the plan, and log what is known by now."""
        self._inside = False
        expected = self._expected(trainer, engine, micro_steps)
        if self._step >= STEADY and expected is not None and not (self._disturbed or self._interrupted):
            self._compare(expected, micro_steps)
        self._disturbed = False
        if measured and self._clock in engine.spans.observers:
            engine.spans.observers.remove(self._clock)
            found = _Measured(logging_step(trainer), self._clock.stop(), self._sent, expected)
            if not self._interrupted:
                self._waiting.append(found)
        self._interrupted = False
        self._log_ready(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log what the device had not got to, and show the summary."""
        for found in self._waiting:
            found.timeline.wait()
        self._log_ready(trainer)
        super().on_train_end(trainer, pl_module)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Between two micro-steps of a step, too. What it sends and takes is not the step's."""
        self._interrupted |= self._inside
        self._inside = False

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Count again, if it ran inside of a step."""
        self._inside = self._interrupted

    def tables(self) -> list[list[tuple[str, ...]]]:
        """Means over the measured steps."""
        done, count = self._done, self._done.count
        if not count:
            return []
        rows: list[tuple[str, ...]] = [(f"mean of {count} steps", "calls", "by plan", "bytes", "by plan", "ratio")]
        for kind, sent in done.sent.items():
            plan = done.expected.get(kind) if done.predicted == count else None
            rows.append(
                (
                    kind,
                    f"{sent.calls / count:g}",
                    "-" if plan is None else f"{plan.calls / count:g}",
                    format_nbytes(sent.nbytes // count),
                    "-" if plan is None else format_nbytes(plan.nbytes // count),
                    f"{sent.nbytes / plan.nbytes:.3f}" if plan is not None and plan.nbytes else "-",
                )
            )
        total = sum(done.seconds.values()) / count
        times: list[tuple[str, ...]] = [("phase", "seconds", "share")]
        for phase, seconds in done.seconds.items():
            mean = seconds / count
            times.append((phase.replace("_", " "), f"{mean:.6f}", f"{mean / total:.1%}" if total else "-"))
        return [rows, [*times, ("total", f"{total:.6f}", "")]]

    def _note(self, call: CollectiveCall) -> None:
        if self._inside:
            before = self._sent.get(call.kind, CollectiveTraffic())
            self._sent[call.kind] = before + CollectiveTraffic(1, call.numel, call.nbytes)
        else:
            self._disturbed = True

    def _expected(
        self, trainer: pl.Trainer, engine: ZeroEngine, micro_steps: int
    ) -> dict[str, CollectiveTraffic] | None:
        """What the plan says about a step of the usual kind; it knows nothing of steps the user runs by hand."""
        module = trainer.lightning_module
        if not module.automatic_optimization or len(strategy_of(trainer).optimizers) != 1:
            return None
        traffic: Traffic = expected_traffic(engine.plan, micro_steps=micro_steps)
        return {kind: getattr(traffic, kind) for kind in _kinds(engine.plan)}

    def _compare(self, expected: dict[str, CollectiveTraffic], micro_steps: int) -> None:
        wrong = [
            f"{kind}: {self._sent[kind].calls} calls, {self._sent[kind].nbytes} bytes; by plan {plan.calls} calls, "
            f"{plan.nbytes} bytes"
            for kind, plan in expected.items()
            if self._sent[kind] != plan
        ]
        if wrong and not self._warned:
            self._warned = True
            warnings.warn(
                f"CommunicationMonitor: a step of {micro_steps} micro-steps sent something else than the plan says "
                f"({'; '.join(wrong)}). The plan takes every unit to run once per forward and once per backward: units "
                "that run more often (recomputed activations), or not at all (a branch not taken, a frozen unit with "
                "nothing to train before it, an optimizer step that a loss scaler skipped), and whatever reads full "
                "parameters or gradients in a step, make the difference.",
                stacklevel=2,
            )

    def _log_ready(self, trainer: pl.Trainer) -> None:
        while self._waiting and self._waiting[0].timeline.ready:
            found = self._waiting.pop(0)
            found.seconds = found.timeline.seconds()
            self._done.add(found)
            log(trainer, found.metrics(), found.step)


def _kinds(plan: Plan) -> tuple[str, ...]:
    """The collectives that a plan predicts."""
    return ("all_gather", "reduce_scatter", "broadcast") if plan.buffers else ("all_gather", "reduce_scatter")
