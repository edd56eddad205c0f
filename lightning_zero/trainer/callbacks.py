"""What Lightning's Trainer, loops, loggers and callbacks are asked, told and refused.

[Note: callbacks that use values]
Some of Lightning's callbacks read and write parameters between steps. Where these do not hold their values then (stage
3, and 16-bit copies), such a callback's methods run inside ``full_parameters``. ``WeightAveraging`` and
``StochasticWeightAveraging`` keep a whole copy of the module on every rank, as under DDP.

A parameter that ``BaseFinetuning`` or its kin thaw in mid-fit makes the next training step lay the module out anew
(``ZeroSession``). What is left is here: such a callback tells by values which parameters an optimizer has already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain, repeat
from typing import Any
from weakref import WeakSet

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerStatus
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from lightning_zero.config import CheckpointPolicy
from lightning_zero.debug import full_parameters
from lightning_zero.errors import ParameterAccessError, ZeroError, add_note, some
from lightning_zero.shards.binding import is_absent

__all__ = [
    "TRAINERS",
    "Replaced",
    "UnmarkedModule",
    "adapt_fit",
    "adapt_set_up",
    "gather_for_graphs",
    "is_running",
    "refuse_other_strategies",
    "refuse_unsynced",
    "show_values",
    "undisturbed",
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


_AVERAGES = (WeightAveraging, StochasticWeightAveraging)


def adapt_set_up(trainer: Trainer, module: nn.Module, replaced: Replaced) -> None:
    """Adapt what Lightning calls from a run's set-up on, before callbacks set themselves up. These may copy a module
    that an earlier fit has sharded: collective there."""
    datamodule, callbacks = trainer.datamodule, trainer.callbacks  # type: ignore[attr-defined]
    for called in (*callbacks, *([] if datamodule is None else [datamodule])):
        replaced.put(called, "on_exception", _noting)
        if isinstance(called, _AVERAGES):
            replaced.within(called, "setup", partial(full_parameters, module))


# What of Lightning's callbacks reads or writes values between steps (2.6).
_USES_VALUES: dict[type[Callback], tuple[str, ...]] = {
    BaseFinetuning: ("finetune_function",),
    ModelPruning: ("_run_pruning", "make_pruning_permanent", "_make_pruning_permanent_on_state_dict"),
    StochasticWeightAveraging: ("update_parameters", "transfer_weights"),
    WeightAveraging: ("on_load_checkpoint", "_swap_models", "_copy_average_to_current"),
}


def show_values(callbacks: Iterable[Callback], module: nn.Module, replaced: Replaced) -> None:
    """Let callbacks have whole parameters where they use values, of a module whose values are absent between steps.

    What they do then is collective: every rank has the same callbacks. So is this, where tensors are split.
    """
    whole = partial(full_parameters, module)
    for callback in callbacks:
        for name in chain(*(names for kind, names in _USES_VALUES.items() if isinstance(callback, kind))):
            replaced.within(callback, name, whole)
        average: Any = callback._average_model if isinstance(callback, _AVERAGES) else None
        if average is None:
            continue
        if len([*average.parameters()]) < len([*module.parameters()]):
            raise ParameterAccessError(
                f"{type(callback).__name__} copied {type(module).__name__} before `configure_model` or `setup` made "
                "all layers: DDP would average nothing of the later ones. Make them in `__init__`."
            )
        if isinstance(callback, WeightAveraging):
            replaced.within(average, "update_parameters", whole)
        copies: dict[Any, nn.Parameter] = {}
        for owner in average.modules():
            for key, parameter in owner._parameters.items():
                if hasattr(parameter, "full_tensor"):  # copied while it was a DTensor
                    copy = nn.Parameter(parameter.full_tensor(), parameter.requires_grad)
                    owner._parameters[key] = copies.setdefault(parameter, copy)


def adapt_fit(
    trainer: Trainer, policy: CheckpointPolicy, is_underway: Callable[[Any], bool], replaced: Replaced
) -> None:
    """Adapt who saves in a fit: ``ModelCheckpoint`` does not choose the name of a checkpoint that ``is_underway``."""
    if policy.format == "sharded":
        for logger in trainer.loggers:
            if getattr(logger, "_log_model", False) or getattr(logger, "_log_model_checkpoints", False):  # 2.6
                rank_zero_warn(
                    f"{type(logger).__name__} uploads checkpoints that are files. A sharded one is a directory: "
                    "it will upload none. Files are written with CheckpointPolicy(format='consolidated')."
                )

    def knowing(known: Callable[..., bool]) -> Callable[..., bool]:
        return lambda path, trainer: known(path, trainer) or is_underway(path)

    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelCheckpoint) and policy.async_save:
            replaced.put(callback, "file_exists", knowing)
            if callback.save_last == "link":
                rank_zero_warn(
                    'ModelCheckpoint(save_last="link") points last.ckpt to a new checkpoint at once, but with '
                    "async_save the checkpoint is there only a while later: a run that is killed in between has no "
                    "last.ckpt to resume from. Use save_last=True."
                )
        elif isinstance(callback, ModelPruning) and callback._use_lottery_ticket_hypothesis:  # 2.6
            raise ValueError(
                f"{type(callback).__name__}(use_lottery_ticket_hypothesis=True), its default, makes the weights "
                "that it remembers the parameters' memory: under DDP they are trained along, and here they would "
                "keep the values of the beginning. Pass use_lottery_ticket_hypothesis=False."
            )


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


def refuse_other_strategies(kind: type[Strategy], module: nn.Module) -> None:
    """Raise ParameterAccessError if a Trainer whose strategy is not of ``kind`` trains a module that one has laid out.

    Its gradients would go to the shards, and its optimizer would find none.
    """
    trainer: Trainer | None = getattr(module, "_trainer", None)
    if trainer and trainer.state.status == TrainerStatus.RUNNING and not isinstance(trainer.strategy, kind):
        raise ParameterAccessError(
            f"{type(module).__name__} was trained with {kind.__name__}, and its gradients still go to what that has "
            f"laid out: {type(trainer.strategy).__name__} would train nothing. Give its Trainer an ordinary copy, made "
            "on every rank: `with lightning_zero.full_parameters(module): module = copy.deepcopy(module)`."
        )


def gather_for_graphs(loggers: Iterable[Logger], module: nn.Module, replaced: Replaced) -> None:
    """Have loggers that draw the module's graph (``TensorBoardLogger(log_graph=True)``, a user's) run it on whole
    parameters. Lightning calls ``log_graph`` on every rank when a run begins: collective then."""
    for logger in loggers:
        own = not type(logger).__module__.startswith("lightning.")
        overridden = getattr(type(logger), "log_graph", None) is not Logger.log_graph
        if overridden and getattr(logger, "_log_graph", own):  # 2.6
            # What is drawn later is drawn by who asks for it.
            contexts: Iterator[AbstractContextManager[Any]] = chain([full_parameters(module)], repeat(nullcontext()))
            replaced.within(logger, "log_graph", contexts.__next__)


def without_modules(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint without the modules among the hyperparameters whose values are not in memory to be pickled."""
    kept = dict(checkpoint)
    for key in ("hyper_parameters", "datamodule_hyper_parameters"):
        given = kept.get(key)
        items = given.items() if isinstance(given, Mapping) else ()
        modules = [k for k, v in items if isinstance(v, nn.Module) and any(map(is_absent, nn.Module.parameters(v)))]
        if modules:
            kept[key] = {name: value for name, value in items if name not in modules}
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
    return any(one.state.status == TrainerStatus.RUNNING and one.lightning_module is module for one in TRAINERS)


def undisturbed(trainer: Any, hooks: Iterable[str]) -> bool:
    """Whether neither the module nor a callback of a Trainer does anything in these hooks."""
    for part in (trainer.lightning_module, *trainer.callbacks):
        base = Callback if isinstance(part, Callback) else LightningModule
        if any(getattr(getattr(part, at, None), "__func__", None) is not getattr(base, at, None) for at in hooks):
            return False
    return True
