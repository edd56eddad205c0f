"""The flat buffer: where every parameter lies, and which contiguous range each rank owns.

[Note: The flat buffer]

Three parameters of 100, 30 and 200 elements on two ranks. Every parameter starts at a multiple of ``ALIGNMENT`` (64)
elements, and the buffer is padded so that every shard ends at one:

    element   0        100 128  158 192            392  512
              |   a    |gap| b  |gap|      c        |gap|
    rank      [         0 .. 255         )[  256 .. 511  )

Rank 0 owns all of ``a`` and ``b`` and the first 64 elements of ``c``; rank 1 owns the other 136 elements of ``c`` and
the tail. The output of the all-gather *is* the parameters' memory and the input of the reduce-scatter *is* the
gradients' memory, so there is neither a copy in nor a copy out.

Why 64 elements: fused optimizer kernels round the scalar tail of a vector loop differently, so a slice that starts or
ends inside a vector lane changes the last bit of a few elements. Cuts at multiples of 8 were measured to be enough; 64
elements are 128 bytes or more in every dtype of two bytes or wider, which is a cache line and the alignment of
vectorised loads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import NamedTuple

import torch

from lightning_zero.config import Offload, Placement, Tier

__all__ = [
    "ALIGNMENT",
    "PAGE_NBYTES",
    "DtypeRules",
    "FlatLayout",
    "ParameterSpec",
    "Part",
    "Rest",
    "ShardSlice",
    "align_up",
    "residual_nbytes",
    "rest_of",
]

ALIGNMENT = 64
"""Elements. Every parameter starts at a multiple of it, and every shard ends at one."""

PAGE_NBYTES = 4_096
"""Regions of files are padded to it: reads and writes past the system's cache begin and end at multiples of it."""


