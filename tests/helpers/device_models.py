"""Models as users write them, on one device: the losses and weights of every stage beside those of DDP, by their bits.

Ranks that share a GPU are hosts of their own to nccl, which refuses two ranks of one host on one device, and they talk
through sockets of the loopback.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_zero import ZeroStrategy, full_parameters

__all__ = ["beside_ddp"]

WIDTH, LENGTH, VOCABULARY, STEPS, BATCH = 32, 12, 64, 3, 4


class Base(pl.LightningModule):
    """Batches are images, from which each model takes what it wants."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def on_train_start(self) -> None:
        torch.manual_seed(self.global_rank)  # plain Lightning has drawn other numbers by now

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch[0])
        self.seen.append(loss.detach())
        return loss

    def loss(self, images: Tensor) -> Tensor:
        raise AssertionError("each model has its own")

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Perceptron(Base):
    """With dropout, a frozen layer, two groups and a schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(48, WIDTH), nn.GELU(), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, 8)
        self.layers[0].requires_grad_(False)

    def loss(self, images: Tensor) -> Tensor:
        return F.cross_entropy(
            self.head(self.layers(images.flatten(1)[:, :48])), torch.arange(BATCH, device=self.device)
        )

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.layers[3].parameters(), "lr": 0.1}, {"params": self.head.parameters()}]
        optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Convolutions(Base):
    """In channels-last format, with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        layers = [
            nn.Conv2d(3, 16, 3),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, stride=2),
            nn.BatchNorm2d(16),
        ]
        self.layers = nn.Sequential(*layers).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def loss(self, images: Tensor) -> Tensor:
        return self.layers(images.contiguous(memory_format=torch.channels_last)).square().mean()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.into(self.before(x)).view(*x.shape[:2], 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.feed(self.after(x))


class Language(Base):
    """A tied weight. ``compiled``: each block, by graphs that nothing lowers further."""

    def __init__(self, compiled: bool = False) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        if compiled:
            for block in self.blocks:
                block.compile(backend="aot_eager")

    def loss(self, images: Tensor) -> Tensor:
        ids = (images.flatten(1)[:, :LENGTH] * VOCABULARY).long()
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


class Recurrent(Base):
    """cuDNN has its weights in one block of memory, and ``flatten_parameters`` puts them there."""

    def __init__(self, kind: Callable[..., nn.RNNBase], flatten: bool) -> None:
        super().__init__()
        self.recurrent = kind(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.flatten = flatten

    def loss(self, images: Tensor) -> Tensor:
        if self.flatten:
            self.recurrent.flatten_parameters()
        return self.recurrent(images.flatten(1)[:, : 8 * WIDTH].unflatten(1, (8, WIDTH)))[0].square().mean()


class Adversarial(Base):
    """Two optimizers in manual optimization, clipped, the second one on a stream of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = (
            nn.Linear(8, WIDTH),
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)),
        )

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        real, noise = batch[0].flatten(1)[:, :WIDTH], torch.randn(BATCH, 8, device=self.device)
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = F.softplus(self.on_own_stream(noise)).mean() - F.logsigmoid(self.critic(real)).mean()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.01, "value")
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
            self.seen.append(loss.detach())

    def on_own_stream(self, noise: Tensor) -> Tensor:
        if self.device.type != "cuda":
            return self.critic(self.generator(noise))
        stream, before = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            score = self.critic(self.generator(noise))
        before.wait_stream(stream)
        score.record_stream(before)
        return score

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), lr=1e-3) for part in (self.critic, self.generator)]


MODELS: dict[str, Callable[[], Base]] = {
    "perceptron": Perceptron,
    "convolutions": Convolutions,
    "language": Language,
    "language, compiled": lambda: Language(compiled=True),
    "LSTM": lambda: Recurrent(nn.LSTM, flatten=True),
    "GRU": lambda: Recurrent(nn.GRU, flatten=False),
    "adversarial": Adversarial,
}


def fitted(device: str, build: Callable[[], Base], strategy: Any, precision: str, world_size: int) -> dict[str, Tensor]:
    """Losses of this rank, and all weights."""
    pl.seed_everything(1, verbose=False)
    net = build()
    images = torch.rand(world_size, STEPS * BATCH, 3, 10, 10)[int(os.environ.get("RANK", "0"))]
    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler")
    place: dict[str, Any] = {"accelerator": "gpu" if device == "cuda" else "cpu", "devices": 1, "num_nodes": world_size}
    options: dict[str, Any] = {**place, **dict.fromkeys(names, False), "precision": precision}
    trainer = pl.Trainer(strategy=strategy, max_epochs=1, **options)
    trainer.fit(net, DataLoader(TensorDataset(images), batch_size=BATCH))
    with full_parameters(net):
        weights = {name: weight.detach().cpu().clone() for name, weight in net.named_parameters()}
    return {f"loss {step}": loss.cpu() for step, loss in enumerate(net.seen)} | weights


def beside_ddp(device: str, precision: str) -> dict[str, list[str]]:
    """For each model and stage names of losses and weights that are not DDP's, or with one rank plain Lightning's."""
    rank = os.environ.get("RANK", "0")
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": rank, "GROUP_RANK": rank}
    os.environ |= {"NCCL_HOSTID": f"host {rank}", "NCCL_SOCKET_IFNAME": "lo", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    torch.use_deterministic_algorithms(True, warn_only=True)  # cuDNN and atomics are else not even like themselves
    world_size, differ = int(os.environ.get("WORLD_SIZE", "1")), {}
    plain = "ddp_find_unused_parameters_true" if world_size > 1 else "auto"
    for name, build in MODELS.items():
        expected = fitted(device, build, plain, precision, world_size)
        for stage in (1, 2, 3):
            found = fitted(device, build, ZeroStrategy(stage), precision, world_size)
            differ[f"{name}, zero{stage}"] = [key for key in expected | found if not _equal(key, expected, found)]
    return differ


def _equal(key: str, *sides: dict[str, Tensor]) -> bool:
    return all(key in side for side in sides) and torch.equal(*(side[key] for side in sides))
