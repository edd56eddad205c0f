"""What a step sends, and where its time goes."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import lightning.pytorch as pl
import torch

from lightning_zero.analysis import CollectiveTraffic, format_nbytes
from lightning_zero.analysis.traffic import expected_traffic
from lightning_zero.comm.collectives import CollectiveCall
from lightning_zero.engine import ZeroEngine
from lightning_zero.engine.events import Span
from lightning_zero.plan import Plan
from lightning_zero.trainer.monitors import STEADY, StepMonitor, let_go, logging_step
from lightning_zero.trainer.strategy import ZeroStrategy

__all__ = ["CommunicationMonitor"]

OTHER = "other"
"""Time of a step in no span of the engine: data on their way, the user's hooks, other callbacks."""

Mark = Any  # seconds on the host (float), or a torch.cuda.Event
Number = TypeVar("Number", float, CollectiveTraffic)


@dataclass(frozen=True)
class Timeline:
    """The marks of one step, each with the phase that the time from there to the next one belongs to."""

    marks: list[tuple[Mark, str]]
    end: Mark

    @property
    def ready(self) -> bool:
        """Whether ``seconds`` would not have to wait."""
        return isinstance(self.end, float) or bool(self.end.query())

    def wait(self) -> None:
        """Wait on the host until the device has got there."""
        if not isinstance(self.end, float):
            self.end.synchronize()

    def seconds(self) -> dict[str, float]:
        """By phase; they add up to the step."""
        found: dict[str, float] = {}
        ends = [*(mark for mark, _ in self.marks[1:]), self.end]
        for (begin, phase), end in zip(self.marks, ends, strict=True):
            seconds = end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1000
            found[phase] = found.get(phase, 0.0) + float(seconds)
        return found


class PhaseClock:
    """Observes spans; at each moment time belongs to the one that began last among those that have not ended.

    On CUDA a mark is an event on the stream that was current at ``start``: time is what that stream spent there, read
    when the device has got past it. Elsewhere ``now`` is the clock, in seconds on the host.
    """

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        self._device = device
        self._open: list[Span] = []
        self._marks: list[tuple[Mark, str]] = []
        self._mark: Callable[[], Mark] = now

    def start(self) -> None:
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
            self._mark = lambda: stream.record_event(torch.cuda.Event(enable_timing=True))
        self._open.clear()
        self._marks = [(self._mark(), OTHER)]

    def stop(self) -> Timeline:
        return Timeline(self._marks, self._mark())

    def begin(self, span: Span) -> None:
        self._open.append(span)
        self._turn()

    def end(self, span: Span) -> None:
        """See ``SpanObserver``. A span that was open before the step began is not known here."""
        if span in self._open:
            self._open.remove(span)
            self._turn()

    def _turn(self) -> None:
        self._marks.append((self._mark(), self._open[-1].phase.name.lower() if self._open else OTHER))


