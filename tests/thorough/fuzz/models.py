"""Small models, each ``(BATCH, WIDTH) -> (BATCH, WIDTH)``, with what makes sharding and synchronising hard."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["BATCH", "MODELS", "TAPS", "WIDTH", "Block"]

WIDTH = 8
BATCH = 4
WORDS = 11

# Called with every ``Block`` as its forward begins: where a program acts inside a forward. Global, so that a model can
# be pickled and copied.
TAPS: list[Callable[[nn.Module], None]] = []


class Block(nn.Module):
    """A residual layer, the usual unit. With ``skip`` it does nothing, as in stochastic depth."""

    skip = False

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 12)
        self.down = nn.Linear(12, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        for tap in TAPS:
            tap(self)
        if self.skip:
            return x
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Perceptron(nn.Module):
    """Blocks and a head."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(dropout), Block(dropout))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


class Convolution(nn.Module):
    """Batch norm: buffers that every training forward moves, differently on every rank.

    Without a bias before it, whose gradient would be rounding, and which Adagrad makes as large as any other.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 3, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm1d(3)
        self.block = Block()
        self.head = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        features = F.relu(self.bn(self.conv(self.block(x).unsqueeze(1))))
        return self.head(features.flatten(1))


class Transformer(nn.Module):
    """Attention over tokens, with a head tied to the embedding. No biases: that of keys has a gradient of rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.position = nn.Parameter(0.1 * torch.randn(WIDTH, WIDTH))
        self.attention = nn.MultiheadAttention(WIDTH, 2, bias=False, batch_first=True)
        self.block = Block(dropout=0.1)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.detach().abs() * 7).long() % WORDS
        h = self.embedding(tokens) + self.position[: tokens.shape[1]]
        h = self.block(h + self.attention(h, h, h, need_weights=False)[0])
        return self.head(h)[..., 0]


class Recurrent(nn.Module):
    """An LSTM, whose weights torch keeps in a list of its own too."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 5, batch_first=True)
        self.block = Block()
        self.head = nn.Linear(5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.head(self.lstm(x.unsqueeze(-1))[0][:, -1]))


class Shared(nn.Module):
    """One block that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.between = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(torch.relu(self.between(self.block(x)))))


class Momentum(nn.Module):
    """A student, and a frozen teacher that a program may move."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH))
        self.teacher = nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH))
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x)
        return self.student(x) - 0.5 * target


class Frozen(nn.Module):
    """Some layers, and a bias of a layer, are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, WIDTH)
        self.blocks[0].requires_grad_(False)
        self.head.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Queue(nn.Module):
    """Buffers that the forward writes: a moving average, a queue of what this rank has seen, and where it stands."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.head = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("queue", torch.zeros(6, WIDTH))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))
        self.register_buffer("scratch", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.block(x)
        if self.training and torch.is_grad_enabled():
            with torch.no_grad():
                self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
                self.queue[int(self.place)] = h[0]
                self.place.copy_((self.place + 1) % 6)
        return self.head(h - 0.1 * self.mean + 0.1 * self.queue.mean(0).detach())


class Lists(nn.Module):
    """Parameters in a list and on the module itself, one of a single element, one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList([nn.Parameter(0.3 * torch.randn(WIDTH, WIDTH)) for _ in range(3)])
        self.scale = nn.Parameter(torch.ones(()))
        self.unused = nn.Parameter(torch.ones(5))
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        for matrix in self.matrices:
            x = torch.tanh(x @ matrix)
        return self.block(x) * self.scale


MODELS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": Perceptron,
    "dropout": lambda: Perceptron(dropout=0.2),
    "convolution": Convolution,
    "transformer": Transformer,
    "recurrent": Recurrent,
    "shared": Shared,
    "momentum": Momentum,
    "frozen": Frozen,
    "queue": Queue,
    "lists": Lists,
}
