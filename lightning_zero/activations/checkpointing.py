"""Modules whose forward is run again in backward, instead of keeping what it computed.

[Note: only ``forward`` is wrapped]
The wrapper stands in the instance's ``forward``, inside of everything that happens around a call: the engine's hooks
and the user's run once. So the units whose weights the forward needs are made whole for the second one explicitly, and
what is saved of their slots is seen by the guard, inside of torch's hooks, in both forwards alike. Names, parameters
and ``state_dict`` are as they were; a copy of the module has an ordinary ``forward``.

[Note: the same bits]
Torch restores its own random state and autocast. In addition the second forward sees the inputs as they were (all
tensors, in keyword arguments and nested ones too, saved as autograd saves: guarded against in-place changes, and
offloaded if that is asked for), attributes, buffers and objects among the arguments as they were (``states``),
Python's random state as it was, and it refuses to run with other weights. NumPy's random state, and all that neither
the module nor its arguments lead to, is as it happens to be: a forward that depends on it does not belong in a policy.
"""

from __future__ import annotations

import copy
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_zero._torch import (
    Pack,
    Unpack,
    disable_dynamo,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    top_saved_tensor_hooks,
    tree_flatten,
    tree_unflatten,
    version_probe,
)
from lightning_zero.activations.offload import check_version
from lightning_zero.activations.states import CallStates, HeldTensor, Key

__all__ = ["Checkpointing", "Gathered"]

Gathered = Callable[[bool], AbstractContextManager[None]]
"""Makes the weights that a forward reads whole, with the engine's guard inside of torch's hooks, as long as the context
lasts. It is told whether the forward runs again."""


class VersionCheck:
    """Autograd's own check for in-place changes, where other saved-tensor hooks have switched it off. Hands everything
    on to these.

    Torch's activation checkpointing keeps no versions: a forward that changes a tensor after saving it (``h = x.exp();
    y = f(h); h.mul_(2)``), which plain torch refuses, would be run again up to some point, and backward would read
    whatever is in the memory then.
    """

    def __init__(self) -> None:
        self._outer: list[tuple[Pack, Unpack]] = []
        # Permanent objects that Dynamo does not trace.
        self._pack_hook = disable_dynamo(self._pack)
        self._unpack_hook = disable_dynamo(self._unpack)

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Check what is saved inside, on this thread. Nests."""
        outer = top_saved_tensor_hooks()
        if outer is None:  # torch checks
            yield
            return
        self._outer.append(outer)
        push_saved_tensor_hooks(self._pack_hook, self._unpack_hook)
        try:
            yield
        finally:
            pop_saved_tensor_hooks()
            self._outer.pop()

    def _pack(self, tensor: Tensor) -> Any:
        pack, unpack = self._outer[-1]
        packed, check = pack(tensor), None
        if type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided:
            check = partial(check_version, version_probe(tensor), tensor._version, tensor.dtype, tensor.shape)
        return packed, unpack, check

    def _unpack(self, saved: tuple[Any, Unpack, Callable[[], None] | None]) -> Tensor:
        packed, unpack, check = saved
        if check is not None:
            check()
        return unpack(packed)


class Checkpointing:
    """Runs the forwards of some modules, by name, again in backward, whenever they are called with gradients enabled.
    ``gathered`` gives what makes the weights of a module's forward whole."""

    def __init__(self, modules: dict[str, nn.Module], gathered: Callable[[nn.Module], Gathered]) -> None:
        self._wrapped: list[_RecomputedForward] = []
        check = VersionCheck()
        try:
            for name, module in modules.items():
                self._wrapped.append(_RecomputedForward(name, module, gathered(module), check))
        except BaseException:
            self.detach()
            raise

    def detach(self) -> None:
        """Give every module its own forward back."""
        for wrapped in self._wrapped:
            wrapped.remove()
        self._wrapped.clear()


