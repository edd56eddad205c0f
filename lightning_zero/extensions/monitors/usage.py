"""``MemoryMonitor`` and ``CommunicationMonitor``: callbacks that log what a run holds and sends, next to its plan.

[Note: which steps are measured]
The third step of a fit, and then every n-th. In the first step the engine records the order of units, and every unit
is gathered on demand; in the second, frozen units may be gathered that stay resident. From the third on all steps are
alike, so that a prediction can be compared with any of them.

[Note: bytes that are held]
Bytes are those of live storages, in the words of the plan's formula. A storage counts once, for the first category that
claims it: the master of a replicated parameter is a view of the parameter and costs nothing. Only sizes are read: no
device is waited for.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from lightning_zero._torch import storage_key
from lightning_zero.comm.collectives import CollectiveCall
from lightning_zero.config import Tier
from lightning_zero.engine import ZeroEngine
from lightning_zero.engine.events import Span
from lightning_zero.engine.unit import ReplicatedUnit
from lightning_zero.errors import readable_size, table
from lightning_zero.offload import OffloadedTensor
from lightning_zero.plan.plan import CollectiveTraffic, Plan
from lightning_zero.registry import extension
from lightning_zero.trainer.strategy import ZeroStrategy

__all__ = ["CommunicationMonitor", "MemoryMonitor", "MemoryStats", "memory_stats"]

STEADY = 3
"""The first step of a fit that is like all that follow."""


class StepMonitor(pl.Callback):
    """Calls ``begin`` and ``end`` around every optimizer step with all its micro-steps."""

    def __init__(self, every_n_steps: int | None = None, summary: bool | None = None) -> None:
        if every_n_steps is not None and (isinstance(every_n_steps, bool) or every_n_steps < 1):
            raise ValueError(f"every_n_steps must be 1 or more, or None for the Trainer's, got {every_n_steps!r}.")
        self.every_n_steps = every_n_steps
        self.summary = summary
        self._strategy: ZeroStrategy | None = None
        self._forget()

    def _forget(self) -> None:
        """Begin a fit anew."""
        self._step = 0  # optimizer steps of this fit that have ended
        self._micro_steps = 0  # of the running step
        self._global_step = 0  # the Trainer's, before the running step
        self._measured = False  # the running step
        self._logged: dict[str, float] = {}  # of the last step that was measured

    def attach(self, strategy: ZeroStrategy) -> None:
        """A fit begins."""

    def detach(self, engine: ZeroEngine) -> None:
        """The fit is over, or an error stopped it: leave no trace in the engine. May be called again."""

    def begin(self, engine: ZeroEngine) -> None:
        """A step begins."""

    def end(self, trainer: pl.Trainer, strategy: ZeroStrategy) -> None:
        """The step has ended."""

    def log_numbers(self, trainer: pl.Trainer, metrics: dict[str, float]) -> None:
        """Give numbers to every logger of the Trainer; each writes on rank 0 only."""
        self._logged = metrics
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=int(trainer.fit_loop.epoch_loop._batches_that_stepped))  # as Lightning's

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Raise ValueError for a Trainer whose strategy has nothing to monitor."""
        if not isinstance(trainer.strategy, ZeroStrategy):
            raise ValueError(
                f"{type(self).__name__} shows what ZeroStrategy holds and sends, but the Trainer runs "
                f"{type(trainer.strategy).__name__}. Use Trainer(strategy='zero1'), 'zero2' or 'zero3', or leave the "
                "callback out."
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._forget()
        if isinstance(trainer.strategy, ZeroStrategy):
            self._strategy = trainer.strategy
            self.attach(self._strategy)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """A micro-step begins, and perhaps a step."""
        if self._strategy is not None and not self._micro_steps:
            step = self._step + 1
            every = int(self.every_n_steps or trainer.log_every_n_steps)  # type: ignore[attr-defined]
            self._measured = step == STEADY or (step > STEADY and every > 0 and step % every == 0)
            self._global_step = trainer.global_step
            self.begin(self._strategy.engine)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A micro-step has ended, and perhaps a step."""
        if self._strategy is None:
            return
        self._micro_steps += 1
        if trainer.global_step != self._global_step:
            self._step += 1
            self.end(trainer, self._strategy)
            self._micro_steps = 0

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show the summary."""
        if self._strategy is None:
            return
        size = self._strategy.session.groups.shard.tensor
        self.on_exception()
        if self.summary if self.summary is not None else not trainer.loggers:
            parallel = f", with its parts of what a tensor-parallel group of {size} has split" if size > 1 else ""
            lines = [f"{type(self).__name__}, rank 0 of {trainer.world_size}{parallel}"]
            rows: dict[str, list[str]] = {}
            for name, value in filter(itemgetter(1), self._logged.items()):
                shown = f"{value:g}" if name.endswith(("calls", "ratio")) else readable_size(int(value))
                rows.setdefault(name.replace("expected_", ""), ["-", "-"])["expected_" in name] = shown
            if self._logged:
                head = ("the last step that was measured", "measured", "by plan")
                lines += ["", *table([head, *((name, *pair) for name, pair in rows.items())])]
            else:
                lines[0] += f": no step was measured; the first one that is would have been step {STEADY}."
            rank_zero_info("\n".join(lines))

    def on_exception(self, *_: Any, **__: Any) -> None:
        """Let go of the engine."""
        strategy, self._strategy = self._strategy, None
        if strategy is not None:
            self.detach(strategy.engine)

    teardown = on_exception


def let_go(observers: list[Any], observer: Any) -> None:
    """Take an observer out of a list, if it is there."""
    if observer in observers:
        observers.remove(observer)


# ------------------------------------------------------------------------------------------------- what a step sends


class CommunicationMonitor(StepMonitor):
    """Log collectives and bytes of a step next to what the plan predicts.

    Each rank counts for itself, so a logger gets rank 0's numbers. Bytes are those of full flat buffers, as in the
    plan; a rank sends and receives the fraction (world size - 1) / world size of them. For the duration of each phase
    record a trace with ``torch.profiler``: the engine's ranges are named ``zero: ...``.

    Warns once if a step sends something else than planned. Skips a step that validation interrupts between two of its
    micro-steps.

    Args:
        every_n_steps: how often a step is measured and logged, from the third step on; ``None``: the Trainer's
            ``log_every_n_steps``.
        summary: whether rank 0 prints a table at the end of a fit; ``None``: if the Trainer has no logger.

    Raises:
        ValueError: if a setting is not usable.

    Example::

        Trainer(strategy="zero3", callbacks=[lightning_zero.CommunicationMonitor()])
    """

    def _forget(self) -> None:
        super()._forget()
        self._sent: dict[str, CollectiveTraffic] = {}
        self._inside = False  # a step is running
        self._disturbed = False  # something was sent between the last step and this one, and may still be resident
        self._interrupted = False  # validation ran between two micro-steps of this step
        self._warned = False

    def attach(self, strategy: ZeroStrategy) -> None:
        strategy.engine.collectives.observers.append(self._note)

    def detach(self, engine: ZeroEngine) -> None:
        let_go(engine.collectives.observers, self._note)

    def begin(self, engine: ZeroEngine) -> None:
        """Count anew."""
        self._sent = dict.fromkeys(_kinds(engine.plan), CollectiveTraffic())
        self._inside, self._interrupted = True, False

    def end(self, trainer: pl.Trainer, strategy: ZeroStrategy) -> None:
        """Hold what was sent against the plan, and log it."""
        self._inside = False
        engine, expected = strategy.engine, None
        # The plan knows nothing of steps the user runs by hand.
        if trainer.lightning_module.automatic_optimization and len(strategy.optimizers) == 1:
            traffic = engine.plan.expected_traffic(micro_steps=self._micro_steps)
            expected = {kind: getattr(traffic, kind) for kind in _kinds(engine.plan)}
            if self._step >= STEADY and not (self._disturbed or self._interrupted):
                self._compare(expected)
        self._disturbed = False
        if self._measured and not self._interrupted:
            self.log_numbers(trainer, self._metrics(expected or {}))
        self._interrupted = False

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Between two micro-steps of a step, too. What it sends and takes is not the step's."""
        self._interrupted |= self._inside
        self._inside = False

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Count again, if it ran inside of a step."""
        self._inside = self._interrupted

    def _metrics(self, expected: Mapping[str, CollectiveTraffic]) -> dict[str, float]:
        found: dict[str, float] = {}
        for kind, traffic in self._sent.items():
            found[f"zero/traffic/{kind}/calls"] = traffic.calls
            found[f"zero/traffic/{kind}/nbytes"] = traffic.nbytes
        for kind, traffic in expected.items():
            found[f"zero/traffic/{kind}/expected_calls"] = traffic.calls
            found[f"zero/traffic/{kind}/expected_nbytes"] = traffic.nbytes
            if traffic.nbytes:
                found[f"zero/traffic/{kind}/ratio"] = self._sent[kind].nbytes / traffic.nbytes
        return found

    def _note(self, call: CollectiveCall) -> None:
        if self._inside:
            before = self._sent.get(call.kind, CollectiveTraffic())
            self._sent[call.kind] = before + CollectiveTraffic(1, call.numel, call.nbytes)
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
                f"CommunicationMonitor: a step of {self._micro_steps} micro-steps sent something else than planned "
                f"({'; '.join(wrong)}). The plan assumes that every unit runs once per forward and once per backward. "
                "Possible reasons: units that run more often (recomputed activations) or not at all (a branch not "
                "taken, a frozen unit with nothing to train before it, an optimizer step that a loss scaler skipped), "
                "and code that reads full parameters or gradients in a step.",
                stacklevel=2,
            )


def _kinds(plan: Plan) -> tuple[str, ...]:
    """The collectives that a plan predicts."""
    return ("all_gather", "reduce_scatter", "broadcast") if plan.buffers else ("all_gather", "reduce_scatter")


# --------------------------------------------------------------------------- what a rank holds, at rest and at its peak


class MemoryMonitor(StepMonitor):
    """Log memory by category, between steps and at the peak, next to what the plan predicts.

    Each rank counts for itself, so a logger gets rank 0's numbers. ``rest`` is the memory of the engine and the
    optimizers after a step, counted in live storages. The engine's peak adds its buffers during a step; the plan's peak
    also includes autograd's gradients and the optimizer's temporary tensors. Memory of the whole process or device,
    activations included, is logged beside them: from the allocator on CUDA, resident memory on Linux.

    Args:
        every_n_steps: how often a step is measured and logged, from the third step on; ``None``: the Trainer's
            ``log_every_n_steps``.
        summary: whether rank 0 prints a table at the end of a fit; ``None``: if the Trainer has no logger.

    Raises:
        ValueError: if a setting is not usable.

    Example::

        Trainer(strategy="zero3", callbacks=[lightning_zero.MemoryMonitor(every_n_steps=100)])
    """

    def _forget(self) -> None:
        super()._forget()
        self._watermark: Beside | None = None
        self._expected: Any = None

    def attach(self, strategy: ZeroStrategy) -> None:
        self._expected = _expected_of(strategy)
        if strategy.engine.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(strategy.engine.device)  # set-up has a peak of its own

    def detach(self, engine: ZeroEngine) -> None:
        let_go(engine.means.spans.observers, self._watermark)
        self._watermark = None

    def begin(self, engine: ZeroEngine) -> None:
        if self._measured and self._watermark is None:
            self._watermark = Beside(engine)
            engine.means.spans.observers.append(self._watermark)

    def end(self, trainer: pl.Trainer, strategy: ZeroStrategy) -> None:
        if self._watermark is None:
            return
        passing, engine = self._watermark.most, strategy.engine
        self.detach(engine)
        adapters = map(strategy.adapter, strategy.optimizers)
        held = memory_stats(engine, chain.from_iterable(adapter.tensors() for adapter in adapters))
        lasting = held.total - held.beside - held.device["gradients"]
        process = {f"zero/memory/{name}": nbytes for name, nbytes in _process_nbytes(engine.device).items()}
        self.log_numbers(trainer, self._metrics(held, max(held.total, lasting + passing)) | process)

    def _metrics(self, held: MemoryStats, peak: int) -> dict[str, float]:
        expected = self._expected
        found: dict[str, float] = {f"zero/memory/rest/{name}": nbytes for name, nbytes in held.device.items()}
        found["zero/memory/rest/beside"] = held.beside
        found["zero/memory/rest/total"] = held.total
        found["zero/memory/peak/total"] = peak
        for when, memory in (("rest", expected.rest), ("peak", expected.peak)):
            planned = {name: nbytes for name, nbytes in memory.items() if name != "activations"}  # nobody planned any
            found |= {f"zero/memory/expected_{when}/{name}": nbytes for name, nbytes in planned.items()}
            found[f"zero/memory/expected_{when}/total"] = memory.total
        if expected.rest.total:
            found["zero/memory/rest/ratio"] = held.total / expected.rest.total
        for category, nbytes in expected.host.items() if held.host else ():
            found[f"zero/memory/host/{category}"] = held.host[category]
            found[f"zero/memory/expected_host/{category}"] = nbytes
        if held.disk or expected.disk.total:
            found["zero/memory/disk/total"] = held.disk
            found["zero/memory/expected_disk/total"] = expected.disk.total
        return found


def _expected_of(strategy: ZeroStrategy) -> Any:
    """What the plan says, a ``StageMemory``, for the optimizers that the run has."""
    costs_of = extension("planner", "leave out the MemoryMonitor")
    engine, plan = strategy.engine, strategy.engine.plan
    costs = [costs_of.OptimizerCost.of(optimizer) for optimizer in strategy.optimizers]
    first = costs[0] if costs else costs_of.OptimizerCost(name="none", state=0)
    wire = {"receive_buffer": engine.collectives.receives, "accelerator": engine.device.type != "cpu"}
    found = costs_of.stage_memory(plan, "", engine.collectives.rank, first, **wire)
    if len({(cost.state, cost.whole, cost.eight_bit) for cost in costs}) > 1 and not any(cost.whole for cost in costs):
        # The formula knows one optimizer; of several, each counts for what this rank's part of it steps on.
        offloaded, state = plan.offload is not None and plan.offload.optimizer, 0
        for cost, optimizer in zip(costs, strategy.optimizers, strict=True):
            for entry in strategy.adapter(optimizer).entries if not offloaded else ():
                if entry.parameter is not None:
                    state += cost.state_nbytes(entry.place.numel, entry.parameter.itemsize, entry.spec.numel)
        found = replace(found, rest=replace(found.rest, optimizer=state), peak=replace(found.peak, optimizer=state))
    return found


def _process_nbytes(device: torch.device) -> dict[str, int]:
    """What only the allocator or the kernel knows, activations included. Waits for nothing."""
    if device.type == "cuda":
        return {
            "device/now": torch.cuda.memory_allocated(device),
            "device/peak": torch.cuda.max_memory_allocated(device),
            "device/reserved": torch.cuda.memory_reserved(device),
        }
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return {}
    found = dict(re.findall(r"^Vm(RSS|HWM):\s*(\d+) kB", status, re.MULTILINE))
    names = {"RSS": "process/now", "HWM": "process/peak"}
    return {name: int(found[key]) * 1024 for key, name in names.items()} if len(found) == 2 else {}


# ----------------------------------------------------------------------------------------------------- what is alive

_DEVICE = ("parameters", "weights", "masters", "gradients", "optimizer", "slots", "gradient_slots", "transport")
_HOST = ("weights", "masters", "gradients", "optimizer", "buffers")


@dataclass(frozen=True, kw_only=True)
class MemoryStats:
    """Bytes of one rank by category."""

    device: dict[str, int]  # by the categories of ``plan.Memory``
    host: dict[str, int]  # by those of ``plan.HostBytes``; empty without offloading
    disk: int  # reserved in files
    beside: int  # on the device, in no category: see ``Beside``

    @property
    def total(self) -> int:
        """Everything on the device."""
        return sum(self.device.values()) + self.beside


def _unclaimed(tensors: Iterable[Tensor | None], claimed: Mapping[int, int]) -> dict[int, int]:
    """Bytes of the storages behind tensors that are not in ``claimed``."""
    found: dict[int, int] = {}
    for tensor in tensors:
        if tensor is None or isinstance(tensor, OffloadedTensor):
            continue
        if tensor.layout is not torch.strided or tensor.is_meta:
            continue
        key = storage_key(tensor)
        if key not in claimed:
            found[key] = tensor.untyped_storage().nbytes()
    return found


def memory_stats(
    engine: ZeroEngine, optimizers: Iterable[Tensor] = (), claimed: dict[int, int] | None = None
) -> MemoryStats:
    """Count what is alive. ``optimizers`` are what these hold beside the shards: state, and whole parameters.

    ``claimed`` gets the bytes of every storage that was counted, by its key.
    """
    claimed = {} if claimed is None else claimed

    def claim(tensors: Iterable[Tensor | None]) -> int:
        found = _unclaimed(tensors, claimed)
        claimed.update(found)
        return sum(found.values())

    reducer, offload = engine._reducer, engine.plan.offload
    flats = [flat for unit in engine.units for flat in unit.flats]
    buckets = reducer.buckets if reducer is not None else ()
    device, host = dict.fromkeys(_DEVICE, 0), dict.fromkeys(_HOST, 0)
    moved = host if offload is not None and offload.optimizer else device
    device["parameters"] = claim(b for u in engine.units if isinstance(u, ReplicatedUnit) for b in u.buffers)
    for tier, found in ((Tier.DEVICE, device), (Tier.HOST, host)):
        found["weights"] = claim(flat.weights for flat in flats if flat.rest.weights is tier)
        found["masters"] = claim(flat.master for flat in flats if flat.rest.master is tier)
    device["weights"] += claim(engine.collectives.kept)
    moved["gradients"] = claim(bucket.shard.there for bucket in buckets)
    device["gradients"] += claim(bucket.resident for bucket in buckets)
    moved["optimizer"] = claim(optimizers)
    device["slots"] = claim(buffer.memory for buffer in engine.means.pool if buffer.unit is not None)
    device["gradient_slots"] = claim(buffer.memory for buffer in engine.means.pool if buffer.unit is None)
    device["transport"] = claim(engine.collectives.buffers)
    host["buffers"] = engine.tiers.host_buffer_nbytes
    return MemoryStats(
        device=device,
        host=host if offload is not None else {},
        disk=engine.tiers.disk_nbytes,
        beside=claim(_beside(engine)),
    )


class Beside:
    """Observes spans: the ``most`` bytes on the device, at one moment of a step, of gradients and of what is there for
    the step only: buffers of the pool, and gradients carried from one reduction to the next.

    Made when nothing runs.
    """

    def __init__(self, engine: ZeroEngine) -> None:
        self._engine = engine
        self._resting: dict[int, int] = {}
        self.most = 0
        memory_stats(engine, claimed=self._resting)
        for key in _unclaimed(_gradients(engine), {}):
            self._resting.pop(key, None)

    def begin(self, span: Span) -> None:
        """Count now."""
        found = _unclaimed(chain(_beside(self._engine), _gradients(self._engine)), self._resting)
        self.most = max(self.most, sum(found.values()))

    def end(self, span: Span) -> None:
        """Nothing: a step has so many spans that a look at their beginnings is enough."""


def _gradients(engine: ZeroEngine) -> Iterator[Tensor | None]:
    """Gradients on the device that stay until they are cleared."""
    offload, buckets = engine.plan.offload, engine._reducer.buckets if engine._reducer is not None else ()
    yield from (bucket.resident for bucket in buckets)
    if offload is None or not offload.optimizer:
        yield from (bucket.shard.there for bucket in buckets)


def _beside(engine: ZeroEngine) -> Iterator[Tensor | None]:
    yield from (buffer.memory for buffer in engine.means.pool)
    if engine._reducer is not None:
        for bucket in engine._reducer.buckets:
            yield None if bucket.room is None else bucket.room.flat
