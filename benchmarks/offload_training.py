"""The model that ``offload.py`` trains, and a world that trains it with each kind of offload in turns."""

from __future__ import annotations

import logging
import os
import socket
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_zero import HostOffload, NvmeOffload, ZeroStrategy
from lightning_zero.engine import ZeroEngine

VOCABULARY = 8192
HEAD_WIDTH = 64


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.head_width = width // max(1, width // HEAD_WIDTH)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: batch, length, width."""
        # Each head's query, key and value follow one another, so that ranks can share the heads.
        projected = self.attention(self.first(x)).unflatten(-1, (-1, 3, self.head_width))
        query, key, value = projected.transpose(1, 2).unbind(3)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class GPT(pl.LightningModule):
    """A small language model whose head and embedding are one weight.

    Args:
        width: of the blocks.
        layers: how many there are.
        make_optimizer: from the parameters; ``AdamW(fused=True)`` if it is not given.
        vocabulary: rows of the embedding.
        tied: whether the head has the embedding's weight.
    """

    def __init__(
        self,
        width: int,
        layers: int,
        make_optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        vocabulary: int = VOCABULARY,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.make_optimizer = make_optimizer
        self.losses: list[Tensor] = []
        self._init_weights(self.embedding)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss: each token is predicted from those before it."""
        logits = self.head(self.norm(self.blocks(self.embedding(tokens[:, :-1]))))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The loss, kept for comparison."""
        loss = self(batch)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The user's own optimizer."""
        if self.make_optimizer is not None:
            return self.make_optimizer(self.parameters())
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


def numel_of(width: int, layers: int, **options: Any) -> int:
    """Parameters of the model."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT(width, layers, **options).parameters())


def gradients_of(engine: ZeroEngine, model: GPT) -> None:
    """One backward through an engine: afterwards every shard parameter has its gradient.

    Its values are then replaced: a step on denormal numbers takes 25 times as long as one on ordinary ones.
    """
    with engine.step("training_step"):
        loss = model(torch.randint(0, VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(1)))
    with engine.backward():
        loss.backward()
    for shard in engine.shards.values():
        if shard.parameter is not None and shard.parameter.grad is not None:
            shard.parameter.grad.normal_(std=1e-3)


class Clock(pl.Callback):
    """Seconds of every step, from batch to batch."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: list[float] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        """Start."""
        self._began = self._now()

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Stop."""
        self.seconds.append(self._now() - self._began)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    @property
    def median(self) -> float:
        """Of all steps but the first, which allocates."""
        return statistics.median(self.seconds[1:])


def quiet() -> None:
    """Only what matters."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "DeepSpeed", "deepspeed"):
        logging.getLogger(name).setLevel(logging.ERROR)


def fit(model: GPT, clock: Clock, steps: int, tokens: tuple[int, int], **options: Any) -> None:
    """Train on random tokens, the same ones every time.

    Args:
        model: to train.
        clock: notes the steps' seconds.
        steps: how many.
        tokens: sequences in a batch of one rank, and the tokens of each.
        options: for the Trainer.
    """
    batch, length = tokens
    ranks = options.get("devices", 1)
    data = torch.randint(0, VOCABULARY, (steps * batch * ranks, length + 1), generator=torch.Generator().manual_seed(2))
    trainer = pl.Trainer(
        max_steps=steps,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(model, DataLoader(data, batch))


def launched(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The variables that ``torchrun`` gives a rank, so that a Trainer in it joins the world and starts nothing."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "benchmark",
    }


def train(rank: int, setting: dict[str, Any], world_size: int, port: int, results: Any) -> None:
    """One rank of a world: each kind of offload in turns. Rank 0 reports seconds and losses by kind and round."""
    quiet()
    os.environ.update(launched(rank, world_size, port))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    dist.init_process_group("gloo")
    files = {
        "path": setting["folder"],
        "buffer_mib": setting["buffer_mib"] / world_size,
        "io_threads": setting["io_threads"],
    }
    kinds: dict[str, Any] = {
        "none": None,
        "host": HostOffload(),
        "host, parameters": HostOffload(parameters=True),
        "files": NvmeOffload(**files),
        "files, parameters": NvmeOffload(parameters=True, **files),
    }
    found: dict[str, list[tuple[float, list[float]]]] = {name: [] for name in kinds}
    for turn in range(setting["repeat"] + 1):
        for name, offload in kinds.items():
            torch.manual_seed(0)
            model, clock = GPT(setting["width"], setting["layers"]), Clock(torch.device("cpu"))
            strategy = ZeroStrategy(3, units=["Block"], offload=offload)
            options = {"accelerator": "cpu", "devices": world_size, "strategy": strategy}
            fit(model, clock, max(2, setting["steps"]), setting["tokens"], **options)
            if turn:  # the first one only warms up
                found[name].append((clock.median, [float(loss) for loss in model.losses]))
    if rank == 0:
        results.put(found)
    dist.destroy_process_group()


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])
