"""Where each layout's bytes rest between uses: decided from numbers, executed by the engine.

| layout | master | weights | gradients, state |
| --- | --- | --- | --- |
| not offloaded | device | the master | device |
| trained, optimizer offloaded, parameters replicated | host or disk | the full buffers | host; host or disk |
| trained, optimizer offloaded, parameters sharded | host or disk | a copy on the device | host; host or disk |
| the same with ``parameters=True`` | host or disk | the master, or a copy beside it in another dtype | same |
| frozen | with the weights, or as a trained one where the dtypes differ | as above | none |
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_zero.config import Offload, Placement, Tier
from lightning_zero.plan.flat import FlatLayout

__all__ = ["Rest", "rest_of"]


@dataclass(frozen=True, kw_only=True)
class Rest:
    """Where one layout's bytes rest.

    Attributes:
        master: the shard that the optimizer updates, in the parameters' dtype.
        weights: a copy of it in the compute dtype, which units are gathered from; ``None``: there is none, the master
            (or the full buffer) is used.
        gradients: the reduced gradient shard.
        state: the optimizer's state.
    """

    master: Tier
    weights: Tier | None
    gradients: Tier
    state: Tier

    @property
    def offloaded(self) -> bool:
        """Whether the master is not on the device."""
        return self.master is not Tier.DEVICE


def rest_of(layout: FlatLayout, placement: Placement, offload: Offload | None) -> Rest:
    """Where the bytes of ``layout`` rest."""
    device = Rest(master=Tier.DEVICE, weights=None, gradients=Tier.DEVICE, state=Tier.DEVICE)
    if offload is None or (layout.trainable and not offload.optimizer):
        return device
    same = layout.dtype == layout.compute_dtype
    if not placement.shards_parameters:
        if not layout.trainable and (same or not offload.optimizer):
            return device  # the full buffer is all there is
        weights = None
    elif not layout.trainable and same:
        if not offload.parameters:
            return device
        weights = None
    elif offload.parameters:
        weights = None if same else offload.tier
    else:
        weights = Tier.DEVICE
    return Rest(master=offload.tier, weights=weights, gradients=Tier.HOST, state=offload.tier)
