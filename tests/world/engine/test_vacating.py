"""Buffers are given back between steps on the CPU, but for memory in which something of the user's lies."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy
from lightning_zero.comm.native import SWITCH
from lightning_zero.engine import pool
from lightning_zero.errors import ParameterAccessError
from tests.helpers.training import make_trainer, quiet
from tests.helpers.world import run_world

WIDTH = 64
WIRES = pytest.mark.parametrize("shared", [True, False], ids=["shared", "gloo"])


class Net(pl.LightningModule):
    """Three layers, the middle one of which runs twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(3))
        self.seen: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = torch.full((2, WIDTH), 0.1 * (1 + batch_idx), requires_grad=True)
        for layer in (*self.layers, self.layers[1]):
            x = x + checkpoint(layer, x, use_reentrant=True)
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(net: Net, stage: Any) -> Any:
    with quiet():
        trainer = make_trainer(ZeroStrategy(stage=stage, units=["Sequential"]))
        trainer.fit(net, DataLoader(range(4), batch_size=None))
    return trainer.strategy.engine  # type: ignore[attr-defined]


@WIRES
def test_no_buffer_is_left_between_steps(shared: bool) -> None:
    def run(rank: int) -> list[Any]:
        pool.KEPT_NBYTES = 1  # in this process alone
        return [buffer.place for stage in (2, 3) for buffer in fit(Net(), stage).means.pool if buffer.memory.numel()]

    assert run_world(2, run, environment={} if shared else {SWITCH: "0"}) == [[], []]


class KeepsGradients(Net):
    """Looks in the next step at what a hook has seen of a gradient: of its first part where it comes in two."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts, self.refused = parts, 0
        self.kept: list[tuple[Tensor, Tensor]] = []
        self.layers[1][0].weight.register_post_accumulate_grad_hook(self.keep)  # type: ignore[index]

    def keep(self, weight: Tensor) -> None:
        if len(self.kept) == 0:
            assert weight.grad is not None
            self.kept.append((weight.grad, weight.grad.clone()))
        else:  # what came before is elsewhere
            with pytest.raises(ParameterAccessError, match="in the middle of an accumulation"):
                _ = weight.grad
            self.refused += 1

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen += [torch.equal(gradient, then) and bool(then.abs().sum() > 0) for gradient, then in self.kept]
        self.kept.clear()
        if self.parts == 2:
            return super().training_step(batch, batch_idx)
        x = torch.full((2, WIDTH), 0.1 * (1 + batch_idx))
        for layer in (*self.layers, self.layers[1]):
            x = x + layer(x)
        return x.square().mean()


@WIRES
def test_a_gradient_that_is_kept_keeps_its_memory(shared: bool) -> None:
    def run(rank: int) -> None:
        for parts in (1, 2):
            net = KeepsGradients(parts)
            fit(net, 2)
            assert (net.seen, net.refused) == ([True] * 3, 4 * (parts - 1)), f"in {parts} parts"

    run_world(2, run, environment={} if shared else {SWITCH: "0"})


class KeepsWeights(Net):
    """Looks in the next step at an alias of a weight, of its forward or of what is computed again in the backward."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.layers[1].register_forward_pre_hook(self.keep)
        self.kept: list[tuple[Tensor, Tensor]] = []

    def keep(self, layer: Any, args: Any) -> None:
        self.kept = [(alias := layer[0].weight.detach().t(), alias.clone())]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen += [torch.equal(alias, then) for alias, then in self.kept]
        x = torch.full((2, WIDTH), 0.1 * (1 + batch_idx), requires_grad=self.checkpointed)
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=True) if self.checkpointed else layer(x))
        return x.square().mean()


@WIRES
def test_an_alias_of_a_weight_that_is_kept_keeps_its_memory(shared: bool) -> None:
    def run(rank: int) -> None:
        for checkpointed in (False, True):
            net = KeepsWeights(checkpointed)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="A tensor that shares memory with")
                fit(net, 3)
            assert net.seen == [True] * 3, f"checkpointed: {checkpointed}"

    run_world(2, run, environment={} if shared else {SWITCH: "0"})
