"""One module, several Trainers: each goes on with what the one before has left, wherever it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, Strategy

from lightning_zero import ZeroPrecision, ZeroStrategy
from tests.helpers.runs import Net, again, assert_same, batches, each_strategy, fit, made, quiet, zero
from tests.helpers.training import make_trainer
from tests.helpers.world import run_world


def test_a_second_trainer_goes_on_with_the_same_module() -> None:
    def play(strategy: Strategy) -> dict[str, Any]:
        module = Net()
        fit(strategy, module)
        other = make_trainer(again(strategy))
        tested = other.test(module, batches(2), verbose=False)
        return {**made(module, fit(again(strategy), module)), "tested": tested}

    assert_same(each_strategy(play))


def test_a_run_that_failed_everywhere_is_over() -> None:
    """What the ranks told one another of their errors would have ended the next run as soon as one rank is slow."""

    def train(deed: Callable[[Net], None]) -> Net:
        module = Net()
        module.on_train_batch_start = lambda *_: deed(module)  # type: ignore[method-assign]
        fit(zero(3), module)
        return module

    def fail(module: Net) -> None:
        raise ZeroDivisionError

    def be_slow(module: Net) -> None:
        if module.global_rank == 1 and module.global_step == 1:
            time.sleep(5)

    def run(rank: int) -> int:
        with quiet():
            with pytest.raises(ZeroDivisionError):
                train(fail)
            return train(be_slow).global_step

    assert run_world(2, run) == [4, 4]


@pytest.mark.parametrize(("place", "fits"), [("configure_model", 0), ("configure_callbacks", 1)])
def test_a_rank_that_fails_before_its_run_has_groups_is_not_waited_for(place: str, fits: int, tmp_path: Path) -> None:
    """It stays alive. Its error counts for the run that the others are in, also if it has not come to that."""

    def fail() -> None:
        raise ZeroDivisionError

    def train(module: Net) -> None:
        options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = pl.Trainer(strategy=zero(3), accelerator="cpu", devices=2, max_steps=1, **options)  # makes the group
        trainer.fit(module, batches(1))

    def run(rank: int) -> str:
        told, module = tmp_path / "told", Net()
        with quiet():
            for _ in range(fits):
                train(Net())
            if rank == 1:
                setattr(module, place, fail)
            with pytest.raises((ZeroDivisionError, RuntimeError)) as failure:
                train(module)
        if rank == 0:
            told.touch()
        while not told.exists():
            time.sleep(0.1)
        return str(failure.value)

    told = run_world(2, run, timeout=30, init_group=False)[0]
    assert "rank 1 has failed with ZeroDivisionError" in told


def test_another_stage_takes_over_the_values() -> None:
    """The parameters are whole in between, and what was accumulated for the former run is gone."""

    def play(strategy: Strategy) -> dict[str, Any]:
        module = Net()
        for stage in (3, 1, 2):
            fit(zero(stage) if isinstance(strategy, ZeroStrategy) else again(strategy), module)
        return made(module, fit(again(strategy), module))

    assert_same(each_strategy(play))


def test_parameters_thawed_between_two_fits_are_trained_in_the_second() -> None:
    def play(strategy: Strategy) -> dict[str, Any]:
        module = Net()
        frozen = [p for name, p in module.named_parameters() if "layers.0" in name]
        for parameter in frozen:
            parameter.requires_grad_(False)
        trainer = fit(strategy, module)
        for parameter in frozen:
            parameter.requires_grad_(True)
        if isinstance(strategy, DDPStrategy):  # DDP's wrapper of the first fit does not know them
            trainer = fit(again(strategy), module)
        else:
            trainer.fit_loop.max_epochs = 2
            trainer.fit(module, batches(4))
            module.losses[4:] = module.losses[-4:]
        return {"weights": made(module, trainer)["weights"], "moved": len(module.losses)}

    results = each_strategy(play)
    assert_same(results, names=["stage 2", "stage 3"], expected="stage 1")
    before = Net()
    for name, value in results[0]["stage 3"]["weights"].items():
        assert not torch.equal(value, dict(before.named_parameters())[name]), name


def test_another_precision_casts_whole_parameters() -> None:
    """Casting placeholders would turn them into a dense model of NaN."""

    def play(strategy: Strategy) -> dict[str, Any]:
        module = Net()
        fit(strategy, module)
        if isinstance(strategy, ZeroStrategy):
            trainer = make_trainer(again(strategy), plugins=ZeroPrecision("bf16-true"))
        else:
            trainer = make_trainer(again(strategy), precision="bf16-true")
        tested = trainer.test(module, batches(2), verbose=False)
        return {"tested": [{k: round(v, 1) for k, v in row.items()} for row in tested]}

    assert_same(each_strategy(play))
