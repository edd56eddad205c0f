"""The callback that measures a candidate, in the candidate's own processes, and ends it."""

from __future__ import annotations

import json
import os
import re
import resource
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping
from lightning.pytorch.utilities.data import extract_batch_size

from lightning_zero.plan.buckets import BUCKETS_OF_A_MODEL, LEAST_BUCKET_NBYTES
from lightning_zero.registry import extension, installed
from lightning_zero.trainer.strategy import ZeroStrategy

__all__ = ["Measurement"]


class Measurement(Callback):
    """Measures optimizer steps, writes what it found into ``folder``, and ends the program. Nothing is saved.

    Rank 0 writes ``facts.json`` before the first step, each rank ``RANK.json`` after the last.
    """

    def __init__(self, folder: str, warm_up: int, steps: int) -> None:
        self.folder, self.warm_up, self.steps = Path(folder), warm_up, steps
        self._room = self._samples = self._global_step = 0
        self._ends: list[float] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take out what writes checkpoints or ends a fit, before it does anything."""
        mine: Any = trainer  # whose type does not say that it has callbacks
        mine.callbacks = [one for one in mine.callbacks if not isinstance(one, Checkpoint | EarlyStopping)]
        mine.save_checkpoint = _save_nothing
        device = trainer.strategy.root_device
        if device.type == "cuda":
            self._room = torch.cuda.mem_get_info(device)[0]
        elif installed("planner"):
            strategy: Any = trainer.strategy
            ranks = getattr(strategy, "num_processes", 1)
            self._room = extension("planner").free_host_memory(ranks) + _resident("RSS")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what the plan is."""
        if trainer.is_global_zero:
            _write(self.folder / "facts.json", {"room": self._room, **_facts(trainer, pl_module)})

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What set-up took does not count."""
        if (device := trainer.strategy.root_device).type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        with suppress(OSError):  # Linux alone can forget a peak
            Path("/proc/self/clear_refs").write_text("5")
        self._global_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A micro-step has ended, and perhaps a step, and perhaps the last. SystemExit then."""
        with suppress(Exception):  # a batch of any kind, whose size nobody can tell
            self._samples = max(self._samples, extract_batch_size(batch))
        if trainer.global_step == self._global_step:
            return
        self._global_step = trainer.global_step
        if (device := trainer.strategy.root_device).type == "cuda":
            torch.cuda.synchronize(device)
        self._ends.append(time.perf_counter())
        if len(self._ends) < self.warm_up + self.steps:
            return
        steps = [end - begin for begin, end in pairwise(self._ends[self.warm_up - 1 :])]
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _resident("HWM")
        sampler: Any = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
        replicas = sampler.get("num_replicas", trainer.world_size)
        found = {"seconds": median(steps), "peak": peak, "ranks": trainer.world_size}
        found["samples"] = self._samples * trainer.accumulate_grad_batches * replicas
        _write(self.folder / f"{trainer.global_rank}.json", found)
        trainer.strategy.barrier("measured")  # nobody leaves a step that others are in
        raise SystemExit(0)


def _save_nothing(*_: Any, **__: Any) -> None:
    """What ``Trainer.save_checkpoint`` does meanwhile."""


def _facts(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """The stage, what of a plan may be tuned, and what each stage takes of a device."""
    strategy = trainer.strategy
    if not isinstance(strategy, ZeroStrategy):
        return {}
    engine, precision, settings = strategy.engine, strategy.precision_plugin, strategy.settings
    plan, placement = engine.plan, settings.placement
    found: dict[str, Any] = {"offload": settings.offload is not None}
    found["stage"] = 1 + placement.shards_gradients + placement.shards_parameters
    if placement.shards_parameters:
        found |= {"prefetch": plan.prefetch, "units": len(plan.units)}
    else:
        whole = sum(layout.parameter_numel * layout.reduce_dtype.itemsize for layout in plan.trainable_layouts)
        most = max(LEAST_BUCKET_NBYTES, whole // (BUCKETS_OF_A_MODEL * (1 + placement.shards_gradients))) / 2**20
        found |= {"bucket_mib": min(settings.bucket_mib, most), "most_bucket_mib": most}
    if installed("planner") and settings.tensor_parallel_size is None:
        on_cpu = strategy.root_device.type == "cpu"
        with suppress(ValueError):  # of what no stage takes
            estimate = extension("planner").estimate_memory(
                module,
                world_size=plan.world_size,
                optimizer=trainer.optimizers[0],
                param_dtype=precision.param_dtype,
                reduce_dtype=precision.reduce_dtype,
                accelerator=not on_cpu,
                receive_buffer=engine.collectives.receives,
                shard_within=plan.placement.span,
                secondary_shards=settings.secondary_shards,
                compression=settings.compression,
                units=settings.units,
                bucket_mib=settings.bucket_mib,
                prefetch=plan.prefetch,
            )
            stages = estimate.stages.items()
            found["planned"] = {name: one.peak.total + (one.host.total if on_cpu else 0) for name, one in stages}
    return found


def _resident(kind: str) -> int:
    """Bytes of this process in memory: ``RSS`` now, ``HWM`` at most."""
    with suppress(OSError):
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return sum(int(size) * 1024 for size in re.findall(rf"^Vm{kind}:\s*(\d+) kB", status, re.MULTILINE))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _write(file: Path, found: dict[str, Any]) -> None:
    """Whole or not at all."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(found))
    os.replace(part, file)