class _RecomputedForward:
    """Stands in a module's ``forward``, or in what ``module.compile()`` put in front of it."""

    def __init__(self, name: str, module: nn.Module, gathered: Gathered, check: VersionCheck) -> None:
        # What is compiled must be run again compiled: it saves other tensors than the same code does uncompiled.
        self._key = "forward" if vars(module).get("_compiled_call_impl") is None else "_compiled_call_impl"
        self._before = vars(module).get(self._key)
        self._module = module
        self.name = name
        self.gathered = gathered
        self.check = check
        self.forward: Callable[..., Any] = getattr(module, self._key)
        self.parameters = tuple(module.parameters())
        self._modules = tuple(module.modules())
        self._constant: set[Key] = set()  # large tensors of its state that the last forward left alone
        self._calls: weakref.WeakSet[_Call] = weakref.WeakSet()  # that may be repeated
        self._again = disable_dynamo(self._checkpointed)
        update_wrapper(self, self.forward, updated=())
        vars(module)[self._key] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Not a matter of the step method: a checkpoint of the user around this module repeats the call in backward,
        # and must find it as it was.
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        return self._again(args, kwargs)

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

    def versions(self) -> list[int]:
        """What the weights count: a forward with other weights is never repeated."""
        return [parameter._version for parameter in self.parameters]

    def refuse(self, held: HeldTensor) -> None:
        """Say that a tensor of the state before the forward is not known any more."""
        raise RuntimeError(
            f"{held.where} was changed between forward and backward: a tensor of shape {list(held.value.shape)}, in "
            f"place, after '{self.name}' was called, which is to run again in backward. Its old values were not "
            "kept (only those of small tensors, and of large ones that change from the first call on, which are "
            "buffers or attributes themselves), so the gradients would be wrong. Leave this class out: "
            f"ActivationPolicy(checkpointing=[...]) with class names other than {type(self._module).__name__}. Or put "
            "a new tensor in its place (self.x = self.x + y, not self.x += y)."
        )

    def _checkpointed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # All tensors as arguments of their own: torch looks no deeper to save them. Each once: what is one object now
        # is one object later, because forwards ask (attention of a sequence to itself: ``query is key``).
        leaves, spec = tree_flatten((args, kwargs))
        unique = {id(leaf): leaf for leaf in leaves}
        places = {key: place for place, key in enumerate(unique)}
        self._forget()
        states = CallStates(self._modules, tuple(unique.values()), self._constant)
        call = _Call(self, args, kwargs, [places[id(leaf)] for leaf in leaves], spec, states)
        self._calls.add(call)
        return checkpoint(call.run, *unique.values(), use_reentrant=False)

    def _forget(self) -> None:
        """Let go of what earlier calls hold that will not be repeated: objects there may hold the graph of the call
        before them, and so on, back to the first step."""
        versions = self.versions()
        for call in list(self._calls):
            if call.is_over(versions):
                self._calls.discard(call)
                call.states = None


@dataclass(eq=False)
class _Call:
    """One forward of a module with ``args`` and ``kwargs``, and its repetitions.

    These are made by ``spec`` of leaves, whose ``places`` say which of the different ones each is. ``states`` are those
    of the module and the arguments before the forward; ``None`` if that will not be repeated.
    """

    wrapped: _RecomputedForward
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    places: Sequence[int]
    spec: Any
    states: CallStates | None
    versions: list[int] | None = None  # of the weights, after the forward
    random_state: Any = None  # Python's, before it

    def run(self, *leaves: Any) -> Any:
        """The forward: first as it was called, later with saved inputs. Refused if weights are not what they were, or
        state cannot be."""
        if self.random_state is not None:
            return self._repeat(leaves)
        self.random_state = random.getstate()
        args, kwargs = self.args, self.kwargs  # the caller's own containers: the forward may write to them
        del self.args, self.kwargs
        with self.wrapped.check.checking(), self.wrapped.gathered(False):
            output = self.wrapped.forward(*args, **kwargs)
        self.versions = self.wrapped.versions()
        if self.states is not None:
            self.states.settle()
        return output

    def is_over(self, versions: list[int]) -> bool:
        """Whether it will not be repeated, because weights have changed; ``versions`` is what they count."""
        return self.versions is not None and self.versions != versions

    def _repeat(self, leaves: Sequence[Any]) -> Any:
        wrapped = self.wrapped
        if self.states is None or self.is_over(wrapped.versions()):
            raise RuntimeError(
                f"The weights of '{wrapped.name}' were changed (by an optimizer step) between this forward and its "
                "backward, so the gradients would be wrong. Run forward again after the step, or step later."
            )
        args, kwargs = tree_unflatten([leaves[place] for place in self.places], self.spec)
        state = random.getstate()
        with self.states.shown(wrapped.refuse), wrapped.gathered(True):
            random.setstate(self.random_state)
            try:
                return wrapped.forward(*args, **kwargs)
            finally:
                random.setstate(state)
