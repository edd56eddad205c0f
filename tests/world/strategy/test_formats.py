"""Layers with weights in channels-last format, or without sizes at first; and functions that compile themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from lightning_zero.engine.hooks import warn_of_formats
from tests.helpers.cases import WIDTH
from tests.helpers.runs import Net, assert_same, batches, each_strategy, fit, made, quiet, raised, zero
from tests.helpers.training import make_trainer
from tests.helpers.world import run_world


class Block(nn.Module):
    """For the rule of units."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def flat() -> nn.Module:
    return nn.Sequential(
        Block(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        Block(nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, groups=4), nn.GELU()),
        Block(nn.ConvTranspose2d(8, 4, 3)),
    )


def deep() -> nn.Module:
    return nn.Sequential(
        Block(nn.Conv3d(2, 4, 3), nn.BatchNorm3d(4), nn.ReLU()), Block(nn.ConvTranspose3d(4, 2, 2), nn.Conv3d(2, 1, 1))
    )


IMAGES = {
    "two dimensions": (flat, (4, 3, 12, 12), torch.channels_last),
    "three dimensions": (deep, (2, 2, 6, 6, 6), torch.channels_last_3d),
}


class Vision(Net):
    def __init__(self, kind: str, weights: bool) -> None:
        build, self.size, self.format = IMAGES[kind]
        super().__init__(build)
        if weights:
            self.model.to(memory_format=self.format)  # type: ignore[call-overload]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = torch.randn(self.size, generator=torch.Generator().manual_seed(10 * batch_idx + self.global_rank))
        out = self.model(x.contiguous(memory_format=self.format))
        self.losses.append(torch.tensor(out.stride()))
        loss = out.pow(2).mean()
        self.losses.append(loss.detach().clone())
        return loss


@pytest.mark.filterwarnings("ignore:.*Grad strides do not match:UserWarning")  # DDP's
@pytest.mark.filterwarnings("ignore:.*is in channels-last format, and is laid out contiguously")
@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("kind", IMAGES)
def test_channels_last(kind: str, weights: bool) -> None:
    """Of images in that format: formats of results, and their bits."""

    def play(strategy: Strategy) -> dict[str, Any]:
        module, trainer = Vision(kind, weights), make_trainer(strategy)
        trainer.fit(module, batches(3))
        return made(module, trainer)

    assert_same(each_strategy(play))


def test_weights_in_another_format_are_named() -> None:
    with pytest.warns(UserWarning, match=r"'0\.layers\.0' is in channels-last format, and is laid out contiguously"):
        warn_of_formats(flat().to(memory_format=torch.channels_last))  # type: ignore[call-overload]


class Late(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Block(nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.ReLU())
        self.head = nn.LazyLinear(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Configured(Net):
    """Gets its lazy layers in ``configure_model``, and their sizes there if ``dry``."""

    def __init__(self, dry: bool) -> None:
        super().__init__(nn.Identity)
        self.dry = dry

    def configure_model(self) -> None:
        if isinstance(self.model, nn.Identity):
            torch.manual_seed(3)
            self.model = Late()
            if self.dry:
                self.model(torch.zeros(2, WIDTH))


def test_lazy_layers_with_sizes_from_a_forward() -> None:
    def play(strategy: Strategy) -> dict[str, Any]:
        module, trainer = Configured(dry=True), make_trainer(strategy)
        trainer.fit(module, batches(3))
        return made(module, trainer)

    assert_same(each_strategy(play))


@pytest.mark.parametrize("stage", [1, 3])
def test_lazy_layers_without_sizes(stage: int) -> None:
    def world(rank: int) -> list[str]:
        errors: list[str] = []
        with quiet(), raised(errors):
            make_trainer(zero(stage)).fit(Configured(dry=False), batches(1))
        return errors

    for (message,) in run_world(2, world):
        assert "'model.body.layers.0.weight' has no shape yet" in message
        assert "`configure_model`" in message


@torch.compile(backend="eager")
def broken(x: Tensor) -> Tensor:
    """Has graph breaks, makes tensors, and asks for shapes, as torchvision's `_roi_align` does."""
    steps = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
    torch._dynamo.graph_break()
    if float(x.detach().sum()) > 0:
        steps = steps + 1
    torch._dynamo.graph_break()
    return x * steps[None].cos()


class Compiled(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = self.data(batch_idx)
        loss = (broken(self.model(broken(x))) - y).pow(2).mean()
        self.losses.append(loss.detach().clone())
        return loss


def test_a_compiled_function_with_graph_breaks() -> None:
    def play(strategy: Strategy) -> dict[str, Any]:
        module = Compiled()
        return made(module, fit(strategy, module))

    assert_same(each_strategy(play))
