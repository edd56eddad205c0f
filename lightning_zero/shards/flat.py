"""The parameters of one layout at run time: the user's objects, this rank's master shard, and weights made of it.

[Note: the write-protected NaN]
A placeholder is one NaN element expanded to the parameter's shape: shape, ``ndim`` and ``numel()`` are true, reading
gives NaN, and memory is one element per dtype. Its storage refuses writes, because ``zero_()`` would otherwise turn
every placeholder into a plausible zero and a fused CPU optimizer would write ``numel()`` elements into one. A storage
resized to zero instead would let a read crash the interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_zero._torch import forbid_writes, untracked
from lightning_zero.plan import FlatLayout, ParameterSpec, Rest, ShardSlice
from lightning_zero.storage.file_tensor import FileTensor, fill_from

__all__ = ["FlatParameters", "ParameterShard", "Placeholders", "cut", "views_of"]

_PIECE_NUMEL = 2**20  # of a file that are looked at together


@dataclass(frozen=True, eq=False)
class ParameterShard:
    """This rank's part of one parameter, from element ``start`` of the flattened parameter on.

    ``data`` is a 1-D part of the master shard, a ``FileTensor`` if that is on disk. Optimizers step on ``parameter``,
    which shares ``data``, or stands in for it if that is on disk; ``None`` for a frozen parameter.
    """

    spec: ParameterSpec
    start: int
    data: Tensor
    parameter: nn.Parameter | None


def cut(shard: Tensor, pieces: Sequence[ShardSlice]) -> list[Tensor]:
    """1-D views of the parts of a shard, one per parameter (0 elements where nothing is owned)."""
    with untracked():
        return [shard.narrow(0, piece.shard_start if piece.numel else 0, piece.numel) for piece in pieces]


def views_of(buffer: Tensor, layout: FlatLayout) -> list[Tensor]:
    """The parameters of a layout as views of a flat buffer, full shapes."""
    with untracked():
        return [
            buffer.narrow(0, offset if spec.numel else 0, spec.numel).view(spec.shape)
            for spec, offset in zip(layout.parameters, layout.offsets, strict=True)
        ]


class FlatParameters:
    """The parameters of one layout: the user's objects, in its order, and this rank's master shard.

    Args:
        master: 1-D, ``layout.shard_numel`` elements of ``layout.dtype``; what the optimizer updates.
        placeholders: what each parameter shows while its values are not there.
        rest: where master, weights, gradients and state rest.
        weights: 1-D, if there are any, the master in ``layout.compute_dtype``, brought up to date after each step.
    """

    def __init__(
        self,
        layout: FlatLayout,
        parameters: Sequence[nn.Parameter],
        rank: int,
        master: Tensor,
        placeholders: Sequence[Tensor],
        rest: Rest,
        weights: Tensor | None = None,
    ) -> None:
        self.layout = layout
        self.parameters = tuple(parameters)
        self.rest = rest
        self.master = master
        self.weights = weights
        self.shown: Tensor | None = None
        """The weights, where the user's parameters show them at any time in the master's dtype: what is written there
        between steps counts, as on ordinary parameters, so the master has to take it over."""
        self.placeholders = tuple(placeholders)
        self.slices = layout.slices(rank)
        parts = cut(master, self.slices)
        self.shards = tuple(
            ParameterShard(spec, piece.parameter_start, data, parameter)
            for spec, piece, data, parameter in zip(
                layout.parameters, self.slices, parts, _shard_parameters(parts, layout), strict=True
            )
        )

    def refresh(self) -> None:
        """Make the weights what the master is, now."""
        if self.weights is not None:
            with untracked():
                fill_from(self.weights, self.master)

    def take_over_shown(self) -> None:
        """Make the master what the user's parameters show, if they can be written to at any time."""
        if self.shown is None:
            return
        with untracked():
            if not isinstance(self.master, FileTensor):
                self.master.copy_(self.shown)
                return
            for start in range(0, self.master.numel(), _PIECE_NUMEL):
                numel = min(_PIECE_NUMEL, self.master.numel() - start)
                part, shown = self.master.part(start, numel), self.shown.narrow(0, start, numel).cpu()
                if not torch.equal(part.read().view(torch.uint8), shown.view(torch.uint8)):  # NaN equals itself
                    part.write(shown)

    def refresh_part(self, start: int, values: Tensor) -> None:
        """Make the weights, from element ``start`` of the shard on, what the master is about to be there."""
        if self.weights is not None:
            with untracked():
                self.weights.narrow(0, start, values.numel()).copy_(values)


class Placeholders:
    """One write-protected sentinel per dtype and device."""

    def __init__(self) -> None:
        self._sentinels: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def like(self, parameter: Tensor, device: torch.device) -> Tensor:
        """A placeholder of ``parameter``'s shape and dtype on ``device``."""
        key = (parameter.dtype, device)
        if key not in self._sentinels:
            with untracked():
                value: float | int = 0
                if parameter.dtype.is_floating_point or parameter.dtype.is_complex:
                    value = float("nan")
                elif parameter.dtype is not torch.bool:
                    value = torch.iinfo(parameter.dtype).min
                sentinel = torch.full((), value, dtype=parameter.dtype, device=device)
            if device.type != "meta":
                forbid_writes(sentinel)
            self._sentinels[key] = sentinel
        with untracked():
            return self._sentinels[key].expand(parameter.shape)


def _shard_parameters(parts: Sequence[Tensor], layout: FlatLayout) -> list[nn.Parameter | None]:
    """What optimizers know the parts of a master by. On disk something stands in: NaN to read, refuses writes."""
    if not layout.trainable:
        return [None] * len(parts)
    with torch.inference_mode(False):
        if any(isinstance(part, FileTensor) for part in parts):
            sentinel = torch.full((), float("nan"), dtype=layout.dtype)
            forbid_writes(sentinel)
            parts = [sentinel.expand(part.numel()) for part in parts]
        return [nn.Parameter(part.detach(), requires_grad=True) for part in parts]
