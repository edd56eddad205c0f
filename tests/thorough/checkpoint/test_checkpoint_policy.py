"""CheckpointPolicy through the Trainer: formats, saving in the background, and saves that must not happen."""

from __future__ import annotations

import os
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_zero import CheckpointPolicy, ZeroStrategy
from lightning_zero.errors import CheckpointError
from tests.helpers.runs import Net, batches, quiet, values_of
from tests.helpers.training import make_trainer
from tests.helpers.world import run_world


def trainer(*callbacks: pl.Callback, policy: CheckpointPolicy, stage: int = 3, **options: Any) -> pl.Trainer:
    checkpointing = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    strategy = ZeroStrategy(stage, checkpoint=policy)
    return make_trainer(strategy, callbacks=list(callbacks), enable_checkpointing=checkpointing, **options)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"format": "one"}, "CheckpointPolicy.format must be one of sharded, consolidated, got 'one'"),
        ({"async_save": 1}, "CheckpointPolicy.async_save must be true or false, got 1"),
        ({"exclude_frozen": "no"}, "CheckpointPolicy.exclude_frozen must be true or false, got 'no'"),
        ({"initial_weights": Path("x")}, "CheckpointPolicy.initial_weights must be a path or URL as a string"),
    ],
)
def test_a_wrong_setting_is_named(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CheckpointPolicy(**setting)


@pytest.mark.parametrize("options", ["sharded", {"formt": "sharded"}, {"format": "zip"}, {"async": "yes"}])
def test_storage_options_that_nobody_knows_are_refused(options: Any) -> None:
    with pytest.raises(ValueError, match=r"storage_options|CheckpointPolicy\.(format|async_save)"):
        CheckpointPolicy().for_one_save(options)


def test_storage_options_differ_from_the_policy_once(tmp_path: Path) -> None:
    @quiet()
    def run(rank: int) -> list[bool]:
        run_ = trainer(policy=CheckpointPolicy(), max_epochs=1)
        run_.fit(Net(), batches(2), batches(1))
        run_.save_checkpoint(tmp_path / "file.ckpt", storage_options={"format": "consolidated"})
        run_.save_checkpoint(tmp_path / "directory.ckpt")
        return [(tmp_path / name).is_dir() for name in ("file.ckpt", "directory.ckpt")]

    assert run_world(2, run) == [[False, True]] * 2


@pytest.mark.parametrize("form", ["sharded", "consolidated"])
def test_a_save_in_the_background_holds_the_weights_of_its_moment(tmp_path: Path, form: Any) -> None:
    """Training goes on, and changes the weights, before the thread has written any of them."""

    class Held(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
            if trainer.global_step == 2:
                pl_module.then = values_of(pl_module)
                gate = threading.Event()
                trainer.strategy.checkpoints._saver._remove_all = lambda paths: gate.wait(20) and []
                trainer.save_checkpoint(tmp_path / "then.ckpt")
                pl_module.gate = gate
            elif trainer.global_step == 4:
                assert not (tmp_path / "then.ckpt").exists()
                pl_module.gate.set()

    @quiet()
    def run(rank: int) -> list[str]:
        module = Net()
        run_ = trainer(Held(), policy=CheckpointPolicy(format=form, async_save=True), max_epochs=1)
        run_.fit(module, batches(4), batches(1))
        other = Net()
        trainer(policy=CheckpointPolicy()).validate(other, batches(1), ckpt_path=tmp_path / "then.ckpt", verbose=False)
        loaded = values_of(other)
        return [name for name, value in module.then.items() if not torch.equal(value, loaded[name])]

    assert run_world(2, run) == [[], []]


def test_a_failure_in_the_background_is_raised_at_the_end_of_the_run(tmp_path: Path) -> None:
    """On both ranks, though only rank 0 could not write, and the checkpoint before it stays."""
    torn = tmp_path / "folder" / "torn.ckpt"

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 1:
                trainer.save_checkpoint(tmp_path / "good.ckpt")
                trainer.strategy.remove_checkpoint(tmp_path / "good.ckpt")
                torn.mkdir(parents=True, exist_ok=True)
                (torn / "precious.txt").touch()  # a folder that is no checkpoint is not replaced
                trainer.save_checkpoint(torn)
                trainer.strategy.remove_checkpoint(tmp_path / "best.ckpt")
                trainer.strategy.checkpoints._saver._underway[1].exception()

    @quiet()
    def run(rank: int) -> tuple[str, int]:
        (tmp_path / "best.ckpt").touch()
        run_ = trainer(Save(), policy=CheckpointPolicy(async_save=True), max_epochs=1)
        with pytest.raises(CheckpointError) as caught:
            run_.fit(Net(), batches(2))
        return str(caught.value), run_.global_step

    for text, step in run_world(2, run):
        assert "torn.ckpt' is a directory that is not a checkpoint" in text
        assert "in the background" in text
        assert step == 2
    assert sorted(os.listdir(tmp_path)) == ["best.ckpt", "folder"]


def test_half_updated_weights_are_not_saved(tmp_path: Path) -> None:
    """What is raised is the user's own error; why there is no checkpoint of it stands below, or is a warning."""

    class Torn(torch.optim.SGD):
        kind: type[BaseException]

        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            self.steps = getattr(self, "steps", 0) + 1
            if self.steps == 3:
                raise self.kind("out of memory, say")

    class Module(Net):
        def configure_optimizers(self) -> Any:
            torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # from now on torch runs hooks of both steps
            return Torn(self.parameters(), lr=0.1)

    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return batches(4)

        def on_exception(self, exception: BaseException) -> None:
            self.trainer.save_checkpoint(tmp_path / "of_data.ckpt")

    def play(kind: type[BaseException], shown: type[BaseException]) -> list[str]:
        Torn.kind = kind
        callback = ModelCheckpoint(dirpath=tmp_path, save_on_exception=True, every_n_train_steps=100)
        interrupted = trainer(callback, policy=CheckpointPolicy(), max_epochs=1, limit_val_batches=0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with pytest.raises(shown) as raised:
                interrupted.fit(Module(), datamodule=Data())
        texts = [*getattr(raised.value, "__notes__", []), *(str(warning.message) for warning in caught)]
        return [text for text in texts if "the middle of an optimizer step, where weights are half updated" in text]

    @quiet()
    def run(rank: int) -> list[int]:
        pairs = ((ArithmeticError, ArithmeticError), (KeyboardInterrupt, SystemExit))
        return [len(play(*pair)) for pair in pairs]

    assert run_world(2, run) == [[2, 2]] * 2  # of the callback and of the data
    assert os.listdir(tmp_path) == []


def test_a_link_to_what_is_not_there_yet_is_warned_of(tmp_path: Path) -> None:
    def run(rank: int) -> list[str]:
        callback = ModelCheckpoint(dirpath=tmp_path, save_last="link")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run_ = trainer(callback, policy=CheckpointPolicy(async_save=True), max_epochs=1)
            run_.fit(Net(), batches(2), batches(1))
        return [str(warning.message) for warning in caught if "last.ckpt" in str(warning.message)]

    (texts,) = run_world(1, run)
    assert len(texts) == 1
    assert "Use save_last=True" in texts[0]


class Slow(pl.Callback):
    """Background saves of this run take a while each."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        saver = trainer.strategy.checkpoints._saver
        remove_all = saver._remove_all
        saver._remove_all = lambda paths: (time.sleep(0.1), remove_all(paths))[1]


class Falling(Net):
    """Logs a metric that gets better with every step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("metric", torch.tensor(-float(batch_idx)))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("top", [-1, 3])
def test_a_name_that_is_being_written_is_taken(tmp_path: Path, top: int) -> None:
    """``ModelCheckpoint`` counts versions up where a name exists; in the background nothing exists yet."""

    @quiet()
    def run(rank: int, asynchronous: bool) -> list[tuple[str, int]]:
        folder = tmp_path / str(asynchronous)
        callback = ModelCheckpoint(
            dirpath=folder, filename="{epoch}", monitor="metric", every_n_train_steps=1, save_top_k=top
        )
        run_ = trainer(callback, Slow(), policy=CheckpointPolicy(async_save=asynchronous), max_epochs=1)
        run_.fit(Falling(), batches(5), batches(1))
        assert "file_exists" not in vars(callback)
        saved = sorted(folder.iterdir())
        return [(path.name, torch.load(path / "meta.pt", weights_only=True)["global_step"]) for path in saved]

    def both(rank: int) -> tuple[Any, Any]:
        return run(rank, False), run(rank, True)

    for in_turn, in_the_background in run_world(2, both):
        assert len(in_turn) == (5 if top == -1 else 3)
        assert in_the_background == in_turn


def test_what_slurm_waits_for_is_there_when_it_returns(tmp_path: Path) -> None:
    class Preempted(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
            if trainer.global_step == 1:
                trainer.save_checkpoint(tmp_path / "hpc_ckpt_1.ckpt")
                pl_module.there = (tmp_path / "hpc_ckpt_1.ckpt" / "zero.json").is_file()

    @quiet()
    def run(rank: int) -> bool:
        module = Net()
        run_ = trainer(Slow(), Preempted(), policy=CheckpointPolicy(async_save=True), max_epochs=1)
        run_.fit(module, batches(2), batches(1))
        return module.there

    assert run_world(2, run) == [True, True]


def test_a_trainer_inside_of_another_waits_for_the_save_in_flight(tmp_path: Path) -> None:
    """They share a group, which belongs to the save while it lasts."""

    class Evaluate(pl.Callback):
        def on_train_batch_end(self, trainer_: pl.Trainer, *_: Any) -> None:
            if trainer_.global_step == 1:
                trainer_.save_checkpoint(tmp_path / "first.ckpt", storage_options={"async": False})
                trainer_.save_checkpoint(tmp_path / "second.ckpt")
                inner = trainer(policy=CheckpointPolicy())
                inner.validate(Net(), batches(1), ckpt_path=tmp_path / "first.ckpt", verbose=False)
                assert (tmp_path / "second.ckpt").is_dir()

    @quiet()
    def run(rank: int) -> int:
        run_ = trainer(Slow(), Evaluate(), policy=CheckpointPolicy(async_save=True), max_epochs=1)
        run_.fit(Net(), batches(4), batches(1))
        return run_.global_step

    assert run_world(2, run, timeout=40) == [4, 4]
    assert sorted(os.listdir(tmp_path)) == ["first.ckpt", "second.ckpt"]


def test_a_second_try_inside_of_except_is_an_ordinary_run(tmp_path: Path) -> None:
    """Its failures are raised, and its saves do not ask who is there."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "precious.txt").touch()

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 1:
                trainer.save_checkpoint(tmp_path / "good.ckpt", storage_options={"async": False})
            if trainer.global_step == 4:
                trainer.save_checkpoint(tmp_path / "folder")

    @quiet()
    def run(rank: int) -> tuple[str, int]:
        try:
            raise MemoryError("the first try")
        except MemoryError:
            run_ = trainer(Save(), policy=CheckpointPolicy(async_save=True), max_epochs=1, limit_val_batches=0)
            with pytest.raises(CheckpointError) as caught:
                run_.fit(Net(), batches(4), batches(1))
        return str(caught.value), sum(run_.strategy.checkpoints._groups._meetings.values())

    for text, attendances in run_world(2, run):
        assert "is a directory that is not a checkpoint" in text
        assert attendances == 0


def test_a_save_that_failed_before_does_not_keep_the_last_one_from_being_made(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "precious.txt").touch()

    class Failing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_step == 2:
                self.trainer.save_checkpoint(tmp_path / "folder")
                raise ArithmeticError("the end")
            return super().training_step(batch, batch_idx)

    def run(rank: int) -> None:
        callback = ModelCheckpoint(dirpath=tmp_path, filename="{step}", save_on_exception=True, every_n_train_steps=99)
        run_ = trainer(callback, policy=CheckpointPolicy(async_save=True), max_epochs=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(ArithmeticError, match="the end"):
                run_.fit(Failing(), batches(4), batches(1))

    run_world(2, run)
    assert (tmp_path / "step=2.ckpt" / "zero.json").is_file()


def test_a_relative_path_is_that_of_the_call(tmp_path: Path) -> None:
    class Wander(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 1:
                os.chdir(tmp_path / "here")
                trainer.save_checkpoint("saved.ckpt")
                trainer.strategy.remove_checkpoint("old.ckpt")
                os.chdir(tmp_path / "elsewhere")

    @quiet()
    def run(rank: int) -> None:
        trainer(Slow(), Wander(), policy=CheckpointPolicy(async_save=True), max_epochs=1).fit(
            Net(), batches(2), batches(1)
        )

    for folder in ("here", "elsewhere"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "old.ckpt").touch()
    run_world(2, run)
    assert os.listdir(tmp_path / "here") == ["saved.ckpt"]
    assert os.listdir(tmp_path / "elsewhere") == ["old.ckpt"]


def test_a_file_of_weights_cannot_be_resumed_and_says_what_can(tmp_path: Path) -> None:
    torch.save(Net().state_dict(), tmp_path / "weights.pt")

    @quiet()
    def run(rank: int) -> None:
        with pytest.raises(CheckpointError, match=r"weights\.pt.*initial_weights"):
            trainer(policy=CheckpointPolicy(), max_epochs=1).fit(
                Net(), batches(2), batches(1), ckpt_path=tmp_path / "weights.pt"
            )

    run_world(2, run)
