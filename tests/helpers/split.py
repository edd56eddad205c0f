"""A tensor-parallel module for checkpoints: split, replicated, frozen and scalar parameters, and a buffer.

``fit`` trains it under a ``Layout``, or on ordinary ranks; ``contents`` is what is in a checkpoint afterwards, whole;
``alone`` is what a plain loop makes of the batches of all ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy
from lightning_zero.checkpoint import open_checkpoint
from lightning_zero.comm import ControlGroup
from tests.helpers.training import make_trainer

__all__ = ["Feed", "Layout", "Net", "Split", "adamw", "alone", "contents", "distance", "fit", "plan_of", "same"]

WORDS, WIDTH, ROWS = 24, 16, 8  # rows of a batch over all ranks

Make = Callable[[Any], torch.optim.Optimizer]


class Feed(nn.Module):
    """A block with a norm and biases, whose layers are split by their outputs and by their inputs."""

    def __init__(self, width: int = WIDTH, hidden: int = 2 * WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """``seed``: of the weights, which are float64."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(WORDS, WIDTH, dtype=torch.float64)
        self.blocks = nn.ModuleList(Feed().double() for _ in range(2))
        self.frozen = Feed().double().requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.head = nn.Linear(WIDTH, WORDS, bias=False, dtype=torch.float64)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen += 1
        x = self.embedding(tokens)
        for block in (*self.blocks, self.frozen):
            x = block(x)
        return self.head(x * self.scale)


def plan_of(net: Net, turned: bool = False) -> dict[str, Any]:
    """How it is parallelised; ``turned``: each weight in its other dimension."""
    names = [*(f"blocks.{index}" for index in range(len(net.blocks))), "frozen"]
    split = {"head": ColwiseParallel(output_layouts=Replicate())}
    if turned:
        split |= {f"{name}.up": RowwiseParallel(input_layouts=Replicate()) for name in names}
        split |= {f"{name}.down": ColwiseParallel(output_layouts=Replicate()) for name in names}
        return {**split, "embedding": ColwiseParallel(output_layouts=Replicate())}
    split |= {f"{name}.up": ColwiseParallel() for name in names}
    split |= {f"{name}.down": RowwiseParallel() for name in names}
    return {**split, "embedding": RowwiseParallel(input_layouts=Replicate())}


class Layout(NamedTuple):
    """How a run is divided. Without tensor-parallel ranks nothing of tensor parallelism is asked for."""

    stage: int
    data: int
    tensor: int = 1

    def strategy(self, **options: Any) -> ZeroStrategy:
        if self.tensor > 1:
            options = {"tensor_parallel_size": self.tensor, "data_parallel_size": self.data, **options}
        return ZeroStrategy(stage=self.stage, **options)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """With an ``eps`` that leaves gradients of pure noise as small as they are."""
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-4)


class Split(pl.LightningModule):
    """Trains ``Net`` on rows of a batch that depends on the global step only.

    Args:
        seed: of the weights.
        turned: whether weights are split in their other dimension.
        change: of the net, before it is parallelised.
        optimizers: makes one, or several of the trainable parameters.
    """

    def __init__(
        self,
        seed: int = 0,
        turned: bool = False,
        change: Callable[[Any], Any] = lambda net: None,
        optimizers: Callable[[list[nn.Parameter]], Any] = adamw,
    ) -> None:
        super().__init__()
        self.seed, self.turned, self.change, self.make = seed, turned, change, optimizers
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = Net(self.seed)
            self.change(self.net)
            if (mesh := getattr(self, "device_mesh", None)) is not None:
                parallelize_module(self.net, mesh["tensor_parallel"], plan_of(self.net, self.turned))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        mesh = getattr(self, "device_mesh", None)
        rank, count = dist.get_rank(), dist.get_world_size()
        if mesh is not None:
            rank, count = mesh["data_parallel"].get_local_rank(), mesh["data_parallel"].size()
        return loss_of(self.net, self.trainer.global_step, rank, count)

    def configure_optimizers(self) -> Any:
        return self.make([p for p in self.parameters() if p.requires_grad])


def loss_of(net: Any, step: int, rank: int = 0, count: int = 1) -> Tensor:
    """Of one rank's rows of a step's batch."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens, targets = torch.randint(0, WORDS, (2, ROWS, 4), generator=generator)
    own = slice(rank * ROWS // count, (rank + 1) * ROWS // count)
    return F.cross_entropy(net(tokens[own]).flatten(0, 1), targets[own].flatten())


class _AtStart(pl.Callback):
    """Saves a run as it begins."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def fit(
    strategy: Any,
    module: pl.LightningModule,
    steps: int,
    *,
    resume: Path | None = None,
    begun: Path | None = None,
    ended: Path | None = None,
    **options: Any,
) -> pl.Trainer:
    """Train until so many steps are taken.

    Args:
        strategy: of the Trainer, or a layout.
        module: fresh.
        steps: since the beginning.
        resume: what to resume from.
        begun: where to save what the run begins with.
        ended: where to save what it ends with.
        options: of the Trainer.

    Collective: every rank.
    """
    strategy = strategy.strategy() if isinstance(strategy, Layout) else strategy
    callbacks = [*options.pop("callbacks", []), *([] if begun is None else [_AtStart(begun)])]
    with warnings.catch_warnings():  # of Lightning: a few workers, and a checkpoint in mid-epoch
        warnings.simplefilter("ignore")
        trainer = make_trainer(strategy, max_epochs=-1, max_steps=steps, callbacks=callbacks, **options)
        trainer.fit(module, DataLoader(range(100), batch_size=None), ckpt_path=resume)  # type: ignore[arg-type]
        if ended is not None:
            trainer.save_checkpoint(ended)
    return trainer


def alone(steps: int, change: Callable[[Any], Any] = lambda net: None, make: Make = adamw) -> dict[str, Tensor]:
    """What a plain loop in one process makes of the batches of all ranks: ``contents`` of its checkpoint."""
    net = Net()
    change(net)
    optimizer = make([p for p in net.parameters() if p.requires_grad])
    for step in range(steps):
        loss_of(net, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = {f"net.{name}": value for name, value in net.state_dict().items()}
    return _flat({"state_dict": weights, "optimizer_states": [optimizer.state_dict()]})


def contents(path: Path) -> dict[str, Tensor]:
    """Weights and optimizer states of a checkpoint, whole; states by optimizer, index of the parameter and key."""
    if path.suffix == ".ckpt":
        return _flat(torch.load(path, weights_only=True))
    return _flat(open_checkpoint(path, ControlGroup(None), verify=True))


def _flat(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    found = {name: value.clone() for name, value in checkpoint["state_dict"].items()}
    for number, optimizer in enumerate(checkpoint["optimizer_states"]):
        for index, key in enumerate(key for group in optimizer["param_groups"] for key in group["params"]):
            for name, value in optimizer["state"].get(key, {}).items():
                found[f"{number}.{index}.{name}"] = torch.as_tensor(value).clone()
    return found


def same(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Assert that every tensor has the same bits."""
    assert list(expected) == list(found)
    for name, value in expected.items():
        assert value.dtype == found[name].dtype, name
        assert torch.equal(value, found[name]), name


def distance(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], but: str = "net.seen") -> float:
    """The largest difference of two elements; of what is named ``but`` it is not asked."""
    assert list(expected) == list(found)
    names = [name for name, value in expected.items() if value.numel() and name != but]
    return max(float((expected[name].double() - found[name].double()).abs().max()) for name in names)
