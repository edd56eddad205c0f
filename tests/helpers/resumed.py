"""A module with everything a checkpoint has to carry, whose global batch is the same in every world.

``Everything`` trains on 12 rows per step, of which each rank takes its share, so that runs at different worlds differ
in rounding only. ``snapshot`` is what a resumed run must have in common with the one that was saved.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_zero import ZeroStrategy
from lightning_zero.engine import engine_of
from lightning_zero.engine.full import whole
from lightning_zero.optim.state import grain
from tests.helpers.cases import Block
from tests.helpers.runs import batches, values_of
from tests.helpers.training import make_trainer

__all__ = ["COUNT", "SAVED_AT", "Everything", "Keeper", "Saver", "optimizer_state_of", "run", "snapshot", "weights_of"]

WIDTH = 20  # large enough for slices that begin within a row: ranks' parts are of whole cache lines
ROWS = 12  # divisible by every world size
COUNT = 2  # batches per epoch
SAVED_AT = (1, 0)  # epoch and batch after which the checkpoint is taken: in mid-epoch


class Odd(nn.Module):
    """Shapes that are easily lost: none, one element, five dimensions, no element at all."""

    def __init__(self, odder: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5) if odder else torch.tensor([1.5]))
        self.single = nn.Parameter(torch.full((1,), 0.5))
        self.five = nn.Parameter(torch.linspace(-1, 1, 840).view(7, 4, 1, 6, 5))
        self.empty = nn.Parameter(torch.zeros(0, 3)) if odder else None

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale + self.single + self.five.mean(dim=(0, 3, 4)).view(4).repeat(5)
        return x if self.empty is None else x + self.empty.sum()


class Everything(pl.LightningModule):
    """Odd shapes, a tied and a frozen weight, a buffer, two param groups, a scheduler and an entry of the user's.

    Args:
        odder: whether one parameter has no dimension and one no element, which ``fully_shard`` refuses.
        tied: whether the head's weight is the stem's.
        seed: of the weights.
    """

    def __init__(self, odder: bool = True, tied: bool = True, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.odd = Odd(odder)
        self.blocks = nn.ModuleList(Block(WIDTH, 13) for _ in range(2))
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(WIDTH, WIDTH)
        if tied:
            self.head.weight = self.stem.weight
        self.register_buffer("seen", torch.zeros(2))
        self.mine = 0
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.odd(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(self.frozen(x))

    def data(self, batch_idx: int) -> tuple[Tensor, Tensor]:
        """This rank's rows of the global batch."""
        generator = torch.Generator().manual_seed(10_000 * self.current_epoch + 100 * batch_idx)
        both = torch.randn(2, ROWS, WIDTH, generator=generator)
        mine = both.chunk(dist.get_world_size() if dist.is_initialized() else 1, dim=1)
        x, y = mine[dist.get_rank() if dist.is_initialized() else 0]
        return x, y

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = self.data(batch_idx)
        self.seen += torch.tensor([1.0, 0.5])
        self.mine += 1
        loss = F.mse_loss(self(x), y)
        self.losses.append(loss.detach().clone())
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        x, y = self.data(batch_idx)
        self.log("test_loss", F.mse_loss(self(x), y), sync_dist=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = self.mine

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.mine = checkpoint["mine"]

    def groups(self) -> list[dict[str, Any]]:
        """Two param groups that interleave the model's order, the frozen parameters among them."""
        matrices = [p for p in self.parameters() if p.ndim >= 2]
        vectors = [p for p in self.parameters() if p.ndim < 2]
        return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 0.02}]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.groups(), lr=0.01, eps=1e-4)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Keeper(pl.Callback):
    """A callback with state of several kinds."""

    def __init__(self) -> None:
        self.count = 0

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "tensor": torch.arange(self.count), "where": Path("some/where"), ("a", 1): {2, 3}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert torch.equal(state["tensor"], torch.arange(state["count"]))
        assert (state["where"], state["a", 1]) == (Path("some/where"), {2, 3})
        self.count = state["count"]


