"""A module's state as it was when a forward began, for running that forward once more without a trace.

[Note: state and a second forward]
A second forward must see what the first one saw: the vectors of a spectral norm, a codebook, a counter that decides,
the hidden state of the last call, what the parent has set, what a cache held, whether the module is training. And it
must leave nothing behind: running statistics would move twice, a counter count twice, an auxiliary loss on the module
become another tensor, a cache hold everything twice. So it runs with the attributes, buffers and argument objects of
then, and afterwards all have again what they had before it. What is seen of them, and what is not: ``object_states``.

Small buffers and tensor attributes are copied, always. A large one (a mask) is copied at the first call, and later only
if it was seen to change; if it changes for the first time later, the second forward is refused. So it is for a tensor
that is reached through containers or arguments, of any size, if it is changed in place. Two tensors of one module that
share memory do not share it in their copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero._torch import untracked
from lightning_zero.activations.object_states import HeldTensor, ObjectStates

__all__ = ["ModuleStates", "StateWatch"]

_SMALL_NBYTES = 64 << 10
# Torch's own names, of which only ``training`` is state, and where forwards are wrapped.
_NOT_STATE = frozenset(vars(nn.Module())) - {"training"} | {"forward", "_compiled_call_impl"}
_Key = tuple[int, str]


class StateWatch:
    """The state of a module and all modules below, over many forwards.

    Args:
        name: of the module, for people.
        module: whose state.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.kind = type(module).__name__
        self._owners = tuple(module.modules())
        self._constant: set[_Key] = set()  # large tensors that the last forward left alone

    def take(self, arguments: Sequence[Any]) -> ModuleStates:
        """The state as it is now, just before a forward.

        Args:
            arguments: leaves of what it is called with. Tensors among them are left to the caller.
        """
        states = ObjectStates()
        large: list[tuple[_Key, HeldTensor]] = []
        with untracked():
            for owner in self._owners:
                kind = type(owner).__name__
                own = states.add_names(vars(owner), _NOT_STATE, "Attribute", kind)
                if isinstance(owner._buffers, dict):  # not of a scripted module
                    own += states.add_names(owner._buffers, (), "Buffer", kind)
                for name, held in own:
                    self._copy((id(owner), name), held, large)
            for argument in arguments:
                if not isinstance(argument, Tensor):
                    states.add(argument, f"An argument of class {type(argument).__name__}")
        states.seal()
        return ModuleStates(self, states, large)

    def settle(self, large: Sequence[tuple[_Key, HeldTensor]]) -> None:
        """Learn from a forward that has just ended, and give up copies of large tensors that did not change."""
        for key, held in large:
            if not held.is_changed() and (held.copy is None or _has_same_bytes(held.copy, held.value)):
                self._constant.add(key)
                held.copy = None
            else:
                self._constant.discard(key)

    def _copy(self, key: _Key, held: HeldTensor, large: list[tuple[_Key, HeldTensor]]) -> None:
        is_large = held.value.numel() * held.value.element_size() > _SMALL_NBYTES
        if is_large:
            large.append((key, held))
        if held.copy is None and not (is_large and key in self._constant):
            held.copy = held.value.detach().clone()


class ModuleStates:
    """The state of a module and all modules below at one moment.

    Args:
        watch: of the module.
        states: of all that it has and is given.
        large: tensors whose copies may turn out to be needless.
    """

    def __init__(self, watch: StateWatch, states: ObjectStates, large: Sequence[tuple[_Key, HeldTensor]]) -> None:
        self._watch = watch
        self._states = states
        self._large = large

    def settle(self) -> None:
        """Note that the forward is over."""
        with untracked():
            self._watch.settle(self._large)

    def let_go(self) -> None:
        """Hold nothing any more; it is not shown again."""
        self._states, self._large = ObjectStates(), ()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """The modules have this state inside, and afterwards again what they have now.

        Raises:
            RuntimeError: naming a tensor whose values then are not known.
        """
        with self._states.shown(self._refuse):
            yield

    def _refuse(self, held: HeldTensor) -> None:
        kind = self._watch.kind
        raise RuntimeError(
            f"{held.where} was changed between forward and backward: a tensor of shape {list(held.value.shape)}, in "
            f"place, after '{self._watch.name}' was called, which is to run again in backward. Its old values were not "
            "kept (only those of small tensors, and of large ones that change from the first call on, which are "
            "buffers or attributes themselves), so the gradients would be wrong. Leave this class out: "
            f"ActivationPolicy(checkpointing=[...]) with class names other than {kind}. Or put a new tensor in its "
            "place (self.x = self.x + y, not self.x += y)."
        )


def _has_same_bytes(left: Tensor, right: Tensor) -> bool:
    """Whether nothing was written, ``.data`` included; waits for the device."""
    if type(right) is not Tensor or right.layout is not torch.strided or right.is_quantized or right.is_meta:
        return True
    one, other = (torch.view_as_real(value) if value.is_complex() else value for value in (left, right))
    return torch.equal(*(value.contiguous().reshape(-1).view(torch.uint8) for value in (one, other)))
