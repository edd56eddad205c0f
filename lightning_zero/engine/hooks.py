"""The only place that registers hooks. Each is one line into the engine; all are removed by one call."""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import get_spawning_popen
from typing import Any
from weakref import ref

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_zero._torch import (
    compiler_of_frames,
    disable_dynamo,
    forward_hooks,
    hook_gradient,
    in_function_transform,
    is_compiled_module,
    is_tracing,
    no_subclasses,
    opaque_to_dynamo,
    sequence_number,
    take_gradient,
    tree_leaves,
    watched,
)
from lightning_zero.engine.events import Span
from lightning_zero.engine.reducer import GradientBucket
from lightning_zero.engine.tied import TiedLayer, tied_layers
from lightning_zero.engine.unit import ReplicatedUnit, ShardedUnit, Unit
from lightning_zero.errors import ParameterAccessError, ZeroError
from lightning_zero.shards.binding import get_gradient, is_absent, set_gradient

__all__ = ["EngineHooks", "ForwardCall", "hook_outputs", "unhooked", "warn_of_formats"]


class EngineHooks:
    """Hooks of one engine on one module tree."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine  # the ``ZeroEngine``
        self._handles: list[Any] = []
        self._watched: set[str] = set()  # names of modules whose forwards have hooks
        self._tied: list[TiedLayer] = []

    def watch_module(self, units: Sequence[Unit], root: int | None) -> None:
        """Watch what the module of an engine with these units needs. ``root``: which of them is the root.

        That is every unit's module, and every module around units or with parameters that no unit's forward brings:
        those of the root, or of replicated units with 16-bit copies.
        """
        engine, module = self._engine, self._engine.module
        by_module = {unit.plan.module: unit for unit in units if isinstance(unit, ShardedUnit) and unit.plan.module}
        scoped: list[Unit] = [unit for unit in units if isinstance(unit, ReplicatedUnit) and not unit.always_bound]
        around = {part for name in by_module for part in _around(name)}
        brought: defaultdict[str, list[ReplicatedUnit]] = defaultdict(list)  # by module: what its forward waits for
        scoped += [unit for unit in units if unit.index == root and isinstance(unit, ShardedUnit)]
        for unit in scoped:
            owners = {name.rpartition(".")[0] for one in unit.plan.parameters for name in (one.name, *one.aliases)}
            around |= owners
            if isinstance(unit, ReplicatedUnit):
                for name in owners:
                    brought[name].append(unit)
        self._watched = {*by_module, *around, ""} if by_module or around else set()
        narrowed = any(flat.layout.dtype != flat.layout.compute_dtype for unit in units for flat in unit.flats)
        for name, child in module.named_modules():
            if isinstance(child, nn.TransformerEncoder):
                # It looks at weights of its first layer, before it calls that, and evaluates by another path.
                first = f"{name}.layers.0.".lstrip(".")
                for unit in [unit for path, unit in by_module.items() if f"{path}.".startswith(first)]:
                    self._around(child, partial(_evaluated, engine, unit), partial(engine.after_unit_forward, unit))
            if name in by_module:
                self._watch_unit(child, by_module[name])
            elif name in self._watched:
                self._watch_scope(child, name or type(child).__name__, brought[name])
            if isinstance(child, nn.RNNBase):
                # On a GPU it moves weights into one block of memory, past everything that sees a parameter be changed.
                # What stands in its place does nothing, and needs nothing of this package in a copy of the module.
                vars(child)["flatten_parameters"] = nullcontext().__enter__
            if isinstance(child, _NORMS) and narrowed and engine.device.type == "cpu":
                self._handles.append(child.register_forward_pre_hook(_Narrowed()))

    def watch_parts(self, units: Iterable[ShardedUnit]) -> None:
        """Watch the modules inside units as the units' own: somebody calls these past the module around them.

        Once is enough, twice does no harm. Not where ``torch.compile`` would meet the hooks.
        """
        module = self._engine.module
        if any(is_compiled_module(child) for child in module.modules()):
            return
        for unit in units:
            top = f"{unit.plan.module}." if unit.plan.module else ""
            names = [name for spec in unit.plan.parameters for name in (spec.name, *spec.aliases)]
            parts = {part for name in names for part in _around(name) if top and part.startswith(top)}
            for part in sorted(parts - self._watched):
                self._watched.add(part)
                self._watch_unit(module.get_submodule(part), unit)

    def _watch_unit(self, module: nn.Module, unit: ShardedUnit) -> None:
        """Gather ``unit`` around every forward of ``module``, before the user's own hooks see it."""
        engine = self._engine
        self._around(module, partial(engine.before_unit_forward, unit), partial(engine.after_unit_forward, unit))

    def _watch_scope(self, module: nn.Module, name: str, units: Sequence[ReplicatedUnit]) -> None:
        """Keep the root's parameters in place around every forward of a module that is not a unit itself.

        New weights of the replicated ``units`` that own parameters of it are there when it begins.
        """
        engine = self._engine
        scope = f"forward of '{name}'"

        def before(module: nn.Module, args: Any) -> None:
            engine.enter(scope, called=True)
            if units:
                engine.weights.bring(units)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            engine.leave(failed=output is None and sys.exc_info()[1] is not None)

        self._around(module, before, after)

    def watch_gradients(self, buckets: Sequence[GradientBucket]) -> None:
        """Hand every finished gradient to the engine, which the module keeps from here on.

        Else it would go with the Trainer of its fit, at another moment on every rank, and gradients elsewhere with it.
        """
        module = self._engine.module
        keep = _Attached(lambda *_, engine=self._engine: None, module)
        self._handles.append(module.register_state_dict_pre_hook(keep))
        register: Any = Tensor.register_post_accumulate_grad_hook
        for bucket in buckets:
            for position, parameter in enumerate(bucket.flat.parameters):
                with no_subclasses():  # absent parameters would be asked one by one
                    handle = register(parameter, _collector(bucket, position, self._engine))
                self._handles.append(handle)
                self._engine.access.bindings[parameter].last_hook = handle.id

    def sum_tied(self, weights: Collection[nn.Parameter], hold: Callable[[nn.Parameter, Tensor], Tensor]) -> None:
        """Have the parts of these weights' gradients added up where ``hold`` puts the first one."""
        self._tied = list(tied_layers(self._engine.module, weights, hold))

    @contextmanager
    def tied(self) -> Iterator[None]:
        """While active, each layer of a tied weight computes with an alias of it."""
        for one in self._tied:
            vars(one.layer).setdefault("forward", one)
        try:
            yield
        finally:
            for one in self._tied:
                if vars(one.layer).get("forward") is one:
                    del vars(one.layer)["forward"]

    def remove(self) -> None:
        """Take all hooks off the module again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for child in self._engine.module.modules():
            if isinstance(child, nn.RNNBase):
                vars(child).pop("flatten_parameters", None)

    def _around(self, module: nn.Module, before: Any, after: Any) -> None:
        self._handles.append(module.register_forward_pre_hook(_Attached(before, module), prepend=True))
        self._handles.append(module.register_forward_hook(_Attached(after, module), always_call=True))


def _around(name: str) -> list[str]:
    """The paths of all modules around what has a path, the outermost first; without the root."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _collector(bucket: GradientBucket, position: int, engine: Any) -> Callable[[Tensor], None]:
    """What autograd calls with a parameter whose gradient is finished: nearly all only have to be copied, here."""
    # Weak: Python's collector does not see through this kind of hook, so what it held would never be freed.
    weak_engine, weak_bucket = ref(engine), ref(bucket)

    def arrived(parameter: Tensor) -> None:
        bucket, engine = weak_bucket(), weak_engine()
        if bucket is None or engine is None:
            return
        now, room, taken = bucket.round, bucket.room, None
        first = room is None and not now.launched
        if (now.plain or first) and position not in now.arrived and not torch.is_grad_enabled() and not watched():
            gradient = get_gradient(parameter)  # past what user code sees
            if gradient is not None and gradient.layout is torch.strided:
                set_gradient(parameter, None)  # its dtype may be another now, which takes no such gradient back
                room = engine.room_for(bucket) if first else room
                if now.plain and room:
                    room.views[position].copy_(gradient)
                    now.arrived.add(position)
                    now.dirty = True
                    if len(now.arrived) == len(room.views):
                        engine.bucket_filled(bucket)
                    return
                taken = gradient
        engine.gradient_arrived(bucket, position, take_gradient(parameter) if taken is None else taken)

    return arrived


