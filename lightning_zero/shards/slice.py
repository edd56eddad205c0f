"""The parameters of one layout at run time: the user's objects, this rank's master shard, and weights made of it.

[Note: the write-protected NaN]
A placeholder is one NaN element expanded to the parameter's shape: shape, ``ndim`` and ``numel()`` are true, reading
gives NaN, and memory is one element per dtype. Its storage refuses writes, because ``zero_()`` would otherwise turn
every placeholder into a plausible zero and a fused CPU optimizer would write ``numel()`` elements into one. A storage
resized to zero instead would let a read crash the interpreter.
"""

from __future__ import annotations

import hashlib
import numbers
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero._torch import forbid_writes, no_functions, untracked
from lightning_zero.offload.host import OffloadedTensor, in_memory
from lightning_zero.plan.layout import FlatLayout, ParameterSpec, Rest, ShardSlice

__all__ = [
    "FlatParameters",
    "Placeholders",
    "Slice",
    "checksum",
    "fingerprint",
    "shard_parameter",
    "views_of",
]


class Slice:
    """This rank's part of one parameter: which elements of it, and where they are.

    Optimizers, checkpoints, averages and what user code sees all go by these, so they read and write a master in
    memory, on the host or in a file alike.

    Attributes:
        flat: the layout's parameters, with the buffer that the part is in.
        position: the parameter's place in the layout.
        data: 1-D, a part of the master shard, wherever that is.
        parameter: what optimizers update: it shares ``data``, or stands in for it if that has no memory; ``None`` for a
            frozen parameter.
        user: the user's parameter.
        layout: what it is laid out in, with others.
        spec: name and shape of the whole parameter.
        name: the parameter's first name.
        place: which elements are here, and where in the shard.
        start: the first element, of the flattened parameter, that is here.
        unit: the index of the parameter's unit.
    """

    def __init__(self, flat: FlatParameters, position: int, data: Tensor, parameter: nn.Parameter | None) -> None:
        self.flat = flat
        self.position = position
        self.data = data
        self.parameter = parameter
        self.user = flat.parameters[position]
        self.layout = flat.layout
        self.spec: ParameterSpec = flat.layout.parameters[position]
        self.name = self.spec.name
        self.place: ShardSlice = flat.slices[position]
        self.start = self.place.parameter_start
        self.unit = flat.unit

    @property
    def gradient(self) -> Tensor | None:
        """1-D: this rank's part of the averaged gradient, if there is one."""
        return None if self.parameter is None else self.parameter.grad

    @property
    def counted(self) -> Any:
        """The gradient, if there is one, for sums over all ranks: no element of what another rank counts."""
        return self.gradient if self.gradient is None or self.spec.counted else self.gradient[:0]

    @property
    def device(self) -> torch.device:
        """Where state of the optimizer for it belongs: with a master in a file, host memory."""
        return self.data.device

    @cached_property
    def target(self) -> nn.Parameter:
        """1-D: what an optimizer steps on, also where the parameter is frozen."""
        return self.parameter if self.parameter is not None else shard_parameter(self.data, self.spec.numel, False)

    @property
    def cut(self) -> tuple[Any, ...]:
        """The same on every rank; equal for parameters of which all ranks hold the same elements."""
        return self.layout.offsets[self.position], self.layout.shard_numel, self.spec.shape

    def ranges(self, world_size: int) -> list[tuple[int, int]]:
        """Of every rank, the first element that it holds, and how many it holds."""
        places = [self.layout.slice_of(self.position, rank) for rank in range(world_size)]
        return [(place.parameter_start, place.numel) for place in places]

    def of(self, whole: Tensor, grain: int = 1) -> Tensor:
        """1-D: the elements that are here of another tensor, which has one for each ``grain`` of the parameter's."""
        first, numel = -(-self.start // grain), -(-self.data.numel() // grain)
        return whole.detach().reshape(-1)[first : first + numel]

    def part_of(self, whole: Tensor) -> Tensor:
        """Of a tensor of the whole shape what is of this rank's parameter, where tensor parallelism has split it."""
        return whole if self.spec.part is None else self.spec.part.of(whole)

    def checksum(self, whole: Tensor) -> int:
        """A number for a tensor of the parameter's shape that ranks can compare: 0 where they have different parts."""
        return 0 if self.spec.is_split else checksum(whole)

    def read(self) -> Tensor:
        """1-D: the elements, in memory; a copy if they have none. Raises ``OffloadError`` if a disk failed."""
        return in_memory(self.data)

    def write(self, values: Tensor) -> None:
        """Make the elements, wherever they are, these: 1-D. Raises ``OffloadError`` if a disk failed."""
        with untracked():
            self.data.copy_(values)


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
        unit: the index of their unit.
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
        unit: int = 0,
    ) -> None:
        self.layout = layout
        self.unit = unit
        self.parameters = tuple(parameters)
        self.rest = rest
        self.master = master
        self.weights = weights
        self.source = master if weights is None else weights
        """What full parameters are gathered from: 1-D, on whatever tier it is."""
        self.shown: Tensor | None = None
        """The weights, where the user's parameters show them at any time in the master's dtype: what is written there
        between steps counts, as on ordinary parameters, so the master has to take it over."""
        self.placeholders = tuple(placeholders)
        self.slices = layout.slices(rank)
        self._sizes, self._places = _tiles(self.slices, layout.shard_numel)
        self.shards = tuple(
            [
                Slice(self, at, data, shard_parameter(data, spec.numel) if layout.trainable else None)
                for at, (data, spec) in enumerate(zip(self.cut(master), layout.parameters, strict=True))
            ]
        )

    def cut(self, shard: Tensor) -> list[Tensor]:
        """1-D views of what in ``shard``, which is laid out as the master, is each parameter's: maybe 0 elements."""
        with untracked():
            if isinstance(shard, OffloadedTensor):
                return [shard.narrow(0, piece.shard_start, piece.numel) for piece in self.slices]
            parts = shard.split_with_sizes(self._sizes)  # one call for all of them: this runs in every backward
        return list(map(parts.__getitem__, self._places))

    def refresh(self) -> None:
        """Make the weights what the master is, now."""
        if self.weights is not None:
            with untracked():
                self.weights.copy_(self.master)

    def take_over_shown(self) -> None:
        """Make the master what the user's parameters show, if they can be written to at any time."""
        if self.shown is not None:
            with untracked():
                self.master.copy_(self.shown)

    def refresh_part(self, start: int, values: Tensor) -> None:
        """Make the weights, from element ``start`` of the shard on, what the master is about to be there."""
        if self.weights is not None:
            with untracked():
                self.weights.narrow(0, start, values.numel()).copy_(values)


