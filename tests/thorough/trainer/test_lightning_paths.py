"""Every way in which Lightning saves, keeps, finds and loads a checkpoint takes a sharded directory."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_zero import CheckpointPolicy
from lightning_zero.session import checkpoints
from tests.helpers import runs
from tests.helpers.runs import Net, assert_same, batches, fit, made, raised, zero
from tests.helpers.training import make_trainer
from tests.helpers.world import run_world

POLICIES = {
    "sharded": CheckpointPolicy(),
    "async": CheckpointPolicy(async_save=True),
    "consolidated": CheckpointPolicy(format="consolidated"),
}
KEEPERS: dict[str, dict[str, Any]] = {
    "top 2 and last": {"monitor": "val_loss", "save_top_k": 2, "save_last": True},
    "top 1 and link": {"monitor": "val_loss", "save_top_k": 1, "save_last": "link"},
    "all and link": {"save_top_k": -1, "save_last": "link", "every_n_train_steps": 2},
    "newest": {"every_n_train_steps": 2},
    "worst weights": {"monitor": "val_loss", "mode": "max", "save_weights_only": True},
}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Also where a run has no ``ModelCheckpoint`` to load the state of one, or links to what is still being written."""
    with runs.quiet():
        warnings.filterwarnings("ignore", ".*callbacks used to create the checkpoint need to be provided.*")
        warnings.filterwarnings("ignore", ".*points last.ckpt to a new checkpoint at once, but with async_save.*")
        yield


class Falling(Net):
    """Its validation loss falls in every epoch, so that each checkpoint is the best so far."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", torch.tensor(10.0 - self.current_epoch), sync_dist=True)


def kept_in(folder: Path) -> dict[str, str]:
    """Names of what is there, and where links lead to."""
    return {path.name: os.readlink(path) if path.is_symlink() else "" for path in folder.iterdir()}


def test_model_checkpoint_keeps_what_it_keeps_under_ddp(tmp_path: Path) -> None:
    """Names, removals and links; ``last`` and ``best`` are found, whole and loaded; under each policy."""
    makes: dict[str, Any] = {"ddp": lambda: DDPStrategy(find_unused_parameters=True)}
    makes |= {name: lambda policy=policy: zero(3, checkpoint=policy) for name, policy in POLICIES.items()}

    def train(make: Any, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
        def fitted(epochs: int, ckpt_path: str | None = None) -> tuple[Any, Falling, pl.Trainer]:
            callback, module = ModelCheckpoint(folder, filename="{epoch}-{step}", **options), Falling()
            trainer = make_trainer(make(), max_epochs=epochs, callbacks=[callback], enable_checkpointing=True)
            trainer.fit(module, batches(3), batches(1), ckpt_path=ckpt_path)
            return callback, module, trainer

        callback, module, trainer = fitted(3)
        found: dict[str, Any] = {
            "kept": kept_in(folder),
            "best": Path(callback.best_model_path).name,
            "tested": trainer.test(module, batches(1), ckpt_path="best", verbose=False),
        }
        if options.get("save_last"):
            found["last"] = trainer.test(module, batches(1), ckpt_path="last", verbose=False)
            found["resumed"] = made(*fitted(4, "last")[1:])
            found["kept later"] = kept_in(folder)
        return found

    def play(rank: int) -> dict[str, dict[str, Any]]:
        with quiet():
            return {
                name: {keeper: train(make, tmp_path / name / keeper, KEEPERS[keeper]) for keeper in KEEPERS}
                for name, make in makes.items()
            }

    results = run_world(2, play, timeout=240)
    assert_same(results, list(POLICIES))
    assert not any(name.startswith(".") for found in results[0]["async"].values() for name in found["kept"])


def test_last_cannot_be_a_link_on_a_file_system_without_links(tmp_path: Path) -> None:
    """Rank 0 says that a directory is no file to copy, and the other rank that rank 0 has failed."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("Operation not permitted")

    def play(rank: int) -> list[str]:
        errors: list[str] = []
        callback = ModelCheckpoint(tmp_path, filename="{step}", save_last="link", every_n_train_steps=2)
        trainer = make_trainer(zero(3), max_epochs=1, callbacks=[callback], enable_checkpointing=True)
        with quiet(), pytest.MonkeyPatch.context() as patch, raised(errors):
            patch.setattr(os, "symlink", refuse)
            trainer.fit(Falling(), batches(4))
        if rank == 0:
            dist.destroy_process_group()  # as the process that ends does
        return errors

    first, second = run_world(2, play)
    assert first[0].startswith("IsADirectoryError")
    assert second[0].startswith("CommunicationError")


