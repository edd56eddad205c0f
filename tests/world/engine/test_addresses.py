"""Addresses that CUDA graphs, registered buffers and symmetric memory would rely on: they do not change in a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy
from lightning_zero.engine.pool import BufferPool
from tests.helpers.training import make_trainer, quiet
from tests.helpers.world import run_world

WIDTH = 16


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.shown = 0

    def forward(self, x: Tensor) -> Tensor:
        self.shown = self.linear.weight.data_ptr()
        return self.linear(x).tanh()


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(1)))  # type: ignore[arg-type]

    val_dataloader = train_dataloader


class Addresses(pl.Callback):
    """Where everything of an engine lies, after each step."""

    def __init__(self) -> None:
        self.seen: list[dict[str, list[int]]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        engine = trainer.strategy.engine  # type: ignore[attr-defined]
        reducer = engine._reducer
        flats = [flat for unit in engine.units for flat in unit.flats]
        found = {
            "buffers": sorted((buffer.memory for buffer in engine.means.pool), key=Tensor.data_ptr),
            "whole parameters": [buffer for unit in engine.units for buffer in getattr(unit, "buffers", ())],
            "gradient buffers": [bucket.resident for bucket in reducer.buckets if bucket.resident is not None],
            "masters": [flat.master for flat in flats],
            "16-bit shards": [flat.weights for flat in flats if flat.weights is not None],
        }
        self.seen.append({name: [tensor.data_ptr() for tensor in tensors] for name, tensors in found.items()})
        self.seen[-1]["shown in a forward"] = [layer.shown for layer in module.layers]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_nothing_moves_in_steps_validation_and_loading(precision: str, tmp_path: Path) -> None:
    def run(rank: int) -> dict[int, list[dict[str, list[int]]]]:
        BufferPool.trim = lambda self: None  # type: ignore[method-assign]  # as on a device, in this process alone
        found = {}
        for stage in (1, 3):
            net, addresses = Net(), Addresses()
            options: dict[str, Any] = {"precision": precision, "callbacks": [addresses], "val_check_interval": 2}
            path, trainers = tmp_path / f"{stage}.ckpt", []
            for epochs in (1, 2):
                strategy = ZeroStrategy(stage, units=["Layer"])
                trainers.append(make_trainer(strategy, **options, max_epochs=epochs, num_sanity_val_steps=0))
            with quiet():
                trainers[0].fit(net)
                trainers[0].save_checkpoint(path)
                trainers[1].fit(net, ckpt_path=path, weights_only=False)
            found[stage] = addresses.seen
        return found

    for by_stage in run_world(2, run):
        for stage, seen in by_stage.items():
            assert len(seen) == 12, f"stage {stage}"
            assert {name for name, found in seen[-1].items() if found} >= {"masters"}, f"stage {stage}"
            assert all(seen[-1]["shown in a forward"]), f"stage {stage}"
            for later in seen[2:]:  # the first step records the order of units
                assert later == seen[1], f"stage {stage}"
