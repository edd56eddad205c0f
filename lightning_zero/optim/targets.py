"""What stands in the param groups in place of the user's parameters."""

from __future__ import annotations

import torch
from torch import nn

from lightning_zero.config import Tier
from lightning_zero.optim.owned import OwnedParameter

__all__ = ["Targets"]


class Targets:
    """The shard parameters of the engine, and parameters like them for those that are frozen."""

    def __init__(self) -> None:
        self._frozen: dict[str, nn.Parameter] = {}

    def of(self, entry: OwnedParameter) -> nn.Parameter:
        """1-D, this rank's slice; the same object at every call."""
        if entry.shard.parameter is not None:
            return entry.shard.parameter
        name = entry.shard.spec.name
        if name not in self._frozen:
            with torch.inference_mode(False):
                data = entry.shard.data.detach()
                if entry.flat.rest.master is Tier.DISK:
                    absent = float("nan") if data.dtype.is_floating_point or data.dtype.is_complex else 0
                    data = torch.full((), absent, dtype=data.dtype).expand(data.numel())
                self._frozen[name] = nn.Parameter(data, requires_grad=False)
        return self._frozen[name]
