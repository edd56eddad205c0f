"""What a tensor-parallel run holds and sends, beside what the planner said of it; and averages of its weights."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from lightning_zero import CommunicationMonitor, MemoryMonitor, ema_update, estimate_memory, full_parameters
from lightning_zero.extensions.monitors import memory_stats
from tests.helpers import split
from tests.helpers.world import run_world


class Averaged(split.Split):
    """Keeps an average of its net in another one, which is frozen and split in the same way."""

    def configure_model(self) -> None:
        super().configure_model()
        if not hasattr(self, "teacher"):
            student, self.net = self.net, None
            super().configure_model()
            self.teacher, self.net = self.net.requires_grad_(False), student

    def on_train_batch_end(self, *args: Any) -> None:
        ema_update(self.teacher, self.net, 0.9)


def averaged(layout: split.Layout) -> dict[str, Tensor]:
    module = Averaged()
    split.fit(layout, module, 3)
    with full_parameters(module):
        return {name: value.detach().clone() for name, value in module.named_parameters()}


class Watched(split.Split):
    """Notes at its end what the engine holds, with the optimizer's state."""

    def on_train_end(self) -> None:
        strategy = self.trainer.strategy
        adapters = [strategy.adapter(optimizer) for optimizer in strategy.optimizers]
        self.held = memory_stats(strategy.engine, [tensor for adapter in adapters for tensor in adapter.tensors()])
        self.plan = strategy.engine.plan


def row_average(_: int) -> None:
    expected = averaged(split.Layout(3, 4))
    for layout in (split.Layout(1, 2, 2), split.Layout(3, 2, 2)):
        assert split.distance(expected, averaged(layout)) < 1e-12


def row_planned(_: int) -> None:
    for stage in (1, 2, 3):
        module, memory, sent = Watched(), MemoryMonitor(), CommunicationMonitor()
        split.fit(split.Layout(stage, 2, 2), module, 4, callbacks=[memory, sent])
        estimate = estimate_memory(module.plan, receive_buffer=True)
        found = estimate.stages[f"zero{stage}"]
        assert module.held.total == pytest.approx(found.rest.total, rel=0.02)
        assert memory._held is not None
        assert memory._held.total == module.held.total
        counted = {kind: getattr(found.traffic, kind) for kind in sent._totals["sent"]}
        assert sent._totals["sent"] == sent._totals["expected"] == counted
        assert estimate.numel == sum(one.numel() for one in split.Net().parameters())
        assert "4 ranks in tensor-parallel groups of 2" in estimate.describe()
        assert "of each tensor-parallel group of 2 one rank" in module.plan.describe()


def rank(number: int) -> None:
    row_average(number)
    row_planned(number)


def test_a_run_holds_and_sends_what_was_planned() -> None:
    run_world(4, rank, timeout=200)
