"""Weights in channels-last format, or without sizes at first, or cast in a forward; and compiled functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from lightning_zero.engine.hooks import warn_of_formats
from tests.helpers import cases
from tests.helpers.cases import WIDTH
from tests.helpers.rows import Row, compared, in_one_world
from tests.helpers.runs import Net, assert_same, batches, fit, made, quiet, raised, zero
from tests.helpers.training import make_trainer


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


def channels_last(kind: str, weights: bool) -> Row:
    """Of images in that format: formats of results, and their bits."""

    def play(strategy: Strategy) -> dict[str, Any]:
        module, trainer = Vision(kind, weights), make_trainer(strategy)
        trainer.fit(module, batches(3))
        return made(module, trainer)

    assert_same((yield compared(play)))


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


def lazy_layers_without_sizes() -> Row:
    def world(rank: int) -> list[str]:
        errors: list[str] = []
        for stage in (1, 3):
            with quiet(), raised(errors):
                make_trainer(zero(stage)).fit(Configured(dry=False), batches(1))
        return errors

    for errors in (yield world):
        assert len(errors) == 2
        assert all("'model.body.layers.0.weight' has no shape yet" in message for message in errors)
        assert all("`configure_model`" in message for message in errors)


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


class Router(nn.Module):
    """Scores in float32, whatever the rest computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.classifier = self.classifier.to(torch.float32)
        return x * torch.softmax(self.classifier(x.to(torch.float32)), dim=-1)


class RoutedBlock(cases.Block):
    """A block that owns a router."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.router(x))


class Routed(cases.Stack):
    """Routers in units and in the root."""

    def __init__(self) -> None:
        super().__init__(RoutedBlock(), cases.Block(), RoutedBlock())
        self.first = Router()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.first(x))


def trains_as_under_ddp(make: Callable[[], Net]) -> Row:
    """Also in a validation that comes after the first gradients."""

    def play(strategy: Strategy) -> dict[str, Any]:
        module = make()
        return made(module, fit(strategy, module, 2, val=1, max_epochs=2, num_sanity_val_steps=0))

    assert_same((yield compared(play)))


@pytest.mark.filterwarnings("ignore:.*Grad strides do not match:UserWarning")  # DDP's
@pytest.mark.filterwarnings("ignore:.*is in channels-last format, and is laid out contiguously")
def test_formats_late_sizes_casts_and_compiled_functions() -> None:
    in_one_world(
        2,
        channels_last("two dimensions", weights=True),
        channels_last("two dimensions", weights=False),
        channels_last("three dimensions", weights=True),
        trains_as_under_ddp(lambda: Configured(dry=True)),
        lazy_layers_without_sizes(),
        trains_as_under_ddp(lambda: Net(Routed)),
        trains_as_under_ddp(Compiled),
    )
