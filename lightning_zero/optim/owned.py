"""What an optimizer sees of the engine: this rank's part of each parameter, and the flat buffer the part lies in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from lightning_zero.comm import ControlGroup
from lightning_zero.plan import FlatLayout, ParameterSpec, ShardSlice
from lightning_zero.plan.resting import Rest

__all__ = ["BeforeStep", "Flat", "OwnedParameter", "Shard"]


class Shard(Protocol):
    """This rank's part of one parameter, as the engine keeps it."""

    @property
    def spec(self) -> ParameterSpec: ...
    @property
    def start(self) -> int: ...
    @property
    def data(self) -> Tensor: ...
    @property
    def parameter(self) -> nn.Parameter | None: ...


class Flat(Protocol):
    """The parameters of one layout, as the engine keeps them.

    ``master`` is 1-D, ``layout.shard_numel`` elements of ``layout.dtype``: in memory, or a ``FileTensor``.
    ``slices`` and ``shards`` say what of it belongs to which parameter, in the layout's order. ``shown`` is 1-D, as
    long and of the same dtype, where the user can write to the values at any time: a step begins with what is there,
    not with what is in the master.
    """

    @property
    def layout(self) -> FlatLayout: ...
    @property
    def rest(self) -> Rest: ...
    @property
    def master(self) -> Tensor: ...
    @property
    def shown(self) -> Tensor | None: ...
    @property
    def slices(self) -> Sequence[ShardSlice]: ...
    @property
    def shards(self) -> Sequence[Shard]: ...


class BeforeStep(Protocol):
    """Lets all ranks agree that they are about to take the same step.

    ``values`` are 64-bit numbers that have to be equal on all of them; if they are not, ``differ`` is called on every
    rank to find out, and raises if it matters. ``running`` tells whether the step is what called.
    Collective: every rank.
    """

    def __call__(
        self,
        label: str,
        values: Sequence[int] = (),
        differ: Callable[[ControlGroup], None] | None = None,
        running: Callable[[], bool] = bool,
    ) -> None: ...


@dataclass(frozen=True)
class OwnedParameter:
    """What an optimizer has to know of one of the user's parameters.

    Args:
        shard: this rank's part.
        unit: index of the unit it belongs to.
        flat: the flat buffer that all ranks' parts are in.
        position: which parameter of its layout.
    """

    shard: Shard
    unit: int
    flat: Flat
    position: int

    @property
    def layout(self) -> FlatLayout:
        """Where all ranks' parts are."""
        return self.flat.layout

    @property
    def slice(self) -> ShardSlice:
        """Where this rank's part is in its shard."""
        return self.flat.slices[self.position]

    @property
    def device(self) -> torch.device:
        """Where state of the optimizer for it belongs: with a master in a file, host memory."""
        return self.shard.data.device
