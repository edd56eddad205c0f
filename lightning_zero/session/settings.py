"""The settings of a run, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_zero.comm import Compression
from lightning_zero.config import (
    ActivationPolicy,
    CheckpointPolicy,
    Offload,
    Placement,
    ShardWithin,
    validate_activations,
    validate_bucket_mib,
    validate_checkpoint,
    validate_offload,
    validate_prefetch,
    validate_shard_within,
    validate_units,
)

__all__ = ["SessionSettings"]


@dataclass(frozen=True, kw_only=True)
class SessionSettings:
    """How a module is sharded, and what is saved of it: the arguments of ``ZeroStrategy``, which explains them.

    Raises:
        ValueError: if a setting is not usable.
    """

    placement: Placement
    units: Sequence[str] | None = None
    shard_within: ShardWithin = None
    compression: Compression | None = None
    bucket_mib: float = 25.0
    prefetch: int | None = None
    offload: Offload | None = None
    activations: ActivationPolicy | None = None
    checkpoint: CheckpointPolicy = field(default_factory=CheckpointPolicy)
    broadcast_buffers: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "units", validate_units(self.units))
        validate_bucket_mib(self.bucket_mib)
        validate_prefetch(self.prefetch)
        validate_offload(self.offload, self.placement)
        validate_activations(self.activations)
        validate_checkpoint(self.checkpoint)
        validate_shard_within(self.shard_within, self.offload)
        if self.compression is not None:
            if not isinstance(self.compression, Compression):
                raise ValueError(f"compression must be a Compression, got {self.compression!r}.")
            self.compression.check(self.placement, self.shard_within)
        if not isinstance(self.broadcast_buffers, bool):
            raise ValueError(f"broadcast_buffers must be True or False, got {self.broadcast_buffers!r}.")
