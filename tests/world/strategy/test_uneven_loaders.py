"""Data that end on some ranks earlier than on others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_zero import LoaderPolicy
from tests.helpers.cases import WIDTH
from tests.helpers.rows import Row, in_one_world
from tests.helpers.runs import Net, batches, quiet, raised, zero
from tests.helpers.training import make_trainer
from tests.helpers.world import run_world

COUNTS = (5, 3)  # batches of the two ranks


class Stream(IterableDataset[int]):
    """Of a length that nobody knows, or of a wrong one."""

    def __init__(self, count: int, length: int | None = None) -> None:
        self.count, self.length = count, length

    def __iter__(self) -> Iterator[int]:
        yield from range(self.count)


class Sized(Stream):
    def __len__(self) -> int:
        return 9


class Plain:
    """What somebody wrote: it can be iterated."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor([i]) for i in range(self.count))


def loader(kind: str, count: int) -> Any:
    if kind == "plain":
        return Plain(count)
    if kind == "map":
        return batches(count)
    return DataLoader(Stream(count) if kind == "stream" else Sized(count), batch_size=1)


class Counting(Net):
    """Its optimizer is linear in the gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(type(batch).__name__)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def all_may_stop_with_the_first(kind: str) -> Row:
    def world(rank: int) -> int:
        trainer = make_trainer(zero(3, loaders=LoaderPolicy(training="stop")), max_epochs=2)
        with quiet():
            trainer.fit(Counting(), loader(kind, COUNTS[rank]))
        return trainer.global_step

    assert (yield world) == [6, 6]


@pytest.mark.timing
@pytest.mark.parametrize("kind", ["map", "stream"])
@pytest.mark.parametrize("stage", [1, 3])
def test_without_a_policy_it_is_an_error_with_names(stage: int, kind: str) -> None:
    def world(rank: int) -> tuple[list[str], float]:
        errors: list[str] = []
        with quiet(), raised(errors):
            begin = time.monotonic()
            make_trainer(zero(stage)).fit(Counting(), loader(kind, COUNTS[rank]))
        return errors, time.monotonic() - begin

    for errors, seconds in run_world(2, world):
        assert errors[0].startswith(
            "DivergenceError: The train_dataloader has ended on rank 1 after 3 batches, and has"
        )
        assert "one more on rank 0" in errors[0]
        assert "training='stop'" in errors[0]
        assert seconds < 10


class Evaluated(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("value", 1.0 + batch_idx + 10 * self.global_rank, sync_dist=True, batch_size=1)
        self.model(torch.ones(1, WIDTH))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(torch.ones(1, WIDTH))


def metrics_and_predictions_are_whole(stage: int, kind: str) -> Row:
    def world(rank: int) -> tuple[float, int]:
        module = Evaluated()
        with quiet():
            trainer = make_trainer(zero(stage))
            found = trainer.validate(module, loader(kind, COUNTS[rank]), verbose=False)
            predicted = trainer.predict(module, loader(kind, COUNTS[rank]))
        assert all(isinstance(value, Tensor) for value in predicted or ())
        return found[0]["value"], len(predicted or ())

    mean = (sum(range(1, 6)) + sum(range(11, 14))) / 8
    assert (yield world) == [(mean, 5), (mean, 3)]


def combined(mode: Any, rank: int) -> CombinedLoader:
    """The short one is shorter on rank 1, and the long one, which says when it is over, is not."""
    long, short = ([10 * rank + i for i in range(4)], [0] * (2 - rank))
    return CombinedLoader({"long": DataLoader(long, batch_size=1), "short": DataLoader(short, batch_size=1)}, mode)


def only_the_end_of_combined_loaders_counts(mode: str) -> Row:
    class Both(Counting):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.seen.append([None if part is None else part.item() for part in batch.values()])
            self.model(torch.ones(1, WIDTH))

    def world(rank: int) -> list[tuple[int, list[Any], list[Tensor]]]:
        results = []
        for strategy in (DDPStrategy(process_group_backend="gloo"), zero(1), zero(3)):
            module, trainer = Both(), make_trainer(strategy)
            with quiet():
                trainer.fit(module, combined(mode, rank))
                trainer.validate(module, combined(mode, rank), verbose=False)
            results.append((trainer.global_step, module.seen, module.losses))
        return results

    for ddp, *others in (yield world):
        for steps, seen, losses in others:
            assert (steps, seen) == ddp[:2]
            assert all(torch.equal(a, b) for a, b in zip(losses, ddp[2], strict=True))


def loaders_that_follow_one_another_are_each_joined() -> Row:
    """Each with a part of the model of its own: ranks are never in steps of different ones."""

    class Heads(Evaluated):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 1 + i)) for i in range(2))
            self.told: list[tuple[int, int]] = []

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.told.append((dataloader_idx, batch_idx))
            super().validation_step(batch, batch_idx)
            self.heads[dataloader_idx](torch.ones(1, WIDTH))

    def world(rank: int) -> tuple[list[tuple[int, int]], list[float]]:
        module = Heads()
        loaders = [batches(COUNTS[rank]), batches(COUNTS[1 - rank])]
        with quiet():
            trainer = make_trainer(zero(3, units=["Block", "Sequential"]))
            found = trainer.validate(module, loaders, verbose=False)
        return module.told, [next(iter(results.values())) for results in found]

    results = yield world
    for rank, (told, values) in enumerate(results):
        assert told == [(i, n) for i in range(2) for n in range(COUNTS[rank ^ i])]
        assert values == [(15 + 36) / 8, (6 + 65) / 8]


def evaluation_beside_training_may_be_uneven(stage: int) -> Row:
    """In a fit, and before it by the same trainer: by DDP's numbers."""

    def world(rank: int) -> list[tuple[int, float, list[Tensor]]]:
        results = []
        for strategy in (DDPStrategy(process_group_backend="gloo"), zero(stage)):
            module, trainer = Counting(), make_trainer(strategy, num_sanity_val_steps=2, max_epochs=2)
            with quiet():
                trainer.predict(module, batches(COUNTS[rank]))
                trainer.fit(module, batches(4), batches(COUNTS[rank]))
            results.append((trainer.global_step, float(trainer.callback_metrics["val_loss"]), module.losses))
        return results

    for ddp, ours in (yield world):
        assert ours[:2] == ddp[:2]
        assert all(torch.equal(a, b) for a, b in zip(ours[2], ddp[2], strict=True))