class _Attached:
    """A hook that does not travel into what is made of its module: a copy, a pickle, a script, a trace.

    Made while parameters are placeholders, that would be a dense model of NaN. Where values are there, nothing is left
    of the hook: a call of the standard library that returns ``None``, so that the copy needs nothing of this package.
    """

    __slots__ = ("_disabled", "_function", "_module")

    def __init__(self, function: Callable[..., Any], module: nn.Module) -> None:
        self._function = function
        self._disabled = disable_dynamo(function)
        self._module = ref(module)

    def __call__(self, *args: Any) -> None:
        if is_tracing():
            self.refuse_absent("A trace")
        try:
            (self._function if compiler_of_frames() is None else self._disabled)(*args)
        except ZeroError:
            raise
        except RuntimeError as error:
            if not in_function_transform():
                raise
            raise ParameterAccessError(
                f"{type(self._module()).__name__} was called inside of a transform of torch.func that differentiates, "
                "where its parameters cannot be put together. Use torch.autograd.grad; or run the transform inside "
                "`with lightning_zero.full_parameters(module):`, on every rank, outside of a step; or use stage 1 or 2."
            ) from error

    opaque_to_dynamo(__call__)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        self.refuse_absent("A copy")
        return nullcontext().__exit__

    def __reduce__(self) -> tuple[Any, ...]:
        self.refuse_absent("A pickle")
        return getattr, (nullcontext(), "__exit__")

    @property
    def __name__(self) -> str:
        """What ``torch.jit.script`` asks for first, to compile the hook with the module."""
        self.refuse_absent("A script")
        raise AttributeError("__name__")

    def refuse_absent(self, what: str) -> None:
        """Raise ParameterAccessError if values would be missing in ``what`` is made of the module.

        Not while a process is spawned, a loader's worker: there an absent parameter raises when it is read.
        """
        module = None if get_spawning_popen() is not None else self._module()
        if module is not None and any(map(is_absent, nn.Module.parameters(module))):
            raise ParameterAccessError(
                f"{what} of {type(module).__name__} was requested while its parameters are not in memory: it would "
                "contain NaN. Do it inside `with lightning_zero.full_parameters(module):`, on every rank, outside of a "
                "step; that takes the memory of the full module."
            )


