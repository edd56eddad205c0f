"""A training program as a user writes it, started by each of the launchers: ``python launched.py FOLDER WAY...``.

Every rank writes what it saw of each way of asking for a strategy to ``FOLDER/{way}.{rank}.json``. The Trainer takes
``DEVICES`` and ``NODES`` of the environment; ``DEADLINE`` ends a process that hangs, with the stacks of its threads.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    faulthandler.dump_traceback_later(float(os.environ["DEADLINE"]), exit=True)

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_zero import ZeroCLI, ZeroStrategy, full_parameters
from lightning_zero.config import Placement

SAMPLES = 12
BATCH = 3


class Launched(pl.LightningModule):
    def __init__(self, width: int = 9) -> None:
        super().__init__()
        # Equal on all ranks whatever their seeds are: rank 0's values count.
        torch.manual_seed(int(os.environ.get("LOCAL_RANK", "0")) + int(os.environ.get("GROUP_RANK", "0")))
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
        self.width = width
        self.seen: list[int] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        index, inputs = batch
        self.seen += index.tolist()
        loss = self.layers(inputs).square().mean()
        self.log("mean_rank", float(self.global_rank), sync_dist=True, on_epoch=True, on_step=False)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)

    def train_dataloader(self) -> DataLoader[Any]:
        inputs = torch.randn(SAMPLES, self.width, generator=torch.Generator().manual_seed(5))
        return DataLoader(torch.utils.data.TensorDataset(torch.arange(SAMPLES), inputs), batch_size=BATCH)


def options() -> dict[str, Any]:
    return {
        "accelerator": "cpu",
        "devices": int(os.environ["DEVICES"]),
        "num_nodes": int(os.environ["NODES"]),
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }


def by_cli(cli: type[LightningCLI], folder: Path, strategy: str) -> tuple[pl.Trainer, Launched]:
    """Train by a YAML file: ``fit --config FILE``."""
    config = folder / f"config.{os.getpid()}.yaml"
    config.write_text("trainer:\n" + "".join(f"  {k}: {json.dumps(v)}\n" for k, v in options().items()) + strategy)
    ran = cli(Launched, save_config_callback=None, args=["fit", "--config", str(config)])
    return ran.trainer, ran.model


def train(way: str, folder: Path) -> tuple[pl.Trainer, Launched]:
    """Ask for the strategy in one of the ways, and train."""
    if way == "yaml-name":
        return by_cli(LightningCLI, folder, "  strategy: zero3\n")
    if way == "yaml-class":
        init = "    init_args:\n      stage: 2\n      bucket_mib: 0.001\n      timeout: 0:01:00\n"
        return by_cli(ZeroCLI, folder, f"  strategy:\n    class_path: lightning_zero.ZeroStrategy\n{init}")
    strategy: Any = ZeroStrategy(stage=2, bucket_mib=0.001) if way == "instance" else way
    trainer, module = pl.Trainer(strategy=strategy, **options()), Launched()
    trainer.fit(module)
    return trainer, module


def report(trainer: pl.Trainer, module: Launched) -> dict[str, Any]:
    """What a test wants to know."""
    strategy = trainer.strategy
    found: dict[str, Any] = {
        "strategy": type(strategy).__name__,
        "world_size": trainer.world_size,
        "rank": trainer.global_rank,
        "local_rank": trainer.local_rank,
        "node_rank": trainer.node_rank,
        "launcher": type(strategy.launcher).__name__,
        "environment": type(getattr(strategy, "cluster_environment", None)).__name__,
        "mean_rank": float(trainer.callback_metrics["mean_rank"]),
        "seen": module.seen,
        "steps": trainer.global_step,
    }
    if isinstance(strategy, ZeroStrategy):
        sampler = trainer.train_dataloader.sampler
        found["is_distributed"] = strategy.is_distributed
        found["replicas"] = sampler.num_replicas if isinstance(sampler, DistributedSampler) else None
        found["stage"] = next(s for s in (1, 2, 3) if Placement.from_stage(s) == strategy.placement)
        found["backend"] = dist.get_backend()
        found["shard_numel"] = sum(shard.data.numel() for shard in strategy.engine.shards.values())
        with full_parameters(module):
            found["weights"] = digest(module)
    else:
        found["weights"] = digest(module)
    return found


def digest(module: nn.Module) -> str:
    """A hash over every bit of the parameters."""
    digest = hashlib.sha256()
    for name, parameter in module.named_parameters():
        digest.update(name.encode() + parameter.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def main(folder: Path, ways: list[str]) -> None:
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    for way in ways:
        trainer, module = train(way, folder)
        (folder / f"{way}.{trainer.global_rank}.json").write_text(json.dumps(report(trainer, module)))
        if way == "zero1":
            register_again()


def register_again() -> None:
    """Importing the package again, or registering by hand, changes nothing and fails nothing."""
    from lightning.pytorch.strategies import StrategyRegistry

    import lightning_zero

    before = dict(StrategyRegistry)
    lightning_zero.register_strategies()
    assert dict(StrategyRegistry) == before


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