def test_hpc_and_last_are_found_among_leftovers(tmp_path: Path) -> None:
    """What a killed save leaves has digits in its name and is newer; nothing of it is taken for a checkpoint."""
    leftovers = [".ztmp-1234567890abcdef", ".zdel-99999999", ".zdata-77777777"]

    def train(module: Net, epochs: int, **options: Any) -> pl.Trainer:
        trainer = make_trainer(zero(2), max_epochs=epochs, default_root_dir=tmp_path, **options)
        trainer.fit(module, batches(2))
        return trainer

    def play(rank: int) -> dict[str, Any]:
        results: dict[str, Any] = {}
        with quiet():
            keeper = ModelCheckpoint(tmp_path, save_last=True, filename="{epoch}")
            whole = Net()
            results["whole"] = made(whole, train(whole, 3))
            results["whole"]["losses"] = results["whole"]["losses"][-2:]
            trainer = train(Net(), 2, callbacks=[keeper], enable_checkpointing=True)
            trainer.save_checkpoint(tmp_path / "hpc_ckpt_9.ckpt")
            trainer.save_checkpoint(tmp_path / "hpc_ckpt_10.ckpt")
            trainer.strategy.barrier()
            if rank == 0:
                for name in leftovers:
                    (tmp_path / name).mkdir()
                    (tmp_path / name / "zero.json").write_bytes(b"{")
            trainer.strategy.barrier()
            for kind in ("last", "hpc"):  # in this order: a run that resumes saves a new last one
                module = Net(seed=7)
                trainer = make_trainer(
                    zero(2),
                    max_epochs=3,
                    default_root_dir=tmp_path,
                    callbacks=[ModelCheckpoint(tmp_path, save_last=True, filename="{epoch}", save_top_k=0)],
                    enable_checkpointing=True,
                )
                trainer.fit(module, batches(2), ckpt_path=kind)
                results[kind] = made(module, trainer)
                results[f"{kind} path"] = {"name": Path(trainer.ckpt_path or "").name}
        return results

    results = run_world(2, play)
    assert_same(results, ["hpc", "last"], 0, "whole")
    assert results[0]["hpc path"]["name"] == "hpc_ckpt_10.ckpt"
    assert results[0]["last path"]["name"] == "last.ckpt"


def test_a_save_after_the_run_is_on_disk_when_it_returns(tmp_path: Path) -> None:
    """Also with ``async_save``: there is no training left to go on, and the user's next line may read it."""

    def play(rank: int) -> bool:
        trainer = make_trainer(zero(3, checkpoint=POLICIES["async"]), max_epochs=1)
        with quiet():
            trainer.fit(Net(), batches(1))
            trainer.save_checkpoint(tmp_path / "saved.ckpt")
        return (tmp_path / "saved.ckpt" / "zero.json").is_file()

    assert run_world(2, play) == [True, True]


# ---------------------------------------------------------------------------------------------------------------------
# Exceptions


class Failing(Net):
    """Raises in the second epoch, on some ranks."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        super().__init__()
        self.ranks = ranks

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if (self.current_epoch, batch_idx) == (1, 1) and dist.get_rank() in self.ranks:
            raise ArithmeticError("no more")
        return super().training_step(batch, batch_idx)


def test_a_checkpoint_saved_because_all_ranks_raised_resumes_bit_for_bit(tmp_path: Path) -> None:
    def play(rank: int) -> dict[str, Any]:
        results: dict[str, Any] = {}
        errors: list[str] = []
        with quiet():
            whole = Net()
            results["whole"] = made(whole, fit(zero(3), whole, 3, max_epochs=3))
            for name, policy in POLICIES.items():
                keeper = ModelCheckpoint(tmp_path / name, save_on_exception=True, filename="{step}")
                with raised(errors):
                    options = {"callbacks": [keeper], "enable_checkpointing": True}
                    fit(zero(3, checkpoint=policy), Failing((0, 1)), 3, max_epochs=3, **options)
                resumed, trainer = Net(), make_trainer(zero(1), max_epochs=3)
                trainer.fit(resumed, batches(3), ckpt_path=tmp_path / name / "step=4.ckpt")
                results[name] = made(resumed, trainer)
        results["whole"]["losses"] = results["whole"]["losses"][-5:]
        assert errors == ["ArithmeticError: no more"] * len(POLICIES)
        return results

    assert_same(run_world(2, play, timeout=100), list(POLICIES), expected="whole")


def test_an_error_before_there_is_anything_to_save_is_raised_itself(tmp_path: Path) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise ArithmeticError("no more")

    def play(rank: int) -> None:
        for hook in ("prepare_data", "setup", "configure_model"):
            trainer = make_trainer(zero(3), callbacks=[OnExceptionCheckpoint(tmp_path)], enable_checkpointing=True)
            module = type("Failing", (Net,), {hook: fails})()
            with quiet():
                warnings.filterwarnings("ignore", ".*without a model|.*no last checkpoint")
                with pytest.raises(ArithmeticError, match="no more"):
                    trainer.fit(module, batches(3))

    run_world(1, play)


def test_a_rank_that_raises_alone_raises_its_own_error(tmp_path: Path) -> None:
    """Its saves say whom they missed; the others name the rank and its error; the checkpoint before is intact."""

    def play(rank: int) -> None:
        checkpoints._ATTENDANCE_SECONDS = 5.0
        keeper = ModelCheckpoint(tmp_path, save_on_exception=True, filename="{step}", save_last="link")
        callbacks = [keeper, OnExceptionCheckpoint(tmp_path)]
        trainer = make_trainer(zero(3), max_epochs=3, callbacks=callbacks, enable_checkpointing=True)
        with quiet():
            warnings.filterwarnings("ignore", ".*without a model|.*no last checkpoint")
            trainer.fit(Failing((1,)), batches(3))

    failures = run_world(2, play, expect_failure=True, timeout=40)
    first, second = failures[1], failures[0]
    assert (first.type, first.message) == ("ArithmeticError", "no more")
    assert second.type == "CommunicationError"
    assert "Rank 1 has failed with ArithmeticError: no more" in second.message
    if sys.version_info >= (3, 11):
        for name in ("step=4.ckpt", "on_exception.ckpt"):
            assert f"{name}', which it was asked to after ArithmeticError: rank 0 did not come" in first.traceback
            assert f"{name}', which it was asked to after CommunicationError: rank 1 did not come" in second.traceback
    assert kept_in(tmp_path) == {"step=3.ckpt": "", "last.ckpt": "step=3.ckpt"}

    def load(rank: int) -> int:
        with quiet():
            trainer = make_trainer(zero(3), max_epochs=1)
            trainer.fit(Net(), batches(3), ckpt_path=tmp_path / "step=3.ckpt")
        return trainer.global_step

    assert run_world(2, load) == [3, 3]
