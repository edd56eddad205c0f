"""Every way in which Lightning saves, keeps, finds and loads a checkpoint takes a sharded directory."""

from __future__ import annotations

import contextlib
import enum
import functools
import os
import sys
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from lightning_zero import CheckpointPolicy, full_parameters
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


def test_evaluation_loads_a_directory_without_a_fit(tmp_path: Path) -> None:
    """``validate``, ``test`` and ``predict`` of a fresh Trainer, in another stage and world size."""
    path = tmp_path / "weights.ckpt"

    def evaluate(make: Any, ckpt_path: Path | None) -> list[Any]:
        found = []
        for kind, options in (("validate", {"verbose": False}), ("test", {"verbose": False}), ("predict", {})):
            trainer, module = make()
            found.append(getattr(trainer, kind)(module, batches(1), ckpt_path=ckpt_path, **options))
        return found

    def save(rank: int) -> list[Any]:
        with quiet():
            module = Net()
            trainer = fit(zero(3), module, 2)
            trainer.save_checkpoint(path)
            return evaluate(lambda: (trainer, module), None)

    def load(rank: int, stage: int) -> list[Any]:
        with quiet():
            return evaluate(lambda: (make_trainer(zero(stage)), Net(seed=9)), path)

    saved = run_world(2, save)
    for expected, found in zip(saved, run_world(2, load, 1), strict=True):
        assert_same([{"now": {"": expected}, "loaded": {"": found}}], ["loaded"], 0, "now")
    assert torch.equal(run_world(1, load, 3)[0][2][0], saved[0][2][0])


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


class Extra(pl.Callback):
    """Puts tensors of its own, and shards of the module, into the checkpoint, at several places."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {
            "mean": torch.linspace(0, 1, 7, dtype=torch.float64),
            "nested": [torch.tensor(3), {"x": torch.ones(2, 0)}],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.found["state"] = state

    def on_save_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        weights = checkpoint["state_dict"]
        checkpoint["copies"] = {"weights": {name: weights[name].clone() for name in weights}, "decay": 0.9}
        checkpoint["moved"] = {"head": weights["model.head.weight"]}
        checkpoint["table"] = torch.arange(70_000, dtype=torch.int32)

    def on_load_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        copies = checkpoint["copies"]
        self.found |= {
            "copies": {name: value.clone() for name, value in copies["weights"].items()},
            "decay": copies["decay"],
            "moved": checkpoint["moved"]["head"].clone(),
            "table": checkpoint["table"].clone(),
        }


@pytest.mark.parametrize("policy", POLICIES)
def test_callbacks_that_add_tensors_get_them_back_whole(policy: str, tmp_path: Path) -> None:
    """Shards that were moved or copied to other keys, and plain tensors in any place."""

    path = tmp_path / "saved.ckpt"

    class Saver(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            trainer.save_checkpoint(path)

    def play(rank: int, resume: bool) -> dict[str, Any]:
        module, extra = Net(), Extra()
        callbacks = [extra] if resume else [extra, Saver()]
        trainer = make_trainer(zero(3, checkpoint=POLICIES[policy]), max_epochs=1 + resume, callbacks=callbacks)
        with quiet():
            trainer.fit(module, batches(2), ckpt_path=path if resume else None)
        with full_parameters(module):
            weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
        return {"weights": weights, "found": extra.found}

    weights = run_world(2, play, False)[0]["weights"]
    for result in run_world(3, play, True):
        found = result["found"]
        assert {name: value.shape for name, value in found["copies"].items()} == {
            name: value.shape for name, value in weights.items()
        }
        assert all(torch.equal(found["copies"][name], value) for name, value in weights.items())
        assert torch.equal(found["moved"], weights["model.head.weight"])
        assert torch.equal(found["table"], torch.arange(70_000, dtype=torch.int32))
        assert found["decay"] == 0.9
        assert torch.equal(found["state"]["mean"], torch.linspace(0, 1, 7, dtype=torch.float64))
        assert found["state"]["nested"][0] == 3
        assert found["state"]["nested"][1]["x"].shape == (2, 0)


def test_a_save_after_the_run_is_on_disk_when_it_returns(tmp_path: Path) -> None:
    """Also with ``async_save``: there is no training left to go on, and the user's next line may read it."""

    def play(rank: int) -> bool:
        trainer = make_trainer(zero(3, checkpoint=POLICIES["async"]), max_epochs=1)
        with quiet():
            trainer.fit(Net(), batches(1))
            trainer.save_checkpoint(tmp_path / "saved.ckpt")
        return (tmp_path / "saved.ckpt" / "zero.json").is_file()

    assert run_world(2, play) == [True, True]


class Colour(enum.Enum):
    RED = 1


def scaled(x: Tensor, by: float) -> Tensor:
    return x * by


DOUBLED = functools.partial(scaled, by=2.0)


class Configured(Net):
    """With hyperparameters that are no numbers."""

    def __init__(
        self,
        where: Path = Path("/some/where"),
        layer: type[nn.Module] = nn.Linear,
        colour: Colour = Colour.RED,
        transform: Any = DOUBLED,
        dtype: torch.dtype = torch.bfloat16,
        every: timedelta = timedelta(minutes=5),
        nested: Any = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_hyperparameters_that_are_paths_classes_enums_or_functions_do_not_stop_a_resumption(tmp_path: Path) -> None:
    """What cannot be loaded without running code is left out by name, with one warning on rank 0."""

    def play(rank: int) -> dict[str, Any]:
        results: dict[str, Any] = {}

        def train(module: Net, epochs: int, ckpt_path: Path | None = None) -> pl.Trainer:
            trainer = make_trainer(zero(3), max_epochs=epochs)
            trainer.fit(module, batches(2), ckpt_path=ckpt_path)
            return trainer

        with quiet(), warnings.catch_warnings(record=True) as caught:
            warnings.filterwarnings("always", "Left out of the checkpoint")
            warnings.filterwarnings("always", "A run that resumes will not have all that was saved")
            whole, resumed = Configured(), Configured(nested={"a": [Path("x"), {1: None}]})
            results["whole"] = made(whole, train(whole, 3))
            train(Configured(), 2).save_checkpoint(tmp_path / "saved.ckpt")
            results["resumed"] = made(resumed, train(resumed, 3, tmp_path / "saved.ckpt"))
            results["whole"]["losses"] = results["whole"]["losses"][-2:]
        texts = [str(w.message) for w in caught]
        results["named"] = [text for text in texts if "will not have all" in text]
        return {**results, "warnings": [text for text in texts if "Left out" in text]}

    results = run_world(2, play)
    assert_same(results, ["resumed"], 0, "whole")
    assert [len(result["warnings"]) for result in results] == [1, 0]
    assert [len(result["named"]) for result in results] == [1, 0]
    assert "'hyper_parameters.transform' (functools.partial)" in results[0]["named"][0]
    assert "transform" in results[0]["warnings"][0]
    assert "where" not in results[0]["warnings"][0].replace("/some/where", "")


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
