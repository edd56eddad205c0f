"""What an engine holds right now, in bytes of live storages and in the words of the plan's formula.

A storage counts once, for the first category that claims it: the master of a replicated parameter is a view of the
parameter and costs nothing. Reads sizes only: no device is waited for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_zero._torch import storage_key
from lightning_zero.config import Tier
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.replicated import ReplicatedUnit
from lightning_zero.engine.sharded import ShardedUnit
from lightning_zero.storage import FileTensor

__all__ = ["Beside", "Claims", "Holdings", "holdings"]

_DEVICE = (
    "parameters",
    "weights",
    "masters",
    "gradients",
    "optimizer",
    "slots",
    "gradient_slots",
    "transport",
)
_HOST = ("weights", "masters", "gradients", "optimizer", "buffers")


@dataclass(frozen=True, kw_only=True)
class Holdings:
    """Bytes of one rank by category.

    Args:
        device: categories of ``plan.Memory``.
        host: categories of ``plan.HostBytes``; empty without offloading.
        disk: bytes reserved in files.
        beside: on the device, in no category: memory that stands in for a slot that is taken, gradients carried from
            one reduction to the next.
    """

    device: dict[str, int]
    host: dict[str, int] = field(default_factory=dict)
    disk: int = 0
    beside: int = 0

    @property
    def total(self) -> int:
        """Everything on the device."""
        return sum(self.device.values()) + self.beside


class Claims:
    """Storages that a category has claimed."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def claim(self, tensors: Iterable[Tensor | None]) -> int:
        """Bytes of the storages that nobody has claimed before."""
        nbytes = 0
        for tensor in tensors:
            if tensor is None or isinstance(tensor, FileTensor) or tensor.layout is not torch.strided:
                continue
            key = storage_key(tensor)
            if key not in self.seen and not tensor.is_meta:
                self.seen.add(key)
                nbytes += tensor.untyped_storage().nbytes()
        return nbytes


def holdings(engine: ZeroEngine, optimizers: Iterable[Tensor] = (), claims: Claims | None = None) -> Holdings:
    """Count what is alive.

    Args:
        engine: of the run.
        optimizers: what those that step on its shards hold beside these: state, and whole parameters.
        claims: what has been claimed before; what is alive is claimed from now on.
    """
    claims = claims if claims is not None else Claims()
    reducer, offload = engine._reducer, engine.plan.offload
    flats = [flat for unit in engine.units for flat in unit.flats]
    buckets = reducer.buckets if reducer is not None else ()
    moved = offload is not None and offload.optimizer
    device, host = dict.fromkeys(_DEVICE, 0), dict.fromkeys(_HOST, 0)
    device["parameters"] = claims.claim(b for u in engine.units if isinstance(u, ReplicatedUnit) for b in u.buffers)
    for tier, found in ((Tier.DEVICE, device), (Tier.HOST, host)):
        found["weights"] = claims.claim(flat.weights for flat in flats if flat.rest.weights is tier)
        found["masters"] = claims.claim(flat.master for flat in flats if flat.rest.master is tier)
    (host if moved else device)["gradients"] = claims.claim(bucket.shard for bucket in buckets)
    device["gradients"] += claims.claim(bucket.resident for bucket in buckets)
    (host if moved else device)["optimizer"] = claims.claim(optimizers)
    device["slots"] = claims.claim(unit.home.buffer for unit in engine.units if isinstance(unit, ShardedUnit))
    if reducer is not None:
        device["gradient_slots"] = claims.claim(slot.buffer for slot in reducer._slots if slot is not None)
    device["transport"] = claims.claim(engine.collectives.buffers)
    store = engine.tiers.store
    host["buffers"] = engine.tiers.transfers.reserved_nbytes
    if store is not None:  # what is read ahead goes through host memory
        host["buffers"] += store.host_nbytes + engine.tiers.fetcher.reserved_nbytes
    elif engine.device.type != "cpu":
        device["slots"] += engine.tiers.fetcher.reserved_nbytes
    return Holdings(
        device=device,
        host=host if offload is not None else {},
        disk=0 if store is None else store.nbytes_on_disk,
        beside=claims.claim(_beside(engine)),
    )


class Beside:
    """Bytes on the device that a running step takes beside what rests there. Cheap enough to be asked at every span.

    Args:
        engine: of the run, when nothing runs.
    """

    def __init__(self, engine: ZeroEngine) -> None:
        self._engine = engine
        claims = Claims()
        holdings(engine, claims=claims)
        self._resting = claims.seen

    def nbytes(self) -> int:
        """Now."""
        found: dict[int, int] = {}
        for tensor in _beside(self._engine):
            if tensor is not None and (key := storage_key(tensor)) not in self._resting:
                found[key] = tensor.untyped_storage().nbytes()
        return sum(found.values())


def _beside(engine: ZeroEngine) -> Iterator[Tensor | None]:
    for unit in engine.units:
        if isinstance(unit, ShardedUnit):
            for slot in (unit.storage, unit._scratch):
                if slot is not None:
                    yield slot.buffer
    if engine._reducer is not None:
        for bucket in engine._reducer.buckets:
            yield bucket.full
            yield bucket._carry
