"""A ``Case`` is a small model with what a trainer needs, so that it runs alike under DDP and under every stage.

All dimensions are small and odd: slices are uneven at three ranks, some ranks own nothing of some parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = [
    "VOCABULARY",
    "WIDTH",
    "Block",
    "Case",
    "Stack",
    "case",
    "cross_entropy",
    "features",
    "images",
    "mse",
    "tokens",
]

Batch = tuple[Any, ...]
WIDTH = 20
VOCABULARY = 37


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model with its data and its loss.

    Args:
        name: identifies the case in test names.
        build: makes the module; called under a fixed seed.
        batch: ``(rank, step)`` to inputs, different for every rank and step.
        loss: ``(module, batch)`` to the scalar that is differentiated. Called on every rank alike.
        units: class names given to the strategy; ``None`` leaves the choice to it.
        steps: optimizer steps worth comparing.
        optimizer: ``"adamw"``, or ``"sgd"`` where gradients are sparse.
        ddp: arguments for the reference where ``find_unused_parameters=True`` does not work.
        notes: why the case exists.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    units: tuple[str, ...] | None = ("Block",)
    steps: int = 4
    optimizer: str = "adamw"
    ddp: dict[str, Any] = field(default_factory=lambda: {"find_unused_parameters": True})
    notes: str = ""

    def __repr__(self) -> str:
        return self.name


def case(name: str, build: Callable[[], nn.Module], **options: Any) -> Case:
    """A case whose data are feature vectors and whose loss is a mean square unless ``options`` say otherwise."""
    return Case(name=name, build=build, **{"batch": features(WIDTH), "loss": mse, **options})


# ---------------------------------------------------------------------------------------------------------------------
# Data and losses


def _generator(rank: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * step + rank)


def features(width: int, *, shape: tuple[int, ...] = (3, 5)) -> Callable[[int, int], Batch]:
    """Inputs and targets of ``(*shape, width)``."""

    def batch(rank: int, step: int) -> Batch:
        both = torch.randn(2, *shape, width, generator=_generator(rank, step))
        return both[0], both[1]

    return batch


def images(rank: int, step: int) -> Batch:
    """Images of ``(4, 3, 8, 8)`` and classes."""
    generator = _generator(rank, step)
    return torch.randn(4, 3, 8, 8, generator=generator), torch.randint(5, (4,), generator=generator)


def tokens(rank: int, step: int) -> Batch:
    """Token ids and next ids, each ``(2, 7)``."""
    ids = torch.randint(VOCABULARY, (2, 8), generator=_generator(rank, step))
    return ids[:, :-1], ids[:, 1:]


def mse(model: nn.Module, batch: Batch) -> Tensor:
    """Mean square difference of ``model(batch[0])`` and ``batch[1]``."""
    return F.mse_loss(model(batch[0]), batch[1])


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of ``model(batch[0])`` over its last dimension."""
    logits = model(batch[0])
    return F.cross_entropy(logits.flatten(0, -2), batch[1].flatten())


# ---------------------------------------------------------------------------------------------------------------------
# What most models are stacked from


class Block(nn.Module):
    """Pre-norm residual MLP: what most cases are stacked from."""

    def __init__(self, width: int = WIDTH, hidden: int = 28) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Root parameters, ``layers``, a head; subclasses change how the layers are used."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layers or (Block(), Block(), Block()))
        self.head = nn.Linear(WIDTH, WIDTH)

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.run(self.stem(x)))
