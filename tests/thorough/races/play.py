"""Small trainings on a simulated device: of each the trace of one rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import NvmeOffload, ZeroPrecision, ZeroStrategy
from lightning_zero.engine import pool
from lightning_zero.plan import plan as plans
from tests.helpers.training import make_trainer, quiet
from tests.thorough.races.simulated import simulated_device
from tests.thorough.races.trace import Item

WIDTH, STEPS = 24, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)
        self.hidden: list[Tensor] = []
        self.keeps = False
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.keeps:
            self.kept = self.up.weight.detach()
        x = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        self.hidden = [x]
        return x.clone()


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.block = nn.Linear(WIDTH, WIDTH), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(self.block(x))


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One training.

    ``twist``: what the module does that is not usual. ``look``: it computes once more between backward and step, and
    steps twice more after the batch. ``skip``: every second time without the first block. ``aside``: it keeps an output
    that has no backward. ``keep``: blocks keep a weight, in its memory. ``hidden``: it goes on with what the last block
    did not return, so that no hook sees its backward. ``files``: what is offloaded rests in files. ``passes``: what a
    pool does with large buffers it does with these.
    """

    stage: Literal[1, 2, 3]
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    accumulate: int = 1
    clip: float | None = None
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    twist: Literal["", "look", "skip", "aside", "keep", "hidden"] = ""
    files: bool = False
    quick: bool = False
    passes: bool = False
    strategy: dict[str, Any] = field(default_factory=dict)


class Net(pl.LightningModule):
    """An embedding that is tied to the head, and blocks: one of them frozen, one in another unit."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.automatic_optimization = setting.twist != "look"
        self.setting = setting
        self.embedding, self.head = nn.Embedding(17, WIDTH), nn.Linear(WIDTH, 17, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks = nn.ModuleList([Block(), Outer(), Block(), Block()])
        self.blocks[2].requires_grad_(False)
        for block in self.blocks.modules():
            if isinstance(block, Block):
                block.keeps = setting.twist == "keep"
        self.kept: Tensor | None = None

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss = self._loss(int(batch))
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss)
        with torch.no_grad():
            self._loss(int(batch))
        self._step()
        return None

    def on_train_batch_end(self, *args: Any) -> None:
        if not self.automatic_optimization:
            self._step()
            self._step()
            self.zero_grad()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self._loss(int(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        whole = self.setting.optimizer is torch.optim.Muon
        parameters = [p for p in self.blocks.parameters() if p.ndim == 2] if whole else self.parameters()
        return self.setting.optimizer(parameters, lr=0.01)

    def _step(self) -> None:
        optimizer: Any = self.optimizers()
        optimizer.step()

    def _loss(self, index: int) -> Tensor:
        tokens = (torch.arange(8, device=self.device) + index + dist.get_rank()).remainder(17)
        x = self.embedding(tokens)
        if self.setting.twist == "aside":
            self.kept = self.blocks[0](x)
        for block in self.blocks[index % 2 if self.setting.twist == "skip" else 0 :]:
            x = block(x)
        if self.setting.twist == "hidden":
            last: Any = self.blocks[-1]
            x = last.hidden[0]
        return nn.functional.cross_entropy(self.head(x), tokens)


@dataclass
class Played:
    """What was recorded on one rank, and see ``Recorder.mixed``."""

    trace: list[Item]
    mixed: list[str]


def play(setting: Setting, folder: str) -> Played:
    """Train on this rank; ``folder`` is for files. Only rank 0 is sure to have a trace. Collective."""
    torch.manual_seed(0)
    traced = dist.get_rank() == 0 or setting.files or bool({"offload", "activations"} & setting.strategy.keys())
    with quiet(), simulated_device(setting.quick, traced) as recorder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "A tensor that shares memory with")  # twist "keep"
        with pytest.MonkeyPatch.context() as patch:
            if setting.passes:
                patch.setattr(plans, "PASSING_NBYTES", 1)
                patch.setattr(pool, "IDLE_NBYTES", 1)
            _train(setting, folder)
    return Played(recorder.trace, recorder.mixed)


def _train(setting: Setting, folder: str) -> None:
    chosen = dict(setting.strategy)
    if setting.files:
        chosen["offload"] = NvmeOffload(path=folder, buffer_mib=8, parameters=setting.stage == 3)
    data: Any = range(STEPS * setting.accumulate), range(1)
    batches, more = (DataLoader(part, batch_size=None) for part in data)
    strategy = ZeroStrategy(setting.stage, units=["Block", "Outer"], bucket_mib=0.01, **chosen)
    trainer = make_trainer(
        strategy,
        accumulate_grad_batches=setting.accumulate,
        gradient_clip_val=setting.clip,
        num_sanity_val_steps=0,
        plugins=[ZeroPrecision(setting.precision)],
    )
    trainer.fit(Net(setting), batches, more)
    strategy.engine.tiers.close()
