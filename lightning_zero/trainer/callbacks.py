"""What Lightning's Trainer, loops, loggers and callbacks are asked, told and refused.

[Note: thawed parameters]
A parameter that ``BaseFinetuning`` or its kin thaw in mid-fit makes the next training step lay the module out anew
(``ZeroSession``). What is left is here: such a callback tells by values which parameters an optimizer has already.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain, repeat
from typing import Any
from weakref import WeakSet

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint, ModelPruning
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.types import LRSchedulerConfig
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from lightning_zero._torch import no_subclasses, untracked
from lightning_zero.config import CheckpointPolicy
from lightning_zero.debug import full_parameters
from lightning_zero.engine import engine_of
from lightning_zero.engine.full import gathered
from lightning_zero.errors import ParameterAccessError, ZeroError, add_note, some
from lightning_zero.shards.binding import is_absent
from lightning_zero.shards.slice import checksum

__all__ = [
    "TRAINERS",
    "Replaced",
    "UnmarkedModule",
    "adapt_fit",
    "adapt_set_up",
    "gather_for_graphs",
    "hold_schedulers",
    "is_running",
    "refuse_other_strategies",
    "refuse_synced_norms",
    "refuse_unsynced",
    "without_modules",
]


class Replaced:
    """What one run has replaced on other objects: none of it outlives the run, or goes into a pickle after it."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def put(self, target: Any, name: str, around: Callable[[Any], Any]) -> None:
        """Let ``target.name`` be ``around`` of what it is."""
        self._before.append((target, name, vars(target).get(name)))
        vars(target)[name] = around(getattr(target, name))

    def within(self, target: Any, name: str, context: Callable[[], AbstractContextManager[Any]]) -> None:
        """Let ``target.name`` be what it is, inside of a context that is made for each call."""

        def around(method: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                with context():
                    return method(*args, **kwargs)

            return call

        self.put(target, name, around)

    def release(self) -> None:
        """Give all of them back, the last one first."""
        while self._before:
            target, name, before = self._before.pop()
            vars(target).pop(name, None)
            if before is not None:
                vars(target)[name] = before


class UnmarkedModule:
    """The module of a strategy, read as any attribute, without the mark of a Trainer that was given a compiled one.

    That has put compiled steps into it by then, and would refuse a marked one, as it does not know the strategy.
    """

    def __set__(self, strategy: Strategy, module: LightningModule | None) -> None:
        if module is not None:
            module._compiler_ctx = None
        strategy.__dict__["_lightning_module"] = module


def refuse_unsynced(module: nn.Module) -> None:
    """Raise ParameterAccessError if code has switched the average of gradients off, as it is done on DDP's wrapper."""
    if vars(module).get("require_backward_grad_sync") is False:
        raise ParameterAccessError(
            f"`require_backward_grad_sync = False` on {type(module).__name__} changes nothing: no DDP wraps it here. "
            "Write `with self.trainer.strategy.block_backward_sync():` around the backward."
        )


def adapt_set_up(trainer: Trainer, module: nn.Module, replaced: Replaced) -> None:
    """Adapt what Lightning calls from a run's set-up on, before callbacks set themselves up."""
    datamodule, callbacks = trainer.datamodule, trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if isinstance(callback, BaseFinetuning):
            replaced.within(callback, "finetune_function", partial(_ValuesCompared, module))
    for called in (*callbacks, *([] if datamodule is None else [datamodule])):
        replaced.put(called, "on_exception", _noting)


def adapt_fit(
    trainer: Trainer,
    module: nn.Module,
    policy: CheckpointPolicy,
    absent: bool,
    is_underway: Callable[[Any], bool],
    replaced: Replaced,
) -> None:
    """Adapt callbacks of a fit whose module is laid out, with parameters that are ``absent`` between steps or not.

    ``ModelCheckpoint`` chooses names that are not taken: ``is_underway`` says whether one is that of a checkpoint which
    is being written. ``ModelPruning`` is called on every rank alike, with the whole module in memory.
    """
    if policy.format == "sharded":
        _warn_of_uploads(trainer.loggers)

    def knowing(known: Callable[..., bool]) -> Callable[..., bool]:
        return lambda path, trainer: known(path, trainer) or is_underway(path)

    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelCheckpoint):
            if policy.format == "sharded":
                replaced.put(callback, "_link_checkpoint", _copying)  # private: 2.6
            if policy.async_save:
                replaced.put(callback, "file_exists", knowing)
            if policy.async_save and callback.save_last == "link":
                rank_zero_warn(
                    'ModelCheckpoint(save_last="link") points last.ckpt to a new checkpoint at once, but with '
                    "async_save the checkpoint is there only a while later: a run that is killed in between has no "
                    "last.ckpt to go on from. Use save_last=True."
                )
        elif isinstance(callback, ModelPruning):
            if callback._use_lottery_ticket_hypothesis:  # 2.6
                raise ValueError(
                    f"{type(callback).__name__}(use_lottery_ticket_hypothesis=True), its default, makes the weights "
                    "that it remembers the parameters' memory: under DDP they are trained along, and here they would "
                    "keep the values of the beginning. Pass use_lottery_ticket_hypothesis=False."
                )
            names = ("_run_pruning", "make_pruning_permanent", "_make_pruning_permanent_on_state_dict")  # 2.6
            for name in names if absent else ():
                replaced.within(callback, name, partial(full_parameters, module))


