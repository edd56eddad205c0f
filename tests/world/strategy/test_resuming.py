"""A run that goes on: what Lightning restores before what, and what user code may do on the way, against DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, Timer
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from lightning_zero import CheckpointPolicy, ZeroStrategy, full_parameters
from tests.helpers.rows import Row, compared, in_one_world
from tests.helpers.runs import (
    Memory,
    Net,
    again,
    assert_same,
    batches,
    fit,
    made,
    name_of,
    quiet,
    values_of,
    zero,
)
from tests.helpers.training import make_trainer
from tests.helpers.world import run_world


class Horizon(Net):
    """Its schedule ends where the checkpoint says."""

    horizon = 100

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["horizon"] = 12

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.horizon = checkpoint["horizon"]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / self.horizon))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Anchor(Net):
    """Is held near the weights that it begins with."""

    def on_fit_start(self) -> None:
        self.anchor = {name: value for name, value in values_of(self).items() if not name.endswith("running_mean")}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + sum((p - self.anchor[name]).square().sum() for name, p in self.model.named_parameters("model"))


class Reset(Net):
    def on_fit_start(self) -> None:
        with full_parameters(self):
            nn.init.constant_(self.model.head.weight, 0.1)


class Grown(Net):
    """Has a layer that only the checkpoint knows of."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert self.state_dict().keys() <= checkpoint["state_dict"].keys()  # its values are there
        self.grow()

    def grow(self) -> None:
        torch.manual_seed(9)
        self.more = nn.Linear(20, 20)

    def forward(self, x: Tensor) -> Tensor:
        return self.more(super().forward(x)) if hasattr(self, "more") else super().forward(x)


class Fresh(Net):
    """Wants its optimizer anew."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["optimizer_states"] = []


class Freezes(pl.Callback):
    """Freezes, at the beginning, what its state says."""

    def __init__(self) -> None:
        self.frozen: list[str] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.frozen = ["stem"]

    def state_dict(self) -> dict[str, Any]:
        return {"frozen": list(self.frozen)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.frozen = state_dict["frozen"]

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for name in self.frozen:
            getattr(pl_module.model, name).requires_grad_(False)


CASES: dict[str, Any] = {
    "what a checkpoint tells the optimizer": (Horizon, list),
    "weights in on_fit_start": (Anchor, list),
    "weights written in on_fit_start": (Reset, list),
    "a callback's state in on_fit_start": (Net, lambda: [Freezes()]),
    "fresh optimizers": (Fresh, list),
    "layers made as the checkpoint is read": (Grown, list),
    "time that is used up": (Net, lambda: [Timer(duration={"seconds": 3600})]),
}


def what_is_restored_before_what(name: str, folder: Path) -> Row:
    build, callbacks = CASES[name]

    def play(strategy: Strategy) -> dict[str, Any]:
        path = folder / f"{name} {name_of(strategy)}.ckpt"
        first = build()
        if isinstance(first, Grown):
            first.grow()
        fit(strategy, first, 3, callbacks=callbacks()).save_checkpoint(path)
        module = build()
        trainer = make_trainer(again(strategy), callbacks=callbacks(), max_epochs=2)
        trainer.fit(module, batches(3), ckpt_path=path)
        return made(module, trainer)

    assert_same((yield compared(play)))


def an_average_is_evaluated_after_its_fit(precision: Any, folder: Path) -> Row:
    def play(strategy: Strategy) -> dict[str, Any]:
        path = folder / f"{precision} {name_of(strategy)}.ckpt"
        module = Net()
        trainer = fit(strategy, module, 3, val=1, callbacks=[EMAWeightAveraging(decay=0.8)], precision=precision)
        trainer.save_checkpoint(path)
        before = trainer.validate(module, batches(2))
        return {"before": before, "restored": trainer.validate(module, batches(2), ckpt_path=path)}

    assert_same((yield compared(play)), bound=0.02 if precision == "bf16-mixed" else 0.0)


@pytest.mark.filterwarnings("ignore:.*used in a forward or backward while no module")
def test_a_run_that_goes_on(tmp_path: Path) -> None:
    in_one_world(
        2,
        *(what_is_restored_before_what(name, tmp_path) for name in CASES),
        *(an_average_is_evaluated_after_its_fit(precision, tmp_path) for precision in ("32-true", "bf16-mixed")),
    )


class WithNet(Net):
    def __init__(self, net: nn.Module, lr: float) -> None:
        super().__init__(lambda: net)
        self.save_hyperparameters(logger=False)


@pytest.mark.filterwarnings("ignore:Attribute 'net' is an instance of")
def test_a_module_among_the_hyperparameters_does_not_stop_a_save(tmp_path: Path) -> None:
    def world(rank: int) -> dict[str, Tensor]:
        module = WithNet(nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20)), 0.1)
        with quiet(), pytest.warns(UserWarning, match="'net' among the hyperparameters") if rank == 0 else quiet():
            fit(ZeroStrategy(3), module, 2).save_checkpoint(tmp_path / "saved.ckpt")
        return values_of(module)

    expected = run_world(2, world)[0]
    from lightning_zero import load_from_checkpoint

    net = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))
    found = load_from_checkpoint(WithNet, tmp_path / "saved.ckpt", net=net)
    assert all(torch.equal(value, expected[name]) for name, value in found.named_parameters())


class Uploads(Memory):
    """As W&B's and MLflow's loggers of Lightning: ``log_model=True``."""

    _log_model = True


@pytest.mark.parametrize("policy", [CheckpointPolicy(), CheckpointPolicy(format="consolidated")])
def test_a_logger_that_uploads_files_is_told_of_directories(policy: CheckpointPolicy) -> None:
    def world(rank: int) -> list[str]:
        import warnings

        logger: Logger = Uploads()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(zero(1, checkpoint=policy), Net(), 1, logger=logger)
        return [str(warning.message) for warning in caught if "uploads" in str(warning.message)]

    told = run_world(2, world)[0]
    assert len(told) == (policy.format == "sharded")
    assert all("Uploads uploads checkpoints that are files" in message for message in told)
