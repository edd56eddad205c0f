"""A program of Ray Train as a user writes it: ``python ray_program.py FOLDER WAY``, and what its workers do.

Each worker writes what it saw to ``FOLDER/RANK.json``. Ray is imported where it is used: ``Net`` runs without it too.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_zero import CheckpointPolicy, full_parameters
from lightning_zero.ray import RayZeroStrategy

EPOCHS, SAMPLES = 3, 24


class Net(pl.LightningModule):
    """Notes which samples it sees; all ranks begin with the same weights."""

    def __init__(self, kill_at: int | None = None, mark: Path | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(9, 17), nn.GELU(), nn.Linear(17, 9))
        self.seen: list[int] = []
        self.begun = 0
        self.kill_at, self.mark = kill_at, mark

    def on_train_start(self) -> None:
        """Notes after which step the run goes on."""
        self.begun = self.trainer.global_step

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Ends the second worker where it is told to, once in all attempts."""
        if (self.global_rank, self.global_step) == (1, self.kill_at) and self.mark and not self.mark.exists():
            self.mark.touch()
            time.sleep(8.0)  # until Ray has heard of what was reported, for which it asks every two seconds
            os.kill(os.getpid(), signal.SIGKILL)
        index, inputs = batch
        self.seen += index.tolist()
        loss = self.layers(inputs).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Keeps state, so that a run that goes on without it ends with other weights."""
        return torch.optim.AdamW(self.parameters(), lr=0.05)

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled, by a sampler that the Trainer puts in: 4 steps an epoch on two ranks."""
        inputs = torch.randn(SAMPLES, 9, generator=torch.Generator().manual_seed(5))
        return DataLoader(TensorDataset(torch.arange(SAMPLES), inputs), batch_size=3, shuffle=True)


def digest(module: pl.LightningModule) -> str:
    """All bits of the weights. Collective."""
    with full_parameters(module):
        return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in module.parameters())).hexdigest()


def trainer_of(strategy: Any, environment: Any, devices: int | str = "auto", **options: Any) -> pl.Trainer:
    """What all ways have in common."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {} if "callbacks" in options else {"enable_checkpointing": False}
    options = {"max_epochs": EPOCHS, **quiet, **options}
    return pl.Trainer(strategy=strategy, accelerator="cpu", devices=devices, plugins=[environment], **options)


def report(trainer: pl.Trainer, module: Net) -> dict[str, Any]:
    """What a test wants to know. Collective."""
    return {
        "world_size": trainer.world_size,
        "rank": trainer.global_rank,
        "loss": float(trainer.callback_metrics["loss"]),
        "seen": module.seen,
        "weights": digest(module),
    }


def compare(environment: Any) -> dict[str, Any]:
    """One run after the other, of Ray's own strategy and of ours, and what cannot work. Collective."""
    from ray.train.lightning import RayDDPStrategy, RayTrainReportCallback, prepare_trainer

    found, zero3 = dict[str, Any](), RayZeroStrategy(stage=3, start_method="fork")
    for way, strategy in {"ddp": RayDDPStrategy(), "zero1": RayZeroStrategy(1), "zero3": zero3}.items():
        trainer, module = prepare_trainer(trainer_of(strategy, environment)), Net()
        trainer.fit(module)
        found[way] = report(trainer, module)
    trainer, module = trainer_of("zero3", environment), Net()
    trainer.fit(module)
    found["plain"] = report(trainer, module)

    later = RayZeroStrategy(checkpoint=CheckpointPolicy(async_save=True))
    wrong = {"async": trainer_of(later, environment, callbacks=[RayTrainReportCallback()])}
    wrong["no environment"] = trainer_of("zero3", LightningEnvironment())
    for way, trainer in wrong.items():
        try:
            trainer.fit(Net())
        except (RuntimeError, ValueError) as error:
            found[way] = str(error)
    return found


def go_on(environment: Any, folder: Path, reported: bool) -> dict[str, Any]:
    """A run in which a worker dies, and which goes on from the last checkpoint when Ray begins again. Collective."""
    from ray.train import get_checkpoint
    from ray.train.lightning import RayTrainReportCallback, prepare_trainer

    callback: pl.Callback = ModelCheckpoint(folder / "checkpoints", save_last=True)
    path: Any = "last"
    if reported:
        callback, last = RayTrainReportCallback(), get_checkpoint()
        path = last and Path(last.path, RayTrainReportCallback.CHECKPOINT_NAME)
    trainer = prepare_trainer(trainer_of(RayZeroStrategy(stage=3), environment, callbacks=[callback]))
    module = Net(kill_at=7, mark=folder / "killed")
    trainer.fit(module, ckpt_path=path)
    return {"begun": module.begun, **report(trainer, module)}


def work(told: dict[str, Any]) -> None:
    """What each worker does."""
    from ray.train import get_context
    from ray.train.lightning import RayLightningEnvironment

    folder, way = Path(told["folder"]), told["way"]
    environment = RayLightningEnvironment()
    found = compare(environment) if way == "parity" else go_on(environment, folder, way == "reported")
    (folder / f"{get_context().get_world_rank()}.json").write_text(json.dumps(found))


def main(folder: str, way: str) -> None:
    """Two workers on this machine."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(num_cpus=2, include_dashboard=False)
    try:
        TorchTrainer(
            work,
            train_loop_config={"folder": folder, "way": way},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=folder, name=way, failure_config=FailureConfig(max_failures=1)),
        ).fit()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
