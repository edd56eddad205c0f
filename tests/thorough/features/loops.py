"""Loops, hooks, data and logging."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric

from tests.helpers.runs import Net, batches, made
from tests.helpers.training import make_trainer
from tests.thorough.features.feature import Feature

__all__ = ["FEATURES"]

Make = Callable[[], Strategy]


def fitting(count: int = 4, val: int = 0, net: Callable[[], Net] = Net, **options: Any) -> Any:
    """A fit of a module."""

    def play(make: Make, folder: Path) -> dict[str, Any]:
        module, trainer = net(), make_trainer(make(), default_root_dir=folder, **options)
        trainer.fit(module, batches(count), batches(val) if val else None)
        return made(module, trainer) | getattr(module, "seen", {})

    return play


def evaluation(make: Make, folder: Path) -> Any:
    module, trainer = Net(), make_trainer(make())
    found: list[Any] = [trainer.validate(module, batches(2)), trainer.test(module, batches(2))]
    found.append(trainer.predict(module, batches(2)))
    trainer = make_trainer(make())
    trainer.fit(module, batches(2), batches(1))
    return [*found, trainer.test(module, batches(2)), trainer.predict(module, batches(2)), made(module, trainer)]


def _hooks() -> list[str]:
    names = {name for base in (ModelHooks, DataHooks, CheckpointHooks) for name in vars(base) if name[0] != "_"}
    names |= {"configure_callbacks", "configure_gradient_clipping", "lr_scheduler_step", "optimizer_step"}
    names |= {"optimizer_zero_grad", "backward", "forward", "training_step", "validation_step", "test_step"}
    names |= {"predict_step", "configure_optimizers"}
    names -= {"prepare_data_per_node", "configure_sharded_model"}
    return sorted(name for name in names if not name.endswith("dataloader"))


class Hooked(Net):
    """Notes every hook of the module, and of a callback, in the order of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        for name in _hooks():
            if hasattr(self, name):
                object.__setattr__(self, name, self._noting(name, getattr(self, name)))

    def _noting(self, name: str, original: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            return original(*args, **kwargs)

        return noted


class Noting(pl.Callback):
    """Notes every hook of a callback."""

    def __init__(self, calls: list[str]) -> None:
        for name in sorted(vars(pl.Callback)):
            if name.startswith(("on_", "setup", "teardown", "load_state_dict")):
                setattr(self, name, lambda *args, name=name, **kwargs: calls.append(f"callback {name}"))


def order_of_hooks(make: Make, folder: Path) -> Any:
    module = Hooked()
    trainer = make_trainer(make(), callbacks=[Noting(module.calls)], max_epochs=2, accumulate_grad_batches=2)
    trainer.fit(module, batches(3), batches(2))
    trainer.save_checkpoint(folder / "saved.ckpt")
    trainer.validate(module, batches(1))
    trainer.test(module, batches(1), ckpt_path=folder / "saved.ckpt")
    trainer.predict(module, batches(1))
    resumed = Hooked()
    trainer = make_trainer(make(), callbacks=[Noting(resumed.calls)], max_epochs=3)
    trainer.fit(resumed, batches(3), batches(2), ckpt_path=folder / "saved.ckpt")
    assert len(set(module.calls)) > 60
    return module.calls, resumed.calls


class Skipping(Net):
    """A hook skips a batch, on all ranks."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 0 and batch_idx == 3 else None


class Nothing(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)


def nothing(make: Make, folder: Path) -> Any:
    try:
        fitting(net=Nothing)(make, folder)
    except RuntimeError as error:
        return str(error)
    return "no error"


class Logging(Net):
    def __init__(self) -> None:
        super().__init__()
        self.metric = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.metric(loss)
        self.log("mean", self.metric, on_step=True, on_epoch=True)
        self.log("largest", loss.detach(), reduce_fx="max", on_epoch=True, on_step=False, sync_dist=True, prog_bar=True)
        self.log_dict({"both": loss, "last": float(batch_idx)}, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("at_the_end", float(self.current_epoch), rank_zero_only=False)


def csv(make: Make, folder: Path) -> Any:
    module = Logging()
    trainer = make_trainer(make(), logger=CSVLogger(folder, version="one"), log_every_n_steps=1, max_epochs=2)
    trainer.fit(module, batches(3), batches(1))
    trainer.strategy.barrier()
    return {"rows": (folder / "lightning_logs" / "one" / "metrics.csv").read_text(), **made(module, trainer)}


class Example(Net):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"width": 20})
        self.example_input_array = torch.zeros(2, 20)


def tensorboard(make: Make, folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    module, logger = Example(), TensorBoardLogger(folder, version="one", log_graph=True)
    trainer = make_trainer(make(), logger=logger, log_every_n_steps=1)
    trainer.fit(module, batches(3), batches(1))
    trainer.strategy.barrier()
    events = EventAccumulator(logger.log_dir).Reload()
    scalars = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    return {"scalars": scalars, "graph": events.Tags()["graph"], **made(module, trainer)}


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(5)


class Uneven(Net):
    """Rank 0 has one batch to evaluate, and any other one more than the one before."""

    def val_dataloader(self) -> Any:
        return batches(1 + self.global_rank)

    def predict_dataloader(self) -> Any:
        return batches(1 + self.global_rank)


def uneven(make: Make, folder: Path) -> dict[str, Any]:
    module, trainer = Uneven(), make_trainer(make(), max_epochs=2, num_sanity_val_steps=2)
    trainer.fit(module, batches(2))
    return {"predicted": trainer.predict(module), "logged": dict(trainer.callback_metrics), **made(module, trainer)}


class Loaders(LightningDataModule):
    """Its hooks have to be called as under DDP."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare")

    def setup(self, stage: str) -> None:
        self.calls.append(f"set up {stage}")

    def train_dataloader(self) -> Any:
        self.calls.append("train")
        return batches(2 + self.trainer.current_epoch)

    def val_dataloader(self) -> Any:
        return [batches(1), batches(2)]

    def state_dict(self) -> dict[str, Any]:
        return {"calls": list(self.calls)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls.append(f"restored {state['calls']}")

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append(f"before {dataloader_idx}")
        return batch

    def teardown(self, stage: str) -> None:
        self.calls.append(f"tear down {stage}")


class SeveralValidations(Net):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", float(batch_idx + dataloader_idx), add_dataloader_idx=True, sync_dist=True)


def data_module(make: Make, folder: Path) -> Any:
    module, data = SeveralValidations(), Loaders()
    trainer = make_trainer(make(), max_epochs=2, reload_dataloaders_every_n_epochs=1)
    trainer.fit(module, datamodule=data)
    trainer.save_checkpoint(folder / "saved.ckpt")
    more = make_trainer(make(), max_epochs=3)
    again = Loaders()
    more.fit(SeveralValidations(), datamodule=again, ckpt_path=folder / "saved.ckpt")
    return [data.calls, again.calls, made(module, trainer)]


def streams(make: Make, folder: Path) -> Any:
    module, trainer = Net(), make_trainer(make(), limit_train_batches=4, val_check_interval=2)
    trainer.fit(module, DataLoader(Stream(), batch_size=None), batches(1))
    return made(module, trainer)


def combined(make: Make, folder: Path) -> Any:
    module, trainer = Net(), make_trainer(make(), max_epochs=2)
    trainer.fit(module, CombinedLoader({"a": batches(2), "b": batches(3)}, "max_size_cycle"))  # type: ignore[arg-type]
    return made(module, trainer)


class Moving(Net):
    """Batches of its own kind, moved by its own hooks."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {"index": batch, "count": 1}

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return {**batch, "count": batch["count"] + 1, "index": batch["index"].to(device)}

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        assert batch["count"] == 2
        return batch


def twice(make: Make, folder: Path) -> Any:
    module, trainer = Net(), make_trainer(make(), max_epochs=1)
    trainer.fit(module, batches(2))
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, batches(2))
    return made(module, trainer)


def out_of_time(make: Make, folder: Path) -> Any:
    module, trainer = Net(), make_trainer(make(), max_epochs=-1, max_time=timedelta(seconds=0.2), max_steps=100_000)
    trainer.fit(module, batches(4))
    assert 0 < trainer.global_step < 100_000
    return trainer.should_stop


FEATURES = {
    "Loops": [
        Feature("fit with validation, sanity check and `val_check_interval`", fitting(4, 2, val_check_interval=2)),
        Feature("`validate`, `test`, `predict`, before a fit and after it", evaluation),
        Feature(
            "`max_steps`, `min_epochs`, `limit_train_batches`",
            fitting(5, max_epochs=-1, max_steps=7, limit_train_batches=3),
        ),
        Feature("`max_time`", out_of_time),
        Feature("`overfit_batches`", fitting(4, overfit_batches=2, max_epochs=2)),
        Feature("`fast_dev_run`", fitting(4, 2, fast_dev_run=2)),
        Feature(
            "`barebones`",
            fitting(
                4,
                barebones=True,
                logger=None,
                enable_checkpointing=None,
                enable_progress_bar=None,
                enable_model_summary=None,
            ),
        ),
        Feature("`detect_anomaly`", fitting(2, detect_anomaly=True)),
        Feature("`deterministic`", fitting(2, deterministic=True)),
        Feature("`inference_mode=False`", fitting(2, 2, inference_mode=False)),
        Feature("a second `fit` of a trainer", twice),
        Feature("batches skipped by `on_train_batch_start`", fitting(5, net=Skipping, max_epochs=2)),
        Feature("`None` from `training_step`", nothing, why="Lightning refuses it in any distributed run"),
        Feature("order of all hooks of module and callback", order_of_hooks),
    ],
    "Data": [
        Feature("`LightningDataModule`, its hooks and state, several loaders for validation", data_module),
        Feature("`IterableDataset`", streams),
        Feature("`CombinedLoader`", combined),
        Feature("data of another length on each rank, in validation and `predict`", uneven),
        Feature("hooks that move batches", fitting(3, net=Moving)),
    ],
    "Logging": [
        Feature("`self.log`, `log_dict`, reductions, torchmetrics; `CSVLogger`", csv),
        Feature("`TensorBoardLogger` with graph and hyperparameters", tensorboard),
    ],
}