class Saver(pl.Callback):
    """Saves once, in mid-epoch, and takes a snapshot there; in a resumed run takes one at the start."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.at: dict[str, Any] = {}

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.path is not None and (trainer.current_epoch, batch_idx) == SAVED_AT:
            trainer.save_checkpoint(self.path)
            self.at = snapshot(module, trainer)

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self.path is None:
            self.at = snapshot(module, trainer)


def optimizer_state_of(module: pl.LightningModule, trainer: pl.Trainer) -> dict[str, Any]:
    """Every state of every optimizer, whole, by optimizer, parameter and key. Collective."""
    if not isinstance(trainer.strategy, ZeroStrategy):
        names = {parameter: name for name, parameter in module.named_parameters()}
        return {
            f"{index} {names[parameter]} {key}": _whole(value)
            for index, optimizer in enumerate(trainer.optimizers)
            for parameter, state in optimizer.state.items()
            for key, value in state.items()
        }
    return {key: copy.deepcopy(value) for key, value in _sharded_states(module, trainer.strategy)}


def _sharded_states(module: pl.LightningModule, strategy: ZeroStrategy) -> Iterator[tuple[str, Any]]:
    engine = engine_of(module)
    assert engine is not None
    for index, optimizer in enumerate(strategy.optimizers):
        for name, state in strategy.adapter(optimizer).named_state().items():
            shard = engine.shards[name]
            yield from ((f"{index} {name} {key}", value) for key, value in state.values.items())
            for key, piece in state.slices.items():
                yield f"{index} {name} {key}", whole(engine, {shard: piece}, key, grain(key))[shard.user]


def _whole(value: Any) -> Any:
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return value.detach().clone() if isinstance(value, Tensor) else value


def weights_of(module: pl.LightningModule, trainer: pl.Trainer) -> Mapping[str, Tensor]:
    """All parameters and buffers, whole. Collective."""
    if isinstance(trainer.strategy, ZeroStrategy):
        return values_of(module)
    return {name: _whole(tensor) for name, tensor in [*module.named_parameters(), *module.named_buffers()]}


def snapshot(module: pl.LightningModule, trainer: pl.Trainer) -> dict[str, Any]:
    """Everything of a run that a resumed one starts with. Collective."""
    loop = trainer.fit_loop.epoch_loop
    return {
        "weights": weights_of(module, trainer),
        "states": optimizer_state_of(module, trainer),
        "options": [
            copy.deepcopy([{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups])
            for optimizer in trainer.optimizers
        ],
        "schedulers": [copy.deepcopy(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs],
        "progress": (
            trainer.global_step,
            trainer.current_epoch,
            loop.batch_progress.total.completed,
            loop.batch_progress.current.completed,
        ),
        "mine": module.mine,
        "kept": [callback.count for callback in trainer.callbacks if isinstance(callback, Keeper)],
    }


def run(
    strategy: Any,
    module: Everything,
    *,
    save: Path | None = None,
    resume: Any = None,
    epochs: int = 3,
    keeper: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """One fit.

    Args:
        strategy: of the Trainer.
        module: fresh.
        save: where to save in mid-epoch.
        resume: what to resume from.
        epochs: until when to train.
        keeper: whether a callback with state takes part.
        options: of the Trainer.

    Returns:
        The snapshot where the checkpoint was taken or loaded, this rank's losses after it, and the weights at the end.

    Collective.
    """
    saver = Saver(save)
    callbacks = [*options.pop("callbacks", []), *([Keeper()] if keeper else []), saver]
    trainer = make_trainer(strategy, max_epochs=epochs, callbacks=callbacks, **options)
    trainer.fit(module, batches(COUNT), ckpt_path=resume)
    steps = epochs * COUNT - (SAVED_AT[0] * COUNT + SAVED_AT[1] + 1)
    return {"at": saver.at, "losses": module.losses[-steps:], "end": weights_of(module, trainer)}
