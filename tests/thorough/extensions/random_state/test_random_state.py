"""A resumed run draws the random numbers of the run that was not interrupted."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import lightning_utilities.core.rank_zero as rank_zero
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_zero import CheckpointPolicy, consolidate_checkpoint, verify_checkpoint
from lightning_zero.checkpoint import (
    open_checkpoint,
    save_checkpoint_directory,
)
from lightning_zero.comm import ControlGroup, Groups
from lightning_zero.errors import CheckpointError
from lightning_zero.extensions.inspection.contents import describe_checkpoint
from lightning_zero.extensions.random_state import RandomState
from tests.helpers.runs import STAGES, quiet, values_of, zero
from tests.helpers.training import make_trainer
from tests.helpers.world import run_world

WIDTH = 20
COUNT = 4  # batches per epoch
EPOCHS = 3
CPU = torch.device("cpu")


def drawn() -> list[float]:
    """One number of each generator."""
    return [random.random(), float(np.random.rand()), torch.rand(()).item()]


def begin(seed: int) -> None:
    """Python's generator is the same on all ranks, the others are not."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    random.seed(seed)
    np.random.seed(seed + rank)
    torch.manual_seed(seed + 10 * rank)


class Augmented(Dataset[Tensor]):
    """Noise is added wherever an item is made: here, or in a worker."""

    def __len__(self) -> int:
        return 3 * COUNT

    def __getitem__(self, index: int) -> Tensor:
        x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(index))
        return x + 0.1 * torch.randn(5, WIDTH) + sum(drawn()[:2])


