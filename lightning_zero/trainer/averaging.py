"""Lightning's own callbacks that average weights, on this rank's slices of the masters.

[Note: averages of slices]
``WeightAveraging`` and ``StochasticWeightAveraging`` copy the module at set-up, and later read, average, swap and write
parameters between steps. Where parameters do not hold their values then (stage 3, and 16-bit copies), each parameter of
the callback's copy becomes 1-D, this rank's elements in the copy's dtype, and in place of the module the callback's
methods get what shows the masters in the same way. An averaging function that is not elementwise is refused by a trial.
Checkpoints hold averages as they hold weights: sharded, under full names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from types import CellType, FunctionType
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn

from lightning_zero.checkpoint import FlatShard
from lightning_zero.checkpoint.format.stored import read_slices
from lightning_zero.debug import full_parameters
from lightning_zero.errors import ParameterAccessError
from lightning_zero.session.names import unwrapped
from lightning_zero.session.session import ZeroSession
from lightning_zero.shards.binding import is_absent
from lightning_zero.trainer.callbacks import Replaced

__all__ = ["average_slices", "copy_whole"]

_KINDS = (WeightAveraging, StochasticWeightAveraging)


def copy_whole(callbacks: Iterable[Callback], module: nn.Module, replaced: Replaced) -> None:
    """Let averaging callbacks copy, at their set-up, a module that an earlier fit has sharded. Collective there."""
    for callback in callbacks if any(map(is_absent, module.parameters())) else ():
        if isinstance(callback, _KINDS):
            replaced.within(callback, "setup", partial(full_parameters, module))


def average_slices(
    callbacks: Iterable[Callback], session: ZeroSession, module: LightningModule, replaced: Replaced
) -> list[Callback]:
    """Make the averaging callbacks of a fit work on slices, and return them.

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

    found: list[Any] = [c for c in callbacks if isinstance(c, _KINDS) and c._average_model is not None]
    for callback in found:
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
    return found


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
