"""The settings of a run, checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_zero.comm import Exchange
from lightning_zero.config import (
    ActivationPolicy,
    CheckpointPolicy,
    Compression,
    NvmeOffload,
    Offload,
    Placement,
    ShardWithin,
    StageLike,
    validate_activations,
    validate_bucket_mib,
    validate_checkpoint,
    validate_offload,
    validate_prefetch,
    validate_shard_within,
    validate_units,
)
from lightning_zero.plan.costs import ZeroPlan
from lightning_zero.registry import extension

__all__ = ["MIXED_DTYPES", "TRUE_DTYPES", "SessionSettings"]

TRUE_DTYPES = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}
"""What everything is in, by the names of Lightning's precisions; in ``32-true`` it stays as it is."""

MIXED_DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""What modules compute in, with masters in ``float32``."""


@dataclass(frozen=True, kw_only=True)
class SessionSettings:
    """How a module is sharded, and what is saved of it: the arguments of ``ZeroStrategy``, which explains them.

    They may be given as users write them there: the fields hold what ``config`` makes of that.

    Raises:
        ValueError: if a setting is not usable.
    """

    placement: Placement
    units: tuple[str, ...] | None = None
    shard_within: ShardWithin = None
    compression: Compression | None = None
    secondary_shards: bool = False
    bucket_mib: float = 100.0
    prefetch: int | None = None
    offload: Offload | None = None
    activations: ActivationPolicy | None = None
    checkpoint: CheckpointPolicy = field(default_factory=CheckpointPolicy)
    broadcast_buffers: bool = True

    @property
    def exchange(self) -> Exchange:
        """What is asked of the exchange between hosts."""
        return Exchange(self.compression, self.secondary_shards)

    def __post_init__(self) -> None:
        validate_bucket_mib(self.bucket_mib)
        validate_prefetch(self.prefetch)
        usable = {
            "units": validate_units(self.units),
            "offload": validate_offload(self.offload, self.placement),
            "activations": validate_activations(self.activations),
            "checkpoint": validate_checkpoint(self.checkpoint),
        }
        for name, value in usable.items():
            object.__setattr__(self, name, value)
        if isinstance(self.offload, NvmeOffload):
            extension("nvme")
        validate_shard_within(self.shard_within)
        if self.compression is not None:
            if not isinstance(self.compression, Compression):
                raise ValueError(
                    f"compression must be a Compression, got {self.compression!r}. Write Compression(gradients='int8')."
                )
            extension("compression")
            self.compression.check(self.shard_within)
        for name in ("broadcast_buffers", "secondary_shards"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        if self.secondary_shards and not self.placement.shards_parameters:
            raise ValueError("secondary_shards is for stage 3: in stages 1 and 2 weights are gathered once a step.")
        if self.secondary_shards and self.shard_within is not None:
            raise ValueError("shard_within keeps all shards within groups: leave secondary_shards out, or the other.")
        if self.secondary_shards:
            extension("hops")

    @classmethod
    def from_user(cls, stage: StageLike, **settings: Any) -> SessionSettings:
        """The settings of a strategy, with a stage in the place of ``placement``."""
        return cls(placement=Placement.from_stage(stage), **settings)

    def check(self, plan: ZeroPlan, scales_loss: bool = False) -> None:
        """Raise ValueError where a setting does not go with how the module is laid out, or with a loss scale."""
        if self.compression is not None:
            extension("compression").check(self.compression, plan, scales_loss)