class _Measured(NamedTuple):
    """One measured step, on the logger's axis: when was what, and the collectives by kind."""

    step: int
    timeline: Timeline
    sent: dict[str, CollectiveTraffic]
    expected: dict[str, CollectiveTraffic] | None
    """Those of the plan; ``None`` where it has nothing to say."""

    def metrics(self, by_phase: dict[str, float]) -> dict[str, float]:
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
        found |= {f"zero/time/{phase}": seconds for phase, seconds in by_phase.items()}
        return found | {"zero/time/total": sum(by_phase.values())}


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
        self._warned = False
        # Sums over the steps whose times are known: their marks are not kept, on CUDA each is an event.
        self._count = self._predicted = 0
        self._all_sent: dict[str, CollectiveTraffic] = {}
        self._all_expected: dict[str, CollectiveTraffic] = {}
        self._all_seconds: dict[str, float] = {}

    def attach(self, strategy: ZeroStrategy) -> None:
        self._clock = PhaseClock(strategy.engine.device)
        strategy.engine.collectives.observers.append(self._note)

    def detach(self, engine: ZeroEngine) -> None:
        let_go(engine.collectives.observers, self._note)
        let_go(engine.spans.observers, self._clock)

    def begin(self, engine: ZeroEngine) -> None:
        """Count anew, and look at the clock if this step is measured."""
        self._sent = dict.fromkeys(_kinds(engine.plan), CollectiveTraffic())
        self._inside, self._interrupted = True, False
        if self._measured and self._clock is not None:
            self._clock.start()
            if self._clock not in engine.spans.observers:
                engine.spans.observers.append(self._clock)

    def end(self, trainer: pl.Trainer, strategy: ZeroStrategy) -> None:
        """Hold what was sent against the plan, and log what is known by now."""
        self._inside = False
        engine, expected = strategy.engine, None
        # The plan knows nothing of steps the user runs by hand.
        if trainer.lightning_module.automatic_optimization and len(strategy.optimizers) == 1:
            traffic = expected_traffic(engine.plan, micro_steps=self._micro_steps)
            expected = {kind: getattr(traffic, kind) for kind in _kinds(engine.plan)}
            if self._step >= STEADY and not (self._disturbed or self._interrupted):
                self._compare(expected)
        self._disturbed = False
        if self._measured and self._clock in engine.spans.observers:
            engine.spans.observers.remove(self._clock)
            if not self._interrupted:
                self._waiting.append(_Measured(logging_step(trainer), self._clock.stop(), self._sent, expected))
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
        count = self._count
        if not count:
            return []
        rows: list[tuple[str, ...]] = [(f"mean of {count} steps", "calls", "by plan", "bytes", "by plan", "ratio")]
        for kind, sent in self._all_sent.items():
            calls, nbytes, ratio = "-", "-", "-"
            plan = self._all_expected.get(kind)
            if plan is not None and self._predicted == count:
                calls, nbytes = f"{plan.calls / count:g}", format_nbytes(plan.nbytes // count)
                ratio = f"{sent.nbytes / plan.nbytes:.3f}" if plan.nbytes else "-"
            rows.append((kind, f"{sent.calls / count:g}", calls, format_nbytes(sent.nbytes // count), nbytes, ratio))
        total = sum(self._all_seconds.values())
        times: list[tuple[str, ...]] = [("phase", "seconds", "share")]
        for phase, seconds in self._all_seconds.items():
            share = f"{seconds / total:.1%}" if total else "-"
            times.append((phase.replace("_", " "), f"{seconds / count:.6f}", share))
        return [rows, [*times, ("total", f"{total / count:.6f}", "")]]

    def _note(self, call: CollectiveCall) -> None:
        if self._inside:
            _add(self._sent, {call.kind: CollectiveTraffic(1, call.numel, call.nbytes)})
        else:
            self._disturbed = True

    def _compare(self, expected: dict[str, CollectiveTraffic]) -> None:
        wrong = [
            f"{kind}: {self._sent[kind].calls} calls, {self._sent[kind].nbytes} bytes; by plan {plan.calls} calls, "
            f"{plan.nbytes} bytes"
            for kind, plan in expected.items()
            if self._sent[kind] != plan
        ]
        if wrong and not self._warned:
            self._warned = True
            warnings.warn(
                f"CommunicationMonitor: a step of {self._micro_steps} micro-steps sent something else than the plan "
                f"says ({'; '.join(wrong)}). The plan takes every unit to run once per forward and once per backward: "
                "units that run more often (recomputed activations), or not at all (a branch not taken, a frozen unit "
                "with nothing to train before it, an optimizer step that a loss scaler skipped), and whatever reads "
                "full parameters or gradients in a step, make the difference.",
                stacklevel=2,
            )

    def _log_ready(self, trainer: pl.Trainer) -> None:
        while self._waiting and self._waiting[0].timeline.ready:
            found = self._waiting.pop(0)
            seconds = found.timeline.seconds()
            self._count += 1
            self._predicted += found.expected is not None
            _add(self._all_sent, found.sent)
            _add(self._all_expected, found.expected or {})
            _add(self._all_seconds, seconds)
            self.log_numbers(trainer, found.metrics(seconds), found.step)


def _add(sums: dict[str, Number], parts: Mapping[str, Number]) -> None:
    for name, part in parts.items():
        sums[name] = sums[name] + part if name in sums else part


def _kinds(plan: Plan) -> tuple[str, ...]:
    """The collectives that a plan predicts."""
    return ("all_gather", "reduce_scatter", "broadcast") if plan.buffers else ("all_gather", "reduce_scatter")
