"""What Lightning's Trainer, loops, loggers and callbacks are asked, told and refused.

[Note: thawed parameters]
A parameter that ``BaseFinetuning`` or its kin thaw in mid-fit makes the next training step lay the module out anew
(``ZeroSession``). What is left is here: such a callback tells by values which parameters an optimizer has already.

[Note: averages of slices]
``WeightAveraging`` and ``StochasticWeightAveraging`` copy the module at set-up, and later read, average, swap and write
parameters between steps. Where parameters do not hold their values then (stage 3, and 16-bit copies), each parameter of
the callback's copy becomes 1-D, this rank's elements in the copy's dtype, and in place of the module the callback's
methods get what shows the masters in the same way. An averaging function that is not elementwise is refused by a trial.
Checkpoints hold averages as they hold weights: sharded, under full names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import partial
from itertools import chain, repeat
from types import CellType, FunctionType
from typing import Any
from weakref import WeakSet

import torch
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
from lightning.pytorch.utilities.types import LRSchedulerConfig
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from lightning_zero._torch import no_subclasses, untracked
from lightning_zero.checkpoint import FlatShard
from lightning_zero.checkpoint.format.stored import read_slices
from lightning_zero.config import CheckpointPolicy
from lightning_zero.debug import full_parameters
from lightning_zero.engine import engine_of
from lightning_zero.engine.full import gathered
from lightning_zero.errors import ParameterAccessError, ZeroError, add_note, some
from lightning_zero.session.names import unwrapped
from lightning_zero.session.session import ZeroSession
from lightning_zero.shards.binding import is_absent
from lightning_zero.shards.slice import checksum

__all__ = [
    "TRAINERS",
    "Replaced",
    "UnmarkedModule",
    "adapt_fit",
    "adapt_set_up",
    "average_slices",
    "averaging",
    "copy_whole",
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
    """Adapt callbacks of a fit whose module is laid out, with parameters that are ``absent`` between steps or not:
    ``ModelCheckpoint`` does not choose the name of a checkpoint that ``is_underway``, and ``ModelPruning`` prunes, on
    every rank alike, with the whole module in memory."""
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
        if isinstance(callback, ModelCheckpoint):
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


class _ValuesCompared(TorchFunctionMode):
    """While active, ``torch.equal`` compares parameters of a sharded module wherever they are, by checksums. Units are
    gathered one after the other when that is first asked for: collective, and asked by every rank alike."""

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
    return any(_runs(trainer) and trainer.lightning_module is module for trainer in TRAINERS)


def _runs(trainer: Trainer) -> bool:
    return trainer.state.status == TrainerStatus.RUNNING


# ------------------------------------------------------------------------------------------------------- averages

_KINDS = (WeightAveraging, StochasticWeightAveraging)


def copy_whole(callbacks: Iterable[Callback], module: nn.Module, replaced: Replaced) -> None:
    """Let averaging callbacks copy, at their set-up, a module that an earlier fit has sharded. Collective there."""
    averages = [callback for callback in callbacks if isinstance(callback, _KINDS)]
    for callback in averages if averages and any(map(is_absent, module.parameters())) else ():
        replaced.within(callback, "setup", partial(full_parameters, module))


def averaging(callbacks: Iterable[Callback]) -> list[Any]:
    """Those of a fit's callbacks that average weights."""
    return [c for c in callbacks if isinstance(c, _KINDS) and c._average_model is not None]


