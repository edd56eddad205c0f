"""Optimizers and schedulers that are not the same on every rank are an error on every rank, by name; equal ones never
are. One optimizer object trains in several fits, as under DDP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau

from lightning_zero import HostOffload
from tests.helpers.runs import (
    Net,
    again,
    assert_same,
    batches,
    each_strategy,
    fit,
    made,
    name_of,
    quiet,
    raised,
    zero,
)
from tests.helpers.training import make_trainer
from tests.helpers.world import run_world

Configure = Callable[["Custom"], Any]


class Custom(Net):
    """``configure_optimizers`` and ``on_before_optimizer_step`` as given."""

    def __init__(
        self, configure: Configure, act: Callable[[Custom, Any], None] = lambda module, optimizer: None
    ) -> None:
        super().__init__()
        self._configure, self._act = configure, act

    def configure_optimizers(self) -> Any:
        return self._configure(self)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._act(self, optimizer)


def errors_in_turn(*fits: tuple[Callable[[], Net], int], count: int = 3, **options: Any) -> list[list[str]]:
    """What each fit, of a module in a stage, raised on each of two ranks. All are in one world: none leaves anything
    behind that the next could stumble over."""

    def play(rank: int) -> list[str]:
        told = []
        for make, stage in fits:
            errors: list[str] = []
            with quiet(), raised(errors):
                fit(zero(stage), make(), count, **options)
            told.append("; ".join(errors))
        return told

    return [list(errors) for errors in zip(*run_world(2, play, timeout=200), strict=True)]


def errors_of(make: Callable[[], Net], stage: int) -> list[str]:
    """What one fit raised on each of two ranks."""
    return errors_in_turn((make, stage))[0]


def assert_named(errors: list[str], *words: str) -> None:
    for rank, error in enumerate(errors):
        for word in ("DivergenceError", *words):
            assert word in error, f"rank {rank} does not say {word!r}: {error or 'nothing was raised'}"


# ----------------------------------------------------------------------------------------------------- in a step


class Unsynced(Net):
    """The rate goes by a metric that each rank computes from its own data: it only gets better on rank 0."""

    sync = False

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        plateau = ReduceLROnPlateau(optimizer, factor=0.001, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "quality"}}

    def on_train_epoch_end(self) -> None:
        worse = dist.get_rank() * self.current_epoch
        self.log("quality", float(worse - self.current_epoch * (1 - dist.get_rank())), sync_dist=self.sync)


class Synced(Unsynced):
    sync = True


def test_a_plateau_of_a_metric_that_is_not_synced_is_named_before_a_step() -> None:
    fits = [(Unsynced, stage) for stage in (1, 2, 3)]
    *told, synced = errors_in_turn(*fits, (Synced, 3), max_epochs=3)
    for errors in told:
        words = ["rank 0: SGD, param group 0, option 'lr': 1\n", "rank 1: SGD, param group 0, option 'lr': 0.001\n"]
        words.append("sync_dist=True")
        assert_named(errors, "SGD", *words)
    assert synced == ["", ""]


def adamw(module: Net) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def on_rank_1(act: Callable[[Custom, Any], None]) -> Callable[[Custom, Any], None]:
    return lambda module, optimizer: act(module, optimizer) if dist.get_rank() == 1 else None


def change_rate(module: Custom, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.5


def take_out(module: Custom, optimizer: Any) -> None:
    group = optimizer.param_groups[0]
    group["params"] = group["params"][1:]


def split_group(module: Custom, optimizer: Any) -> None:
    if len(optimizer.param_groups) == 1:
        group = optimizer.param_groups[0]
        group["params"], moved = group["params"][:-1], group["params"][-1:]
        optimizer.add_param_group({"params": moved, "lr": 0.001})


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (
            change_rate,
            ["rank 0: AdamW, param group 0, option 'lr': 0.01", "rank 1: AdamW, param group 0, option 'lr': 0.5"],
        ),
        (
            take_out,
            ["rank 0: AdamW, param group 0, parameter 0: 'model.stem.weight'", "parameter 0: 'model.stem.bias'"],
        ),
        (split_group, ["rank 0: (nothing more)", "rank 1: AdamW, param group 1, option"]),
    ],
)
def test_a_change_on_one_rank_is_named_before_the_step_and_on_all_trains(act: Any, words: list[str]) -> None:
    acts = [on_rank_1(act), act]
    told = errors_in_turn(*((lambda act=act: Custom(adamw, act), stage) for act in acts for stage in (1, 2, 3)))
    for errors in told[:3]:
        assert_named(errors, "AdamW", "No rank has taken", *words)
    assert told[3:] == [["", ""]] * 3


def test_no_rank_has_stepped_when_ranks_differ() -> None:
    def play(rank: int) -> Tensor:
        before: list[Tensor] = []

        def act(module: Custom, optimizer: Any) -> None:
            adapter = module.trainer.strategy.adapter(optimizer)
            shards = [entry.parameter for entry in adapter.entries]
            before.append(torch.cat([p.detach().clone() for p in shards]))
            module.shards = shards
            if len(before) == 2:
                optimizer.param_groups[0]["lr"] = 0.1 + dist.get_rank()

        module = Custom(lambda module: torch.optim.SGD(module.parameters(), lr=0.1), act)
        errors: list[str] = []
        with quiet(), raised(errors):
            fit(zero(1), module)
        assert len(before) == 2
        assert "option 'lr'" in errors[0]
        return (torch.cat(module.shards) - before[-1]).abs().max().detach()

    assert [float(moved) for moved in run_world(2, play, timeout=100)] == [0.0, 0.0]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_rate_that_is_a_tensor_is_compared_by_value(stage: int) -> None:
    def configure(module: Net) -> Any:
        return torch.optim.AdamW(module.parameters(), lr=torch.tensor(0.125), foreach=False)

    def write(module: Custom, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"].fill_(0.25)

    acts = [on_rank_1(write), write]
    errors, equal = errors_in_turn(*((lambda act=act: Custom(configure, act), stage) for act in acts))
    assert_named(errors, "rank 0: AdamW, param group 0, option 'lr': 0.125", "option 'lr': 0.25")
    assert equal == ["", ""]


# ----------------------------------------------------------------------------------------------------- at set-up


class Other(torch.optim.SGD):
    """Another class with the same arithmetic."""


def differing(configure: Callable[[Net, bool], Any]) -> Configure:
    """``configure(module, here)``: ``here`` is true on rank 1."""
    return lambda module: configure(module, dist.get_rank() == 1)


def decay(module: Net, here: bool) -> Any:
    groups = [{"params": [p]} for p in module.parameters()]
    return torch.optim.AdamW(
        [{**group, "weight_decay": 0.3 if here and i == 2 else 0.1} for i, group in enumerate(groups)]
    )


def lacking(module: Net, here: bool) -> Any:
    return torch.optim.AdamW(list(module.parameters())[1 if here else 0 :])


def swapped(module: Net, here: bool) -> Any:
    parameters = list(module.parameters())
    return torch.optim.AdamW(parameters[::-1] if here else parameters)


def other_group(module: Net, here: bool) -> Any:
    parameters = list(module.parameters())
    cut = 2 if here else 3
    return torch.optim.AdamW([{"params": parameters[:cut]}, {"params": parameters[cut:]}])


def other_class(module: Net, here: bool) -> Any:
    return (Other if here else torch.optim.SGD)(module.parameters(), lr=0.1)


def one_more(module: Net, here: bool) -> Any:
    module.automatic_optimization = False
    first, *rest = module.parameters()
    both = [torch.optim.SGD([first], lr=0.1), torch.optim.SGD(rest, lr=0.1)]
    return both[:1] if here else both


def no_scheduler(module: Net, here: bool) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return optimizer if here else {"optimizer": optimizer, "lr_scheduler": CosineAnnealingLR(optimizer, 10)}


def other_length(module: Net, here: bool) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return [optimizer], [CosineAnnealingLR(optimizer, 20 if here else 10)]


def other_interval(module: Net, here: bool) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scheduler = LambdaLR(optimizer, lambda step: 1.0)
    return [optimizer], [{"scheduler": scheduler, "interval": "step" if here else "epoch"}]


def foreign(module: Net, here: bool) -> Any:
    parameters = list(module.parameters())
    return torch.optim.SGD([*parameters, nn.Parameter(torch.zeros(3))] if here else parameters, lr=0.1)


SET_UPS: list[tuple[Callable[[Net, bool], Any], list[str]]] = [
    (decay, ["rank 0: AdamW, param group 2, option 'weight_decay': 0.1", "option 'weight_decay': 0.3"]),
    (lacking, ["rank 0: AdamW, param group 0, parameter 0: 'model.stem.weight'", "parameter 0: 'model.stem.bias'"]),
    (
        swapped,
        ["rank 0: AdamW, param group 0, parameter 0: 'model.stem.weight'", "rank 1: AdamW, param group 0, param"],
    ),
    (other_group, ["rank 0: AdamW, param group 0, parameter 2: 'model."]),
    (other_class, ["rank 0: optimizers: torch.optim.sgd.SGD", "rank 1: optimizers: tests."]),
    (
        one_more,
        ["rank 0: optimizers: torch.optim.sgd.SGD, torch.optim.sgd.SGD", "rank 1: optimizers: torch.optim.sgd.SGD"],
    ),
    (no_scheduler, ["rank 0: schedulers: torch.optim.lr_scheduler.CosineAnnealingLR"]),
    (other_length, ["rank 0: scheduler 0 (CosineAnnealingLR), setting 'T_max': 10", "setting 'T_max': 20"]),
    (other_interval, ["scheduler 0 (LambdaLR), setting 'interval': 'epoch'", "setting 'interval': 'step'"]),
    (foreign, ["rank 1: SGD, param group 0, parameter", "(not the model's, of shape (3,))"]),
]


@pytest.mark.parametrize("stage", [1, 3])
def test_what_differs_at_set_up_is_named(stage: int) -> None:
    fits = [(lambda configure=configure: Custom(differing(configure)), stage) for configure, _ in SET_UPS]
    for errors, (_, words) in zip(errors_in_turn(*fits), SET_UPS, strict=True):
        assert_named(errors, "configure_optimizers", *words)


# ----------------------------------------------------------------------------------------------- equal never raises


def one_cycle(module: Net) -> Any:
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    return [optimizer], [{"scheduler": OneCycleLR(optimizer, 0.1, total_steps=20), "interval": "step"}]


def cosine(module: Net) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=torch.tensor(0.1), momentum=0.9)
    return [optimizer], [{"scheduler": CosineAnnealingLR(optimizer, 10), "interval": "step"}]


def many_groups(module: Net) -> Any:
    return torch.optim.NAdam([{"params": [p], "lr": 0.01 / (i + 1)} for i, p in enumerate(module.parameters())])


def named(module: Net) -> Any:
    return torch.optim.AdamW(module.named_parameters(), lr=0.01, betas=[0.9, 0.95])  # type: ignore[arg-type]


def whole(module: Net) -> Any:
    return torch.optim.Muon([p for p in module.parameters() if p.ndim == 2], lr=0.01)


def rate_is_not_a_number(module: Net) -> Any:
    return torch.optim.SGD(module.parameters(), lr=float("nan"))


EQUAL: list[Configure] = [one_cycle, cosine, many_groups, named, whole, rate_is_not_a_number]
SIMPLE = ["SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"]


@pytest.mark.parametrize("offload", [None, HostOffload()], ids=["device", "host"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_equal_optimizers_never_raise(stage: int, offload: Any) -> None:
    def play(rank: int) -> list[str]:
        errors: list[str] = []
        # Each in one stage here; tests/world/optim/test_optimizers.py trains with all of them in two.
        names = SIMPLE[stage - 1 :: 3]
        makes = [lambda module, name=name: getattr(torch.optim, name)(module.parameters(), lr=0.01) for name in names]
        for configure in [*EQUAL, *makes]:
            with quiet(), raised(errors):
                fit(zero(stage, offload=offload), Custom(configure), 3)
        return errors

    assert run_world(2, play, timeout=200) == [[], []]


class Pair(Net):
    """Two optimizers, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            x, y = self.data(batch_idx)
            self.manual_backward((self(x) - y).square().mean())
            optimizer.step(closure=lambda: None)
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        first, *rest = self.parameters()
        return [torch.optim.SGD([first], lr=0.1), torch.optim.AdamW(rest, lr=0.01)]