class Stream(IterableDataset[Tensor]):
    """Has no length, and draws nothing."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.randn(3 * COUNT, 5, WIDTH, generator=torch.Generator().manual_seed(3))


class Resumable:
    """A loader that goes on in the middle of an epoch."""

    def __init__(self) -> None:
        self.epoch = self.done = 0
        self.sampler = self  # where Lightning looks for ``set_epoch``

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self.done = epoch, 0

    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Iterator[Tensor]:
        data = Augmented()
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(self.epoch)).tolist()
        while self.done < COUNT:
            self.done += 1
            yield torch.stack([data[i] for i in order[3 * self.done - 3 : 3 * self.done]])

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.done = state["epoch"], state["done"]


def loader(**options: Any) -> DataLoader[Tensor]:
    return DataLoader(Augmented(), batch_size=3, shuffle=True, **options)


class Noisy(pl.LightningModule):
    """A transformer with dropout, whose steps and hooks draw from every generator."""

    def __init__(self, estimates: bool = False, hooks: bool = True) -> None:
        super().__init__()
        self.estimates, self.hooks = estimates, hooks
        layers = [nn.TransformerEncoderLayer(WIDTH, 2, 24, dropout=0.3, batch_first=True) for _ in range(2)]
        self.model = nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))
        self.losses: list[Tensor] = []
        self.first: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        numbers = drawn()
        self.first = self.first or numbers
        loss = F.mse_loss(self.model(batch + sum(numbers)), batch)
        self.losses.append(loss.detach().clone())
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self.model(batch), batch), sync_dist=True)

    def on_train_start(self) -> None:
        drawn()

    def on_train_epoch_start(self) -> None:
        if self.hooks:
            drawn()

    def on_train_epoch_end(self) -> None:
        if self.hooks:
            drawn()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.estimates:  # which makes the loader, and an iterator, in the middle of set-up
            assert self.trainer.estimated_stepping_batches != 0
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Saver(Checkpoint):
    """Saves after some batches, and at the end of some epochs (``None``), as late as ModelCheckpoint does."""

    def __init__(self, folder: Path, *moments: tuple[int, int | None]) -> None:
        self.folder, self.moments = folder, moments

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._save(trainer, batch_idx)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._save(trainer, None)

    def _save(self, trainer: pl.Trainer, at: int | None) -> None:
        if (trainer.current_epoch, at) in self.moments:
            trainer.save_checkpoint(self.folder / f"{trainer.current_epoch} {at}")


def run(
    strategy: Any, data: Any, seed: int, *, saver: Any = None, resume: Any = None, **options: Any
) -> dict[str, Any]:
    """One fit: the losses, weights and generators at its end. Collective."""
    begin(seed)
    module = Noisy(**{name: options.pop(name) for name in ("estimates", "hooks") if name in options})
    begin(seed)
    callbacks = [saver] if saver is not None else []
    trainer = make_trainer(
        strategy, **{"max_epochs": EPOCHS, "callbacks": callbacks, "enable_checkpointing": bool(callbacks), **options}
    )
    with quiet():
        trainer.fit(module, *data, ckpt_path=resume)
    weights, state = values_of(module), np.random.get_state(legacy=False)
    assert isinstance(state, dict)
    return {
        "losses": module.losses,
        "weights": weights,
        "random": (random.getstate(), state["state"]["pos"], state["state"]["key"].tolist(), torch.get_rng_state()),
        "first": module.first,
    }


def differences(expected: dict[str, Any], found: dict[str, Any], at: str) -> list[str]:
    """Where the resumed run is not what the other did from there on, to the bit."""
    wrong = []
    losses = expected["losses"][-len(found["losses"]) :]
    if not all(torch.equal(a, b) for a, b in zip(losses, found["losses"], strict=True)):
        wrong.append(f"{at}: losses {losses} and {found['losses']}")
    wrong += [f"{at}: {name}" for name, w in expected["weights"].items() if not torch.equal(w, found["weights"][name])]
    *others, host = expected["random"]
    if others != list(found["random"][:-1]) or not torch.equal(host, found["random"][-1]):
        wrong.append(f"{at}: generators at the end")
    return wrong


def strategy_of(stage: int, **options: Any) -> Any:
    return zero(stage, units=["TransformerEncoderLayer"], **options)


def resumed(
    make: Callable[[], Any], data: Callable[[], Any], folder: Path, *moments: tuple[int, int | None], **options: Any
) -> list[str]:
    """Run through, saving at these moments, then resume from each, from other seeds. Collective."""
    whole = run(make(), data(), 1, saver=Saver(folder, *moments), **options)
    found = []
    for epoch, at in moments:
        path = folder / f"{epoch} {at}"
        again = run(make(), data(), 77, resume=path, **options)
        assert 0 < len(again["losses"]) < len(whole["losses"])
        found += differences(whole, again, f"saved in epoch {epoch} after {at}")
    return found


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_a_resumed_run_is_the_uninterrupted_one(stage: int, tmp_path: Path) -> None:
    """In mid-epoch and at the end of an epoch, with data that are augmented in the process."""

    moments = (0, 1), (1, 2), (0, None), (1, None)

    def rank(_: int) -> list[str]:
        return resumed(lambda: strategy_of(stage), lambda: [Resumable()], tmp_path, *moments)

    assert run_world(2, rank, timeout=300) == [[], []]


def test_in_the_background_too(tmp_path: Path) -> None:
    def rank(_: int) -> list[str]:
        policy = CheckpointPolicy(async_save=True)
        return resumed(lambda: strategy_of(2, checkpoint=policy), lambda: [Resumable()], tmp_path, (0, 1), (1, None))

    assert run_world(2, rank, timeout=300) == [[], []]


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: [loader()],
    "with workers": lambda: [loader(num_workers=2, multiprocessing_context="fork")],
    "a stream": lambda: [DataLoader(Stream(), batch_size=3)],
    "validated": lambda: [loader(), DataLoader(torch.randn(2, 5, WIDTH))],  # type: ignore[arg-type]
}


@pytest.mark.parametrize(
    ("name", "estimates"),
    [*((name, False) for name in LOADERS), ("shuffled", True), ("with workers", True)],
)
def test_an_epoch_begins_with_the_order_and_the_workers_seeds_of_the_uninterrupted_run(
    name: str, estimates: bool, tmp_path: Path
) -> None:
    def rank(_: int) -> list[str]:
        return resumed(lambda: strategy_of(1), LOADERS[name], tmp_path, (0, None), (1, None), estimates=estimates)

    assert run_world(2, rank, timeout=300) == [[], []]


def test_saved_after_the_last_batch(tmp_path: Path) -> None:
    """Lightning leaves the hooks between the two epochs out then; here they draw nothing."""

    def rank(_: int) -> list[str]:
        moments = (0, COUNT - 1), (1, COUNT - 1)
        found = []
        for name in ("shuffled", "with workers"):
            found += resumed(lambda: strategy_of(2), LOADERS[name], tmp_path / name, *moments, hooks=False)
        return found

    assert run_world(2, rank, timeout=300) == [[], []]


def test_saved_by_a_model_checkpoint_after_the_validation_of_an_epoch(tmp_path: Path) -> None:
    def rank(_: int) -> list[str]:
        def saver() -> ModelCheckpoint:
            return ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=-1, filename="{epoch}")

        whole = run(strategy_of(3), LOADERS["validated"](), 1, saver=saver())
        again = run(strategy_of(3), LOADERS["validated"](), 77, saver=saver(), resume=tmp_path / "epoch=0.ckpt")
        assert len(again["losses"]) == 2 * COUNT
        return differences(whole, again, "saved after validation")

    assert run_world(2, rank, timeout=300) == [[], []]


# ---------------------------------------------------------------------------------------------------------------------
# Where it cannot be the same


class Said(logging.Handler):
    """What rank 0 says."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "andom number" in record.getMessage():
            self.texts.append(record.getMessage())

    def __enter__(self) -> Said:
        rank_zero.log.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        rank_zero.log.removeHandler(self)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3)])
