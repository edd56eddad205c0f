"""What is sent in one collective: buckets of gradients of replicated parameters, the module's buffers that rank 0
broadcasts, and whole parameters for the ranks that own them. Numbers only."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_zero.plan.layout import DtypeRules, ParameterSpec, align_up

__all__ = [
    "PIECE_NBYTES",
    "ROUND_NBYTES",
    "BufferPiece",
    "BufferSpec",
    "deal_out",
    "limit_bucket",
    "make_buckets",
    "make_pieces",
    "plan_rounds",
    "sent_buffers",
]

PIECE_NBYTES = 4 * 2**20
"""A buffer of so many bytes is sent by itself, from where it lies. Smaller ones are sent together, up to so many."""

ROUND_NBYTES = 64 * 2**20
"""Bytes that one all-to-all gives to one rank, but for a parameter that is larger."""

BUCKETS_OF_A_MODEL = 8
"""How many buckets a model has at least, so that most are reduced during the backward. Twice as many where gradients
are sharded: two of them may be in memory at once, besides the shards."""

LEAST_BUCKET_NBYTES = 2**20
"""Which a bucket may have even so: smaller ones take the time of their calls."""

# ------------------------------------------------------------------------------------------------------------ gradients


def limit_bucket(parameters: Sequence[ParameterSpec], nbytes: int, dtypes: DtypeRules, beside: bool) -> int:
    """Bytes of the reduce dtype that a bucket of this model may have, at most ``nbytes``.

    ``beside``: two of them may be in memory at once, besides the shards of gradients.
    """
    whole = sum([spec.numel * dtypes.reduce(spec).itemsize for spec in parameters if spec.trainable])
    return min(nbytes, max(LEAST_BUCKET_NBYTES, whole // (2 * BUCKETS_OF_A_MODEL if beside else BUCKETS_OF_A_MODEL)))


def make_buckets(
    parameters: Sequence[ParameterSpec], bucket_nbytes: int, dtypes: DtypeRules
) -> tuple[tuple[ParameterSpec, ...], ...]:
    """Group parameters into buckets in backward order, the reverse of registration order, frozen ones last.

    A bucket holds parameters of one group (dtype, compute dtype, trainable) that are neighbours among the parameters
    *of that group*: a float32 batch norm between two 16-bit convolutions does not cut the convolutions' bucket. Buckets
    are ordered by their last parameter, which is when they are ready to be reduced.

    Args:
        parameters: in registration order.
        bucket_nbytes: limit per bucket, in bytes of the reduce dtype, counted with the alignment of every parameter but
            without the tail padding (which depends on the world size; the buckets do not). A single larger parameter is
            a bucket of its own.
        dtypes: mixed precision.
    """
    ready_at = {spec: position for position, spec in enumerate(reversed(parameters))}
    buckets: list[list[ParameterSpec]] = []
    filling: dict[tuple[torch.dtype, torch.dtype, bool], tuple[list[ParameterSpec], int]] = {}
    for spec in ready_at:
        nbytes = align_up(spec.numel) * dtypes.reduce(spec).itemsize
        group = dtypes.group(spec)
        bucket, filled = filling.get(group, ([], 0))
        if bucket and filled + nbytes > bucket_nbytes:
            bucket, filled = [], 0
        if not bucket:
            buckets.append(bucket)
        bucket.append(spec)
        filling[group] = bucket, filled + nbytes
    buckets.sort(key=lambda bucket: (not bucket[0].trainable, ready_at[bucket[-1]]))
    return tuple(map(tuple, buckets))


# -------------------------------------------------------------------------------------------------------------- buffers


class BufferSpec(NamedTuple):
    """One buffer as all ranks must have it, under its first name in the module."""

    name: str
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Of all elements."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def line(self) -> str:
        """For people."""
        return f"buffer '{self.name}': {str(self.dtype).removeprefix('torch.')} of shape {tuple(self.shape)}"


@dataclass(frozen=True)
class BufferPiece:
    """Buffers that are sent in one collective, one after the other."""

    # Their indices; by dtype, wider ones first, so that each begins at a multiple of its element's size.
    members: tuple[int, ...]
    nbytes: int  # of all of them


def sent_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The buffers that ``DistributedDataParallel`` would send, as they are now, each object once.

    Left out are those named in ``module._ddp_params_and_buffers_to_ignore``, as there, and what is not a dense tensor
    in memory of its own (sparse, quantised, of a subclass with other data), which it cannot send.
    """
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    return [(name, buffer) for name, buffer in module.named_buffers() if name not in ignored and _is_dense(buffer)]


def _is_dense(buffer: Tensor) -> bool:
    plain = type(buffer).__torch_dispatch__ is Tensor.__torch_dispatch__ and not is_lazy(buffer)
    return plain and buffer.layout is torch.strided and not buffer.is_quantized


def make_pieces(specs: Sequence[BufferSpec]) -> tuple[BufferPiece, ...]:
    """Which buffers are sent together; those without elements are not sent."""
    pieces: list[list[int]] = []
    together: list[int] = []
    size = 0
    for index, spec in enumerate(specs):
        if spec.nbytes >= PIECE_NBYTES:
            pieces.append([index])
        elif spec.nbytes:
            if not together or size + spec.nbytes > PIECE_NBYTES:
                together, size = [], 0
                pieces.append(together)
            together.append(index)
            size += spec.nbytes
    for piece in pieces:
        piece.sort(key=lambda index: (-specs[index].dtype.itemsize, str(specs[index].dtype)))
    return tuple(BufferPiece(tuple(piece), sum(specs[index].nbytes for index in piece)) for piece in pieces)


# ----------------------------------------------------- whole parameters, for optimizers that are not elementwise: see
# ----------------------------------------------------- [Note: owners] in ``optim/whole.py``


def deal_out(sizes: Sequence[int], world_size: int) -> list[int]:
    """The owner of each size: the largest first, each to the rank with the least so far; ties: first, lowest."""
    owners = [0] * len(sizes)
    loads = [(0, rank) for rank in range(world_size)]
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        load, rank = heapq.heappop(loads)
        owners[index] = rank
        heapq.heappush(loads, (load + sizes[index], rank))
    return owners


def plan_rounds(nbytes: Sequence[int], owners: Sequence[int], limit: int) -> list[list[int]]:
    """Which parameters, of so many bytes, travel in one all-to-all: to each owner ``limit`` bytes, or a larger one.

    Owners take turns, so that a round keeps many of them busy.
    """
    queues: dict[int, list[int]] = {}
    for index, owner in enumerate(owners):
        queues.setdefault(owner, []).append(index)
    rounds: list[list[int]] = []
    received: Counter[int] = Counter()
    for index in (index for turn in zip_longest(*queues.values()) for index in turn if index is not None):
        owner = owners[index]
        if not rounds or (received[owner] and received[owner] + nbytes[index] > limit):
            rounds.append([])
            received.clear()
        rounds[-1].append(index)
        received[owner] += nbytes[index]
    return rounds
