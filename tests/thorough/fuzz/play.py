"""One program under one strategy, on one rank: a LightningModule that does what is asked, and what came of it."""

from __future__ import annotations

import contextlib
import random
import re
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy, full_parameters
from lightning_zero.errors import ParameterAccessError, ZeroError
from lightning_zero.shards.sharded import ShardedTensor
from tests.helpers.training import make_trainer
from tests.thorough.fuzz.models import BATCH, MODELS, TAPS, WIDTH
from tests.thorough.fuzz.programs import BATCHES, EPOCHS, Program
from tests.thorough.fuzz.vocabulary import CALLBACK_HOOKS, Context, load_vocabulary

__all__ = ["Error", "Fuzzed", "Player", "Record", "play"]


@dataclass
class Error:
    """Why a run ended.

    Args:
        type: class of the exception.
        message: what it said.
        during: which action of the program raised it, ``None``: the package or torch did at another time, ``-1``: the
            harness, when it read the end.
        named: it is one of the package's own, or names an object of the program.
        stack: where.
    """

    type: str
    message: str
    during: int | None
    named: bool
    stack: str


@dataclass
class Record:
    """What one rank saw of one run."""

    losses: list[Tensor] = field(default_factory=list)
    returned: dict[tuple[int, int], Any] = field(default_factory=dict)  # by action and call
    refused: dict[tuple[int, int], str] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    trained: list[str] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)
    steps: int = 0
    error: Error | None = None


class Player:
    """Carries out a program's actions when their time has come."""

    def __init__(self, program: Program, rank: int, folder: Path) -> None:
        self.program, self.rank, self.folder = program, rank, folder
        self.record = Record()
        self.during: int | None = None
        self._seen: Counter[tuple[str, bool]] = Counter()
        self._calls: Counter[int] = Counter()
        self._kept: dict[int, dict[str, Any]] = {}
        self._actions = load_vocabulary()

    def __deepcopy__(self, memo: Any) -> Player:
        return self

    def __reduce__(self) -> Any:
        return str, ("player",)

    def reach(self, module: Any, hook: str, callback: bool, block: Any = None) -> None:
        """Do what the program says for this occurrence of a hook."""
        occurrence = self._seen[hook, callback]
        self._seen[hook, callback] += 1
        for index, placed in enumerate(self.program.actions):
            if (placed.hook, placed.callback) == (hook, callback) and occurrence in placed.times:
                self._do(index, module, hook, block)

    def _do(self, index: int, module: Any, hook: str, block: Any) -> None:
        placed = self.program.actions[index]
        action, call = self._actions[placed.action], self._calls[index]
        self._calls[index] += 1
        kept = self._kept.setdefault(index, {})
        context = Context(module, module.trainer, self.rank, hook, call, placed.pick, kept, self.folder, block)
        self.during = index
        try:
            # What is refused draws no random numbers, and what only reads has to leave none drawn either.
            with torch.random.fork_rng(devices=[], enabled=action.reads):
                self.record.returned[index, call] = copied(action.run(context))
        except ParameterAccessError as error:
            if not action.reads:
                raise
            self.record.refused[index, call] = f"{type(error).__name__}: {error}"
        self.during = None


