"""Lightning's own callbacks that average weights, on this rank's slices of the masters.

[Note: averages of slices]
``WeightAveraging`` and ``StochasticWeightAveraging`` copy the module at set-up, and later read, average, swap and write
parameters between steps. Where parameters do not hold their values then (stage 3, and 16-bit copies), each parameter of
the callback's copy becomes a sliced tensor that holds this rank's elements in the copy's dtype, and in place of the
module the callback's methods get what shows the masters in the same way. An averaging function that is not elementwise
cannot be applied to slices, and raises. Checkpoints hold averages as they hold weights: sharded, under full names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn

from lightning_zero.checkpoint import FlatShard
from lightning_zero.checkpoint.format.stored import read_slices
from lightning_zero.debug import full_parameters
from lightning_zero.engine.full import whole_slices
from lightning_zero.session.names import unwrapped
from lightning_zero.session.session import ZeroSession
from lightning_zero.shards.binding import is_absent
from lightning_zero.shards.sliced_tensor import SlicedTensor
from lightning_zero.trainer.callbacks import Replaced

__all__ = ["Averages", "as_shards", "copy_whole"]

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
            if not any(isinstance(p, SlicedTensor) for p in callback._average_model.parameters()):
                self._slice(callback._average_model)  # else it is that of a fit before, to be evaluated
            if isinstance(callback, WeightAveraging):
                replaced.put(callback._average_model, "update_parameters", self._reads)
                replaced.put(callback, "_swap_models", self._writes)
                replaced.put(callback, "_copy_average_to_current", self._writes)
                replaced.put(callback, "on_load_checkpoint", self._loads)
            else:
                replaced.put(callback, "update_parameters", self._reads)
                replaced.put(callback, "transfer_weights", self._writes)
                replaced.put(callback, "_load_average_model_state", self._takes)

    @contextmanager
    def carried(self) -> Iterator[None]:
        """While active, the module is laid out anew: averages are cut as parameters are afterwards. Collective."""
        former = self._session.engine
        models = [callback._average_model for callback in self._callbacks]
        kept = [whole_slices(former, {p: average.own for p, average in self._of(model).items()}) for model in models]
        yield
        for model, whole in zip(models, kept, strict=True):
            for parameter, average in self._of(model).items():
                fresh: Any = self._session.engine.access.master(parameter).clone().to(average.device, average.dtype)
                average.be(fresh.copy_(whole[parameter].to(fresh.device)))

    def _of(self, model: nn.Module) -> dict[nn.Parameter, SlicedTensor]:
        """The average of each of the module's parameters in a callback's copy."""
        copy = model.module if hasattr(model, "n_averaged") else model
        pairs = zip(self._module.parameters(), copy.parameters(), strict=True)  # type: ignore[union-attr]
        return {own: average for own, average in pairs if isinstance(average, SlicedTensor)}

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
                checkpoint = {**checkpoint, "state_dict": self._fitted(copy, checkpoint["state_dict"])}
            method(trainer, self._shown(pl_module), checkpoint)

        return call

    def _takes(self, method: Callable[..., Any]) -> Callable[..., Any]:
        copy: nn.Module = method.__self__._average_model  # type: ignore[attr-defined]
        return lambda state: method(self._fitted(copy, state))

    def _shown(self, value: Any) -> Any:
        return _Masters(self._session, self._module) if value is self._module else value

    def _slice(self, average: nn.Module) -> None:
        """Let the parameters of the callback's copy be slices, of the values that the module has."""
        owned = self._session.engine.access.bindings
        copies: dict[nn.Parameter, SlicedTensor] = {}
        for name, parameter in self._module.named_parameters(remove_duplicate=False):
            prefix = "module." if hasattr(average, "n_averaged") else ""
            owner, _, key = f"{prefix}{name}".rpartition(".")
            place: dict[str, Any] = average.get_submodule(owner)._parameters
            if parameter in owned and place.get(key) is not None:
                if parameter not in copies:
                    own: Any = self._session.engine.access.master(parameter).clone()
                    copies[parameter] = own.to(place[key].device, place[key].dtype).as_parameter()
                place[key] = copies[parameter]

    def _fitted(self, copy: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
        """A stored average under the names of ``copy``, of which each rank reads its own slices."""
        own = {unwrapped(key): (key, value) for key, value in copy.state_dict(keep_vars=True).items()}
        fitted = {}
        for key, value in state.items():
            name, target = own.get(unwrapped(key), (key, None))
            if isinstance(target, SlicedTensor) and value.shape == target.shape:
                values: Any = target.clone()
                read_slices([(value, values.start, values.own)])
                value = values
            fitted[name] = value
        return fitted


class _Masters:
    """A module as averaging callbacks use it, with slices of the masters in place of parameters."""

    def __init__(self, session: ZeroSession, module: LightningModule) -> None:
        self._session = session
        self._module = module
        session.engine.take_over_shown()

    def parameters(self) -> Iterator[Tensor]:
        """Slices of masters, in the module's order."""
        access = self._session.engine.access
        for parameter in self._module.parameters():
            yield access.master(parameter) if parameter in access.bindings else parameter

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


def as_shards(value: Any) -> Any:
    """A checkpoint, or a part of one, in which sliced tensors have become what is saved sharded."""
    if isinstance(value, SlicedTensor):
        return FlatShard(value.own, value.shape, value.start)
    if isinstance(value, Mapping) and any(isinstance(item, SlicedTensor) for item in value.values()):
        return {unwrapped(key): as_shards(item) for key, item in value.items()}
    return {key: as_shards(item) for key, item in value.items()} if type(value) is dict else value
