"""What a rank holds at rest and at its peak."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import chain
from pathlib import Path

import lightning.pytorch as pl
import torch

from lightning_zero.analysis import OptimizerCost, StageMemory, format_nbytes
from lightning_zero.analysis.memory import stage_memory
from lightning_zero.debug import Beside, MemoryStats, memory_stats
from lightning_zero.engine import ZeroEngine
from lightning_zero.trainer.monitors import StepMonitor, let_go, logging_step
from lightning_zero.trainer.strategy import ZeroStrategy

__all__ = ["MemoryMonitor"]


class MemoryMonitor(StepMonitor):
    """Logs bytes by category, at rest and at the peak, next to what the plan says.

    The numbers are those of each rank itself, so a logger gets rank 0's. At rest is what the engine and the optimizers
    hold after a step, counted in live storages. The engine's peak adds what a step takes beside that; the plan's peak
    also has autograd's gradients and the optimizer's temporary tensors. What only the whole process or device knows,
    activations included, is logged beside them: the allocator's numbers on CUDA, resident memory on Linux.

    Args:
        every_n_steps: how often a step is measured and logged, beginning with the third; ``None``: the Trainer's
            ``log_every_n_steps``.
        summary: whether a table appears at the end of a fit, on rank 0; ``None``: where the Trainer has no logger.

    Raises:
        ValueError: if a setting is not usable.

    Example::

        Trainer(strategy="zero3", callbacks=[lightning_zero.MemoryMonitor(every_n_steps=100)])
    """

    def _forget(self) -> None:
        super()._forget()
        self._watermark: Beside | None = None
        self._expected: StageMemory | None = None
        self._held: MemoryStats | None = None
        self._beside = 0
        self._process: dict[str, int] = {}

    def attach(self, strategy: ZeroStrategy) -> None:
        self._expected = _expected_of(strategy)
        if strategy.engine.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(strategy.engine.device)  # set-up has a peak of its own

    def detach(self, engine: ZeroEngine) -> None:
        let_go(engine.spans.observers, self._watermark)
        self._watermark = None

    def begin(self, engine: ZeroEngine) -> None:
        if self._measured and self._watermark is None:
            self._watermark = Beside(engine)
            engine.spans.observers.append(self._watermark)

    def end(self, trainer: pl.Trainer, strategy: ZeroStrategy) -> None:
        if self._watermark is None:
            return
        beside, engine = self._watermark.most, strategy.engine
        self.detach(engine)
        adapters = map(strategy.adapter, strategy.optimizers)
        self._held = memory_stats(engine, chain.from_iterable(adapter.tensors() for adapter in adapters))
        self._beside = max(self._beside, beside)
        self._process = _process_nbytes(engine.device)
        self.log_numbers(trainer, self._metrics(beside), logging_step(trainer))

    def tables(self) -> list[list[tuple[str, ...]]]:
        """The last measured step, and the largest peak."""
        held, expected = self._held, self._expected
        if held is None or expected is None:
            return []
        rows: list[tuple[str, ...]] = [("bytes on the device", "at rest", "by plan", "by plan at the peak")]
        peak = dict(expected.peak.items())
        for category, nbytes in expected.rest.items():
            row = (held.device.get(category, 0), nbytes, peak[category])
            if any(row):
                rows.append((category.replace("_", " "), *map(format_nbytes, row)))
        if held.beside:
            rows.append(("beside the plan", format_nbytes(held.beside), "", ""))
        totals = (held.total, expected.rest.total, expected.peak.total)
        rows.append(("total without activations", *map(format_nbytes, totals)))
        rows.append(("engine at its peak", format_nbytes(held.total - held.beside + self._beside), "", ""))
        for category, nbytes in expected.host.items() if held.host else ():
            rows.append((f"host: {category}", format_nbytes(held.host[category]), format_nbytes(nbytes), ""))
        if held.disk or expected.disk.total:
            rows.append(("disk", format_nbytes(held.disk), format_nbytes(expected.disk.total), ""))
        for where in dict.fromkeys(name.partition("/")[0] for name in self._process):
            for what, title in (("now", f"whole {where}"), ("peak", f"whole {where} at its peak")):
                rows.append((title, format_nbytes(self._process[f"{where}/{what}"]), "", ""))
        return [rows]

    def _metrics(self, beside: int) -> dict[str, float]:
        held, expected = self._held, self._expected
        if held is None or expected is None:
            return {}
        found: dict[str, float] = {f"zero/memory/rest/{name}": nbytes for name, nbytes in held.device.items()}
        found["zero/memory/rest/beside"] = held.beside
        found["zero/memory/rest/total"] = held.total
        found["zero/memory/peak/total"] = held.total - held.beside + beside
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
        return found | {f"zero/memory/{name}": nbytes for name, nbytes in self._process.items()}


def _expected_of(strategy: ZeroStrategy) -> StageMemory:
    """What the plan says, for the optimizers that the run has."""
    engine, plan = strategy.engine, strategy.engine.plan
    rank, accelerator = engine.collectives.rank, engine.device.type != "cpu"
    costs = [OptimizerCost.of(optimizer) for optimizer in strategy.optimizers]
    first = costs[0] if costs else OptimizerCost(name="none", state=0)
    found = stage_memory(plan, "", rank, first, receive_buffer=engine.collectives.receives, accelerator=accelerator)
    if len({(cost.state, cost.whole) for cost in costs}) > 1 and not any(cost.whole for cost in costs):
        # The formula knows one optimizer; of several, each counts for what this rank's part of it steps on.
        offloaded, state = plan.offload is not None and plan.offload.optimizer, 0
        for cost, optimizer in zip(costs, strategy.optimizers, strict=True):
            shards = [entry.shard.parameter for entry in strategy.adapter(optimizer).entries]
            state += 0 if offloaded else cost.state * sum(shard.nbytes for shard in shards if shard is not None)
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
