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
from lightning_zero.plan.units import find_recomputed
from lightning_zero.registry import extension

__all__ = ["Activations", "Recomputed", "SavedOnHost"]

Gathered = Callable[[bool], AbstractContextManager[Any]]
"""Gathers the weights that a forward reads, for as long as the context lasts. ``True``: the forward runs again."""

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
        self._partitioned: Any = None
        if policy.partition:
            to_host = None if self._saved is None else (self._saved.pack, self._saved.unpack)
            split = extension("partitioned_activations").Partitioned
            self._partitioned = split(engine.module, policy.min_kib * 1024, to_host)
        if policy.checkpointing is not None:
            for name in find_recomputed(engine.module, policy.checkpointing, units):
                module = engine.module.get_submodule(name)
                keeping = nullcontext if self._partitioned is None else self._partitioned.keeping(name)
                self._recomputed.append(Recomputed(name, module, self._gathered(module), keeping))

    def training(self) -> AbstractContextManager[Any]:
        """Around a training step, outside of ``engine.step``: what the forwards inside save goes to the host."""
        if self._partitioned is not None:
            self._partitioned.check()
        return nullcontext() if self._saved is None else self._saved.saving()

    def detach(self) -> None:
        """Give modules their own forwards back. Once is enough, twice does no harm."""
        while self._recomputed:
            self._recomputed.pop().remove()

    def _gathered(self, module: nn.Module) -> Gathered:
        """What gathers the weights that a module's forward needs, but for those that its own submodules gather."""
        engine = self._engine
        modules, inside = dict(engine.module.named_modules()), {*module.modules()} - {module}
        needed = set(module.parameters())
        units = [u for u in engine.units if isinstance(u, ShardedUnit) and not needed.isdisjoint(u.parameters)]
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

    def __init__(
        self,
        name: str,
        module: nn.Module,
        gathered: Gathered,
        keeping: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        # What is compiled must run again compiled: it saves other tensors than the same code does uncompiled.
        self._key = "forward" if vars(module).get("_compiled_call_impl") is None else "_compiled_call_impl"
        self._before = vars(module).get(self._key)
        self._module, self.name, self._gathered, self._keeping = module, name, gathered, keeping
        self.forward: Callable[..., Any] = getattr(module, self._key)
        self._stores = [store for one in module.modules() for store in (vars(one), one._buffers)]
        self._checkpointed = disable_dynamo(self._run)
        update_wrapper(self, self.forward, updated=())
        vars(module)[self._key] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._checkpointed(args, kwargs) if torch.is_grad_enabled() else self.forward(*args, **kwargs)

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

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One forward, which torch runs a second time with the inputs that it has saved."""
        leaves, spec = tree_flatten((args, kwargs))
        # Torch saves tensors that are arguments of their own. What is one object now is one later: attention asks.
        inputs = {id(leaf): leaf for leaf in leaves}
        places = [list(inputs).index(id(leaf)) for leaf in leaves]
        plain = (leaf for leaf in inputs.values() if hasattr(leaf, "__dict__") and not isinstance(leaf, Tensor))
        objects = [(one, dict(vars(one))) for one in plain]
        called: list[Any] = [(args, kwargs)]  # the caller's own containers, for the first forward
        state = [{key: _without_graph(value) for key, value in store.items()} for store in self._state()]
        versions = [(key, value, value._version) for key, value in self._tensors(state)]
        weights = [parameter._version for parameter in self._module.parameters()]
        chance = random.getstate()  # Python's; torch keeps its own

        def forward(*inputs: Any) -> Any:
            if called:
                first, more = called.pop()
                with self._gathered(False):
                    output = self.forward(*first, **more)
                self._refuse_changes(versions, objects, "by")
                return output
            if weights != [parameter._version for parameter in self._module.parameters()]:
                raise RuntimeError(
                    f"The weights of '{self.name}' were changed (by an optimizer step) between this forward and its "
                    "backward, so the gradients would be wrong. Run forward again after the step, or step later."
                )
            self._refuse_changes(versions, objects, "after")
            given, named = tree_unflatten([inputs[place] for place in places], spec)
            now, chance_now = self._state(), random.getstate()
            self._put(state)
            random.setstate(chance)
            try:
                with self._gathered(True):
                    return self.forward(*given, **named)
            finally:
                self._put(now)
                random.setstate(chance_now)

        with self._keeping():  # torch saves the inputs, and hides what is saved inside
            return checkpoint(forward, *inputs.values(), use_reentrant=False)

    def _state(self) -> list[dict[str, Any]]:
        """Buffers and plain attributes of all modules inside, as they are now."""
        return [{key: value for key, value in store.items() if key not in _NOT_STATE} for store in self._stores]

    def _put(self, state: Sequence[dict[str, Any]]) -> None:
        for store, values in zip(self._stores, state, strict=True):
            for key in store.keys() - _NOT_STATE - values.keys():
                del store[key]
            store.update(values)

    def _tensors(self, state: Sequence[dict[str, Any]]) -> Iterator[tuple[str, Tensor]]:
        for module, values in zip((m for m in self._module.modules() for _ in range(2)), state, strict=True):
            for key, value in values.items():
                if isinstance(value, Tensor) and not value.is_inference():
                    yield f"{type(module).__name__}.{key}", value

    def _refuse_changes(self, versions: Sequence[tuple[str, Tensor, int]], objects: Sequence[Any], when: str) -> None:
        changed = [key for key, tensor, version in versions if tensor._version != version]
        changed += [f"An argument of class {type(one).__name__}" for one, before in objects if _differs(one, before)]
        if changed:
            raise RuntimeError(
                f"{changed[0]} was changed in place {when} the forward of '{self.name}', which runs again in backward "
                "and would find other values then, so the gradients would be wrong. (It is a running statistic, a "
                "counter, a codebook, or a cache of keys and values, which `use_cache=False` switches off.) Leave this "
                "class out: ActivationPolicy(checkpointing=[...]) with class names other than "
                f"{type(self._module).__name__}; or freeze what changes (`eval()`)."
            )


def _without_graph(value: Any) -> Any:
    """What to hold of an attribute: a tensor without its graph, or a chain of graphs would grow from step to step."""
    if type(value) in (list, dict, tuple):
        return tree_map_only(Tensor, _without_graph, value)
    if isinstance(value, Tensor) and value.grad_fn is not None:
        return value.detach().requires_grad_()  # what requires a gradient has to go on requiring one
    return value


def _differs(one: Any, before: dict[str, Any]) -> bool:
    now = vars(one)
    return now.keys() != before.keys() or any(now[key] is not before[key] for key in before)


class SavedOnHost:
    """Keeps on the host what autograd saves, until the backward needs it: ``torch.autograd.graph.save_on_cpu`` that
    leaves small tensors and weights where they are, keeps strides (kernels, and so bits, depend on them), and goes on
    checking for changes in place, which saved-tensor hooks switch off.

    Copies are in order with the device's work and do not block the host. On the CPU they are real copies, too.
    """

    def __init__(self, device: torch.device, min_nbytes: float) -> None:
        self._device, self._min_nbytes = device, min_nbytes
        # Permanent objects that Dynamo does not trace.
        self._hooks = disable_dynamo(self.pack), disable_dynamo(self.unpack)

    def saving(self) -> saved_tensors_hooks:
        """A context in which this thread's saved tensors go to the host."""
        return saved_tensors_hooks(*self._hooks)

    def pack(self, tensor: Tensor) -> Any:
        plain = type(tensor) is Tensor and tensor.layout is torch.strided and tensor.device == self._device
        weight = isinstance(tensor._base, nn.Parameter)  # parameters are a type of their own
        small = tensor.nbytes < max(1, self._min_nbytes) if plain else True
        if small or weight or tensor.is_conj() or tensor.is_neg() or 0 in tensor.stride():
            return tensor, tensor, tensor._version
        with untracked():
            host = torch.empty_like(tensor, device="cpu", pin_memory=self._device.type == "cuda")
            host.copy_(tensor, non_blocking=True)
            return host, version_probe(tensor), tensor._version, tensor.stride()

    def unpack(self, packed: Any) -> Tensor:
        saved: Tensor
        saved, probe, version, *stride = packed
        check_version(probe, version, saved.dtype, saved.shape)
        if not stride:
            return saved
        with untracked():
            back = torch.empty_strided(saved.shape, *stride, dtype=saved.dtype, device=self._device)
            return back.copy_(saved, non_blocking=True)