def average_slices(
    callbacks: Iterable[Callback], session: ZeroSession, module: LightningModule, replaced: Replaced
) -> None:
    """Make the averaging callbacks of a fit work on slices.

    ``ParameterAccessError`` for an averaging function that is not elementwise. Every rank has the same callbacks.
    """

    def shown(value: Any) -> Any:
        return _Masters(session, module) if value is module else value

    def reads(method: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: method(*map(shown, args), **{key: shown(kwargs[key]) for key in kwargs})

    def writes(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> None:
            reads(method)(*args, **kwargs)
            session.engine.masters_changed(range(len(session.engine.units)))

        return call

    for callback in averaging(callbacks):
        model: Any = callback._average_model
        if not any(map(_part, model.parameters())):  # else it is that of a fit before, to be evaluated
            _slice(model, session, module)
        if isinstance(callback, WeightAveraging):
            _check_elementwise(callback, model.avg_fn, model.multi_avg_fn)
            replaced.put(model, "update_parameters", reads)
            replaced.put(callback, "_swap_models", writes)
            replaced.put(callback, "_copy_average_to_current", writes)
            replaced.put(callback, "on_load_checkpoint", partial(_fitting, model.module, shown))
        else:
            _check_elementwise(callback, callback._avg_fn, None)
            replaced.put(callback, "update_parameters", reads)
            replaced.put(callback, "transfer_weights", writes)
            replaced.put(callback, "_load_average_model_state", partial(_fitting_state, model))


class _Masters:
    """A module as averaging callbacks use it, with slices of the masters in place of parameters."""

    def __init__(self, session: ZeroSession, module: LightningModule) -> None:
        self._session, self._module = session, module
        session.engine.take_over_shown()
        if session.engine.plan.offload is not None:
            session.engine.tiers.settle()

    def parameters(self) -> Iterator[Tensor]:
        """Slices of masters, in the module's order."""
        engine = self._session.engine
        for parameter in self._module.parameters():
            yield engine.shards[engine.names[parameter]].data if parameter in engine.names else parameter

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Each rank reads its own slices. Collective: every rank."""
        self._session.module_state(self._module).load(state, strict=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _slice(average: nn.Module, session: ZeroSession, module: nn.Module) -> None:
    """Let the parameters of a callback's copy be slices, of the values that the module has."""
    engine, prefix = session.engine, "module." if hasattr(average, "n_averaged") else ""
    copies: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owner, _, key = f"{prefix}{name}".rpartition(".")
        place: dict[str, Any] = average.get_submodule(owner)._parameters
        if parameter in engine.names and place.get(key) is not None:
            if parameter not in copies:
                one, like = engine.shards[engine.names[parameter]], place[key]
                values = one.read().detach().to(like.device, like.dtype, copy=True)
                copies[parameter] = nn.Parameter(values, requires_grad=False)
                vars(copies[parameter])["zero_part"] = (torch.Size(one.spec.shape), one.start)
            place[key] = copies[parameter]
    average.state_dict = partial(_saved, average)  # type: ignore[assignment]


def _part(average: Tensor) -> tuple[torch.Size, int] | None:
    """The shape of the whole average, and the first element that is here; ``None`` of an ordinary parameter."""
    return getattr(average, "zero_part", None)


def _saved(copy: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """What a callback's copy answers to ``state_dict``, for good, because the Trainer may save it after the fit:
    averages as what is saved sharded, under full names."""
    state = {}
    for key, value in type(copy).state_dict(copy, *args, **{**kwargs, "keep_vars": True}).items():
        if isinstance(value, Tensor):
            part = _part(value)
            value = FlatShard(value.detach(), *part) if part else value.detach()
        state[unwrapped(key)] = value
    return state


def _fitting(copy: nn.Module, shown: Callable[[Any], Any], load: Callable[..., Any]) -> Callable[..., None]:
    """``WeightAveraging.on_load_checkpoint``, which reads slices."""

    def call(trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if "state_dict" in checkpoint:
            checkpoint = {**checkpoint, "state_dict": _fitted(copy, checkpoint["state_dict"])}
        load(trainer, shown(pl_module), checkpoint)

    return call


def _fitting_state(copy: nn.Module, load: Callable[..., Any]) -> Callable[[Any], None]:
    """``StochasticWeightAveraging._load_average_model_state``, which reads slices."""
    return lambda state: load(_fitted(copy, state))


def _fitted(copy: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """A stored average under the names of ``copy``, of which each rank reads its own slices."""
    own = {unwrapped(key): (key, value) for key, value in copy.named_parameters(remove_duplicate=False)}
    fitted = {}
    for key, value in state.items():
        name, target = own.get(unwrapped(key), (key, None))
        if target is not None and (part := _part(target)) and value.shape == part[0]:
            values = target.detach().clone()
            read_slices([(value, part[1], values)])
            value = values
        fitted[name] = value
    return fitted


_SHAPES = [(6, 8), (5,)]
_COUNTS = (0, 1, 2, 3, 1000)  # Lightning copies where the count is 0, so a function may fail there
_RANKS = 3


def _check_elementwise(callback: Callback, alone: Any, together: Any) -> None:
    """Raise ParameterAccessError unless an averaging function gives slices what it gives the whole: by a trial.

    Copies of it run through several updates: one with whole tensors, and one for each of three ranks with its slices.
    """
    if alone is None and together is None:
        return
    wholes = [torch.linspace(-1.0, end, torch.Size(shape).numel()).view(shape) for shape in _SHAPES for end in (3, -2)]
    try:
        with torch.random.fork_rng(devices=[]):
            expected = _updated(alone, together, wholes)
            ranks = [[whole.flatten().tensor_split(_RANKS)[rank] for whole in wholes] for rank in range(_RANKS)]
            found = zip(*(_updated(alone, together, slices) for slices in ranks), strict=True)
            alike = all(
                torch.equal(whole.view(torch.int32), torch.cat(slices).view(torch.int32))
                for whole, slices in zip(expected, found, strict=True)
            )
    except Exception:
        alike = False
    if not alike:
        raise ParameterAccessError(
            f"The averaging function of {type(callback).__name__} gives other numbers for a slice of a parameter than "
            "for the whole, or other ones in every run, and each rank has slices. Pass an elementwise one, such as "
            "those of torch.optim.swa_utils, or use stage 1 or 2 in full precision."
        )


def _updated(alone: Any, together: Any, tensors: Iterable[Tensor]) -> list[Tensor]:
    """The averages, flat, after each of several updates by a copy of the function."""
    alone, together, found = _copied(alone), _copied(together), []
    copies = [tensor.clone() for tensor in tensors]
    averages, values = copies[::2], copies[1::2]
    for count in map(torch.tensor, _COUNTS):
        try:
            if alone is None:
                together(averages, values, count)
            else:
                for average, value in zip(averages, values, strict=True):
                    average.copy_(alone(average, value, count))
        except Exception:
            if count:
                raise
        found += [average.flatten().clone() for average in averages]
        for value in values:
            value.mul_(-0.75)
    return found


def _copied(function: Any) -> Any:
    """A function with what it keeps copied: a method's or callable's object, and variables of the scope around it."""
    if isinstance(function, FunctionType) and function.__closure__ is not None:
        cells = tuple(CellType(_copied(cell.cell_contents)) for cell in function.__closure__)
        copy = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
        copy.__kwdefaults__ = function.__kwdefaults__
        return copy
    if isinstance(function, nn.Module | Trainer | Callback):
        return function  # too large, and no state of the average
    return deepcopy(function)
