"""Optimizers and schedulers that are not the same on every rank are an error on every rank, by name; equal ones never
are. One optimizer object trains in several fits, as under DDP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    return torch.optim.AdamW(module.parameters(), lr=0.125)


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


TENSOR_RATE: Configure = lambda module: torch.optim.AdamW(module.parameters(), lr=torch.tensor(0.125), foreach=False)  # noqa: E731


def write_rate(module: Custom, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"].fill_(0.5)


RATES = ["rank 0: AdamW, param group 0, option 'lr': 0.125", "rank 1: AdamW, param group 0, option 'lr': 0.5"]
STEM = ["rank 0: AdamW, param group 0, parameter 0: 'model.stem.weight'", "parameter 0: 'model.stem.bias'"]
IN_STEPS: list[tuple[Configure, Callable[[Custom, Any], None], list[str]]] = [
    (adamw, change_rate, RATES),
    (TENSOR_RATE, write_rate, RATES),
    (adamw, take_out, STEM),
    (adamw, split_group, ["rank 0: (nothing more)", "rank 1: AdamW, param group 1, option"]),
]


def test_a_change_on_one_rank_is_named_before_the_step_and_on_all_trains() -> None:
    fits = [
        (lambda make=make, act=act: Custom(make, act), stage)
        for make, change, _ in IN_STEPS
        for act in (on_rank_1(change), change)
        for stage in (1, 2, 3)
    ]
    told = iter(errors_in_turn(*fits))
    for _, change, words in IN_STEPS:
        for _ in range(3):
            assert_named(next(told), "AdamW", "No rank has taken", *words)
        for _ in range(3):
            assert next(told) == ["", ""], change


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
    (lacking, STEM),
    (swapped, [STEM[0], "rank 1: AdamW, param group 0, param"]),
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


def test_what_differs_at_set_up_is_named() -> None:
    rows = [(stage, *row) for stage in (1, 3) for row in SET_UPS]
    fits = [(lambda configure=configure: Custom(differing(configure)), stage) for stage, configure, _ in rows]
    for errors, (_, _, words) in zip(errors_in_turn(*fits), rows, strict=True):
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


def no_number(module: Net) -> Any:
    return torch.optim.SGD(module.parameters(), lr=float("nan"))


def spelled_otherwise(module: Net) -> Any:
    """What means the same on every rank is the same, but for addresses, random masks and last bits."""
    here = dist.get_rank() == 1
    options: dict[str, Any] = {"lr": torch.tensor(0.5) if here else 0.5, "betas": [0.5, 0.75] if here else (0.5, 0.75)}
    optimizer = torch.optim.AdamW(module.parameters(), foreach=False, **options)
    more = {
        "amsgrad": 0 if here else False,
        "eps": 1e-8 * (1 + here * 1e-15),
        "nothing": float("nan"),
        "one": here or 1,
    }
    optimizer.param_groups[0] |= {**more, "hook": lambda: here, "thing": object(), "mask": torch.rand(100)}
    optimizer.param_groups[0]["cache"] = [[None] * 3] if here else [[1.0, 2.0]]  # RAdam of old kept step sizes there
    if here:
        optimizer.param_groups[0] = dict(reversed(optimizer.param_groups[0].items()))
    return optimizer


def own_plateau(module: Net) -> Any:
    """Of schedulers settings count, and not the state, which goes by what a rank has seen."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    plateau = ReduceLROnPlateau(optimizer)
    plateau.step(float(dist.get_rank()))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "train_loss"}}


def needs_no_closure(module: Net) -> Any:
    return Optional(module.parameters(), lr=0.1)


EQUAL: list[Configure] = [
    spelled_otherwise,
    own_plateau,
    one_cycle,
    cosine,
    many_groups,
    named,
    whole,
    no_number,
]


def test_equal_optimizers_never_raise() -> None:
    """tests/world/optim/test_optimizers.py trains with all of torch's."""

    def play(rank: int) -> list[str]:
        errors: list[str] = []
        for stage in (1, 2, 3):
            for offload in (None, HostOffload()):
                for configure in (*EQUAL, needs_no_closure):
                    with quiet(), raised(errors):
                        fit(zero(stage, offload=offload), Custom(configure), 3)
        with quiet(), raised(errors):
            fit(zero(3), Pair(), 3)
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


def test_the_same_optimizer_in_a_second_fit_is_an_error_by_name() -> None:
    def play(rank: int) -> list[str]:
        errors: list[str] = []
        for make in REUSED.values():
            for stage in (1, 3):
                module = make()
                with quiet():
                    fit(zero(stage), module)
                    with raised(errors):
                        fit(zero(stage), module)
        return errors

    for errors in run_world(2, play, timeout=100):
        assert len(errors) == 2 * len(REUSED)
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