def test_several_optimizers_and_a_closure_that_does_nothing_train() -> None:
    assert errors_of(Pair, 3) == ["", ""]


def test_parameters_that_are_in_no_optimizer_are_not_trained_and_are_saved(tmp_path: Path) -> None:
    def configure(module: Net) -> Any:
        return torch.optim.AdamW(list(module.parameters())[:-3], lr=0.01)

    def play(strategy: Strategy) -> dict[str, Any]:
        module = Custom(configure)
        trainer = fit(strategy, module)
        path = tmp_path / f"{name_of(strategy)}.ckpt"
        trainer.save_checkpoint(path)
        other = Custom(configure)
        resumed = make_trainer(again(strategy), max_epochs=2)
        resumed.fit(other, batches(4), ckpt_path=path)
        return {"first": made(module, trainer), "resumed": made(other, resumed)}

    assert_same(each_strategy(play))


# ------------------------------------------------------------------------------------------------- a second fit


class Once(Custom):
    """Builds its optimizer in the first fit only."""

    kept: Any = None

    def configure_optimizers(self) -> Any:
        if self.kept is None:
            self.kept = super().configure_optimizers()
        return self.kept


def muon_and_adamw(module: Net) -> Any:
    matrices = [p for p in module.parameters() if p.ndim == 2]
    others = [p for p in module.parameters() if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01)]


