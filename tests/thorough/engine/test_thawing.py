"""Freezing and thawing in the middle of a fit, against DDP's numbers.

DDP never averages gradients of what is frozen when it wraps the module, so what it is compared with freezes after that.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning, EMAWeightAveraging
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn

from lightning_zero import ActivationPolicy, AdamW8bit, HostOffload, NvmeOffload
from tests.helpers.cases import WIDTH, Block
from tests.helpers.runs import STAGES, Net, again, assert_same, batches, each_strategy, fit, made, quiet, raised, zero
from tests.helpers.training import make_trainer
from tests.helpers.world import run_world


class Backbone(Net):
    """Running statistics, a shared weight, and an optimizer of the head alone, with state of its own."""

    def __init__(self, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        super().__init__(lambda: nn.Sequential(Block(), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), Block()))
        self.optimizer = optimizer
        self.backbone = self.model[:3]
        self.head = self.model[3]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))

    def configure_optimizers(self) -> Any:
        options = {} if self.optimizer is not torch.optim.SGD else {"momentum": 0.9}
        return self.optimizer(self.head.parameters(), lr=0.02, **options)  # type: ignore[call-arg]


class Late:
    """Freezes when DDP has wrapped the module, and not before."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if not isinstance(trainer.strategy, DDPStrategy):
            self.freeze_before_training(pl_module)  # type: ignore[attr-defined]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if isinstance(trainer.strategy, DDPStrategy):
            self.freeze_before_training(pl_module)  # type: ignore[attr-defined]


class ByEpoch(Late, BackboneFinetuning):
    pass