def _tiles(pieces: Sequence[ShardSlice], numel: int) -> tuple[list[int], list[int]]:
    """The sizes of what follows one another in a shard, gaps included, and which of it are ``pieces``."""
    sizes: list[int] = []
    places: list[int] = []
    end = 0
    for piece in pieces:
        if piece.numel and piece.shard_start > end:
            sizes.append(piece.shard_start - end)
        places.append(len(sizes))
        sizes.append(piece.numel)
        end = piece.shard_start + piece.numel if piece.numel else end
    return [*sizes, numel - end], places


class Placeholders:
    """One write-protected sentinel per dtype and device, seen in every shape that is needed."""

    def __init__(self) -> None:
        self._sentinels: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def like(self, parameter: Tensor, device: torch.device) -> Tensor:
        """A placeholder of ``parameter``'s shape and dtype on ``device``."""
        key = (parameter.dtype, device)
        if key not in self._sentinels:
            dtype, real = parameter.dtype, not (parameter.dtype.is_floating_point or parameter.dtype.is_complex)
            absent = False if dtype is torch.bool else torch.iinfo(dtype).min if real else float("nan")
            with untracked():
                self._sentinels[key] = torch.full((), absent, dtype=dtype, device=device)
            if device.type != "meta":
                forbid_writes(self._sentinels[key])
        with untracked():
            return self._sentinels[key].expand(parameter.shape)


def shard_parameter(data: Tensor, whole_numel: int, trainable: bool = True) -> nn.Parameter:
    """What an optimizer knows a part of a master by. Where that has no memory something stands in, which reads as NaN
    and refuses writes. Its ``whole_numel`` are the elements of the whole parameter, for optimizers that go by them."""
    with torch.inference_mode(False):
        data = data.detach()
        if isinstance(data, OffloadedTensor):
            data = Placeholders().like(data, data.device)
        parameter: Any = nn.Parameter(data, requires_grad=trainable)
        parameter.whole_numel = whole_numel
        return parameter  # type: ignore[no-any-return]


_SUM_NUMEL = 2**18  # what is summed together, a multiple of 8; this takes at most 6 MiB for it
_BITS = 2**63 - 1
_PLACE, _FIRST, _SECOND = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB  # odd, no pattern in their bits


def checksum(tensor: Tensor) -> int:
    """63 bits that depend on every bit of a tensor's elements and on their order, and on nothing else.

    -0.0 is not 0.0, and NaNs with other payloads differ. The host is synchronised once for each tensor.
    """
    with untracked(), no_functions():
        if tensor.layout is not torch.strided:
            tensor = tensor.to_dense()
        tensor = tensor.detach().contiguous().view(-1)
        total = torch.full((), tensor.numel() * tensor.element_size(), dtype=torch.int64, device=tensor.device)
        for start in range(0, tensor.numel(), _SUM_NUMEL):
            words = _words(tensor[start : start + _SUM_NUMEL])
            place = start * tensor.element_size() // 8
            mixed = torch.arange(place + 1, place + 1 + len(words), device=words.device).mul_(_PLACE).add_(words)
            # Not linear, or two flipped signs would take each other away.
            mixed.mul_(_FIRST).bitwise_xor_((mixed >> 32).bitwise_and_(2**32 - 1))
            mixed.mul_(_SECOND).bitwise_xor_((mixed >> 29).bitwise_and_(2**35 - 1))
            total += mixed.sum()
        return int(total.item()) & _BITS


def fingerprint(*parts: Any) -> int:
    """63 bits that stand for some values, the same on every rank that passes the same.

    Of tensors bits, shape and dtype count; of objects that are no numbers, strings, indices, or tuples, lists and dicts
    of these, only the type.
    """
    return int.from_bytes(hashlib.blake2b(_text(parts).encode(), digest_size=8).digest(), "little") & _BITS


def _words(piece: Tensor) -> Tensor:
    """The bits of a contiguous piece as int64, whole words of them."""
    size = piece.element_size()
    piece = piece.resolve_conj().resolve_neg()
    missing = -piece.numel() * size % 8 // size
    if missing:
        piece = torch.cat([piece, piece.new_zeros(missing)])
    elif piece.storage_offset() * size % 8:
        piece = piece.clone()
    return piece.view(torch.int64)


def _text(part: Any) -> str:
    if isinstance(part, Tensor):
        return f"{checksum(part)} {tuple(part.shape)} {part.dtype}"
    if isinstance(part, tuple | list):
        return f"[{'; '.join(map(_text, part))}]"
    if isinstance(part, dict):
        return _text(sorted(part.items()))
    if isinstance(part, slice):
        return _text(("slice", part.start, part.stop, part.step))
    if part is None or part is Ellipsis or isinstance(part, str | numbers.Number | torch.dtype):
        return repr(part)
    return type(part).__qualname__
