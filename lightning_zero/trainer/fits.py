"""From one fit to the next, and into the middle of one: what Lightning's Trainer and loops are asked and told."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerStatus
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_zero.errors import ParameterAccessError

__all__ = ["begin_epoch", "refuse_other_strategies", "running_trainer"]


def refuse_other_strategies(kind: type[Strategy], module: nn.Module) -> None:
    """Raise if a Trainer with a strategy of another kind trains a module that was laid out by an earlier fit.

    Its gradients would go to the shards, and its optimizer would find none.

    Args:
        kind: of the strategies that know the layout.
        module: the root.

    Raises:
        ParameterAccessError: naming the module and both strategies.
    """
    trainer = running_trainer(module)
    if trainer is not None and not isinstance(trainer.strategy, kind):
        raise ParameterAccessError(
            f"{type(module).__name__} was trained with {kind.__name__}, and its gradients still go to what that has "
            f"laid out: {type(trainer.strategy).__name__} would train nothing. Give its Trainer an ordinary copy, made "
            "on every rank: `with lightning_zero.full_parameters(module): module = copy.deepcopy(module)`."
        )


def running_trainer(module: nn.Module) -> Trainer | None:
    """Who trains or evaluates the module at this moment."""
    trainer: Trainer | None = getattr(module, "_trainer", None)
    return trainer if trainer is not None and trainer.state.status == TrainerStatus.RUNNING else None


def begin_epoch(trainer: Trainer) -> None:
    """Draw what the iterator of an epoch draws, if the run goes on at the beginning of one.

    ``FitLoop`` has worked out already where it goes on, and has not called a hook of the epoch yet.
    """
    fit = trainer.fit_loop
    over = not fit.restarting  # the epoch before, with its hooks
    last = fit.epoch_loop.restarted_on_train_batch_end and fit.epoch_loop.batch_progress.is_last_batch
    if trainer.current_epoch == 0 or not (over or last):
        return
    loaders = fit._combined_loader.flattened if fit._combined_loader is not None else []
    if not all(map(_may_begin_twice, loaders)):
        for loader in loaders:
            if isinstance(loader, DataLoader) and loader.generator is None:
                torch.empty((), dtype=torch.int64).random_()
    elif over:
        fit._resuming_from_checkpoint = False  # Lightning makes it, as in every epoch, after `on_train_epoch_start`
    elif fit._data_fetcher is not None:
        for loader in loaders:
            _set_sampler_epoch(loader, trainer.current_epoch)
        iter(fit._data_fetcher)


def _may_begin_twice(loader: Any) -> bool:
    """Whether an iterator over it can be made and thrown away without a loss."""
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and not hasattr(loader, "load_state_dict")
    )
