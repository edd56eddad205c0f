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

import torch

from lightning_zero.config import Offload, Placement, Tier

__all__ = [
    "ALIGNMENT",
    "PAGE_NBYTES",
    "DtypeRules",
    "FlatLayout",
    "ParameterSpec",
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


@dataclass(frozen=True)
class ParameterSpec:
    """What a plan knows about one parameter: never its data."""

    name: str  # the first of its names in registration order, relative to the root module
    aliases: tuple[str, ...]  # its further names, for a tied parameter or one held by a shared module
    shape: tuple[int, ...]  # its full shape; ``()`` for a scalar
    dtype: torch.dtype  # its own dtype, which is the master dtype
    trainable: bool  # ``requires_grad``
    # Tensors of its size that autograd has at once while it makes the gradient: several where parts of it are added up.
    parts: int = 1

    @property
    def numel(self) -> int:
        """Elements; 1 for a scalar, 0 if one dimension is 0."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
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

    def narrows(self, spec: ParameterSpec) -> bool:
        """Whether the module computes with a copy of another dtype."""
        return self.compute(spec) != spec.dtype

    def reduce(self, spec: ParameterSpec) -> torch.dtype:
        """The dtype of the gradient bucket; the compute dtype for a frozen parameter, which has none."""
        return _narrowed(spec.dtype, self.reduce_dtype) if spec.trainable else self.compute(spec)

    def group(self, spec: ParameterSpec) -> tuple[torch.dtype, torch.dtype, bool]:
        """Parameters of one group, ``(dtype, compute dtype, trainable)``, may share a flat buffer."""
        return spec.dtype, self.compute(spec), spec.trainable


def _narrowed(own: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    return own if asked is None or not own.is_floating_point or own is torch.float64 else asked


@dataclass(frozen=True)
class ShardSlice:
    """The part of one parameter that lies in one rank's shard."""

    name: str  # the parameter's name
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
        if self.world_size < 1:
            raise ValueError(f"A flat layout needs a world size of at least 1, got {self.world_size}.")
        if not self.parameters or len(self.parameters) != len(self.offsets):
            raise ValueError(
                "A flat layout needs at least one parameter and one offset for each: "
                f"got {len(self.parameters)} parameters and {len(self.offsets)} offsets."
            )
        if self.numel <= 0 or self.numel % (self.world_size * ALIGNMENT) != 0:
            raise ValueError(
                f"A flat buffer of {self.numel} elements is not a positive multiple of world size {self.world_size} "
                f"times {ALIGNMENT} elements."
            )
        end = 0
        for spec, offset in zip(self.parameters, self.offsets, strict=True):
            if offset % ALIGNMENT != 0:
                raise ValueError(f"'{spec.name}' starts at element {offset}, not at a multiple of {ALIGNMENT}.")
            if offset < end:
                raise ValueError(f"'{spec.name}' starts at element {offset}, before its predecessor's end {end}.")
            end = offset + spec.numel
            if end > self.numel:
                raise ValueError(f"'{spec.name}' ends at element {end} of a buffer of {self.numel} elements.")
            if spec.dtype != self.dtype or spec.trainable != self.trainable:
                raise ValueError(
                    f"'{spec.name}' ({spec.dtype}, trainable={spec.trainable}) does not belong into a flat buffer of "
                    f"{self.dtype}, trainable={self.trainable}."
                )
        if not self.trainable and self.reduce_dtype != self.compute_dtype:
            raise ValueError("A frozen flat buffer is never reduced: its reduce dtype must equal its compute dtype.")

    @classmethod
    def build(
        cls,
        parameters: Sequence[ParameterSpec],
        world_size: int,
        *,
        compute_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
    ) -> FlatLayout:
        """Lay ``parameters``, one or more, end to end in the given order, aligned and padded.

        A layout whose parameters are all empty still gets one alignment unit per rank: a collective on an empty buffer
        is an edge case of every backend, and nobody downstream has to think of it.
        """
        offsets: list[int] = []
        end = 0
        for spec in parameters:
            offsets.append(end)
            end = align_up(end + spec.numel)
        return cls(
            parameters=tuple(parameters),
            offsets=tuple(offsets),
            numel=align_up(max(end, 1), world_size * ALIGNMENT),
            world_size=world_size,
            dtype=parameters[0].dtype,
            compute_dtype=compute_dtype,
            reduce_dtype=reduce_dtype,
            trainable=parameters[0].trainable,
        )

    @property
    def parameter_numel(self) -> int:
        """Real elements: the buffer without gaps and padding."""
        return sum(spec.numel for spec in self.parameters)

    @property
    def shard_numel(self) -> int:
        """Elements of every rank's shard, a multiple of ``ALIGNMENT``."""
        return self.numel // self.world_size

    def shard_range(self, rank: int) -> tuple[int, int]:
        """``(start, end)`` of the rank's shard in the buffer, in elements; ValueError if there is no such rank."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"There is no rank {rank} in a shard group of {self.world_size}.")
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def cut_of(self, position: int) -> tuple[int, ...]:
        """Of a parameter: equal for others of the same shape that are cut over the ranks at the same places."""
        return self.offsets[position], self.shard_numel

    def residual_nbytes(self, ranks: int | None, world_size: int) -> int:
        """Bytes that error feedback keeps on each rank, in float32, where ``ranks`` divide what is rounded."""
        if ranks is None or not self.dtype.is_floating_point:
            return 0
        groups = world_size // self.world_size
        return residual_nbytes(align_up(self.numel // ranks, groups * ALIGNMENT), groups)

    def slices(self, rank: int) -> tuple[ShardSlice, ...]:
        """What the rank owns: exactly one slice per parameter, in buffer order; empty where it owns nothing.

        Costs O(parameters), whatever their size.
        """
        return tuple(self.slice_of(position, rank) for position in range(len(self.parameters)))

    def slice_of(self, position: int, rank: int) -> ShardSlice:
        """What the rank owns of one parameter."""
        spec, offset = self.parameters[position], self.offsets[position]
        shard_start, shard_end = self.shard_range(rank)
        first = min(max(shard_start, offset), offset + spec.numel)
        last = min(max(shard_end, offset), offset + spec.numel)
        place = min(max(first, shard_start), shard_end) - shard_start
        return ShardSlice(spec.name, first - offset, place, last - first)

    def gaps(self) -> tuple[tuple[int, int], ...]:
        """``(start, end)`` element ranges that belong to no parameter, in order: alignment gaps and the tail padding.

        Gaps and parameters tile the buffer.
        """
        ends = [0, *(offset + spec.numel for spec, offset in zip(self.parameters, self.offsets, strict=True))]
        starts = [*self.offsets, self.numel]
        return tuple((end, start) for end, start in zip(ends, starts, strict=True) if end < start)


@dataclass(frozen=True, kw_only=True)
class Rest:
    """The tier of memory that each part of a layout rests in between uses."""

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

    @property
    def gathered_from(self) -> Tier:
        """Where the shard rests that units are gathered from."""
        return self.weights or self.master


def rest_of(layout: FlatLayout, placement: Placement, offload: Offload | None) -> Rest:
    """Where the bytes of ``layout`` rest: decided here from numbers, executed by the engine.

    | layout | master | weights | gradients, state |
    | --- | --- | --- | --- |
    | not offloaded | device | the master | device |
    | trained, optimizer offloaded, parameters replicated | host or disk | the full buffers | host; host or disk |
    | trained, optimizer offloaded, parameters sharded | host or disk | a copy on the device | host; host or disk |
    | the same with ``parameters=True`` | host or disk | the master, or a copy beside it in another dtype | same |
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
