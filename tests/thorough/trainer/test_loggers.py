"""What loggers ask a module for, on the first rank only as a rule: graphs, histograms, norms."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from lightning_zero import ZeroStrategy
from tests.helpers.cases import WIDTH
from tests.helpers.runs import Memory, Net, assert_same, each_strategy, fit, made, name_of, quiet, zero
from tests.helpers.world import run_world

pytest.importorskip("tensorboard")


class Example(Net):
    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)))
        self.example_input_array = torch.ones(2, WIDTH)


def units(strategy: Strategy, **options: Any) -> Strategy:
    """Each linear layer is a unit."""
    name = name_of(strategy)
    return strategy if name == "ddp" else zero(int(name[-1]), units=["Linear"], **options)


class Drawing(Memory):
    """A logger of the user's own that calls the module on the first rank."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[Tensor] = []

    def log_graph(self, model: Any, input_array: Tensor | None = None) -> None:
        if model.global_rank == 0:
            with torch.no_grad():
                self.drawn.append(model(model.example_input_array))


def test_a_logger_of_one_s_own_may_call_the_module() -> None:
    def play(strategy: Strategy) -> dict[str, Any]:
        module, logger = Example(), Drawing()
        trainer = fit(units(strategy), module, logger=logger)
        return {**made(module, trainer), "drawn": logger.drawn}

    results = each_strategy(play)
    assert len(results[0]["ddp"]["drawn"]) == 1
    assert_same(results)


def test_a_graph_that_one_rank_draws_where_lightning_asks_for_none() -> None:
    """Nobody else draws it, so nothing may wait for the others. In zero3 only all ranks together can."""

    class Draws(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            if trainer.is_global_zero:
                trainer.loggers[0].log_graph(pl_module)

    def world(rank: int) -> int:
        logger = Drawing()
        with quiet():
            fit(ZeroStrategy(1), Example(), 2, logger=logger, callbacks=[Draws()], enable_autolog_hparams=False)
        return len(logger.drawn)

    assert run_world(2, world) == [1, 0]


def test_a_summary_with_an_example_runs_on_every_rank() -> None:
    class Summary(ModelSummary):
        sizes: tuple[Any, ...] = ()

        def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            super().on_fit_start(trainer, pl_module)
            summary = self._summary(trainer, pl_module)
            self.sizes = summary.in_sizes, summary.out_sizes, summary.total_flops, summary.total_parameters

    def play(strategy: Strategy) -> dict[str, Any]:
        module, summary = Example(), Summary(max_depth=-1)
        trainer = fit(units(strategy), module, callbacks=[summary], enable_model_summary=True)
        return {**made(module, trainer), "sizes": summary.sizes}

    results = each_strategy(play)
    assert results[0]["ddp"]["sizes"][0][0] == [2, WIDTH]
    assert_same(results)


class Watches(pl.Callback):
    """What Weights & Biases does for ``watch(module, log="all")``, on the first rank only."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_rank == 0:
            pl_module.model.register_forward_hook(self._weights)
            for parameter in pl_module.parameters():
                parameter.register_hook(lambda gradient: self._note(gradient.data))

    def _weights(self, module: nn.Module, *_: Any) -> None:
        for parameter in module.parameters():
            self._note(parameter.data)

    def _note(self, value: Tensor) -> None:
        flat = value.cpu().reshape(-1)
        flat = flat[torch.isfinite(flat)]
        self.seen.append(flat.histc(bins=8, min=flat.min().item(), max=flat.max().item()))


def test_a_watch_on_one_rank_sees_what_it_sees_under_ddp() -> None:
    """In the forward, where what is read is brought; gradients are those of its own rank."""

    def play(strategy: Strategy) -> dict[str, Any]:
        module, watches = Example(), Watches()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*stay.*", UserWarning)
            trainer = fit(units(strategy), module, callbacks=[watches])
        return {**made(module, trainer), "seen": watches.seen}

    results = each_strategy(play)
    assert len(results[0]["ddp"]["seen"]) == 2 * 4 * len(list(Example().parameters()))
    assert_same(results)