def align_up(numel: int, multiple: int = ALIGNMENT) -> int:
    """The smallest multiple of ``multiple`` that is at least ``numel``."""
    return -(-numel // multiple) * multiple


def residual_nbytes(numel: int, groups: int) -> int:
    """Bytes that error feedback keeps of so many elements that a rank rounds, in float32.

    With several shard groups in the world these are a shard, and there is its part of the average of all groups, too.
    """
    return 4 * numel * (groups + (groups > 1)) // groups


class Part(NamedTuple):
    """Which part of a whole tensor a parameter is, under tensor parallelism."""

    shape: tuple[int, ...]  # of the whole
    dim: int | None  # in which it was split; ``None``: every rank of the tensor group has all of it
    start: int  # where in that dimension this rank's part begins
    rank: int  # in the tensor group
    ranks: int  # of the tensor group

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The shape of this rank's part."""
        return tuple(size // self.ranks if dim == self.dim else size for dim, size in enumerate(self.shape))

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor of the whole shape: a view of it."""
        return whole if self.dim is None else whole.narrow(self.dim, self.start, self.own_shape[self.dim])


@dataclass(frozen=True)
class ParameterSpec:
    """What a plan knows about one parameter: never its data."""

    name: str  # the first of its names in registration order, relative to the root module
    aliases: tuple[str, ...]  # its further names, for a tied parameter or one held by a shared module
    shape: tuple[int, ...]  # its full shape; ``()`` for a scalar
    dtype: torch.dtype  # its own dtype, which is the master dtype
    trainable: bool  # ``requires_grad``
    # Tensors of its size that autograd has at once for the gradient: several where parts are added up, or cut off.
    parts: int = 1
    part: Part | None = None  # of a larger tensor, or of a group that has it alike; ``None``: neither

    @property
    def counted(self) -> bool:
        """Whether this rank's elements count in sums over all ranks: of those that several have, the first's do."""
        return self.part is None or self.part.dim is not None or self.part.rank == 0

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of what it is a part of."""
        return self.shape if self.part is None else self.part.shape

    @property
    def is_split(self) -> bool:
        """Whether other ranks of a tensor group have other parts."""
        return self.part is not None and self.part.dim is not None

    @cached_property
    def numel(self) -> int:
        """Elements; 1 for a scalar, 0 if one dimension is 0."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class DtypeRules:
    """Mixed precision as data. ``None`` stands for each parameter's own dtype.

    Parameters named in ``keep`` are computed in their own dtype; so is what is not floating, and float64, which only
    those have who want it (autocast leaves it alone too). The reduction dtype does not follow the compute dtype, so
    that 16-bit compute over float32 masters reduces in float32.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    keep: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for setting, dtype in (("param_dtype", self.param_dtype), ("reduce_dtype", self.reduce_dtype)):
            if dtype is not None and not dtype.is_floating_point:
                raise ValueError(f"{setting} must be a floating dtype, got {dtype}.")

    def compute(self, spec: ParameterSpec) -> torch.dtype:
        """The dtype of the buffer that the module computes with."""
        return spec.dtype if spec.name in self.keep else _narrowed(spec.dtype, self.param_dtype)

    def reduce(self, spec: ParameterSpec) -> torch.dtype:
        """The dtype of the gradient bucket; the compute dtype for a frozen parameter, which has none."""
        return _narrowed(spec.dtype, self.reduce_dtype) if spec.trainable else self.compute(spec)

    def group(self, spec: ParameterSpec) -> tuple[torch.dtype, torch.dtype, bool]:
        """Parameters of one group, ``(dtype, compute dtype, trainable)``, may share a flat buffer."""
        return spec.dtype, self.compute(spec), spec.trainable


@cache
def _narrowed(own: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    return own if asked is None or not own.is_floating_point or own is torch.float64 else asked


@dataclass(frozen=True)
class ShardSlice:
    """The part of one parameter that lies in one rank's shard."""

    parameter_start: int  # first owned element of the flattened parameter
    shard_start: int  # the place of that element in the shard
    # Owned elements; 0 if the rank owns nothing of this parameter. Both starts are in bounds even then, so that
    # ``shard[shard_start : shard_start + numel]`` is a valid empty slice.
    numel: int


@dataclass(frozen=True)
class FlatLayout:
    """The layout of one flat buffer. See [Note: The flat buffer].

    Raises:
        ValueError: if the parts do not prove each other (alignment, order, disjointness, bounds, padding, dtypes).
    """

    # In buffer order; at least one; all of one dtype, all trainable or all frozen.
    parameters: tuple[ParameterSpec, ...]
    offsets: tuple[int, ...]  # first element of each parameter in the buffer
    numel: int  # elements of the whole buffer, gaps and tail padding included. Never 0.
    world_size: int  # of the shard group
    dtype: torch.dtype  # the parameters' own dtype = master dtype
    compute_dtype: torch.dtype  # of the unsharded buffer that the module computes with
    # That gradients are reduced in; equal to ``compute_dtype`` (and unused) for frozen parameters.
    reduce_dtype: torch.dtype
    trainable: bool  # whether the parameters are

    def __post_init__(self) -> None:
        problem, end = "", 0
        if not self.parameters or len(self.parameters) != len(self.offsets):
            problem = f"{len(self.parameters)} parameters with {len(self.offsets)} offsets"
        elif self.world_size < 1 or self.numel < 1 or self.numel % (self.world_size * ALIGNMENT):
            problem = f"{self.numel} elements: that is no positive multiple of {self.world_size} times {ALIGNMENT}"
        elif not self.trainable and self.reduce_dtype != self.compute_dtype:
            problem = "a reduce dtype of its own, as it is frozen and never reduced"
        for spec, offset in zip(self.parameters, self.offsets, strict=False):
            if problem:
                break
            if (spec.dtype, spec.trainable) != (self.dtype, self.trainable):
                problem = f"'{spec.name}', which is {spec.dtype}, trainable={spec.trainable}"
            elif offset % ALIGNMENT or not end <= offset <= self.numel - spec.numel:
                problem = f"'{spec.name}' at element {offset} of {self.numel}, with the one before up to {end}"
            end = offset + spec.numel
        if problem:
            raise ValueError(f"A flat layout of {self.dtype}, trainable={self.trainable}, cannot have {problem}.")

    @classmethod
    def build(
        cls, parameters: Sequence[ParameterSpec], world_size: int, compute_dtype: torch.dtype, reduce_dtype: torch.dtype
    ) -> FlatLayout:
        """Lay ``parameters``, one or more, end to end in the given order, aligned and padded.

        A layout whose parameters are all empty still gets one alignment unit per rank, so that no collective is empty.
        """
        *offsets, end = accumulate([align_up(spec.numel) for spec in parameters], initial=0)
        numel, first = align_up(max(end, 1), world_size * ALIGNMENT), parameters[0]
        return cls(
            tuple(parameters),
            tuple(offsets),
            numel,
            world_size,
            first.dtype,
            compute_dtype,
            reduce_dtype,
            first.trainable,
        )

    @property
    def parameter_numel(self) -> int:
        """Real elements: the buffer without gaps and padding."""
        return sum([spec.numel for spec in self.parameters])

    @property
    def shard_numel(self) -> int:
        """Elements of every rank's shard, a multiple of ``ALIGNMENT``."""
        return self.numel // self.world_size

    def residual_nbytes(self, ranks: int | None, world_size: int) -> int:
        """Bytes that error feedback keeps on each rank, in float32, where ``ranks`` divide what is rounded."""
        if ranks is None or not self.dtype.is_floating_point:
            return 0
        groups = world_size // self.world_size
        return residual_nbytes(align_up(self.numel // ranks, groups * ALIGNMENT), groups)

    def slices(self, rank: int) -> tuple[ShardSlice, ...]:
        """What the rank owns: exactly one slice per parameter, in buffer order; empty where it owns nothing."""
        return tuple([self.slice_of(position, rank) for position in range(len(self.parameters))])

    def slice_of(self, position: int, rank: int) -> ShardSlice:
        """What the rank owns of one parameter."""
        spec, offset = self.parameters[position], self.offsets[position]
        shard_numel = self.numel // self.world_size
        shard_start, shard_end = rank * shard_numel, (rank + 1) * shard_numel
        first = min(max(shard_start, offset), offset + spec.numel)
        last = min(max(shard_end, offset), offset + spec.numel)
        place = min(max(first, shard_start), shard_end) - shard_start
        return ShardSlice(first - offset, place, last - first)

    def gaps(self) -> tuple[tuple[int, int], ...]:
        """``(start, end)`` element ranges that belong to no parameter, in order: alignment gaps and the tail padding.

        Gaps and parameters tile the buffer.
        """
        ends = [0, *[offset + spec.numel for spec, offset in zip(self.parameters, self.offsets, strict=True)]]
        starts = [*self.offsets, self.numel]
        return tuple([(end, start) for end, start in zip(ends, starts, strict=True) if end < start])


@dataclass(frozen=True, kw_only=True)
class Rest:
    """The memory tier of each part of a layout between uses."""

    master: Tier  # the shard that the optimizer updates, in the parameters' dtype
    # A copy of it in the compute dtype, which units are gathered from; ``None``: there is none, the master (or the full
    # buffer) is used.
    weights: Tier | None
    gradients: Tier  # the reduced gradient shard
    state: Tier  # the optimizer's state

    @property
    def offloaded(self) -> bool:
        """Whether the master is not on the device."""
        return self.master is not Tier.DEVICE


def rest_of(layout: FlatLayout, placement: Placement, offload: Offload | None) -> Rest:
    """The memory tiers of ``layout`` between uses.

    | layout | master | weights | gradients, state |
    | --- | --- | --- | --- |
    | not offloaded | device | the master | device |
    | trained, optimizer offloaded, parameters replicated | host or disk | the full buffers | host; host or disk |
    | trained, optimizer offloaded, parameters sharded | host or disk | a copy on the device | host; host or disk |
    | the same with ``parameters=True`` | host or disk | the master, or a copy of it in another dtype | same |
    | frozen | with the weights, or as a trained one where the dtypes differ | as above | none |
    """
    device = Rest(master=Tier.DEVICE, weights=None, gradients=Tier.DEVICE, state=Tier.DEVICE)
    if offload is None or (layout.trainable and not offload.optimizer):
        return device
    same = layout.dtype == layout.compute_dtype
    weights: Tier | None = None
    if not placement.shards_parameters:
        if not layout.trainable and (same or not offload.optimizer):
            return device  # the full buffer is all there is
    elif not layout.trainable and same:
        if not offload.parameters:
            return device
    elif offload.parameters:
        weights = None if same else offload.tier
    else:
        weights = Tier.DEVICE
    return Rest(master=offload.tier, weights=weights, gradients=Tier.HOST, state=offload.tier)