class TwoByHand(Once):
    def __init__(self, configure: Configure) -> None:
        super().__init__(configure)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = nn.functional.mse_loss(self(self.data(batch_idx)[0]), self.data(batch_idx)[1])
        self.losses.append(loss.detach().clone())
        self.manual_backward(loss)
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()


REUSED: dict[str, Callable[[], Once]] = {
    "AdamW": lambda: Once(lambda module: Net.configure_optimizers(module)),
    "Adagrad": lambda: Once(lambda module: torch.optim.Adagrad(module.parameters(), lr=0.01)),
    "momentum": lambda: Once(lambda module: torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)),
    "Muon": lambda: TwoByHand(muon_and_adamw),
}


@pytest.mark.parametrize("name", REUSED)
def test_the_same_optimizer_in_a_second_fit_is_an_error_by_name(name: str) -> None:
    def play(rank: int) -> list[str]:
        errors: list[str] = []
        for stage in (1, 3):
            module = REUSED[name]()
            with quiet():
                fit(zero(stage), module)
                with raised(errors):
                    fit(zero(stage), module)
        return errors

    for errors in run_world(2, play, timeout=100):
        assert len(errors) == 2
        for error in errors:
            assert "has trained in an earlier fit" in error
            assert "Build a new optimizer in configure_optimizers" in error