def warn_of_formats(root: nn.Module) -> None:
    """Name a convolution whose weight is in channels-last format: parameters are laid out contiguously."""
    for name, module in root.named_modules():
        weight = module._parameters.get("weight") if isinstance(module, _CONVOLUTIONS) else None
        if weight is not None and not weight.is_contiguous() and weight.shape[1] > 1:
            rank_zero_warn(
                f"The weight of '{name}' is in channels-last format, and is laid out contiguously here. Give the model "
                "its images in that format (`images.to(memory_format=torch.channels_last)`), and convolutions compute "
                "in it as before; otherwise they compute in the ordinary one, and last bits differ from DDP's."
            )
            return


_CONVOLUTIONS = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)


_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


class _Narrowed:
    """Casts a norm's input to the dtype of its weight, where that is narrower: on CPUs, autocast leaves norms what they
    get, and torch takes no wider inputs there. A copy of it does nothing. ``torch.compile`` looks inside."""

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        weight = module.weight
        if not args or not isinstance(weight, Tensor) or args[0].dtype.itemsize <= weight.dtype.itemsize:
            return None
        return (args[0].to(weight.dtype), *args[1:])


@contextmanager
def unhooked(root: nn.Module, whole: Collection[nn.Parameter]) -> Iterator[None]:
    """While active, modules all of whose parameters are ``whole`` have no hooks of an engine.

    They can be called by one rank alone then, and copied, pickled, scripted or traced like any others.
    """
    taken: list[tuple[OrderedDict[int, Any], dict[int, Any], set[int]]] = []
    for module in root.modules():
        tables = forward_hooks(module)
        ours = {key for table in tables[:2] for key, hook in table.items() if isinstance(hook, _Attached)}
        if ours and all(parameter in whole for parameter in nn.Module.parameters(module)):
            for table in tables:
                taken.append((table, dict(table), ours))
                for key in ours & table.keys():
                    del table[key]
    try:
        yield
    finally:
        for table, before, ours in taken:
            now = dict(table)
            table.clear()
            table.update({key: hook for key, hook in before.items() if key in now or key in ours} | now)


def _evaluated(engine: Any, unit: ShardedUnit, module: nn.Module, *called: Any) -> None:
    """``before_unit_forward`` of what a module looks at when it evaluates."""
    if not module.training:
        engine.before_unit_forward(unit)


@dataclass(eq=False, slots=True)
class ForwardCall:
    """One forward of a unit, and what autograd calls before its backward."""

    engine: Any
    unit: ShardedUnit
    version: int  # the weights it computes with
    first_node: int  # autograd's next sequence number when it began: nodes from here on are its own
    guarded: bool  # whether the saved-tensor guard was pushed for it
    implicit: bool  # whether it opened a scope of its own, being called outside of any
    recomputed: bool  # whether it runs inside a backward (activation checkpointing)
    counted: bool = False  # whether its backward is still to come and its unit waits for it
    span: Span | None = None  # opened for listeners

    def __call__(self, *_: Any) -> None:
        self.engine.before_unit_backward(self)


def hook_outputs(output: Any, call: ForwardCall) -> bool:
    """Have ``call`` called before the first backward node of this forward. Returns whether it will be.

    A tensor hook on each output, and a prehook on the node behind an output that is a view: autograd drops the tensor
    hooks of a view that is changed in place later (``y = block(x); y += x``), but the node stays.
    """
    hooked = False
    for tensor in (output,) if type(output) is Tensor else tree_leaves(output):
        node = tensor.grad_fn if isinstance(tensor, Tensor) else None
        if node is None:
            continue
        if sequence_number(node) >= call.first_node:
            if not hook_gradient(tensor, call):
                tensor.register_hook(call)
            hooked = True
        base = tensor._base
        if base is not None and base.grad_fn is not None and sequence_number(base.grad_fn) >= call.first_node:
            base.grad_fn.register_prehook(call)
            hooked = True
    return hooked