def _noting(handle: Callable[..., Any]) -> Callable[..., Any]:
    """Let the exception that ends a run be the one that is raised, also where saving a checkpoint for it fails."""

    def on_exception(*args: Any) -> None:
        try:
            handle(*args)
        except BaseException as error:
            if isinstance(error, ZeroError) and error is not args[-1]:
                add_note(args[-1], f"{type(error).__name__}: {error}")
            elif error is not args[-1]:
                raise

    return on_exception


def _copying(link: Callable[..., None]) -> Callable[..., None]:
    """Let ``save_last="link"`` copy a directory on a file system without links, as Lightning copies a file. Collective
    there: every rank waits until it is copied."""

    def call(trainer: Trainer, filepath: str, linkpath: str) -> None:
        try:
            link(trainer, filepath, linkpath)
        except OSError:
            if not os.path.isdir(filepath):
                raise
            shutil.copytree(filepath, linkpath)
            trainer.strategy.barrier()

    return call


class _ValuesCompared(TorchFunctionMode):
    """While active, two parameters of a sharded module are equal if all their elements are, wherever these are.

    Units are gathered one after the other when that is first asked for: collective, and asked by every rank alike.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._engine = engine_of(module)
        self._sums: dict[Any, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer ``torch.equal`` of absent parameters; let everything else through."""
        engine = self._engine
        asked = func is torch.equal and any(map(is_absent, args))
        if not asked or engine is None or not engine.names.keys() >= {*args}:
            return func(*args, **(kwargs or {}))
        for unit in engine.units if not self._sums else ():
            with gathered(engine, unit.parameters), untracked():
                for parameter in unit.parameters:
                    self._sums[parameter] = checksum(parameter.detach() + 0)  # the two zeros are equal
        with no_subclasses():
            alike = args[0].shape == args[1].shape and args[0].dtype == args[1].dtype
        return alike and self._sums[args[0]] == self._sums[args[1]]


def hold_schedulers(configs: Iterable[LRSchedulerConfig], optimizer: Optimizer, held: Replaced) -> None:
    """Keep per-step schedulers of a skipped step from advancing until ``held`` is released: out of their reach."""
    for config in configs:
        if config.interval == "step" and config.scheduler.optimizer is optimizer:
            held.put(config, "frequency", lambda _: sys.maxsize)


