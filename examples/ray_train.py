"""Ray Train: workers of a Ray cluster train one model in ZeRO stage 3, and go on when one of them has died.

    python examples/ray_train.py --workers 2 --epochs 3 --storage runs

Without a cluster Ray starts one on this machine. Its workers get no GPU: ``--gpus`` gives one to each.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Digits(pl.LightningModule):
    """Learns which of ten fixed patterns is below the noise."""

    def __init__(self) -> None:
        super().__init__()
        layers = [module for _ in range(3) for module in (nn.Linear(128, 128), nn.GELU())]
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.GELU(), *layers, nn.Linear(128, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Cross entropy; its average over an epoch is reported to Ray."""
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Any optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(options: dict[str, Any]) -> None:
    """What every worker does."""
    from ray.train import get_checkpoint
    from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback, prepare_trainer

    from lightning_zero.ray import RayZeroStrategy

    pl.seed_everything(1, verbose=False)
    label = torch.randint(10, (2048,))
    data = TensorDataset(torch.randn(10, 64)[label] + torch.randn(2048, 64), label)
    callback, last = RayTrainReportCallback(), get_checkpoint()
    trainer = pl.Trainer(
        strategy=RayZeroStrategy(stage=options["stage"]),
        plugins=[RayLightningEnvironment()],
        callbacks=[callback],
        max_epochs=options["epochs"],
        logger=False,
        enable_checkpointing=False,  # Ray's callback saves
        enable_progress_bar=False,
    )
    path = Path(last.path, callback.CHECKPOINT_NAME) if last else None
    prepare_trainer(trainer).fit(Digits(), DataLoader(data, batch_size=32, shuffle=True), ckpt_path=path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="how many processes train")
    parser.add_argument("--gpus", action="store_true", help="give a GPU to each worker, not a core")
    parser.add_argument("--stage", type=int, default=3, choices=(1, 2, 3), help="of ZeRO")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--storage", type=Path, default=Path("runs"), help="a folder that all machines share")
    arguments = parser.parse_args()
    if find_spec("ray") is None:
        raise SystemExit("ray_train.py: error: Ray Train is not installed: pip install 'lightning-zero[ray]'")
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    workers = ScalingConfig(num_workers=arguments.workers, use_gpu=arguments.gpus)
    run = RunConfig(storage_path=str(arguments.storage.resolve()), failure_config=FailureConfig(max_failures=2))
    told = {"stage": arguments.stage, "epochs": arguments.epochs}
    result = TorchTrainer(train, train_loop_config=told, scaling_config=workers, run_config=run).fit()
    print(f"loss {result.metrics['loss']:.3f} after {result.metrics['step']} steps: {result.checkpoint.path}")
