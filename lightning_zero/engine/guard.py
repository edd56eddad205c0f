"""The saved-tensor guard: no backward ever reads another unit's weights.

[Note: why the guard is always on]
Autograd saves views of weights (``weight.t()`` of every linear layer). Such a view holds its whole buffer, so that all
weights of a model would stay in memory from the forward to the backward. So while a unit's forward runs, saved views of
buffers are replaced by (unit, version, offset, shape, stride), and a backward that wants one back finds it in whatever
buffer the unit has then. Usually the hook on a unit's output makes the unit resident before its backward runs. But
autograd drops tensor hooks of a view that is later changed in place, and no hook can be put on a tensor hidden in a
user's object: there the guard has the unit gathered.

Saved-tensor hooks switch autograd's own check for in-place changes off, so the guard makes that check itself; and only
the innermost pair of hooks is applied, so it hands everything else to the pair that was active before (the user's
``save_on_cpu``, activation checkpointing).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero._torch import (
    Pack,
    Unpack,
    compiler_of_frames,
    disable_dynamo,
    opaque_to_dynamo,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    storage_address,
    top_saved_tensor_hooks,
)
from lightning_zero.comm import Streams
from lightning_zero.engine.events import Span
from lightning_zero.engine.pool import BufferPool
from lightning_zero.engine.unit import SavedPlace, ShardedUnit

__all__ = ["WRAPPERS", "SavedTensorGuard", "check_version", "check_weights"]

WRAPPERS: dict[type[Tensor], Callable[[Tensor], tuple[Tensor, Callable[[Tensor], Tensor]]]] = {}
"""By class of tensors around others, which may be weights: what gives the inner one, and what wraps another so."""

_new = tuple.__new__
_makes_graph = torch.is_grad_enabled  # in a backward: whether it is one with create_graph


class _Saved(NamedTuple):
    """A view of a unit's weights, as autograd keeps it. Who writes to weights in a forward is refused at its end."""

    unit: ShardedUnit
    place: SavedPlace
    version: int  # of the weights


class _Handed(NamedTuple):
    packed: Any
    unpack: Unpack


class _Wrapped(NamedTuple):
    saved: _Saved
    wrap: Callable[[Tensor], Tensor]


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


class SavedTensorGuard:
    """Keeps what autograd saves during a unit's forward free of the pool's memory.

    Args:
        pool: of the units' buffers.
        restore: makes a unit's full weights available during backward; returns whether they stay until its backward is
            over.
        streams: where device work is ordered.
    """

    def __init__(self, pool: BufferPool, restore: Callable[[ShardedUnit], bool], streams: Streams) -> None:
        self._restore = restore
        self._streams = streams
        self._pool = pool
        self.active: dict[ShardedUnit, Span | None] = {}
        """Units whose backward runs, so that their buffers stay, each with the span that was opened for it."""
        self.of_root = False
        """Whether one ``push`` was for the root's parameters."""
        self._outer: list[tuple[Pack, Unpack] | None] = []  # for each forward of a unit that runs
        # Permanent objects that Dynamo does not trace: a fresh closure per forward would be recompiled every time.
        self._pack_hook, self._unpack_hook = self._hooks()
        # As torch marks its own hooks: since 2.14, selective checkpointing looks for those of the user behind them.
        self._seen = vars(self._pack_hook)
        self._seen.update(_checkpoint_internal=True, _user_hooks=None)

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

    def abandon(self) -> None:
        """Undo every ``push``, after an error."""
        self.of_root = False
        self.active.clear()
        while self._outer:
            self.pop()

    def _hooks(self) -> tuple[Pack, Unpack]:
        """Both hooks. They run some ten times for every unit, so they call no function where all is as nearly always.

        Dynamo looks into neither.
        """
        buffers, outer, active, restored = self._pool.used, self._outer, self.active, disable_dynamo(self._restored)
        wrappers = WRAPPERS

        def pack(tensor: Tensor) -> Any:
            try:
                buffer = buffers.get(storage_address(tensor))
            except NotImplementedError:  # it has no memory of its own: see ``storage_key``
                buffer = None
            if buffer is not None and (unit := buffer.unit) is not None:
                place = unit.places.get(id(tensor))
                if place is None:  # a view: the same object for all like it, which is less for the collector
                    place = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
                    place = unit.places.setdefault(place, place)
                return _new(_Saved, (unit, place, unit.version))
            if wrappers and (inside := wrappers.get(type(tensor))) is not None:
                inner, wrap = inside(tensor)
                if type(saved := pack(inner)) is _Saved:
                    return _Wrapped(saved, wrap)
            if outer and (hooks := outer[-1]) is not None:
                return _Handed(hooks[0](tensor), hooks[1])
            version = tensor._version
            return (tensor, version) if version else tensor  # no tuple: less for the collector

        def unpack(packed: Any) -> Tensor:
            tensor: Tensor
            if type(packed) is _Saved:
                unit, place, version = packed
                if unit in active and unit.version == version and compiler_of_frames() is None and not _makes_graph():
                    found: Tensor | None = unit.storage.made.get(place)  # type: ignore[union-attr]
                    return unit.view_at(place) if found is None else found
                tensor = restored(packed)
            elif type(packed) is _Wrapped:
                with torch.no_grad():
                    tensor = packed.wrap(unpack(packed.saved))
            elif type(packed) is _Handed:
                tensor = packed.unpack(packed.packed)
            else:
                tensor, version = packed if type(packed) is tuple else (packed, 0)
                if tensor._version != version:
                    check_version(tensor, version, tensor.dtype, tensor.shape)
            return tensor

        return opaque_to_dynamo(pack), opaque_to_dynamo(unpack)

    def _restored(self, saved: _Saved) -> Tensor:
        """What was saved of a unit whose backward does not run, or of whose gradient a graph is made."""
        unit, place, version = saved
        check_weights(unit, version)
        stays = self._restore(unit)
        weights = unit.view_at(place)
        if stays and not _makes_graph():
            return weights
        with torch.no_grad():  # a graph of a gradient keeps it, which no hook of a unit's forward sees
            copy = weights.clone()
        if not stays and unit.storage is not None:  # nothing may overwrite it on a device before that
            unit.storage.free = self._streams.mark()
        return copy
