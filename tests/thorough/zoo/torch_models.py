"""Modules of torch itself, as people put them together."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tests.thorough.zoo.play import listed

__all__ = ["ARCHITECTURES"]

WIDTH = 20


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: object) -> None:
        super().__init__()
        self.layers = kind(WIDTH, WIDTH, num_layers=2, dropout=0.1, batch_first=True, **options)  # type: ignore[arg-type]
        self.head = nn.LazyLinear(3)
        self.head(self.layers(torch.randn(1, 2, WIDTH))[0])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)[0])


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, WIDTH)
        self.core = nn.Transformer(WIDTH, 4, 2, 2, 36, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, 31, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.core(self.embed(x), self.embed(x.flip(1))))


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True)
        self.scale = nn.ParameterList([nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(()))])

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0] * self.scale[0] + self.scale[1]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Dropout2d(0.1))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head((x + self.body(x)).mean((2, 3)))


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 2, 2), nn.InstanceNorm2d(8, affine=True), nn.LeakyReLU())
        self.up = nn.Sequential(nn.Conv2d(8, 12, 1), nn.PixelShuffle(2), nn.ConvTranspose2d(3, 3, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x)) - x


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(31, WIDTH, mode="mean")
        self.pair = nn.Bilinear(WIDTH, WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.pair(self.bag(x), self.bag(x.flip(0)))


def normed() -> nn.Module:
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
        nn.PReLU(),
        parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
        parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)),
        nn.LayerNorm(WIDTH),
    )


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 36, dropout=0.1, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def features(model: nn.Module) -> Tensor:
    return model(torch.randn(3, 6, WIDTH)).square().mean()


def images(model: nn.Module) -> Tensor:
    return model(torch.randn(3, 3, 8, 8)).square().mean()


def tokens(model: nn.Module) -> Tensor:
    return F.log_softmax(model(torch.randint(31, (3, 6))), -1)[..., 0].square().mean()


_TABLE: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor]]] = {
    "Transformer": (Translator, tokens),
    "TransformerEncoder": (encoder, features),
    "MultiheadAttention": (Attentive, features),
    "LSTM": (lambda: Recurrent(nn.LSTM, bidirectional=True), features),
    "LSTM with projections": (lambda: Recurrent(nn.LSTM, proj_size=7), features),
    "GRU": (lambda: Recurrent(nn.GRU), features),
    "RNN": (lambda: Recurrent(nn.RNN), features),
    "convolutions with BatchNorm": (Residual, images),
    "autoencoder": (Autoencoder, images),
    "EmbeddingBag and Bilinear": (Bag, tokens),
    "parametrizations": (normed, features),
    "Linear": (lambda: nn.Sequential(nn.Linear(WIDTH, 33), nn.GELU(), nn.Dropout(0.2), nn.Linear(33, 5)), features),
}
ARCHITECTURES = listed("torch", _TABLE)
