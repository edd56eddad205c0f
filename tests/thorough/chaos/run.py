"""The training into which faults are thrown: one rank's side, which leaves a report of how it ended."""

from __future__ import annotations

import atexit
import hashlib
import inspect
import json
import os
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_zero import CheckpointPolicy, HostOffload, NvmeOffload, ZeroStrategy
from lightning_zero.config import Offload
from tests.helpers.runs import Net, values_of

__all__ = ["LOADING", "SETTING_UP", "STEPPING", "Scene", "Struck", "as_a_program", "attempt"]

BATCHES, EPOCHS, SAVED_EVERY = 4, 2, 2

SETTING_UP = ("setup", "configure_model", "configure_optimizers", "on_fit_start", "on_train_start")
STEPPING = (
    "on_train_batch_start", "training_step", "layer", "on_before_zero_grad", "on_before_backward", "backward",
    "on_after_backward", "on_before_optimizer_step", "step", "stepped", "on_train_batch_end", "on_save_checkpoint",
    "validation_step", "on_train_epoch_end", "data",
)  # fmt: skip
LOADING = ("on_load_checkpoint",)
_HOOKS = {*SETTING_UP, *STEPPING, *LOADING} - {"layer", "backward", "step", "stepped", "data"}


@dataclass
class Scene:
    """One run, and what happens in it.

    Args:
        folder: what the ranks share: ``saved``, ``files``, and their reports.
        stage: of the strategy.
        offload: ``""``, ``"host"`` or ``"files"``.
        asynchronous: whether checkpoints are written in the background.
        act: the fault; ``None`` for a run that nothing disturbs.
        place: of ``SETTING_UP``, ``STEPPING`` or ``LOADING``.
        step: from which on it happens, where places come again.
        victims: ranks.
        stop: the last step.
        resume: the checkpoint to go on from; ``older``: what the victims take in its place.
        workers: of the DataLoader.
        timeout: of the strategy, in seconds.
        point: which moment of several, for faults that know some.
    """

    folder: Path
    stage: int
    offload: str = ""
    asynchronous: bool = False
    act: Callable[[Any], object] | None = None
    place: str = ""
    step: int = 0
    victims: tuple[int, ...] = ()
    stop: int = BATCHES * EPOCHS
    resume: str | None = "last"
    older: str | None = None
    workers: int = 0
    timeout: float = 300.0
    point: int = 0
    undo: list[Callable[[], object]] = field(default_factory=list)
    """What a rank does before it reports, so that it can."""

    def strategy(self) -> ZeroStrategy:
        """As users ask for it."""
        files = self.folder / "files"
        offload: dict[str, Offload | None] = {"": None, "host": HostOffload(parameters=self.stage == 3)}
        offload["files"] = NvmeOffload(path=str(files), buffer_mib=1, parameters=self.stage == 3)
        return ZeroStrategy(
            self.stage,  # type: ignore[arg-type]
            units=["Block"],
            offload=offload[self.offload],
            checkpoint=CheckpointPolicy(async_save=self.asynchronous, verify=True),
            timeout=timedelta(seconds=self.timeout),
        )

    def callbacks(self) -> list[pl.Callback]:
        """Checkpoints each few steps."""
        keep = 1 if self.older is None and self.stop == BATCHES * EPOCHS else -1
        saved = self.folder / "saved"
        return [ModelCheckpoint(saved, every_n_train_steps=SAVED_EVERY, save_top_k=keep, save_last=True)]


class _Numbers(Dataset[int]):
    def __init__(self, strike: Callable[[str], None], length: int) -> None:
        self.strike, self.length = strike, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if index >= self.length:
            raise IndexError
        if index == self.length - 2:
            self.strike("data")
        return index


class Struck(Net):
    """A small regression in which a fault strikes this rank, once."""

    def __init__(self, rank: int, scene: Scene) -> None:
        super().__init__()
        self.rank, self.scene, self.struck = rank, scene, False
        self.batches, self.last, self.skips = BATCHES, -1, False
        self.model.layers[1].register_forward_pre_hook(lambda *_: self.strike("layer"))

    def strike(self, place: str) -> None:
        """Here is a place: if it is the one, the fault happens now."""
        scene = self.scene
        if scene.act is None or place != scene.place or self.rank not in scene.victims or self.struck:
            return
        if place in STEPPING and place != "data" and self.trainer.global_step < scene.step:
            return
        self.struck = True
        (scene.folder / f"struck.{self.rank}").write_text(str(time.monotonic()))
        scene.act(self)

    def train_dataloader(self) -> Any:
        numbers = _Numbers(self.strike, self.batches)
        return DataLoader(numbers, num_workers=self.scene.workers, persistent_workers=self.scene.workers > 0)

    def val_dataloader(self) -> Any:
        return DataLoader(range(1))  # type: ignore[arg-type]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        self.strike("training_step")
        assert int(batch) in (0, self.last + 1), "a batch was lost"  # Lightning begins a loader anew where it resumes
        self.last = int(batch)
        loss = super().training_step(batch, batch_idx)
        if self.skips:
            self.skips = False
            return None
        loss.register_hook(lambda _: self.strike("backward"))
        return loss

    def configure_optimizers(self) -> Any:
        self.strike("configure_optimizers")
        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(lambda *_: self.strike("step"))
        optimizer.register_step_post_hook(lambda *_: self.strike("stepped"))
        return optimizer


def _striking(name: str) -> Callable[..., Any]:
    inherited = getattr(Net, name)

    def hook(self: Struck, *args: Any, **kwargs: Any) -> Any:
        self.strike(name)
        return inherited(self, *args, **kwargs)

    hook.__name__, hook.__signature__ = name, inspect.signature(inherited)  # type: ignore[attr-defined]
    return hook


for _name in sorted(_HOOKS - vars(Struck).keys()):
    setattr(Struck, _name, _striking(_name))


def attempt(rank: int, scene: Scene) -> bool:
    """Train, and report: the losses, the error, a digest of the weights. Returns whether it failed."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    report: dict[str, Any] = {"error": "", "weights": "", "steps": 0}
    path = scene.folder / f"report.{rank}"
    module = Struck(rank, scene)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            strategy=scene.strategy(), accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", 2)), logger=False,
            max_epochs=EPOCHS, max_steps=scene.stop, callbacks=scene.callbacks(), use_distributed_sampler=False,
            enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        )  # fmt: skip
        try:
            resume = scene.older if scene.older and rank in scene.victims else scene.resume
            trainer.fit(module, ckpt_path=resume)
            report["weights"] = _digest(module)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            for undo in scene.undo:
                undo()
            report["error"] = f"{type(error).__name__}: {error}"
    report |= {"steps": trainer.global_step, "losses": [loss.item() for loss in module.losses]}
    del module, trainer
    path.write_text(json.dumps(report))
    return bool(report["error"])


def as_a_program(rank: int, scene: Scene) -> None:
    """``attempt`` and what an interpreter does at its end; then the report has the time."""
    atexit._clear()  # of pytest
    attempt(rank, scene)
    atexit._run_exitfuncs()
    path = scene.folder / f"report.{rank}"
    path.write_text(json.dumps({**json.loads(path.read_text()), "ended": time.monotonic()}))


def _digest(module: Struck) -> str:
    """Of all weights, bit for bit. Collective."""
    whole = hashlib.sha256()
    for name, value in sorted(values_of(module).items()):
        whole.update(name.encode() + value.numpy().tobytes())
    return whole.hexdigest()
