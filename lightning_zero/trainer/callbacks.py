"""What Lightning's Trainer, loops, loggers and callbacks are asked, told and refused.

[Note: thawed parameters]
A parameter that ``BaseFinetuning`` or its kin thaw in mid-fit makes the next training step lay the module out anew
(``ZeroSession``). What is left is here: such a callback tells by values which parameters an optimizer has already.

[Note: averages of slices]
``WeightAveraging`` and ``StochasticWeightAveraging`` copy the module at set-up, and later read, average, swap and write
parameters between steps. Where parameters do not hold their values then (stage 3, and 16-bit copies), each parameter of
the callback's copy becomes 1-D, this rank's elements in the copy's dtype, and in place of the module the callback's
methods get what shows the masters in the same way. Averaging functions are those of torch and Lightning: elementwise.
Checkpoints hold averages as they hold weights: sharded, under full names.
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
from torch import Tensor, nn

from lightning_zero.checkpoint.format.stored import read_slices
from lightning_zero.config import CheckpointPolicy
from lightning_zero.debug import full_parameters
from lightning_zero.errors import ParameterAccessError, ZeroError, add_note, some
from lightning_zero.session.session import ZeroSession
from lightning_zero.session.state import flat_shard, local_part, unwrapped
from lightning_zero.shards.binding import is_absent

__all__ = [
    "TRAINERS",
    "Replaced",
    "UnmarkedModule",
    "adapt_fit",
    "adapt_set_up",
    "average_slices",
    "averaging",
    "gather_for_graphs",
    "is_running",
    "refuse_other_strategies",
    "refuse_unsynced",
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


def adapt_set_up(trainer: Trainer, module: nn.Module, replaced: Replaced) -> None:
    """Adapt what Lightning calls from a run's set-up on, before callbacks set themselves up. Those that average copy a
    module then, which an earlier fit may have sharded: collective there."""
    datamodule, callbacks = trainer.datamodule, trainer.callbacks  # type: ignore[attr-defined]
    for called in (*callbacks, *([] if datamodule is None else [datamodule])):
        replaced.put(called, "on_exception", _noting)
        if isinstance(called, _KINDS):
            replaced.within(called, "setup", partial(full_parameters, module))


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
                    "last.ckpt to resume from. Use save_last=True."
                )
        elif isinstance(callback, BaseFinetuning) and absent:
            replaced.within(callback, "finetune_function", partial(full_parameters, module))
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


# ------------------------------------------------------------------------------------------------------- averages

_KINDS = (WeightAveraging, StochasticWeightAveraging)
_ELEMENTWISE = ("torch.optim.swa_utils", StochasticWeightAveraging.__module__)  # where averaging functions may be from


def averaging(callbacks: Iterable[Callback]) -> list[Any]:
    """Those of a fit's callbacks that average weights."""
    return [c for c in callbacks if isinstance(c, _KINDS) and c._average_model is not None]


def average_slices(
    callbacks: Iterable[Callback], session: ZeroSession, module: LightningModule, replaced: Replaced
) -> None:
    """Make the averaging callbacks of a fit work on slices.

    ``ParameterAccessError`` for an averaging function that may not be elementwise. Every rank has the same callbacks.
    """

    def shows(method: Callable[..., Any], writes: bool) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            masters = _Masters(session, module)
            shown = {key: masters if value is module else value for key, value in kwargs.items()}
            method(*(masters if value is module else value for value in args), **shown)
            if writes:
                session.engine.masters_changed(range(len(session.engine.units)))

        return call

    def fits(load: Callable[..., None], copy: nn.Module) -> Callable[..., None]:
        def call(trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
            if "state_dict" in checkpoint:
                checkpoint = {**checkpoint, "state_dict": _fitted(copy, checkpoint["state_dict"])}
            load(trainer, pl_module, checkpoint)

        return call

    for callback in averaging(callbacks):
        model: Any = callback._average_model
        wraps = isinstance(callback, WeightAveraging)
        for function in (model.avg_fn, model.multi_avg_fn) if wraps else (callback._avg_fn,):
            if function is not None and getattr(function, "__module__", None) not in _ELEMENTWISE:
                raise ParameterAccessError(
                    f"The averaging function of {type(callback).__name__} would get slices of parameters, and nobody "
                    "knows whether it is elementwise. Use those of torch.optim.swa_utils, average "
                    "`lightning_zero.local_slices(module)` yourself, or use stage 1 or 2 in full precision."
                )
        if not any(hasattr(parameter, "zero_part") for parameter in model.parameters()):
            _slice(model, session, module, "module." if wraps else "")  # else it is that of a fit before
        replaced.put(model if wraps else callback, "update_parameters", partial(shows, writes=False))
        for name in ("_swap_models", "_copy_average_to_current") if wraps else ("transfer_weights",):
            replaced.put(callback, name, partial(shows, writes=True))
        if wraps:
            replaced.put(callback, "on_load_checkpoint", partial(shows, writes=False))
            replaced.put(callback, "on_load_checkpoint", partial(fits, copy=model.module))
        else:
            replaced.put(callback, "_load_average_model_state", partial(_fitting, model))


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


def _slice(average: nn.Module, session: ZeroSession, module: nn.Module, prefix: str) -> None:
    """Let the parameters of a callback's copy be slices of the module's values, for good: what they are of, and the
    first element, are in ``zero_part``. The Trainer may save it after the fit."""
    engine, copies = session.engine, dict[nn.Parameter, nn.Parameter]()
    there = {name for name, _ in average.named_parameters(remove_duplicate=False)}
    if later := [name for name, _ in module.named_parameters() if f"{prefix}{name}" not in there]:
        raise ParameterAccessError(
            f"The callback that averages copied {type(module).__name__} before `configure_model` or `setup` made "
            f"{some(map(repr, later))}: DDP would average nothing of these. Make them in `__init__`."
        )
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owner, _, key = f"{prefix}{name}".rpartition(".")
        place: dict[str, Any] = average.get_submodule(owner)._parameters
        if parameter in engine.names:
            if parameter not in copies:
                one, like = engine.shards[engine.names[parameter]], place[key]
                values = one.read().detach().to(like.device, like.dtype, copy=True)
                copies[parameter] = nn.Parameter(values, requires_grad=False)
                vars(copies[parameter])["zero_part"] = one.spec, one.start
            place[key] = copies[parameter]
    vars(average)["state_dict"] = partial(_saved, average)


def _saved(copy: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """What a sliced copy answers to ``state_dict``: averages as what is saved sharded, under full names."""
    state = {}
    for key, value in type(copy).state_dict(copy, *args, **{**kwargs, "keep_vars": True}).items():
        if isinstance(value, Tensor):
            part = getattr(value, "zero_part", None)
            value = flat_shard(value.detach(), *part) if part else value.detach()
        state[unwrapped(key)] = value
    return state


def _fitting(copy: nn.Module, load: Callable[[Any], None]) -> Callable[[Any], None]:
    return lambda state: load(_fitted(copy, state))


def _fitted(copy: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """A stored average under the names of a sliced copy, of which each rank reads its own slices."""
    own = {unwrapped(key): (key, value) for key, value in copy.named_parameters(remove_duplicate=False)}
    fitted = {}
    for key, value in state.items():
        name, target = own.get(unwrapped(key), (key, None))
        part = getattr(target, "zero_part", None)
        if target is not None and part and tuple(value.shape) == part[0].whole_shape:
            stored, value = value, target.detach().clone()
            read_slices([(local_part(stored, part[0].part), part[1], value)])
        fitted[name] = value
    return fitted
