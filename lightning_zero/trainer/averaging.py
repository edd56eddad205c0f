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
from contextlib import contextmanager
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
from lightning_zero.engine import ZeroEngine
from lightning_zero.engine.full import whole
from lightning_zero.errors import ParameterAccessError
from lightning_zero.session.names import unwrapped
from lightning_zero.session.session import ZeroSession
from lightning_zero.shards.binding import is_absent
from lightning_zero.shards.slice import Slice
from lightning_zero.trainer.callbacks import Replaced

__all__ = ["Averages", "copy_whole"]

_KINDS = (WeightAveraging, StochasticWeightAveraging)


class Averages:
    """The averaging callbacks of one fit, made to work on slices. Collective: every rank has the same callbacks."""

    def __init__(
        self, callbacks: Iterable[Callback], session: ZeroSession, module: LightningModule, replaced: Replaced
    ) -> None:
        self._session = session
        self._module = module
        self._callbacks: list[Any] = [c for c in callbacks if isinstance(c, _KINDS) and c._average_model is not None]
        for callback in self._callbacks:
            if not any(_part(p) for p in callback._average_model.parameters()):
                self._slice(callback._average_model)  # else it is that of a fit before, to be evaluated
                callback._average_model.state_dict = partial(_saved, callback._average_model)
            if isinstance(callback, WeightAveraging):
                model: Any = callback._average_model
                _check_elementwise(callback, model.avg_fn, model.multi_avg_fn)
                replaced.put(model, "update_parameters", self._reads)
                replaced.put(callback, "_swap_models", self._writes)
                replaced.put(callback, "_copy_average_to_current", self._writes)
                replaced.put(callback, "on_load_checkpoint", self._loads)
            else:
                _check_elementwise(callback, callback._avg_fn, None)
                replaced.put(callback, "update_parameters", self._reads)
                replaced.put(callback, "transfer_weights", self._writes)
                replaced.put(callback, "_load_average_model_state", self._takes)

    @contextmanager
    def carried(self) -> Iterator[None]:
        """While active, the module is laid out anew: averages are cut as parameters are afterwards. Collective."""
        former = self._session.engine
        models = [callback._average_model for callback in self._callbacks]
        kept = [self._whole(former, self._of(model)) for model in models]
        yield
        engine = self._session.engine
        for model, found in zip(models, kept, strict=True):
            for parameter, average in self._of(model).items():
                fresh = engine.shards[engine.names[parameter]]
                average.data = fresh.of(found[parameter]).to(average.device, average.dtype, copy=True)
                _mark(average, fresh)

    def _whole(self, engine: ZeroEngine, averages: Mapping[nn.Parameter, nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """Whole averages, on the host; the device has those of a layout at a time. Collective."""
        found: dict[nn.Parameter, Tensor] = {}
        for flat in (flat for unit in engine.units for flat in unit.flats):
            pieces = {one: averages[one.user].data for one in flat.shards if one.user in averages}
            found.update((parameter, value.cpu()) for parameter, value in whole(engine, pieces, "averages").items())
        return found

    def _of(self, model: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
        """The average of each of the module's parameters in a callback's copy."""
        copy = model.module if hasattr(model, "n_averaged") else model
        pairs = zip(self._module.parameters(), copy.parameters(), strict=True)  # type: ignore[union-attr]
        return {own: average for own, average in pairs if _part(average)}

    def _reads(self, method: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: method(
            *map(self._shown, args), **{key: self._shown(value) for key, value in kwargs.items()}
        )

    def _writes(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> None:
            self._reads(method)(*args, **kwargs)
            self._session.engine.masters_changed(range(len(self._session.engine.units)))

        return call

    def _loads(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
            copy = method.__self__._average_model.module  # type: ignore[attr-defined]
            if "state_dict" in checkpoint:
                checkpoint = {**checkpoint, "state_dict": _fitted(copy, checkpoint["state_dict"])}
            method(trainer, self._shown(pl_module), checkpoint)

        return call

    def _takes(self, method: Callable[..., Any]) -> Callable[..., Any]:
        copy: nn.Module = method.__self__._average_model  # type: ignore[attr-defined]
        return lambda state: method(_fitted(copy, state))

    def _shown(self, value: Any) -> Any:
        return _Masters(self._session, self._module) if value is self._module else value

    def _slice(self, average: nn.Module) -> None:
        """Let the parameters of the callback's copy be slices, of the values that the module has."""
        engine = self._session.engine
        copies: dict[nn.Parameter, nn.Parameter] = {}
        for name, parameter in self._module.named_parameters(remove_duplicate=False):
            prefix = "module." if hasattr(average, "n_averaged") else ""
            owner, _, key = f"{prefix}{name}".rpartition(".")
            place: dict[str, Any] = average.get_submodule(owner)._parameters
            if parameter in engine.names and place.get(key) is not None:
                if parameter not in copies:
                    one, like = engine.shards[engine.names[parameter]], place[key]
                    own = one.read().detach().to(like.device, like.dtype, copy=True)
                    copies[parameter] = nn.Parameter(own, requires_grad=False)
                    _mark(copies[parameter], one)
                place[key] = copies[parameter]


def _mark(average: nn.Parameter, one: Slice) -> None:
    """Note on an average which elements of a parameter it has."""
    vars(average)["zero_part"] = (torch.Size(one.spec.shape), one.start)


def _part(average: Tensor) -> tuple[torch.Size, int] | None:
    """The shape of the whole average, and the first element that is here; ``None`` of an ordinary parameter."""
    return getattr(average, "zero_part", None)


def _saved(copy: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """What a callback's copy answers to ``state_dict``, for good, because the Trainer may save it after the fit:
    averages as what is saved sharded, under full names."""
    state = type(copy).state_dict(copy, *args, **{**kwargs, "keep_vars": True})
    return {
        unwrapped(key): FlatShard(value.detach(), *part) if (part := _part(value)) else _detached(value)
        for key, value in state.items()
    }


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


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


_SHAPES = [(6, 8), (5,), (2, 3, 2, 2), ()]
_COUNTS = (0, 1, 2, 3, 1000)  # Lightning copies where the count is 0, so a function may fail there
_RANKS = 3


def _check_elementwise(callback: Callback, alone: Any, together: Any) -> None:
    """Raise ParameterAccessError unless an averaging function gives slices what it gives the whole: by a trial.

    Copies of it run through several updates of tensors of several shapes: one copy with whole tensors, and one for each
    of three ranks with its slices, of which some are empty. What a copy keeps from call to call is its own, as on a
    rank. One more copy with whole tensors shows whether results depend on what is not copied.
    """
    if alone is None and together is None:
        return
    torch_state = torch.get_rng_state()
    wholes = [(_ramp(shape, 3.0), _ramp(shape, -2.0)) for shape in _SHAPES]
    try:
        expected, again = (_updated(alone, together, wholes) for _ in range(2))
        slices = [
            _updated(alone, together, [(_own(average, rank), _own(value, rank)) for average, value in wholes])
            for rank in range(_RANKS)
        ]
        joined = [[torch.cat(parts) for parts in zip(*update, strict=True)] for update in zip(*slices, strict=True)]
        alike = all(
            torch.equal(whole.reshape(-1).view(torch.int32), other.reshape(-1).view(torch.int32))
            for others in (again, joined)
            for update, found in zip(expected, others, strict=True)
            for whole, other in zip(update, found, strict=True)
        )
    except Exception:
        alike = False
    finally:
        torch.set_rng_state(torch_state)
    if not alike:
        raise ParameterAccessError(
            f"The averaging function of {type(callback).__name__} gives other numbers for a slice of a parameter than "
            "for the whole, or other ones in every run, and each rank has slices. Pass an elementwise one, such as "
            "those of torch.optim.swa_utils, or use stage 1 or 2 in full precision."
        )


def _own(whole: Tensor, rank: int) -> Tensor:
    return whole.reshape(-1).tensor_split(_RANKS)[rank].clone()


def _ramp(shape: tuple[int, ...], end: float) -> Tensor:
    return torch.linspace(-1.0, end, max(1, torch.Size(shape).numel())).view(shape)


def _updated(alone: Any, together: Any, pairs: Iterable[tuple[Tensor, Tensor]]) -> list[list[Tensor]]:
    """The averages after each of several updates, by a copy of the function."""
    alone, together = _copied(alone), _copied(together)
    averages, values, found = [average.clone() for average, _ in pairs], [value.clone() for _, value in pairs], []
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
        found.append([average.reshape(-1).clone() for average in averages])
        for value in values:
            value.mul_(-0.75)
    return found


def _copied(function: Any) -> Any:
    """A function with what it keeps copied: a method's or callable's object, and variables of the scope around it."""
    if not isinstance(function, FunctionType) or function.__closure__ is None:
        if isinstance(function, nn.Module | Trainer | Callback):
            return function  # too large, and no state of the average
        try:
            return deepcopy(function)
        except Exception:  # the second copy shows whether results depend on it
            return function
    cells = tuple(CellType(_copied(cell.cell_contents)) for cell in function.__closure__)
    made = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = deepcopy(function.__kwdefaults__)
    return made


class _Masters:
    """A module as averaging callbacks use it, with slices of the masters in place of parameters."""

    def __init__(self, session: ZeroSession, module: LightningModule) -> None:
        self._session = session
        self._module = module
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


def copy_whole(callbacks: Iterable[Callback], module: nn.Module, replaced: Replaced) -> None:
    """Let averaging callbacks copy, at their set-up, a module that an earlier fit has sharded. Collective there."""
    for callback in callbacks if any(map(is_absent, module.parameters())) else ():
        if isinstance(callback, _KINDS):
            replaced.within(callback, "setup", partial(full_parameters, module))