class Fuzzed(pl.LightningModule):
    """The model of a program, trained as the program says."""

    def __init__(self, program: Program, player: Player) -> None:
        super().__init__()
        self.program, self.player = program, player
        self.automatic_optimization = not program.manual
        self.model = MODELS[program.model]()
        if program.precision == "64-true":
            self.model.double()
        self.initial = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.left_out = ""
        self.x = self.loss = torch.zeros(())
        self.skip = self.twice = self.toggled = False

    def reach(self, hook: str) -> None:
        self.player.reach(self, hook, callback=False)

    def data(self, batch_idx: int, epoch: int) -> tuple[Tensor, Tensor]:
        """Different for each rank and step."""
        seed = 7919 * self.program.seed + 1000 * epoch + 10 * batch_idx + self.player.rank
        both = torch.randn(2, BATCH, WIDTH, generator=torch.Generator().manual_seed(seed))
        x, y = both.to(torch.float64 if self.program.precision == "64-true" else torch.float32)
        return x, y

    def add_to_loss(self, more: Tensor) -> None:
        """A further term of this step's loss; before the forward it waits for that."""
        self.loss = self.loss + more

    def again(self) -> Tensor:
        """The loss of this batch once more, from a forward of its own."""
        return self.model(self.x.detach()).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        self.x, y = self.data(batch_idx, self.current_epoch)
        self.loss = torch.zeros((), dtype=y.dtype)
        self.skip = self.twice = self.toggled = False
        self.reach("before_forward")
        self.loss = self.loss + (self.model(self.x) - y).square().mean()
        self.reach("after_forward")
        loss, self.loss = self.loss, torch.zeros(())
        self.player.record.losses.append(loss.detach().clone())
        self.log("train_loss", loss.detach(), sync_dist=True, on_step=False, on_epoch=True)
        if self.program.manual:
            self._by_hand(loss)
            return None
        return loss

    def _by_hand(self, loss: Tensor) -> None:
        if self.skip:
            return
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss, retain_graph=self.twice)
        if self.twice:
            self.manual_backward(loss)
        self.reach("manual_gradients")
        optimizer.step()
        if self.toggled:
            self.untoggle_optimizer(optimizer)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = self.data(batch_idx, 50)
        self.reach("validation_step")
        self.loss = torch.zeros(())
        self.log("val_loss", (self.model(x) - y).square().mean(), sync_dist=True)

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.reach("configure_gradient_clipping")
        super().configure_gradient_clipping(optimizer, *args, **kwargs)

    def configure_optimizers(self) -> Any:
        self.reach("configure_optimizers")
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        if self.program.leave_out and len(named) > 2:
            self.left_out = named.pop()[0]
        matrices = [p for _, p in named if p.ndim >= 2]
        vectors = [p for _, p in named if p.ndim < 2]
        optimizer = make_optimizer(self.program.optimizer, matrices, vectors)
        if self.program.scheduler is None:
            return optimizer
        if self.program.scheduler == "step":
            scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        else:
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class FuzzedCallback(pl.Callback):
    """The actions that stand in a callback."""


def _module_hook(hook: str) -> Callable[..., None]:
    return lambda self, *args, **kwargs: self.reach(hook)


def _callback_hook(hook: str) -> Callable[..., None]:
    return lambda self, trainer, module, *args, **kwargs: module.player.reach(module, hook, callback=True)


for _hook in CALLBACK_HOOKS:
    setattr(Fuzzed, _hook, _module_hook(_hook))
    setattr(FuzzedCallback, _hook, _callback_hook(_hook))


def make_optimizer(name: str, matrices: list[Any], vectors: list[Any]) -> torch.optim.Optimizer:
    """The usual two groups. ``eps`` keeps gradients that are noise small."""
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    makers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "sgd": lambda: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
        "sgd_plain": lambda: torch.optim.SGD(groups, lr=0.1),
        "adamw": lambda: torch.optim.AdamW(groups, lr=0.01, eps=1e-4),
        "adam_amsgrad": lambda: torch.optim.Adam(groups, lr=0.01, eps=1e-4, amsgrad=True),
        "nadam": lambda: torch.optim.NAdam(groups, lr=0.01, eps=1e-4),
        "adagrad": lambda: torch.optim.Adagrad(groups, lr=0.05),
        "rmsprop": lambda: torch.optim.RMSprop(groups, lr=0.01, eps=1e-4, momentum=0.5),
        "adafactor": lambda: torch.optim.Adafactor(groups, lr=0.01),
    }
    return makers[name]()


