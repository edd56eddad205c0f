"""Gradient buckets: what is reduced together while parameters are replicated."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_zero.plan.dtypes import DtypeRules
from lightning_zero.plan.flat import ParameterSpec, align_up


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
