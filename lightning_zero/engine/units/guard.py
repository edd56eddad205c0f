"""The saved-tensor guard: no backward ever reads another unit's weights.

[Note: why the guard is always on]
Autograd saves views of weights (``weight.t()`` of every linear layer). In a slot, such a view shows whatever unit was
gathered last. Usually the hook on a unit's output makes the unit resident before its backward runs, but autograd drops
tensor hooks of a view that is later changed in place, and no hook can be put on a tensor hidden in a user's object.
Without the guard those cases give silently wrong gradients. So while a unit's forward runs, saved views of slots are
replaced by (unit, version, offset, shape, stride); a backward that wants one back has its unit gathered.

Saved-tensor hooks switch autograd's own check for in-place changes off, so the guard makes that check itself; and only
the innermost pair of hooks is applied, so it hands everything else to the pair that was active before (the user's
``save_on_cpu``, activation checkpointing).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from lightning_zero._torch import (
    Pack,
    Unpack,
    compiler_of_frames,
    disable_dynamo,
    opaque_to_dynamo,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    storage_key,
    top_saved_tensor_hooks,
)
from lightning_zero.engine.units.sharded import ShardedUnit, Slot
from lightning_zero.errors import ParameterAccessError

__all__ = [
    "SavedTensorGuard",
    "SlotView",
    "check_version",
    "check_weights",
    "explain_failure",
    "refuse_graph_of_gradients",
]

_new = tuple.__new__
_makes_graph = torch.is_grad_enabled  # in a backward: whether it is one with create_graph


class SlotView(NamedTuple):
    """A saved view of a unit's weights."""

    unit: ShardedUnit
    version: int  # the weights it showed
    view: Tensor  # of ``slot``, without a graph. Its values are the unit's whenever that is there
    slot: Slot  # the unit's home
    writes: int  # how often user code had written to the parameter; -1 where the view cannot tell


class _Handed(NamedTuple):
    packed: Any
    unpack: Unpack


def check_version(probe: Tensor, version: int, dtype: torch.dtype, shape: torch.Size) -> None:
    """Refuse, as torch itself does, a saved tensor of this dtype and shape whose ``probe``, which counts its changes,
    does not count what it did when the tensor was saved."""
    if probe._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a "
            f"{dtype} tensor of shape {list(shape)} was saved at version {version} and is now at version "
            f"{probe._version}. Change a copy of it instead (y = y + x, not y += x)."
        )


def check_weights(unit: ShardedUnit, version: int) -> None:
    """Raise ``RuntimeError`` if a unit's weights are others than the forward of a backward that runs has used."""
    if unit.version != version:
        raise RuntimeError(
            f"The weights of unit '{unit.name}' were changed (by an optimizer step) between this forward and its "
            "backward, so the gradients would be wrong. Run forward again after the step, or step later."
        )


def refuse_graph_of_gradients() -> None:
    """Raise where a gradient arrives in a backward that makes a graph."""
    raise RuntimeError(
        "backward(create_graph=True) is not supported: gradients are sent as they arrive, without a graph. Take them "
        "with torch.autograd.grad(loss, inputs, create_graph=True), which works."
    )


def explain_failure(error: BaseException, replaced: str, stayed: str) -> None:
    """Raise ``ParameterAccessError`` where it is known why a backward has failed.

    ``replaced``: what was written to since its forward. ``stayed``: a parameter that was used in that forward, for the
    first time, while no module of its unit ran.
    """
    if replaced and isinstance(error, RuntimeError) and "inplace operation" in str(error):
        raise ParameterAccessError(
            f"{replaced}: other values were written between a forward and its backward, which needs those of the "
            "forward. Write to parameters before the forward, or after the backward (`on_after_backward`)."
        ) from error
    if stayed and isinstance(error, CheckpointError):
        raise ParameterAccessError(
            f"'{stayed}' was used inside of a function that is checkpointed, for the first time while no module of its "
            "unit ran, so that computing the function again saves other tensors than before. Have the checkpoint call "
            "the module that owns it, `checkpoint(module, x, use_reentrant=False)`, and not a method or a part of it."
        ) from error


