"""What loggers ask a module for, on the first rank only as a rule: graphs, histograms, norms."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from lightning_zero import ZeroStrategy, full_gradients, full_parameters
from tests.helpers.cases import WIDTH
from tests.helpers.runs import Memory, Net, assert_same, each_strategy, fit, made, name_of, quiet, raised, zero
from tests.helpers.world import run_world

pytest.importorskip("tensorboard")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


class Example(Net):
    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)))
        self.example_input_array = torch.ones(2, WIDTH)


def read(logger: TensorBoardLogger) -> Any:
    logger.experiment.flush()
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    return events


def units(strategy: Strategy, **options: Any) -> Strategy:
    """Each linear layer is a unit."""
    name = name_of(strategy)
    return strategy if name == "ddp" else zero(int(name[-1]), units=["Linear"], **options)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_logged_graph_is_that_of_ddp(tmp_path: Path, precision: Any) -> None:
    """The first rank runs the module alone for it; training goes on as if nothing had been."""

    def play(strategy: Strategy) -> dict[str, Any]:
        logger = TensorBoardLogger(tmp_path, name=name_of(strategy), log_graph=True)
        module = Example()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*torch.jit.* is deprecated.*")
            trainer = fit(units(strategy), module, logger=logger, precision=precision, val=1)
        assert "log_graph" not in vars(logger)
        nodes = [(node.name, node.op) for node in read(logger).Graph().node] if trainer.global_rank == 0 else []
        return {**made(module, trainer), "graph": sorted(nodes)} if precision == "32-true" else {"graph": sorted(nodes)}

    results = each_strategy(play)
    assert any("weight" in name for name, _ in results[0]["ddp"]["graph"])
    assert_same(results)


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


class Histograms(pl.Callback):
    """Weights, gradients and their norms, gathered on every rank and written by the first."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        with full_gradients(pl_module), full_parameters(pl_module):
            if trainer.global_rank == 0:
                for name, parameter in pl_module.named_parameters():
                    trainer.logger.experiment.add_histogram(f"grad/{name}", parameter.grad, trainer.global_step)
                    trainer.logger.experiment.add_histogram(name, parameter, trainer.global_step)
                    trainer.logger.experiment.add_scalar(f"norm/{name}", parameter.norm(), trainer.global_step)


def test_histograms_and_norms_are_those_of_ddp(tmp_path: Path) -> None:
    def play(strategy: Strategy) -> dict[str, Any]:
        logger = TensorBoardLogger(tmp_path, name=name_of(strategy))
        module = Example()
        trainer = fit(units(strategy), module, logger=logger, callbacks=[Histograms()])
        found: dict[str, Any] = {}
        if trainer.global_rank == 0:
            events = read(logger)
            tags = events.Tags()
            found = {tag: [event.histogram_value for event in events.Histograms(tag)] for tag in tags["histograms"]}
            norms = [tag for tag in tags["scalars"] if tag.startswith("norm/")]
            found |= {tag: [event.value for event in events.Scalars(tag)] for tag in norms}
        return {**made(module, trainer), "logged": found}

    results = each_strategy(play)
    assert len(results[0]["ddp"]["logged"]) == 3 * len(list(Example().parameters()))
    assert_same(results)


class OneRank(pl.Callback):
    """The same, but the first rank does not ask for values."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_rank == 0:
            experiment = trainer.logger.experiment
            for name, parameter in pl_module.named_parameters():
                for write in (
                    lambda p=parameter, n=name: experiment.add_histogram(n, p),
                    lambda p=parameter, n=name: experiment.add_histogram(n, p.data),
                    lambda p=parameter, n=name: experiment.add_scalar(n, p.median()),
                    lambda p=parameter, n=name: experiment.add_scalar(n, p.detach().abs().median()),
                ):
                    with raised(self.told):
                        write()


def test_one_rank_alone_is_told_the_way(tmp_path: Path) -> None:
    """Where values are absent; where they are there it gets them. The run is none the worse for it."""

    def play(rank: int, stage: int, precision: Any) -> list[str]:
        callback, module = OneRank(), Example()
        with quiet():
            fit(zero(stage, units=["Linear"]), module, precision=precision, logger=TensorBoardLogger(tmp_path),
                callbacks=[callback], max_epochs=2)  # fmt: skip
            with full_parameters(module):
                assert all(bool(parameter.isfinite().all()) for parameter in module.parameters())
        return callback.told

    # Two epochs, four ways; a batch norm has no 16-bit copies.
    for stage, precision, expected in ((1, "32-true", 0), (3, "32-true", 8 * 6), (1, "bf16-mixed", 8 * 4)):
        told, other = run_world(2, play, stage, precision)
        assert (len(told), other) == (expected, [])
        assert all(line.startswith("ParameterAccessError") and "full_parameters(module)" in line for line in told)


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