def loaders_of_one_trainer_are_as_they_were_for_the_next() -> Row:
    def world(rank: int) -> tuple[list[int], list[str]]:
        with quiet():
            both = CombinedLoader({"a": batches(COUNTS[rank]), "b": batches(COUNTS[rank])}, "max_size_cycle")
        steps, errors = [], list[str]()
        trainer = make_trainer(zero(3, loaders=LoaderPolicy(training="stop")))
        with quiet():
            trainer.fit(Counting(), both)
        steps.append(trainer.global_step)
        with quiet(), raised(errors):
            make_trainer(zero(1)).fit(Counting(), both)
        return steps, errors

    for steps, errors in (yield world):
        assert steps == [3]
        assert "has ended on rank 1 after 3 batches" in errors[0]


def a_run_that_ends_before_the_data_is_none_the_wiser() -> Row:
    """With no length known, the end is seen one batch ahead."""

    @quiet()
    def world(rank: int) -> int:
        trainer = make_trainer(zero(3), max_steps=3)
        trainer.fit(Counting(), loader("stream", COUNTS[rank]))
        return trainer.global_step

    assert (yield world) == [3, 3]


def one_rank_may_look_at_its_data() -> Row:
    @quiet()
    def world(rank: int) -> int:
        class Looking(Counting):
            def on_train_epoch_start(self) -> None:
                if self.global_rank == 0:
                    next(iter(self.trainer.train_dataloader))  # type: ignore[arg-type]

        trainer = make_trainer(zero(3))
        trainer.fit(Looking(), loader("stream", 3))
        return trainer.global_step

    assert (yield world) == [3, 3]


def a_loader_that_is_alike_everywhere_is_left_as_it_is() -> Row:
    @quiet()
    def world(rank: int) -> tuple[bool, bool]:
        given, stream = batches(4), DataLoader(Stream(4), batch_size=1)
        module = Counting()
        trainer = make_trainer(zero(1))
        trainer.fit(module, given)
        same = trainer.train_dataloader is given
        trainer = make_trainer(zero(1))
        trainer.fit(module, stream)
        found: Any = trainer.train_dataloader
        return same, isinstance(found, DataLoader) and found.dataset is stream.dataset

    assert (yield world) == [(True, True)] * 2


@pytest.mark.filterwarnings("ignore:.*Your `IterableDataset` has `__len__` defined", "ignore:Length of IterableDataset")
def test_ranks_with_other_numbers_of_batches() -> None:
    in_one_world(
        2,
        *map(all_may_stop_with_the_first, ("plain", "map", "stream", "sized stream")),
        metrics_and_predictions_are_whole(1, "map"),
        metrics_and_predictions_are_whole(3, "stream"),
        *map(only_the_end_of_combined_loaders_counts, ("max_size", "max_size_cycle")),
        loaders_that_follow_one_another_are_each_joined(),
        *map(evaluation_beside_training_may_be_uneven, (1, 3)),
        loaders_of_one_trainer_are_as_they_were_for_the_next(),
        a_run_that_ends_before_the_data_is_none_the_wiser(),
        one_rank_may_look_at_its_data(),
        a_loader_that_is_alike_everywhere_is_left_as_it_is(),
    )
