"""A zoo of small models, each a way in which real models differ from a stack of layers.

``ZOO`` must train bit for bit like DDP. What may also fail cleanly lives in ``hazards.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.helpers.cases import VOCABULARY, WIDTH, Block, Case, Stack, case, cross_entropy, images, tokens
from tests.helpers.models_autograd import CASES as _AUTOGRAD

__all__ = ["CHANNELS_LAST", "ZOO"]

ZOO: dict[str, Case] = dict(_AUTOGRAD)


def _add(name: str, build: Callable[[], nn.Module], **options: Any) -> None:
    ZOO[name] = case(name, build, **options)


# ---------------------------------------------------------------------------------------------------------------------
# The usual: language models, convolutions, recurrence


class GPTBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = Block()

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.mlp(x + self.out(mixed.transpose(1, 2).flatten(2)))


class GPT(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(7, WIDTH) / 10)
        self.blocks = nn.ModuleList(GPTBlock() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


for _tied in (False, True):
    _name = "gpt_tied" if _tied else "gpt"
    _gpt = {"batch": tokens, "loss": cross_entropy}
    _add(_name, lambda tied=_tied: GPT(tied=tied), units=("GPTBlock",), steps=6, **_gpt)
_add("gpt_tied_automatic_units", lambda: GPT(tied=True), units=None, **_gpt)


class ConvBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.norm(self.conv(x)))


def _conv_net() -> nn.Module:
    blocks = (ConvBlock(3, 7), ConvBlock(7, 11), ConvBlock(11, 5))
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 5))


_add("conv_batchnorm", _conv_net, batch=images, loss=cross_entropy, units=("ConvBlock",), notes="in-place ReLU")

# Not in the zoo of equal bits: a flat buffer holds every parameter in its own order of dimensions, so a convolution
# with a channels-last weight computes in another order.
CHANNELS_LAST = case(
    "conv_channels_last",
    lambda: _conv_net().to(memory_format=torch.channels_last),
    batch=images,
    loss=cross_entropy,
    units=("ConvBlock",),
)


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        options = {"nhead": 2, "dim_feedforward": 28, "dropout": 0.1, "batch_first": True}
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, **options), 2, enable_nested_tensor=False
        )
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, **options), 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(x, self.encoder(x))


_add("transformer", EncoderDecoder, units=("TransformerEncoderLayer", "TransformerDecoderLayer"), notes="dropout")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.second = nn.MultiheadAttention(WIDTH, 2, kdim=WIDTH, vdim=WIDTH, add_bias_kv=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x, x, x, need_weights=False)[0]
        mixed, weights = self.second(x, x, x)
        return mixed * weights.mean()


_add("attention", Attention, units=("MultiheadAttention",), notes="out_proj is used, never called")


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH // 2, num_layers=2, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


_add("lstm", lambda: Stack(Recurrent(), Recurrent()), units=("Recurrent",))

# ---------------------------------------------------------------------------------------------------------------------
# Order of use


class Repeated(Stack):
    def __init__(self, order: tuple[int, ...], layers: int = 2) -> None:
        super().__init__(*(Block() for _ in range(layers)))
        self.order = order

    def run(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.layers[index](x)
        return x


_add("called_twice_interleaved", lambda: Repeated((0, 1, 0, 1)))
_add("called_in_reverse", lambda: Repeated((2, 1, 0), 3), notes="against registration order")


class Skips(Stack):
    def run(self, x: Tensor) -> Tensor:
        down = [x]
        for layer in self.layers:
            down.append(layer(down[-1]))
        return down[-1] + down[1] * down[0]


_add("unet_skips", Skips)


class Outer(Block):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(super().forward(x)) + self.up(x).mean()


_add("nested_units", lambda: Stack(Outer(), Outer()), units=("Outer", "Block"))
_add("every_linear_a_unit", Stack, units=("Linear", "LayerNorm"))


class SharedAcrossUnits(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2].up.weight = self.layers[0].up.weight
        self.layers[1].norm = self.layers[0].norm


_add("shared_across_units", SharedAcrossUnits, notes="a tensor and a module with two owners")


class OrderChanges(Stack):
    """The second step runs the units in another order, the third one leaves one out."""

    def run(self, x: Tensor) -> Tensor:
        self.count = getattr(self, "count", 0) + 1
        order = {2: (2, 0, 1), 3: (0, 2)}.get(self.count, (0, 1, 2))
        for index in order:
            x = self.layers[index](x)
        return x


_add("order_changes", OrderChanges, steps=5)

# ---------------------------------------------------------------------------------------------------------------------
# Which parameters take part


class Gain(Block):
    """A parameter that takes part never, or in every second step only."""

    def __init__(self, sometimes: bool) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.sometimes, self.count = sometimes, 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x * self.gain if self.sometimes and self.count % 2 else x)


def _unused_parameter(sometimes: bool = False) -> nn.Module:
    model = Stack(Block(), Gain(sometimes), Block())
    model.stem = Gain(sometimes)
    return model


class SkippedUnit(Stack):
    def __init__(self, sometimes: bool = False) -> None:
        super().__init__()
        self.sometimes, self.count = sometimes, 0

    def run(self, x: Tensor) -> Tensor:
        self.count += 1
        x = self.layers[0](x)
        if self.sometimes and self.count % 2:
            x = self.layers[1](x)
        return self.layers[2](x)


_sometimes = {"steps": 5, "notes": "no gradient is not a zero gradient: moments and decay stand still"}
_add("unused_parameter", _unused_parameter, units=("Gain", "Block"))
_add("sometimes_unused_parameter", lambda: _unused_parameter(True), units=("Gain", "Block"), **_sometimes)
_add("sometimes_unused_parameter_of_root", lambda: _unused_parameter(True), **_sometimes)
_add("unused_unit", SkippedUnit)
_add("sometimes_unused_unit", lambda: SkippedUnit(True), **_sometimes)


class RankDependent(Stack):
    """In some steps each rank leaves out another one of two units of equal size, as routing by content does."""

    def __init__(self, steps: tuple[int, ...]) -> None:
        super().__init__()
        self.steps, self.count = steps, 0

    def run(self, x: Tensor) -> Tensor:
        self.count += 1
        left_out = 1 + dist.get_rank() % 2 if self.count in self.steps else None
        for index, layer in enumerate(self.layers):
            if index != left_out:
                x = layer(x)
        return x


_add("ranks_use_other_units_later", lambda: RankDependent((3,)), steps=5)
_add("ranks_use_other_units_always", lambda: RankDependent((1, 2, 3, 4)))
_add("ranks_use_other_units_at_times", lambda: RankDependent((2, 4, 5)), steps=6)


def _frozen_mix() -> nn.Module:
    model = Stack(Block(), Block(), Block(), Block())
    model.stem.requires_grad_(False)
    model.layers[0].requires_grad_(False)
    model.layers[1].up.weight.requires_grad_(False)
    model.layers[2].norm.requires_grad_(False)
    model.layers[3].requires_grad_(False)  # between trainable units: its backward still needs its weights
    return model


_add("frozen_mix", _frozen_mix)


class OddSizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.single = nn.Parameter(torch.full((1, 1, 1), 0.5))
        self.prime = nn.Parameter(torch.linspace(-1, 1, 67))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.single + self.prime[: x.shape[-1]] + self.empty.sum() + self.prime.square().mean()


_add("odd_sizes", lambda: Stack(OddSizes(), OddSizes()), units=("OddSizes",))


class MixedDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(x) + self.wide(x.double()).float()


_add("mixed_dtypes", lambda: Stack(MixedDtypes(), MixedDtypes()), units=("MixedDtypes",))
