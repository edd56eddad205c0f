"""What is saved, resumed and loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn

from tests.helpers.runs import Net, batches, made
from tests.helpers.training import make_trainer
from tests.thorough.features.feature import Feature

__all__ = ["FEATURES"]

Make = Callable[[], Strategy]


class Keeping(Net):
    """With a state and hyperparameters of its own in checkpoints."""

    def __init__(self, factor: float = 0.5) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.restored: list[Any] = []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = [self.trainer.global_step, dist.get_rank() * 0]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.restored = [checkpoint["mine"], dict(checkpoint["hyper_parameters"])]


def resuming(count: int, **options: Any) -> Any:
    """Ends after ``max_steps``, saves and goes on in a new trainer, as one run would have."""

    def play(make: Make, folder: Path) -> Any:
        first = make_trainer(make(), max_epochs=3, max_steps=count, **options)
        first.fit(Keeping(), batches(4), batches(1))
        first.save_checkpoint(folder / "saved.ckpt")
        module, trainer = Keeping(), make_trainer(make(), max_epochs=3, **options)
        trainer.fit(module, batches(4), batches(1), ckpt_path=folder / "saved.ckpt")
        return {"restored": module.restored, **made(module, trainer)}

    return play


def named_checkpoints(make: Make, folder: Path) -> Any:
    def keeper() -> Any:
        return ModelCheckpoint(folder, monitor="val_loss", save_last=True, save_top_k=1, filename="{epoch}")

    module, trainer = Keeping(), make_trainer(make(), max_epochs=3, callbacks=[keeper()], enable_checkpointing=True)
    trainer.fit(module, batches(3), batches(1))
    found: list[Any] = [trainer.test(module, batches(1), ckpt_path=name) for name in ("best", "last")]
    longer = make_trainer(make(), max_epochs=4, callbacks=[keeper()], enable_checkpointing=True)
    module = Keeping()
    longer.fit(module, batches(3), batches(1), ckpt_path="last")
    return [found, made(module, longer)]


def by_steps(make: Make, folder: Path) -> Any:
    """Every second step is kept, and a class method reads one."""
    keeper = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    module, trainer = Keeping(0.25), make_trainer(make(), max_epochs=2, callbacks=[keeper], enable_checkpointing=True)
    trainer.fit(module, batches(3))
    dist.barrier()
    loaded = Keeping.load_from_checkpoint(folder / "step=4.ckpt")
    resumed = make_trainer(make(), max_epochs=2)
    module = Keeping(0.25)
    resumed.fit(module, batches(3), ckpt_path=folder / "step=2.ckpt")
    found = sorted(path.name for path in folder.glob("step*"))
    return [found, loaded.hparams["factor"], sorted(loaded.state_dict().items()), made(module, resumed)]


def weights_only(make: Make, folder: Path) -> Any:
    module, trainer = Keeping(), make_trainer(make())
    trainer.fit(module, batches(3))
    trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    other = Keeping()
    return [make_trainer(make()).test(other, batches(2), ckpt_path=folder / "weights.ckpt"), other.restored]


def state_of_stages(make: Make, folder: Path) -> Any:
    """Where the trainer says it is."""
    trainer = make_trainer(make())
    trainer.fit(Net(), batches(2))
    return [str(trainer.state.status), str(trainer.state.fn), trainer.state.fn == TrainerFn.FITTING, trainer.world_size,
            trainer.num_training_batches, trainer.is_global_zero == (dist.get_rank() == 0)]  # fmt: skip


FEATURES = {
    "Checkpoints": [
        Feature("resuming in mid-epoch, hooks, hyperparameters", resuming(6)),
        Feature("resuming at the end of an epoch", resuming(8)),
        Feature('`ckpt_path="best"` and `"last"`', named_checkpoints),
        Feature("`every_n_train_steps`, `load_from_checkpoint`", by_steps),
        Feature("`save_checkpoint(weights_only=True)`", weights_only),
        Feature("what `trainer.state` says", state_of_stages),
    ],
}
