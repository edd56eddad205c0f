"""A cast that changes nothing, in a forward: mixtures of experts keep their router in float32 that way."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from tests.helpers.cases import WIDTH, Block, Stack
from tests.helpers.runs import Net, assert_same, each_strategy, fit, made


class Router(nn.Module):
    """Scores in float32, whatever the rest computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.classifier = self.classifier.to(torch.float32)
        return x * torch.softmax(self.classifier(x.to(torch.float32)), dim=-1)


class RoutedBlock(Block):
    """A block that owns a router."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.router(x))


class Routed(Stack):
    """Routers in units and in the root."""

    def __init__(self) -> None:
        super().__init__(RoutedBlock(), Block(), RoutedBlock())
        self.first = Router()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.first(x))


def test_casts_that_change_nothing() -> None:
    """In training, and in a validation that comes after the first gradients."""

    def play(strategy: Strategy) -> dict[str, Any]:
        module = Net(Routed)
        trainer = fit(strategy, module, 3, val=2, max_epochs=2, num_sanity_val_steps=0)
        return made(module, trainer)

    assert_same(each_strategy(play))
