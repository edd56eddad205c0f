"""What a resumed run has beside weights, state and loops, which tests/world/strategy/test_elastic.py compares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor

from lightning_zero import ZeroPrecision, full_optimizer_state
from lightning_zero.optim.gradients import LossScaler
from tests.helpers.runs import STAGES, Net, again, assert_same, batches, each_strategy, fit, made, name_of, quiet, zero
from tests.helpers.training import make_trainer
from tests.helpers.world import run_world


class Resumable(Net):
    """With everything that a checkpoint has to carry."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))
        self.mine = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen += torch.tensor([1.0, 0.5])
        self.mine += 1
        return super().training_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = self.mine

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.mine = checkpoint["mine"]

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def result_of(module: Resumable, trainer: pl.Trainer, last: int) -> dict[str, Any]:
    """All that a resumed run has in common with an uninterrupted one; of the losses, the last ones. Collective."""
    optimizer = module.optimizers(use_pl_optimizer=False)
    state: dict[str, Any] = {}
    for key in ("exp_avg", "exp_avg_sq", "step"):
        for name, parameter in module.named_parameters():
            ddp = isinstance(trainer.strategy, DDPStrategy)
            state[f"{key} of {name}"] = (
                optimizer.state[parameter][key] if ddp else full_optimizer_state(module, name, key)
            )
    result = made(module, trainer)
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return {
        **result,
        "losses": result["losses"][-last:],
        "state": state,
        "rates": [group["lr"] for group in optimizer.param_groups],
        "scheduler": module.lr_schedulers().state_dict()["last_epoch"],
        "mine": module.mine,
        "batches": (progress.total.completed, progress.current.completed),
    }


def folder_of(root: Path, strategy: Strategy) -> Path:
    """A folder for this strategy, the same on both ranks."""
    return root / name_of(strategy)


def test_resuming_in_mid_epoch(tmp_path: Path) -> None:
    """``trainer.save_checkpoint`` between two steps, called by the user from a hook; with and without accumulation."""

    class Saver(pl.Callback):
        def on_train_batch_end(
            self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if (trainer.current_epoch, batch_idx) == (1, 1):
                trainer.save_checkpoint(folder_of(tmp_path, trainer.strategy) / "mid.ckpt")

    def play(strategy: Strategy) -> dict[str, Any]:
        found: dict[str, Any] = {"whole": {}, "resumed": {}}
        for accumulate in (1, 2):
            options: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": accumulate}
            module = Resumable()
            trainer = fit(again(strategy), module, count=4, callbacks=[Saver()], **options)
            found["whole"][accumulate] = result_of(module, trainer, last=2)
            module = Resumable()
            trainer = make_trainer(again(strategy), **options)
            trainer.fit(module, batches(4), ckpt_path=folder_of(tmp_path, strategy) / "mid.ckpt")
            found["resumed"][accumulate] = result_of(module, trainer, last=2)
        return found

    for result in each_strategy(play):
        for name in ("ddp", *STAGES):
            assert_same([result[name]], ["resumed"], 0, "whole")


def test_the_loss_scale_is_resumed(tmp_path: Path) -> None:
    """fp16: the scale has grown, and a step that overflows after the resumption is skipped in both runs alike."""

    class Overflowing(Resumable):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            overflows = self.current_epoch == 2 and batch_idx == 0 and dist.get_rank() == 1
            return loss * float("inf") if overflows else loss

    def run(stage: int, epochs: int, ckpt_path: Path | None = None) -> dict[str, Any]:
        precision = ZeroPrecision("16-mixed", scaler=LossScaler(init_scale=2.0**10, growth_interval=2))
        module = Overflowing()
        trainer = make_trainer(
            zero(stage),
            plugins=[precision],
            max_epochs=epochs,
        )
        trainer.fit(module, batches(3), ckpt_path=ckpt_path)
        trainer.save_checkpoint(tmp_path / f"stage {stage}, {epochs} epochs")
        return {**result_of(module, trainer, last=3), "scale": precision.state_dict()}

    def play(rank: int) -> dict[str, dict[str, Any]]:
        results = {}
        with quiet():
            for name, stage in STAGES.items():
                results[name] = run(stage, 3)
                run(stage, 2)
                results[f"{name} resumed"] = run(stage, 3, tmp_path / f"stage {stage}, 2 epochs")
        return results

    results = run_world(2, play, timeout=120)
    for name in STAGES:
        assert_same(results, [f"{name} resumed"], expected=name)
        # 6 good steps in pairs, one overflow, one pair of good steps.
        assert results[0][name]["scale"]["scale"] == 2.0**10 * 2**3 / 2 * 2
        assert results[0][name]["scheduler"] == 9  # as under DDP, the skipped step has moved the scheduler


def test_a_checkpoint_of_weights_cannot_resume_a_fit(tmp_path: Path) -> None:
    def play(strategy: Strategy) -> dict[str, Any]:
        path = folder_of(tmp_path, strategy) / "weights.ckpt"
        trainer = fit(strategy, Net(), count=1)
        trainer.save_checkpoint(path, weights_only=True)
        with pytest.raises(KeyError, match="contains only the model"):
            make_trainer(again(strategy), max_epochs=2).fit(Net(), batches(1), ckpt_path=path)
        return {}

    each_strategy(play)