def test_an_optimizer_that_has_trained_under_ddp_goes_on() -> None:
    def play(strategy: Strategy) -> dict[str, Any]:
        module = REUSED["AdamW"]()
        fit(DDPStrategy(find_unused_parameters=True), module)
        return made(module, fit(strategy, module))

    assert_same(each_strategy(play))


def test_a_step_between_two_fits_is_an_error_by_name() -> None:
    """The optimizer of a fit before the last one: the model has gone on without it."""

    def play(rank: int) -> list[str]:
        errors: list[str] = []
        module = REUSED["AdamW"]()
        with quiet():
            trainer = fit(zero(2), module)
            first, module.kept = module.kept, None
            trainer.fit_loop.max_epochs = 2
            trainer.fit(module, batches(2))
        with raised(errors):
            first.step()
        return errors

    for errors in run_world(2, play, timeout=100):
        assert "AdamW is an optimizer of an earlier fit" in errors[0]


# ----------------------------------------------------------------------------------------------------- closures


class Optional(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            loss = closure()
        super().step()
        return loss


def test_one_that_only_shows_it_in_a_later_step_is_named_there() -> None:
    class Needs(torch.optim.SGD):
        steps = 0

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.steps += 1
            if closure is None and self.steps > 2:  # a trial takes two
                raise RuntimeError("a closure is required")

    errors = errors_of(lambda: Custom(lambda module: Needs(module.parameters(), lr=0.1)), 3)
    assert all(error.startswith("UnsupportedOptimizerError: Needs cannot be sharded as it is") for error in errors)
    assert all("`def step(self, closure)`" in error for error in errors)


def test_an_optional_closure_is_no_reason_to_refuse() -> None:
    assert errors_of(lambda: Custom(lambda module: Optional(module.parameters(), lr=0.1)), 3) == ["", ""]
