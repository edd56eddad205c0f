"""Shards that ranks read out of one another's memory: what users write to them counts as it does over a wire."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from lightning_zero import local_slices
from lightning_zero.comm.native import SWITCH
from tests.helpers.runs import Net, _differences, fit, made, quiet, values_of, zero
from tests.helpers.world import run_world


class Writes(Net):
    """Writes to its slices, on one rank later than on the other."""

    def __init__(self) -> None:
        super().__init__()
        self.averages: list[Tensor] = []

    def late(self) -> None:
        if dist.get_rank() == 1:
            time.sleep(0.05)


class SwapsForValidation(Writes):
    """Validates other weights than it trains."""

    def swap(self) -> None:
        if self.trainer.sanity_checking:
            return
        self.late()
        before = []
        for place, part in enumerate(local_slices(self, write=True)):
            before.append(part.value.clone())
            part.value.copy_(self.averages[place] if self.averages else torch.full_like(part.value, 0.1))
        self.averages = before

    on_validation_start = swap
    on_validation_end = swap


class ClipsBeforeTheBatch(Writes):
    def on_train_batch_start(self, *args: Any) -> None:
        self.late()
        for part in local_slices(self, write=True):
            part.value.clamp_(-0.05, 0.05)


class Fuse(torch.autograd.Function):
    """Lets a backward fail at its very end."""

    armed = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        if Fuse.armed:
            raise ValueError("blown")
        return gradient


class Retries(Net):
    """Runs a backward again that has failed after its gradients were on their way."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.fails = fails

    def loss(self, batch_idx: int) -> Tensor:
        x, y = self.data(batch_idx)
        return F.mse_loss(self(Fuse.apply(x.clone().requires_grad_())), y)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        if self.fails:
            Fuse.armed = True
            with pytest.raises(ValueError, match="blown"):
                self.manual_backward(self.loss(batch_idx))
            Fuse.armed = False
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch_idx))
        optimizer.step()


def test_what_a_slower_rank_writes_to_its_shards_is_read_as_over_a_wire() -> None:
    """And a backward that failed leaves nothing in the next one, either way."""

    @quiet()
    def play(rank: int) -> list[dict[str, Any]]:
        found = []
        for kind in (SwapsForValidation, ClipsBeforeTheBatch):
            module = kind()
            found.append(made(module, fit(zero(3, prefetch=0), module, count=3, val=1)))
        for fails in (False, True):
            module = Retries(fails)
            fit(zero(1), module, count=2)
            found.append(values_of(module))
        return found

    for shared, over_gloo in zip(run_world(2, play), run_world(2, play, environment={SWITCH: "0"}), strict=True):
        assert not _differences(over_gloo, shared, 0.0, "shared")
        assert not _differences(shared[2], shared[3], 0.0, "after a failure")
