"""In steady state every parameter and every gradient has its place, which the engine took at set-up; only shards of
gradients take memory in each step, and give it back when gradients are cleared."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

import lightning_zero
from lightning_zero import ZeroStrategy
from lightning_zero.engine.pool import BufferPool
from tests.helpers.training import make_trainer, quiet
from tests.helpers.world import run_world

PACKAGE = str(Path(lightning_zero.__file__).parent)
SMALL_NBYTES = 2048  # agreements between hosts, counters
STEPS = 5


class Net(pl.LightningModule):
    def __init__(self, counter: Fresh) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(48, 48), nn.Linear(48, 48)) for _ in range(4))
        self.counter = counter

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = torch.ones(3, 48) * (1 + batch_idx)
        for layer in self.layers:
            x = x + layer(x)
        return x.float().square().mean()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == STEPS - 1:  # orders are recorded and optimizers have their state
            self.counter.__enter__()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == STEPS - 1:
            self.counter.__exit__(None, None, None)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Fresh(TorchDispatchMode):
    """Notes every operation that the engine calls and that takes memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.shards: Counter[int] = Counter()  # of gradients, by bytes: they are gone when gradients are cleared
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        place = _caller()
        if place is not None:
            self.calls += 1
            known = {
                tensor.untyped_storage().data_ptr() for tensor in tree_leaves((args, kwargs)) if _has_memory(tensor)
            }
            for tensor in tree_leaves(result):
                if _has_memory(tensor) and tensor.untyped_storage().data_ptr() not in known:
                    nbytes = tensor.untyped_storage().nbytes()
                    if place.startswith("engine/reducer.py:") and func is torch.ops.aten.empty.memory_format:
                        self.shards[nbytes] += 1
                    elif nbytes > SMALL_NBYTES:
                        self.found.append(f"{func} takes {nbytes} bytes in {place}")
        return result


def _has_memory(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided


def _caller() -> str | None:
    """Where in the engine or on the wire an operation was called; ``None``: by an optimizer, or a model."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(PACKAGE):
            inside = path[len(PACKAGE) + 1 :]
            return f"{inside}:{frame.f_lineno}" if inside.startswith(("engine", "comm")) else None
        if "/torch/" not in path and "contextlib" not in path:
            return None
        frame = frame.f_back
    return None


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_step_takes_no_memory_for_parameters_and_gradients(precision: Any) -> None:
    def fit(rank: int) -> dict[int, tuple[int, bool, list[str]]]:
        found = {}
        BufferPool.trim = lambda self: None  # type: ignore[method-assign]  # as on a device, in this process alone
        for stage in (1, 2, 3):
            counter = Fresh()
            with quiet():
                strategy = ZeroStrategy(stage=stage, units=["Sequential"], bucket_mib=0.02)  # type: ignore[arg-type]
                trainer = make_trainer(strategy, precision=precision)
                trainer.fit(Net(counter), DataLoader(range(STEPS), batch_size=None))
            shards = Counter(layout.shard_numel * 4 for layout in strategy.engine.plan.layouts)
            taken = shards if stage > 1 else Counter()
            found[stage] = counter.calls, counter.shards == taken, counter.found
        return found

    for result in run_world(2, fit):
        for stage, (calls, shards_alone, found) in result.items():
            assert shards_alone, f"stage {stage}"
            assert calls >= 16, f"stage {stage}: only {calls} operations of the engine were seen"
            assert found == [], f"stage {stage}"
