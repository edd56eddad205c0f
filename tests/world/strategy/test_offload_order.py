"""Copies between device and host may be as late as anybody allows, and nothing is read before or overwritten meanwhile.

On the CPU a copy is quick, and a missing wait goes unnoticed. Here every copy runs at the last moment: when somebody
waits for it, or for one that was started after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_zero import HostOffload, ZeroPrecision
from lightning_zero.offload.transfers import Transfers
from tests.helpers.cases import Block, Case, Stack, case
from tests.helpers.probe import Probe, fit, masters
from tests.helpers.world import run_world


class Late:
    """The result of a job that runs when it is asked for, after all jobs before it."""

    def __init__(self, queue: deque[Late], job: Callable[[], Any]) -> None:
        self._queue, self._job, self._done = queue, job, False

    def result(self) -> Any:
        while not self._done:
            first = self._queue.popleft()
            first._value, first._done = first._job(), True
        return self._value

    def exception(self) -> None:
        self.result()

    def done(self) -> bool:
        return self._done


class LateTransfers(Transfers):
    def _submit(self, job: Callable[[], Any]) -> Any:
        queue = self.__dict__.setdefault("late", deque())
        self.__dict__["count"] = self.__dict__.get("count", 0) + 1
        late = Late(queue, job)
        queue.append(late)
        self._last = late
        return late


class MakeLate(pl.Callback):
    """Swaps the class of the object that everybody holds already."""

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.transfers = trainer.strategy.engine.tiers.transfers
        self.transfers.__class__ = LateTransfers


class Frozen(Stack):
    """Three blocks, one used twice, one frozen, with small buckets and one gradient slot for several units."""

    def __init__(self) -> None:
        super().__init__(Block(), Block(), Block(), Block())
        self.layers[1].requires_grad_(False)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return super().run(self.layers[0](x))


CASE: Case = case("late", Frozen, units=("Block",))
SETTINGS = [
    (1, HostOffload(), "32-true", 1),
    (2, HostOffload(), "bf16-mixed", 3),
    (3, HostOffload(), "32-true", 3),
    (3, HostOffload(parameters=True), "32-true", 1),
    (3, HostOffload(parameters=True), "bf16-mixed", 3),
]


def test_late_copies_change_nothing() -> None:
    def run(rank: int) -> list[tuple[str, bool, float]]:
        found = []
        for stage, offload, precision, accumulate in SETTINGS:
            results, count = [], 0
            for policy in (None, offload):
                probe, late = Probe(CASE), MakeLate()
                options = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.05}
                fit(
                    probe,
                    stage=stage,
                    micro_steps=4 * accumulate,
                    callbacks=[late],
                    options={**options, "plugins": ZeroPrecision(precision)},
                    offload=policy,
                    bucket_mib=0.002,
                    prefetch=1,
                )
                count = late.transfers.__dict__.get("count", 0)
                results.append([*probe.losses, *masters(probe).values()])
            same = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
            found.append((f"stage {stage}, {offload}, {precision}", same, count / accumulate))
        return found

    for found in run_world(2, run, timeout=120):
        assert len(found) == len(SETTINGS)
        for name, same, count in found:
            assert same, name
            assert count >= 4, f"{name}: nothing was late"