class ByParts(Late, BaseFinetuning):
    """Thaws a part at a time, without giving all of it to the optimizer."""

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module.backbone, train_bn=False)

    def finetune_function(self, pl_module: pl.LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch in (1, 2):
            self.unfreeze_and_add_param_group(pl_module.backbone[epoch], optimizer, lr=0.01)
        if epoch == 3:
            pl_module.backbone[0].requires_grad_(True)


class ByHand(Late, pl.Callback):
    """Thaws in the middle of an epoch, and freezes again."""

    def __init__(self, at: tuple[int, int] = (1, 2), add: bool = True) -> None:
        self.at, self.add = at, add

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        pl_module.backbone.requires_grad_(False)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        part = pl_module.backbone[0] if self.add else pl_module.backbone
        if (trainer.current_epoch, batch_idx) == self.at:
            part.requires_grad_(True)
            if self.add:
                trainer.optimizers[0].add_param_group({"params": list(part.parameters()), "lr": 0.03})
        if (trainer.current_epoch, batch_idx) == (3, 0):
            part.requires_grad_(False)


CALLBACKS: dict[str, Any] = {
    "backbone": lambda: ByEpoch(unfreeze_backbone_at_epoch=2, lambda_func=lambda epoch: 1.5),
    "parts": ByParts,
    "by hand": ByHand,
}
OPTIONS: dict[str, Any] = {"max_epochs": 4, "check_val_every_n_epoch": 2}


class Table(Backbone):
    """Gets a buffer of its own dtype after the precision has cast the module, which it keeps."""

    def on_train_start(self) -> None:
        self.head.register_buffer("table", torch.linspace(0, 1, WIDTH, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.head.table.float()  # type: ignore[operator, union-attr]


# What thaws, the optimizer, and how it is trained.
ROWS: dict[str, tuple[str, type[torch.optim.Optimizer], dict[str, Any]]] = {
    **{name: (name, torch.optim.AdamW, {"val": 1}) for name in CALLBACKS},
    "clipped": (
        "backbone",
        torch.optim.SGD,
        {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
    ),
    "whole parameters": ("backbone", torch.optim.Adafactor, {}),
    "bf16-true": ("backbone", torch.optim.AdamW, {"precision": "bf16-true"}),
    "accumulated": ("backbone", torch.optim.SGD, {"accumulate_grad_batches": 2}),
}


def test_what_is_thawed_in_mid_fit_trains_as_under_ddp() -> None:
    """SGD's sums over micro-steps are rounded in another order."""

    def play(strategy: Strategy) -> dict[str, Any]:
        found = {}
        for row, (name, optimizer, options) in ROWS.items():
            module = (Table if row == "bf16-true" else Backbone)(optimizer)
            trainer = fit(again(strategy), module, 4, callbacks=[CALLBACKS[name]()], **{**OPTIONS, **options})
            found[row] = made(module, trainer)
        module = Both()
        found["parts that take turns"] = made(
            module, fit(again(strategy), module, 3, callbacks=[Alternates()], max_epochs=4)
        )
        return found

    results = each_strategy(play)
    assert_same([{name: {"": found.pop("accumulated")} for name, found in by.items()} for by in results], bound=2e-6)
    assert_same(results)


class InTheStep(Backbone):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            self.backbone.requires_grad_(True)
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss

    def on_fit_start(self) -> None:
        self.backbone.requires_grad_(False)


def test_thawing_inside_of_a_step_is_an_error() -> None:
    """Its gradient of that step would be lost, and nobody would know."""

    def world(rank: int) -> list[str]:
        class Frozen(pl.Callback):
            def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
                pl_module.backbone.requires_grad_(False)

        errors: list[str] = []
        for stage in STAGES.values():
            with quiet(), raised(errors):
                fit(zero(stage), InTheStep(), 4, callbacks=[Frozen()])
        return errors

    for errors in run_world(2, world):
        assert len(errors) == 3
        for error in errors:
            assert "ParameterAccessError: Parameter 'model." in error
            assert "on_train_batch_start" in error


class Alternates(Late, pl.Callback):
    """One part is frozen where another one thaws, with gradients of the last step still there."""

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        pl_module.backbone.requires_grad_(False)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch:
            pl_module.backbone.requires_grad_(trainer.current_epoch % 2 == 1)
            pl_module.head.requires_grad_(trainer.current_epoch % 2 == 0)


class Both(Backbone):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def data(self, batch_idx: int, epoch: int | None = None) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(batch_idx)  # alike on all ranks: see the top of this file
        both = torch.randn(2, 3, WIDTH, generator=generator)
        return both[0], both[1]


class Counted(ByEpoch):
    """Notes its own set-up, which runs once for each fit."""

    def __init__(self) -> None:
        super().__init__(unfreeze_backbone_at_epoch=1)
        self.calls = 0

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        self.calls += 1


def test_a_callback_is_what_it_was_after_the_fit(tmp_path: Path) -> None:
    """It can be pickled, used with another module, and its hooks are called as often as Lightning calls them."""

    def play(strategy: Strategy) -> dict[str, Any]:
        name = type(strategy).__name__
        callback, saved = Counted(), tmp_path / f"{name}{getattr(strategy, 'placement', None)}"[:200]
        before = set(vars(callback))
        module = Backbone()
        trainer = fit(strategy, module, 2, callbacks=[callback], max_epochs=2)
        left = set(vars(callback)) - before - {"log", "log_dict"}  # Lightning's own
        trainer.save_checkpoint(saved)
        second = Backbone()
        fit(again(strategy), second, 2, callbacks=[callback], max_epochs=2)
        resumed, fresh = Backbone(), Counted()
        trainer = make_trainer(again(strategy), callbacks=[fresh], max_epochs=3)
        trainer.fit(resumed, batches(2), ckpt_path=saved)
        return {
            "left": sorted(left),
            "calls": [callback.calls, fresh.calls],
            "losses": [*second.losses, *resumed.losses],
        }

    assert_same(each_strategy(play))


def test_gradients_of_a_window_that_has_begun_are_kept_or_it_is_an_error() -> None:
    """The backward of two batches is one window, in the middle of which all of them thaw."""

    def play(strategy: Strategy) -> dict[str, Any]:
        module, errors, callback = Backbone(), list[str](), ByHand(at=(0, 1), add=False)
        with raised(errors):
            return made(module, fit(strategy, module, 4, callbacks=[callback], accumulate_grad_batches=2))
        return {"errors": errors}

    results = each_strategy(play)
    assert_same(results, ["stage 2", "stage 3"], bound=2e-6)
    for result in results:
        assert "in the middle of an accumulation" in result["stage 1"]["errors"][0]


def test_averages_offload_and_recomputation_go_along(tmp_path: Path) -> None:
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "host": {"offload": HostOffload()},
        "nvme": {"offload": NvmeOffload(path=tmp_path)},
        "recomputed": {"activations": ActivationPolicy(checkpointing=["Block"])},
    }

    def train(stage: int, averaged: bool, **options: Any) -> dict[str, Any]:
        module = Backbone()
        callbacks = [CALLBACKS["backbone"](), *([EMAWeightAveraging(decay=0.9)] if averaged else [])]
        return made(module, fit(zero(stage, **options), module, 4, val=1, callbacks=callbacks, **OPTIONS))

    def play(rank: int) -> dict[str, Any]:
        errors: list[str] = []
        with quiet():
            results: dict[str, Any] = {
                name: {str(stage): train(stage, stage < 3, **options) for stage in STAGES.values()}
                for name, options in ways.items()
            }
            with raised(errors):
                train(3, True)
        return {**results, "errors": errors}

    results = run_world(2, play, timeout=120)
    assert_same(results, ["host", "recomputed", "nvme"], expected="plain")
    for found in results:
        assert "whose slices EMAWeightAveraging averages" in found["errors"][0]


def makers() -> dict[str, Any]:
    return {name: lambda stage=stage: zero(stage) for name, stage in STAGES.items()}


class Save(pl.Callback):
    """Saves where an epoch ends, by default the third: the backbone was thawed at its beginning."""

    def __init__(self, path: Path, epoch: int = 2) -> None:
        self.path, self.epoch = path, epoch

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == self.epoch:
            trainer.save_checkpoint(self.path)


class Turns(Both):
    """Two optimizers if ``two``; the parts ``frozen`` are frozen from the start; data are alike on all ranks.

    Args:
        optimizer: of each part.
        frozen: by index in the backbone.
        parts: what the first optimizer has: the head, all, or what trains.
        two: whether the second block of the backbone has an optimizer of its own.
    """

    def __init__(
        self, optimizer: Any = torch.optim.Adam, frozen: Any = (), parts: str = "head", two: bool = False
    ) -> None:
        super().__init__(optimizer)
        self.parts, self.automatic_optimization = parts, not two
        for index in frozen:
            self.backbone[index].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        chosen = {"head": self.head.parameters(), "all": self.parameters()}.get(
            self.parts, (p for p in self.parameters() if p.requires_grad)
        )
        optimizers = [self.optimizer(chosen, lr=0.02)]
        if not self.automatic_optimization:
            optimizers.append(self.optimizer(self.backbone[2].parameters(), lr=0.02))
        return optimizers

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            optimizers = self.optimizers()
            self.zero_grad()
            self.manual_backward(loss)
            for optimizer in optimizers:  # type: ignore[union-attr]
                optimizer.step()
        return loss


class At(pl.Callback):
    """Does ``what(moment, trainer, module, resumed)`` at set-up and where the fit, training and an epoch start."""

    def __init__(self, what: Any, resumed: bool) -> None:
        self.what, self.resumed = what, resumed

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.what("setup", trainer, pl_module, self.resumed)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.what("fit", trainer, pl_module, self.resumed)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.what("train", trainer, pl_module, self.resumed)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.what(trainer.current_epoch, trainer, pl_module, self.resumed)


def add(trainer: pl.Trainer, module: Any, part: int, optimizer: int = 0) -> None:
    module.backbone[part].requires_grad_(True)
    trainer.optimizers[optimizer].add_param_group({"params": list(module.backbone[part].parameters()), "lr": 0.01})


def again_and_more(moment: Any, trainer: pl.Trainer, module: Any, resumed: bool) -> None:
    """A part thaws in the second epoch, and before optimizer states are loaded; another one after the resumption."""
    if moment == "setup":
        module.backbone.requires_grad_(False)
    if moment == ("fit" if resumed else 1):
        add(trainer, module, 0)
    if moment == 3:
        add(trainer, module, 2)
    if moment == "train" and resumed:  # what user code sees of the state that was loaded
        optimizer = trainer.optimizers[0]
        members = [p for group in optimizer.param_groups for p in group["params"]]
        if not isinstance(optimizer, torch.optim.Adafactor):
            assert len(optimizer.state_dict()["state"]) == len(members)
            assert all(key is parameter for key, parameter in zip(optimizer.state, members, strict=True))


def in_the_second(moment: Any, trainer: pl.Trainer, module: Any, resumed: bool) -> None:
    if moment == "setup":
        module.backbone[0].requires_grad_(False)
    if moment == ("fit" if resumed else 1):
        add(trainer, module, 0, optimizer=1)


def taken_out(moment: Any, trainer: pl.Trainer, module: Any, resumed: bool) -> None:
    """A group is out of the optimizer while another part thaws; it comes back with the state that it had."""
    optimizer = trainer.optimizers[0] if trainer.optimizers else None
    if moment == "setup":
        module.backbone[2].requires_grad_(False)
    if moment == 0:
        add(trainer, module, 0)
    if moment == 1 and optimizer is not None:
        module.out = optimizer.param_groups.pop()
    if moment == 2:
        add(trainer, module, 2)
    if moment == 3 and optimizer is not None:
        optimizer.param_groups.append(module.out)
    if moment == "fit" and resumed:
        add(trainer, module, 2)
        add(trainer, module, 0)


def by_turns(moment: Any, trainer: pl.Trainer, module: Any, resumed: bool) -> None:
    if moment == "setup" and resumed:
        module.backbone[0].requires_grad_(False)
    if isinstance(moment, int):
        module.backbone[0].requires_grad_(moment % 2 == 1)
        module.head.requires_grad_(moment % 2 == 0)


def nothing(moment: Any, trainer: pl.Trainer, module: Any, resumed: bool) -> None:
    """The module's ``__init__`` does it all."""


RESUMED: dict[str, tuple[Any, int, dict[str, Any], dict[str, Any]]] = {
    # What is done, the epoch at whose end it is saved, and how the module is built before and after.
    "thawed again": (again_and_more, 2, {}, {}),
    "thawed again, at owners": (again_and_more, 2, {"optimizer": torch.optim.Adafactor}, {}),
    "thawed again, in 8 bits": (again_and_more, 2, {"optimizer": partial(AdamW8bit, min_8bit_size=100)}, {}),
    "in the second optimizer": (in_the_second, 2, {"two": True}, {}),
    "taken out": (taken_out, 3, {}, {}),
    "by turns": (by_turns, 1, {"parts": "all"}, {}),
    "frozen by __init__ afterwards": (nothing, 1, {"parts": "all"}, {"frozen": [0]}),
}


def test_state_of_what_thaws_comes_back(tmp_path: Path) -> None:
    """Whatever changes what trains, between set-up and loading, or between saving and loading; wherever state is."""
    nvme = NvmeOffload(path=tmp_path)
    ways: dict[str, Any] = {"ddp": lambda: DDPStrategy(find_unused_parameters=True), **makers()}
    offloaded = {
        "host": lambda: zero(3, offload=HostOffload()),
        "nvme": lambda: zero(3, offload=nvme),
        "nvme, stage 1": lambda: zero(1, offload=nvme),
    }

    def play(make: Any, row: str, path: Path) -> dict[str, Any]:
        what, epoch, before, after = RESUMED[row]
        callbacks = [At(what, False), Save(path, epoch)]
        make_trainer(make(), callbacks=callbacks, max_epochs=epoch + 1).fit(Turns(**before), batches(1))
        module = Turns(**{**before, **after})
        trainer = make_trainer(make(), callbacks=[At(what, True)], max_epochs=5)
        trainer.fit(module, batches(1), ckpt_path=str(path))
        return made(module, trainer)

    def world(rank: int) -> dict[str, dict[str, Any]]:
        with quiet():
            return {
                f"{name}: {row}": play(make, row, tmp_path / f"{name} {row}")
                for row in RESUMED
                for name, make in {**ways, **(offloaded if row in ("thawed again", "taken out") else {})}.items()
            }

    results = run_world(2, world)
    for row in RESUMED:
        names = [name for name in results[0] if name.endswith(f": {row}") and not name.startswith("ddp")]
        assert_same(results, names, expected=f"ddp: {row}")


def moved(moment: Any, trainer: pl.Trainer, module: Any, resumed: bool) -> None:
    """User code gives parameters to another optimizer, with their state."""
    if moment == 2:
        first, second = trainer.optimizers
        group = second.param_groups.pop()
        first.add_param_group(group)
        for parameter in group["params"]:
            first.state[parameter] = second.state.pop(parameter)
        second.add_param_group({"params": list(module.backbone[0].parameters())})


def removed(moment: Any, trainer: pl.Trainer, module: Any, resumed: bool) -> None:
    """A bias leaves its layer, and then a part thaws."""
    if moment == "setup":
        module.backbone[0].requires_grad_(False)
    if moment == 1:
        module.head.up.bias = None
        add(trainer, module, 0)


@pytest.mark.parametrize(
    ("what", "built", "message"),
    [
        (moved, {"two": True}, "The optimizer state of 'model.2.weight'"),
        (removed, {}, "'model.3.up.bias' left the module before model.0."),
    ],
)
def test_what_is_moved_or_removed_is_an_error_by_name(what: Any, built: dict[str, Any], message: str) -> None:
    def world(rank: int) -> list[str]:
        errors: list[str] = []
        for stage in STAGES.values():
            with quiet(), raised(errors):
                fit(zero(stage), Turns(**built), 2, callbacks=[At(what, False)], max_epochs=4)
        return errors

    for errors in run_world(2, world):
        assert len(errors) == len(STAGES)
        assert all(f"ParameterAccessError: {message}" in error for error in errors), errors


def test_state_that_nobody_takes_is_an_error_by_name(tmp_path: Path) -> None:
    """When it is loaded, also where weights need not fit; and when it is saved, as torch's own ``KeyError``."""

    class Loose(Turns):
        strict_loading = False

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            if self.drops:
                state = checkpoint["optimizer_states"][0]["state"]
                for name in [name for name in state if name.startswith(("model.0.", "backbone.0."))]:
                    del state[name]

    def world(rank: int) -> list[list[str]]:
        found = []
        for stage in STAGES.values():
            errors: list[str] = []
            with quiet():
                fit(zero(stage), Turns(parts="trained"), 2).save_checkpoint(tmp_path / f"{stage}")
                for module in (Turns(parts="trained", frozen=[0]), Loose(parts="trained", frozen=[0])):
                    module.drops = False
                    with raised(errors):
                        trainer = make_trainer(zero(stage), max_epochs=2)
                        trainer.fit(module, batches(2), ckpt_path=str(tmp_path / f"{stage}"))
                module = Loose(parts="trained", frozen=[0])
                module.drops = True
                trainer = make_trainer(zero(stage), max_epochs=2)
                trainer.fit(module, batches(2), ckpt_path=str(tmp_path / f"{stage}"))
                with raised(errors):
                    group = trainer.optimizers[0].param_groups[0]
                    group["params"] = [p for p in group["params"] if p is not module.head.up.weight]
                    trainer.save_checkpoint(tmp_path / "never")
            found.append(errors)
        return found

    for by_stage in run_world(2, world):
        for errors in by_stage:
            assert len(errors) == 3, errors
            for error in errors[:2]:
                assert "ValueError: The checkpoint holds optimizer state that does not fit Adam: 'model.0." in error
                assert "not in the optimizer" in error
            assert "Adam has state for 'model.3.up.weight', which is in none of its param groups" in errors[2]
    assert not (tmp_path / "never").exists()
