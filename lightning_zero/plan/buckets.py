"""What travels together: gradients of replicated parameters, and buffers that rank 0 sends to the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_zero.plan.layout import DtypeRules, ParameterSpec, align_up

__all__ = ["PIECE_NBYTES", "BufferPiece", "BufferSpec", "make_buckets", "make_pieces", "sent_buffers"]

PIECE_NBYTES = 4 * 2**20
"""A buffer of so many bytes is sent by itself, from where it lies. Smaller ones are sent together, up to so many."""


def make_buckets(
    parameters: Sequence[ParameterSpec],
    bucket_nbytes: int,
    *,
    dtypes: DtypeRules | None = None,
) -> tuple[tuple[ParameterSpec, ...], ...]:
    """Group parameters into buckets in backward order, frozen ones last.

    Backward order is the reverse of registration order. A bucket holds parameters of one group (dtype, compute dtype,
    trainable) that are neighbours among the parameters *of that group*: a float32 batch norm between two 16-bit
    convolutions does not cut the convolutions' bucket. Buckets are ordered by their last parameter, which is when they
    are ready to be reduced.

    Args:
        parameters: in registration order.
        bucket_nbytes: limit per bucket, in bytes of the reduce dtype, counted with the alignment of every parameter but
            without the tail padding (which depends on the world size; the buckets do not). A single larger parameter is
            a bucket of its own.
        dtypes: mixed precision; None: every parameter's own dtype.

    Raises:
        ValueError: if the limit is not positive.
    """
    if bucket_nbytes <= 0:
        raise ValueError(f"The bucket size must be positive, got {bucket_nbytes} bytes.")
    rules = dtypes if dtypes is not None else DtypeRules()
    filling: dict[tuple[torch.dtype, torch.dtype, bool], _Filling] = {}
    buckets: list[_Filling] = []
    for position, spec in enumerate(reversed(parameters)):
        nbytes = align_up(spec.numel) * rules.reduce(spec).itemsize
        group = rules.group(spec)
        bucket = filling.get(group)
        if bucket is None or bucket.nbytes + nbytes > bucket_nbytes:
            bucket = filling[group] = _Filling()
            buckets.append(bucket)
        bucket.parameters.append(spec)
        bucket.nbytes += nbytes
        bucket.ready_at = position
    buckets.sort(key=lambda bucket: (not bucket.parameters[0].trainable, bucket.ready_at))
    return tuple(tuple(bucket.parameters) for bucket in buckets)


class _Filling:
    """A bucket while it is being filled."""

    def __init__(self) -> None:
        self.parameters: list[ParameterSpec] = []
        self.nbytes = 0
        self.ready_at = 0


@dataclass(frozen=True)
class BufferSpec:
    """One buffer as all ranks must have it.

    Attributes:
        name: its first one in the module.
        shape: of its elements.
        dtype: of each.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, name: str, buffer: Tensor) -> BufferSpec:
        """What a tensor is."""
        return cls(name, tuple(buffer.shape), buffer.dtype)

    @property
    def nbytes(self) -> int:
        """Of all elements."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def line(self) -> str:
        """For people."""
        return f"buffer '{self.name}': {str(self.dtype).removeprefix('torch.')} of shape {self.shape}"


@dataclass(frozen=True)
class BufferPiece:
    """Buffers that are sent in one collective, one after the other.

    Attributes:
        members: their indices; by dtype, wider ones first, so that each begins at a multiple of its element's size.
        nbytes: of all of them.
    """

    members: tuple[int, ...]
    nbytes: int


def sent_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The buffers that ``DistributedDataParallel`` would send, as they are now, each object once.

    Left out are those named in ``module._ddp_params_and_buffers_to_ignore``, as there, and what is not a dense tensor
    in memory of its own (sparse, quantised, of a subclass with other data), which it cannot send.
    """
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    return [(name, buffer) for name, buffer in module.named_buffers() if name not in ignored and _is_dense(buffer)]


def make_pieces(specs: Sequence[BufferSpec]) -> tuple[BufferPiece, ...]:
    """Which buffers are sent together; those without elements are not sent."""
    groups: list[list[int]] = []
    together: list[int] = []
    size = 0
    for index, spec in enumerate(specs):
        if spec.nbytes >= PIECE_NBYTES:
            groups.append([index])
        elif spec.nbytes:
            if together and size + spec.nbytes > PIECE_NBYTES:
                groups.append(together)
                together, size = [], 0
            together.append(index)
            size += spec.nbytes
    if together:
        groups.append(together)
    return tuple(
        BufferPiece(
            tuple(sorted(group, key=lambda index: (-specs[index].dtype.itemsize, str(specs[index].dtype)))),
            sum(specs[index].nbytes for index in group),
        )
        for group in groups
    )


def _is_dense(buffer: Tensor) -> bool:
    if type(buffer) is not Tensor and not _is_plain(buffer):
        return False
    return buffer.layout is torch.strided and not buffer.is_quantized


def _is_plain(buffer: Tensor) -> bool:
    """Whether a tensor of a subclass is data as usual."""
    return type(buffer).__torch_dispatch__ is Tensor.__torch_dispatch__ and not is_lazy(buffer)