def test_at_another_number_of_ranks_new_streams_begin_and_it_is_said_once(
    before: int, after: int, tmp_path: Path
) -> None:
    """Python's generator was the same on all ranks, which may rely on that: it goes on, and stays the same."""

    def save(_: int) -> list[float]:
        whole = run(strategy_of(3), [Resumable()], 1, saver=Saver(tmp_path, (0, 1)))
        assert len(whole["losses"]) == EPOCHS * COUNT
        next_one = run(strategy_of(3), [Resumable()], 2, resume=tmp_path / "0 1")
        return next_one["first"]

    def resume(_: int) -> tuple[list[float], list[float], list[str]]:
        with Said() as said:
            first = run(strategy_of(3), [Resumable()], 5, resume=tmp_path / "0 1")["first"]
            second = run(strategy_of(2), [Resumable()], 6, resume=tmp_path / "0 1")["first"]
        return first, second, said.texts

    goes_on = run_world(before, save, timeout=300)
    found = run_world(after, resume, timeout=300)
    assert [first for first, _, _ in found] == [second for _, second, _ in found]
    assert [len(texts) for _, _, texts in found] == [2] + [0] * (after - 1)  # once for each run
    shared, kept = {"python", "numpy", "torch"}, "python, torch, numpy go on, alike on all ranks"
    if before > 1:
        shared, kept = {"python"}, "python go on, alike on all ranks; new streams begin for torch, numpy"
    assert all(f"of {before} ranks and this run of {after}. Random numbers: {kept}" in text for text in found[0][2])
    for place, name in enumerate(("python", "numpy", "torch")):
        numbers = {first[place] for first, _, _ in found}
        if name in shared:
            assert numbers == {goes_on[0][place]}
        else:
            assert len(numbers) == after
            assert not numbers & {first[place] for first in goes_on}


def test_a_checkpoint_without_random_state_still_loads(tmp_path: Path) -> None:
    """One of an earlier version, which had nothing of this in it, in the same format."""

    class Old(Saver):
        def _save(self, trainer: pl.Trainer, at: int | None) -> None:
            if (trainer.current_epoch, at) in self.moments:
                control = ControlGroup(dist.group.WORLD, dist.get_rank(), dist.get_world_size())
                content = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
                save_checkpoint_directory(content, self.folder / "old", control, plan_summary={})

    def rank(_: int) -> tuple[list[float], list[str]]:
        run(strategy_of(3), [Resumable()], 1, saver=Old(tmp_path, (0, 1)))
        with Said() as said:
            again = run(strategy_of(3), [Resumable()], 5, resume=tmp_path / "old")
        assert len(again["losses"]) == EPOCHS * COUNT - 2
        return again["first"], said.texts

    found = run_world(2, rank, timeout=300)
    assert "lightning_zero" not in open_checkpoint(tmp_path / "old", ControlGroup(None))
    assert [texts for _, texts in found] == [[], []]