def refuse_other_strategies(kind: type[Strategy], module: nn.Module) -> None:
    """Raise ParameterAccessError if a Trainer whose strategy is not of ``kind`` trains a module that one has laid out.

    Its gradients would go to the shards, and its optimizer would find none.
    """
    trainer: Trainer | None = getattr(module, "_trainer", None)
    if trainer is not None and _runs(trainer) and not isinstance(trainer.strategy, kind):
        raise ParameterAccessError(
            f"{type(module).__name__} was trained with {kind.__name__}, and its gradients still go to what that has "
            f"laid out: {type(trainer.strategy).__name__} would train nothing. Give its Trainer an ordinary copy, made "
            "on every rank: `with lightning_zero.full_parameters(module): module = copy.deepcopy(module)`."
        )


def refuse_synced_norms(module: nn.Module, device: torch.device) -> None:
    """Raise ValueError for a batch norm over all ranks that is to train on CPUs: torch has none."""
    for name, child in module.named_modules() if device.type == "cpu" else ():
        if isinstance(child, nn.SyncBatchNorm):
            raise ValueError(
                f"'{name}' is a SyncBatchNorm, which torch has for GPUs only, and this rank trains on the CPU. Leave "
                "`Trainer(sync_batchnorm=True)` and `convert_sync_batchnorm` out there: every rank normalises by its "
                "own batch then, as under DDP."
            )


def gather_for_graphs(loggers: Iterable[Logger], module: nn.Module, replaced: Replaced) -> None:
    """Have loggers that are about to draw the module's graph run it on whole parameters: they do on one rank alone.

    ``TensorBoardLogger(log_graph=True)`` does; other loggers of Lightning do not call the module. Theirs and the user's
    ``log_graph`` is called on every rank when a run begins. That call is collective then, and gathers the module.
    """
    for logger in loggers:
        own = not type(logger).__module__.startswith("lightning.")
        overridden = getattr(type(logger), "log_graph", None) is not Logger.log_graph
        if overridden and getattr(logger, "_log_graph", own):  # 2.6
            # What is drawn later is drawn by who asks for it.
            contexts: Iterator[AbstractContextManager[Any]] = chain([full_parameters(module)], repeat(nullcontext()))
            replaced.within(logger, "log_graph", contexts.__next__)


def _warn_of_uploads(loggers: Iterable[Logger]) -> None:
    """Say that loggers which upload checkpoints upload files, and sharded checkpoints are directories."""
    for logger in loggers:
        if getattr(logger, "_log_model", False) or getattr(logger, "_log_model_checkpoints", False):  # 2.6
            rank_zero_warn(
                f"{type(logger).__name__} uploads checkpoints that are files. A sharded one is a directory: it will "
                "upload none. ZeroStrategy(checkpoint=CheckpointPolicy(format='consolidated')) writes files."
            )


def without_modules(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint without the modules among the hyperparameters whose values are not in memory to be pickled.

    Their weights are in the checkpoint once more, as the weights that they are.
    """
    kept = dict(checkpoint)
    for key in ("hyper_parameters", "datamodule_hyper_parameters"):
        given = kept.get(key)
        modules = [
            name
            for name, value in (given.items() if isinstance(given, Mapping) else ())
            if isinstance(value, nn.Module) and any(map(is_absent, nn.Module.parameters(value)))
        ]
        if modules and given is not None:
            kept[key] = {name: value for name, value in given.items() if name not in modules}
            rank_zero_warn(
                f"{some(map(repr, modules))} among the hyperparameters is a module whose weights are spread over the "
                "ranks: the checkpoint has the weights, and not the object. Leave it out with `save_hyperparameters("
                f"ignore={modules})`, and give it to `load_from_checkpoint` where the checkpoint is loaded."
            )
    return kept


TRAINERS: WeakSet[Trainer] = WeakSet()
"""Those that have run a module with one of these strategies. Its own ``trainer`` may be that of one around it."""


def is_running(module: nn.Module) -> bool:
    """Whether one of them trains or evaluates the module at this moment."""
    return any(_runs(trainer) and trainer.lightning_module is module for trainer in TRAINERS)


def _runs(trainer: Trainer) -> bool:
    return trainer.state.status == TrainerStatus.RUNNING
