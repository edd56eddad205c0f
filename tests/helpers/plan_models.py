"""Small models, all on the meta device: a plan never reads data."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_zero.config import validate_units
from lightning_zero.plan import units
from lightning_zero.plan.tree import ModuleTree


class Block(nn.Module):
    """12 width² + 13 width elements: an ordinary transformer block with a ``Sequential`` in it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x


class Gpt(nn.Module):
    """An embedding, blocks, a norm and a head, tied or not."""

    def __init__(self, *, width: int = 64, blocks: int = 4, vocabulary: int = 2_000, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return x


class Llama70BBlock(nn.Module):
    """855,654,400 elements."""

    def __init__(self) -> None:
        super().__init__()
        width, keys, hidden = 8_192, 1_024, 28_672
        self.query, self.output = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.key, self.value = nn.Linear(width, keys, bias=False), nn.Linear(width, keys, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Llama70B(nn.Module):
    """The shapes of Llama 3 70B: 80 blocks, 70,553,706,496 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128_256, 8_192)
        self.blocks = nn.ModuleList(Llama70BBlock() for _ in range(80))
        self.norm = nn.RMSNorm(8_192)
        self.head = nn.Linear(8_192, 128_256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x


def on_meta(build: type[nn.Module], **settings: object) -> nn.Module:
    """The module with parameters that have no memory."""
    with torch.device("meta"):
        return build(**settings)


def numel(module: nn.Module) -> int:
    """Elements of the module's distinct parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def find_units(module: nn.Module, rules: Sequence[str] | None) -> tuple[units.UnitSpec, ...]:
    """The units of a module."""
    return units.find_units(ModuleTree(module), validate_units(rules))