def test_validating_from_a_checkpoint_leaves_the_generators_alone(tmp_path: Path) -> None:
    def rank(_: int) -> list[bool]:
        run(strategy_of(3), [Resumable()], 1, saver=Saver(tmp_path, (0, 1)))
        same = []
        for path in (None, tmp_path / "0 1"):
            begin(5)
            trainer, module = make_trainer(strategy_of(3)), Noisy()
            begin(5)
            with quiet():
                trainer.validate(module, DataLoader(torch.randn(2, 5, WIDTH)), ckpt_path=path)  # type: ignore[arg-type]
            same.append(drawn())
        return [same[0] == same[1]]

    assert run_world(2, rank, timeout=300) == [[True], [True]]


# ---------------------------------------------------------------------------------------------------------------------
# The directory


def test_only_directories_that_a_run_can_go_on_from_have_it(tmp_path: Path) -> None:
    def rank(_: int) -> None:
        class Ways(Saver):
            def _save(self, trainer: pl.Trainer, at: int | None) -> None:
                if (trainer.current_epoch, at) == (0, 1):
                    trainer.save_checkpoint(self.folder / "whole")
                    trainer.save_checkpoint(self.folder / "weights", weights_only=True)
                    trainer.save_checkpoint(self.folder / "file.ckpt", storage_options={"format": "consolidated"})

        run(strategy_of(3), [Resumable()], 1, saver=Ways(tmp_path), max_epochs=1)

    run_world(2, rank, timeout=300)
    consolidate_checkpoint(tmp_path / "whole", tmp_path / "offline.ckpt", progress=False)
    assert verify_checkpoint(tmp_path / "whole") == []
    assert ["random", "state", "of", "2", "ranks"] in map(
        str.split, describe_checkpoint(tmp_path / "whole").splitlines()
    )
    saved = open_checkpoint(tmp_path / "whole", ControlGroup(None))["lightning_zero"]["random_state"]
    assert tuple(saved.shape) == (2, 24576)
    assert "lightning_zero" not in open_checkpoint(tmp_path / "weights", ControlGroup(None))
    for name in ("file", "offline"):
        assert list(torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["lightning_zero"]) == ["plan"]


def through(change: Callable[[dict[str, Any]], object]) -> RandomState:
    """What is loaded after a change to what was saved."""
    state = RandomState(Groups.create())
    row = bytes(state.save(CPU).local.tolist())  # type: ignore[attr-defined]
    content = json.loads(row)
    change(content)
    changed = json.dumps(content).encode()
    state.load(torch.frombuffer(bytearray(changed), dtype=torch.uint8).view(1, -1), 7, CPU)
    return state


def test_a_device_that_is_not_there_is_left_out_and_one_that_was_not_saved_begins_anew() -> None:
    begin(3)
    numbers = drawn()

    def elsewhere(content: dict[str, Any]) -> None:
        content["states"]["cuda"] = content["states"].pop("numpy")

    with Said() as said:
        begin(3)
        found = through(elsewhere)._loaded
    assert sorted(found) == ["numpy", "python", "torch"]
    assert ["numpy" in text and "torch" not in text for text in said.texts] == [True]
    assert found["python"] == random.getstate()
    assert drawn() == numbers  # loading has not touched them


def test_a_damaged_row_is_an_error_before_anything_is_given_back() -> None:
    begin(3)
    numbers = drawn()
    begin(3)
    for change in (
        lambda content: content.pop("states"),
        lambda content: content["states"].update(python=[1, 2]),
        lambda content: content["states"].update(torch=3),
        lambda content: content.update(states={"torch": {"$": "no such type"}}),
    ):
        with pytest.raises(CheckpointError, match="random number generators"):
            through(change)
    assert drawn() == numbers
