"""How slices of optimizer state are shown to user code: the optimizers' side asks, the engine's tensors answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

from torch import Tensor

from lightning_zero.engine import ZeroEngine
from lightning_zero.optim.groups import OwnedParameter
from lightning_zero.shards.elements import fingerprint
from lightning_zero.shards.sliced_tensor import SlicedTensor
from lightning_zero.shards.sliced_values import state_of

__all__ = ["StateSlices"]


class StateSlices:
    """``optim.shown.Slices`` of one engine, which compares between the ranks what user code writes.

    Args:
        engine: of the run. Not held.
    """

    def __init__(self, engine: ZeroEngine) -> None:
        self._engine = ref(engine)
        self._device = engine.device

    def show(self, entry: OwnedParameter, key: str, own: Tensor, alive: Callable[[], bool]) -> Tensor:
        """A tensor of the parameter's shape."""
        shard = entry.shard

        def edited(digest: int) -> None:
            self._note(entry, key, digest)

        meaning = state_of(shard.spec.name, key)
        start = shard.start if own.numel() else 0
        cut = entry.layout.cut_of(entry.position)
        return SlicedTensor(own, start, shard.spec.shape, shard.spec.name, alive, edited, self._device, meaning, cut)

    def own(self, entry: OwnedParameter, value: Tensor) -> Tensor | None:
        """This rank's elements of it, if it is sliced.

        Raises:
            ParameterAccessError: if it is cut at other places, or does not exist any more.
        """
        return value.elements(entry.layout.cut_of(entry.position)) if isinstance(value, SlicedTensor) else None

    def note(self, entry: OwnedParameter, key: str, value: Any) -> None:
        """Note what was put into the state."""
        if isinstance(value, SlicedTensor):
            value = value.history
        self._note(entry, key, value if isinstance(value, Tensor) else fingerprint(value))

    def _note(self, entry: OwnedParameter, key: str, value: Tensor | int) -> None:
        engine = self._engine()
        if engine is not None:
            engine.access.writes.note(f"the optimizer state '{key}' of '{entry.shard.spec.name}'", value)
