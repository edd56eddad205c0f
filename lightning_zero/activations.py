"""What happens to the tensors that autograd saves for the backward: computed again there, or kept on the host.

Both are torch's own ways: ``torch.utils.checkpoint(use_reentrant=False)`` around the forward of the modules that an
``ActivationPolicy`` names, and saved-tensor hooks that copy to the host. What this adds is what torch leaves to the
caller: weights of other units that such a forward needs are gathered for both forwards, and what would make the second
forward differ in silence (weights or buffers that have changed) is an error that names the module.

[Note: only ``forward`` is wrapped]
The wrapper stands in the instance's ``forward``, inside of the hooks of the engine and of the user, which so run once.
The engine's saved-tensor guard is pushed inside of torch's hooks, in both forwards alike, so torch never sees a view of
gathered weights.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lightning_zero._torch import (
    current_graph_task,
    disable_dynamo,
    tree_flatten,
    tree_map_only,
    tree_unflatten,
    untracked,
    version_probe,
)
from lightning_zero.config import ActivationPolicy
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.guard import check_version
from lightning_zero.engine.unit import ShardedUnit
from lightning_zero.plan import find_recomputed

__all__ = ["Activations", "Recomputed", "SavedOnHost"]

Gathered = Callable[[bool], AbstractContextManager[Any]]
"""Gathers the weights that a forward reads, for as long as the context lasts. ``True``: the forward runs again."""

_State = list[dict[str, Any]]  # plain attributes and buffers of modules, two for each

# Names of a module that are no state of its forward, but for ``training``.
_NOT_STATE = frozenset(vars(nn.Module())) - {"training"} | {"forward", "_compiled_call_impl"}


class Activations:
    """Applies an ``ActivationPolicy`` to the module of an engine. A session makes one for each fit.

    Args:
        engine: runs the module.
        policy: what to do.
        units: class names of the units (the strategy's setting), ``None``: found automatically.

    Raises:
        ValueError: if the policy names classes that the module does not have, or nothing is there to recompute.
    """

    def __init__(self, engine: ZeroEngine, policy: ActivationPolicy, units: Sequence[str] | None = None) -> None:
        self._engine = engine
        self._recomputed: list[Recomputed] = []
        self._saved = SavedOnHost(engine.device, policy.min_kib * 1024) if policy.offload else None
        if policy.checkpointing is not None:
            for name in find_recomputed(engine.module, policy.checkpointing, units):
                module = engine.module.get_submodule(name)
                self._recomputed.append(Recomputed(name, module, self._gathered(module)))

    def training(self) -> AbstractContextManager[Any]:
        """Around a training step, outside of ``engine.step``: what the forwards inside save goes to the host."""
        return nullcontext() if self._saved is None else self._saved.saving()

    def detach(self) -> None:
        """Give modules their own forwards back. Once is enough, twice does no harm."""
        for recomputed in self._recomputed:
            recomputed.remove()
        self._recomputed.clear()

    def _gathered(self, module: nn.Module) -> Gathered:
        """What gathers the weights that a module's forward needs, but for those that its own submodules gather."""
        engine = self._engine
        modules = dict(engine.module.named_modules())
        inside = set(module.modules()) - {module}
        needed = set(module.parameters())
        sharded = [unit for unit in engine.units if isinstance(unit, ShardedUnit)]
        units = [unit for unit in sharded if not needed.isdisjoint(unit.parameters)]
        outside = [unit for unit in units if modules[unit.plan.module] not in inside]

        @contextmanager
        def gathered(again: bool) -> Iterator[None]:
            if again and units and current_graph_task() != -1:
                engine.begin_backward()
            with ExitStack() as stack:
                for unit in outside:
                    engine.before_unit_forward(unit)
                    stack.push(partial(_leave, engine, unit))
                yield

        return gathered


def _leave(engine: ZeroEngine, unit: ShardedUnit, kind: Any, error: Any, trace: Any) -> None:
    engine.after_unit_forward(unit, failed=error is not None)


class Recomputed:
    """Stands in a module's ``forward``, or in what ``module.compile()`` put in front of it, and has that run again in
    backward whenever it is called with gradients enabled. A copy of the module has an ordinary ``forward``."""

    def __init__(self, name: str, module: nn.Module, gathered: Gathered) -> None:
        # What is compiled must run again compiled: it saves other tensors than the same code does uncompiled.
        self._key = "forward" if vars(module).get("_compiled_call_impl") is None else "_compiled_call_impl"
        self._before = vars(module).get(self._key)
        self._module = module
        self._modules = tuple(module.modules())
        self._stores = [store for one in self._modules for store in (vars(one), vars(one).get("_buffers", {}))]
        self.name, self.gathered, self.kind = name, gathered, type(module).__name__
        self.forward: Callable[..., Any] = getattr(module, self._key)
        self._checkpointed = disable_dynamo(_Call.checkpointed)
        update_wrapper(self, self.forward, updated=())
        vars(module)[self._key] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        return self._checkpointed(self, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.forward, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        owner = getattr(self.forward, "__self__", None)
        return (partial, (self.forward,)) if owner is None else (getattr, (owner, self.forward.__name__))

    def remove(self) -> None:
        """Put back what was there, unless somebody has put something else there since."""
        if vars(self._module).get(self._key) is self:
            del vars(self._module)[self._key]
            if self._before is not None:
                vars(self._module)[self._key] = self._before

    def weights(self) -> list[int]:
        """The versions of all parameters: they count every change."""
        return [parameter._version for parameter in self._module.parameters()]

    def state(self) -> _State:
        """Buffers and plain attributes of all modules inside, as they are now. A tensor is held without its graph."""
        return [{key: _without_graph(one) for key, one in _items(store)} for store in self._stores]

    def find_written(self, state: _State, versions: Sequence[int]) -> str:
        """The first tensor of ``state`` that was changed in place since it had these versions, or nothing."""
        found = zip(_tensors(state), versions, strict=True)
        return next(
            (
                f"{type(self._modules[place // 2]).__name__}.{key}"
                for (place, key, one), version in found
                if one._version != version
            ),
            "",
        )

    @contextmanager
    def showing(self, then: _State) -> Iterator[None]:
        """While active, buffers and plain attributes are what they were when the first forward began."""
        now = [dict(_items(store)) for store in self._stores]
        self._put(then)
        try:
            yield
        finally:
            self._put(now)

    def _put(self, state: _State) -> None:
        for store, values in zip(self._stores, state, strict=True):
            for key in store.keys() - _NOT_STATE - values.keys():
                del store[key]
            store.update(values)


def _items(store: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((key, value) for key, value in store.items() if key not in _NOT_STATE)


def _tensors(state: _State) -> Iterator[tuple[int, str, Tensor]]:
    for place, values in enumerate(state):
        for key, value in values.items():
            if isinstance(value, Tensor) and not value.is_inference():
                yield place, key, value


def _without_graph(value: Any) -> Any:
    """What to hold of an attribute: a tensor without its graph, or a chain of graphs would grow from step to step."""
    if type(value) in (list, dict, tuple):
        return tree_map_only(Tensor, _without_graph, value)
    if isinstance(value, Tensor) and value.grad_fn is not None:
        return value.detach().requires_grad_()  # what requires a gradient has to go on requiring one
    return value


class _Call:
    """One forward of a module, which torch calls a second time with the inputs that it has saved."""

    def __init__(self, recomputed: Recomputed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._recomputed = recomputed
        self._called: tuple[Any, Any] | None = (args, kwargs)  # the caller's own containers, for the first forward
        leaves, self._spec = tree_flatten((args, kwargs))
        # Torch saves tensors that are arguments of their own. What is one object now is one later: attention asks.
        self.inputs = {id(leaf): leaf for leaf in leaves}
        places = {key: place for place, key in enumerate(self.inputs)}
        self._places = [places[id(leaf)] for leaf in leaves]
        objects = (leaf for leaf in leaves if hasattr(leaf, "__dict__") and not isinstance(leaf, Tensor))
        self._objects = [(one, dict(vars(one))) for one in objects]
        self._state = recomputed.state()
        self._versions = [tensor._version for _, _, tensor in _tensors(self._state)]
        self._weights = recomputed.weights()
        self._random = random.getstate()  # Python's; torch keeps its own

    @staticmethod
    def checkpointed(recomputed: Recomputed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of the forward, of whose inside autograd saves nothing."""
        call = _Call(recomputed, args, kwargs)
        inputs = list(call.inputs.values())
        call.inputs.clear()
        return checkpoint(call, *inputs, use_reentrant=False)

    def __call__(self, *inputs: Any) -> Any:
        recomputed = self._recomputed
        if self._called is not None:
            (args, kwargs), self._called = self._called, None
            with recomputed.gathered(False):
                output = recomputed.forward(*args, **kwargs)
            self._refuse_changes("in place by")
            return output
        if self._weights != recomputed.weights():
            raise RuntimeError(
                f"The weights of '{recomputed.name}' were changed (by an optimizer step) between this forward and its "
                "backward, so the gradients would be wrong. Run forward again after the step, or step later."
            )
        self._refuse_changes("in place after")
        args, kwargs = tree_unflatten([inputs[place] for place in self._places], self._spec)
        now = random.getstate()
        random.setstate(self._random)
        try:
            with recomputed.showing(self._state), recomputed.gathered(True):
                return recomputed.forward(*args, **kwargs)
        finally:
            random.setstate(now)

    def _refuse_changes(self, by: str) -> None:
        recomputed = self._recomputed
        written = recomputed.find_written(self._state, self._versions)
        for one, before in self._objects:
            if _ids(vars(one)) != _ids(before):
                written = f"An argument of class {type(one).__name__}"
        if written:
            raise RuntimeError(
                f"{written} was changed {by} the forward of '{recomputed.name}', which runs again in backward and "
                "would find other values then, so the gradients would be wrong. (It is a running statistic, a counter, "
                "a codebook, or a cache of keys and values, which `use_cache=False` switches off.) Leave this class "
                f"out: ActivationPolicy(checkpointing=[...]) with class names other than {recomputed.kind}; or freeze "
                "what changes (`eval()`)."
            )


def _ids(attributes: dict[str, Any]) -> dict[str, int]:
    return {key: id(value) for key, value in attributes.items()}


_SPARSE = 8  # what shows less than 1 / this of the bytes it spans stays on the device


class SavedOnHost:
    """Keeps on the host what autograd saves, until the backward needs it: ``torch.autograd.graph.save_on_cpu`` that
    leaves small tensors and weights where they are, keeps strides (kernels, and so bits, depend on them), and goes on
    checking for changes in place, which saved-tensor hooks switch off.

    Copies are in order with the device's work and do not block the host. On the CPU they are real copies, too.
    """

    def __init__(self, device: torch.device, min_nbytes: float) -> None:
        self._device, self._min_nbytes = device, min_nbytes
        # Permanent objects that Dynamo does not trace.
        self._hooks = disable_dynamo(self._pack), disable_dynamo(self._unpack)

    def saving(self) -> saved_tensors_hooks:
        """A context in which this thread's saved tensors go to the host."""
        return saved_tensors_hooks(*self._hooks)

    def _pack(self, tensor: Tensor) -> Any:
        if self._stays(tensor):
            return tensor, tensor, tensor._version
        locked = self._device.type == "cuda"
        with untracked():
            host = torch.empty_like(tensor, device="cpu", pin_memory=locked).copy_(tensor, non_blocking=True)
            return host, version_probe(tensor), tensor._version, tensor.stride()

    def _unpack(self, packed: Any) -> Tensor:
        saved: Tensor
        saved, probe, version, *stride = packed
        check_version(probe, version, saved.dtype, saved.shape)
        if not stride:
            return saved
        with untracked():
            back = torch.empty_strided(saved.shape, *stride, dtype=saved.dtype, device=self._device)
            saved = back.copy_(saved, non_blocking=True)
        return saved

    def _stays(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.device != self._device:
            return True  # parameters are a type of their own
        if isinstance(tensor._base, nn.Parameter) or tensor.is_quantized or not tensor.numel():
            return True
        if tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor() or 0 in tensor.stride():
            return True
        spans = 1 + sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
        return tensor.nbytes < self._min_nbytes or spans > _SPARSE * tensor.numel()