class SavedTensorGuard:
    """Keeps what autograd saves during a unit's forward free of slot memory.

    Args:
        restore: makes a unit's full weights available during backward; returns the byte buffer they lie in and whether
            that buffer will stay untouched until the unit's backward is over.
        was_read: told when a buffer that will not stay has been copied from.
    """

    def __init__(
        self,
        restore: Callable[[ShardedUnit], tuple[Tensor, bool]],
        was_read: Callable[[ShardedUnit], None] | None = None,
    ) -> None:
        self._restore = restore
        self._was_read = was_read
        self._slots: dict[int, Slot] = {}
        self._outer: list[tuple[Pack, Unpack] | None] = []
        self._kinds: set[type[Tensor]] = {Tensor}  # classes of which nobody looks at what is done
        # Permanent objects that Dynamo does not trace: a fresh closure per forward would be recompiled every time.
        self._pack_hook, self._unpack_hook = self._hooks()
        # As torch marks its own hooks: since 2.14, selective checkpointing looks for those of the user behind them.
        self._seen = vars(self._pack_hook)
        self._seen.update(_checkpoint_internal=True, _user_hooks=None)

    @property
    def depth(self) -> int:
        """How many units' forwards are running."""
        return len(self._outer)

    def watch(self, slot: Slot) -> None:
        """Watch views of a slot's memory."""
        self._slots[slot.key] = slot

    def know(self, unit: ShardedUnit) -> None:
        """Watch a unit's slot, and expect leaves of the classes of its parameters where they show their values."""
        self.watch(unit.home)
        self._kinds.update(kind for _, _, kind in unit.home_views)

    def forget_empty(self, permanent: set[int]) -> None:
        """Stop watching memory that was only borrowed and has been given up."""
        gone = [key for key, slot in self._slots.items() if slot.owner is None and key not in permanent]
        for key in gone:
            del self._slots[key]

    def forget(self, slot: Slot) -> None:
        """Stop watching memory that is nobody's any more."""
        self._slots.pop(slot.key, None)

    def push(self) -> None:
        """Guard what is saved from here on, on this thread."""
        top = top_saved_tensor_hooks()
        # Inside a nested unit our own pair is on top; what it would hand on to is what we hand on to.
        if top is not None and top[0] is self._pack_hook:
            top = self._outer[-1] if self._outer else None
        self._outer.append(top)
        self._seen["_user_hooks"] = top
        push_saved_tensor_hooks(self._pack_hook, self._unpack_hook)

    def pop(self) -> None:
        """Undo the last ``push``."""
        self._outer.pop()
        self._seen["_user_hooks"] = self._outer[-1] if self._outer else None
        pop_saved_tensor_hooks()

    def _hooks(self) -> tuple[Pack, Unpack]:
        """Both hooks, with the way that is nearly always taken: some ten times for every unit, so that calls count."""
        slots, outer, kinds = self._slots, self._outer, self._kinds
        pack_otherwise, unpack_otherwise = disable_dynamo(self._pack), disable_dynamo(self._unpack)

        def pack(tensor: Tensor) -> Any:
            if compiler_of_frames() is not None or type(tensor) not in kinds:
                return pack_otherwise(tensor)
            try:
                slot = slots.get(tensor.untyped_storage()._cdata)
            except NotImplementedError:  # it has no memory of its own: see ``storage_key``
                return pack_otherwise(tensor)
            if slot is None and outer and outer[-1] is None:
                version = tensor._version
                return (tensor, version) if version else tensor  # no tuple: less for the collector
            if slot is not None and type(unit := slot.owner) is ShardedUnit and slot is unit.home:
                key = unit.index, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
                view = slot.views.get(key)
                view = slot.save(key, tensor) if view is None else view
                return _new(SlotView, (unit, unit.version, view, slot, tensor._version))
            return pack_otherwise(tensor)

        def unpack(packed: Any) -> Tensor:
            if compiler_of_frames() is None:
                if type(packed) is SlotView:
                    unit, version, view, slot, writes = packed
                    current = unit.version == version and (writes < 0 or view._version == writes)
                    if current and unit.in_backward and unit.storage is slot and not _makes_graph():
                        return view  # its backward is running, as nearly always
                elif type(packed) is Tensor and not packed._version:
                    return packed
            tensor: Tensor = unpack_otherwise(packed)
            return tensor

        return opaque_to_dynamo(pack, self._pack), opaque_to_dynamo(unpack, self._unpack)

    def _pack(self, tensor: Tensor) -> Any:
        slot = self._slots.get(storage_key(tensor))
        if slot is not None and isinstance(slot.owner, ShardedUnit):
            unit = slot.owner
            if slot is unit.home:
                key = unit.index, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
                view = slot.views[key] if key in slot.views else slot.save(key, tensor)
                return _new(SlotView, (unit, unit.version, view, slot, tensor._version))
            # Memory that is borrowed for once is not kept alive: the same view of the home slot says where to look.
            with torch.no_grad():
                view = unit.home.buffer.view(tensor.dtype).as_strided(
                    tensor.shape, tensor.stride(), tensor.storage_offset()
                )
            return SlotView(unit, unit.version, view, unit.home, -1)
        outer = self._outer[-1] if self._outer else None
        if outer is not None:
            return _Handed(outer[0](tensor), outer[1])
        version = tensor._version
        return (tensor, version) if version else tensor

    def _unpack(self, packed: Any) -> Tensor:
        kind = type(packed)
        tensor: Tensor
        if kind is SlotView:
            return self._unpack_view(packed)
        if kind is _Handed:
            tensor = packed.unpack(packed.packed)
            return tensor
        tensor, version = packed if kind is tuple else (packed, 0)
        if tensor._version != version:
            check_version(tensor, version, tensor.dtype, tensor.shape)
        return tensor

    def _unpack_view(self, packed: SlotView) -> Tensor:
        unit, version, view, slot, writes = packed
        check_weights(unit, version)
        if writes >= 0 and view._version != writes:
            check_version(view, writes, view.dtype, view.shape)
        if unit.in_backward and unit.storage is slot and not _makes_graph():
            return view
        buffer, stays = self._restore(unit)
        kept = _makes_graph()  # by the graph of a gradient, which no hook of a unit's forward sees: it gets a copy
        if stays and buffer is slot.buffer and not kept:
            return view
        with torch.no_grad():
            weights = buffer.view(view.dtype).as_strided(view.shape, view.stride(), view.storage_offset())
            if stays and not kept:
                return weights
            copy = weights.clone()
        if not stays and self._was_read is not None:
            self._was_read(unit)
        return copy