def play(program: Program, stage: int, rank: int, folder: Path) -> Record:
    """Train, and say what came of it; an exception becomes a part of that. Collective.

    Args:
        program: what to do.
        stage: of this package's strategy; 0 is DDP.
        rank: of this process.
        folder: for what the program saves; shared by the ranks.
    """
    player = Player(program, rank, folder)
    record = player.record
    module = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for seed in (random.seed, np.random.seed, torch.manual_seed):
                seed(program.seed)
            module = Fuzzed(program, player)
            torch.manual_seed(program.seed + 1 + rank)
            with _tapped(module):
                trainer = _fit(program, module, strategy_of(program, stage))
            player.during = -1
            _look_at_the_end(record, module, trainer)
        except Exception as error:
            record.error = _noted(error, player.during, module)
    return record


def strategy_of(program: Program, stage: int) -> Strategy:
    """DDP, or a stage with the program's settings."""
    if stage == 0:
        return DDPStrategy(find_unused_parameters=True)
    return ZeroStrategy(
        stage=stage,  # type: ignore[arg-type]
        units=["Block"] if program.units else None,
        bucket_mib=program.bucket_mib,
        prefetch=program.prefetch,
    )


def _fit(program: Program, module: Fuzzed, strategy: Strategy) -> pl.Trainer:
    trainer = make_trainer(
        strategy,
        max_epochs=EPOCHS,
        precision=program.precision,
        accumulate_grad_batches=program.accumulate,
        gradient_clip_val=0.05 if program.clip else None,
        gradient_clip_algorithm=program.clip,
        callbacks=[FuzzedCallback()],
        num_sanity_val_steps=0,
        enable_progress_bar=False,
    )
    batches = DataLoader(range(BATCHES * program.accumulate), batch_size=1)  # type: ignore[arg-type]
    trainer.fit(module, batches, DataLoader(range(1), batch_size=1))  # type: ignore[arg-type]
    return trainer


def _look_at_the_end(record: Record, module: Fuzzed, trainer: pl.Trainer) -> None:
    record.metrics = {name: value.detach().clone() for name, value in trainer.callback_metrics.items()}
    record.steps = trainer.global_step
    groups = trainer.optimizers[0].param_groups
    record.groups = [{key: copied(value) for key, value in group.items() if key != "params"} for group in groups]
    record.buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    record.trained = [name for name, p in module.named_parameters() if p.requires_grad]
    with full_parameters(module):
        record.parameters = {name: p.detach().clone() for name, p in module.named_parameters()}


@contextlib.contextmanager
def _tapped(module: Fuzzed) -> Iterator[None]:
    """While training runs, the first block reaches the place ``forward``."""

    def tap(block: Any) -> None:
        if module.training and torch.is_grad_enabled():
            module.player.reach(module, "forward", callback=False, block=block)

    TAPS.append(tap)
    try:
        yield
    finally:
        TAPS.remove(tap)


def _noted(error: Exception, during: int | None, module: Fuzzed | None) -> Error:
    text = str(error)
    stack = "".join(traceback.format_exception(error)[-12:])[-3000:]
    return Error(type(error).__name__, text, during, isinstance(error, ZeroError) or _names(text, module), stack)


def _names(text: str, module: Fuzzed | None) -> bool:
    """Whether a message names an object of the user: a parameter, a module, an optimizer, or something in quotes."""
    if module is None:
        return False
    known = {name for name, _ in [*module.named_parameters(), *module.named_modules(), *module.named_buffers()] if name}
    known = {name for name in known if len(name) > 3}
    known |= {type(optimizer).__name__ for optimizer in module.trainer.optimizers} if module._trainer else set()
    return any(re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", text) for name in known)


class Sharded(NamedTuple):
    """What is known of a sharded gradient: its shape, and its norm over all ranks."""

    shape: tuple[int, ...]
    norm: float


def copied(value: Any) -> Any:
    """A value of its own, which does not change any more."""
    if isinstance(value, ShardedTensor):
        return Sharded(tuple(value.shape), value.norm().item())
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [copied(item) for item in value]
    return value
