"""Optimizers that run forward and backward in their step: DDP's numbers in every stage, on whole parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from lightning_zero import HostOffload, ZeroPrecision
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


class SAM(torch.optim.Optimizer):
    """As the usual implementation has it: a norm over all gradients, a base optimizer with a state of its own."""

    def __init__(self, params: Any, base: Any, rho: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "Sharpness Aware Minimization requires closure, but it was not provided"
        closure = torch.enable_grad()(closure)
        loss = closure()
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["old_p"] = p.data.clone()
                    p.add_(p.grad * (group["rho"] / (norm + 1e-12)))
        closure()
        for p in parameters:
            p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        return loss


class Steps(torch.optim.Optimizer):
    """Heavy balls whose closure is run twice, with a list of tensors in the state."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        for number in range(2):
            with torch.enable_grad():
                loss = closure()
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        state = self.state[p]
                        past = state.setdefault("past", [])
                        past.append(p.grad.clone())
                        del past[:-3]
                        state["count"] = state.get("count", 0) + 1
                        state.setdefault("sum", torch.zeros_like(p)).mul_(0.5).add_(sum(past))
                        p.sub_(group["lr"] * (number + 1) * state["sum"])
        return loss


CONFIGURED: dict[str, Callable[[nn.Module], Any]] = {
    "SAM": lambda module: SAM(module.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9),
    "SAM over AdamW": lambda module: SAM(module.parameters(), torch.optim.AdamW, lr=0.01),
    "LBFGS": lambda module: torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=5, history_size=4),
    "steps": lambda module: Steps(module.parameters(), lr=0.02),
}


class Closed(Net):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def configure_optimizers(self) -> Any:
        optimizer = CONFIGURED[self.name](self)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def fitted(strategy: Strategy, module: Net, **options: Any) -> Any:
    """A fit of which the first rank says what it costs."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*every rank steps on whole parameters.*")
        return fit(strategy, module, **{"count": 2, **options})


@pytest.mark.parametrize("name", CONFIGURED)
@pytest.mark.parametrize("clip", [None, 0.05])
def test_numbers_are_those_of_ddp(name: str, clip: float | None) -> None:
    def play(strategy: Strategy) -> dict[str, Any]:
        module = Closed(name)
        options = {"gradient_clip_val": clip, "gradient_clip_algorithm": "value"} if clip else {}
        return made(module, fitted(strategy, module, max_epochs=2, val=1, **options))

    results = each_strategy(play)
    assert len(results[0]["ddp"]["losses"]) >= 2 * 2 * 2  # closures
    assert_same(results)


@pytest.mark.parametrize("name", ["steps", "LBFGS"])
def test_a_resumed_run_goes_on_with_the_whole_state(name: str, tmp_path: Path) -> None:
    """From a directory of slices, and from a plain file."""

    def play(strategy: Strategy) -> dict[str, Any]:
        whole, half = Closed(name), Closed(name)
        expected = made(whole, fitted(strategy, whole, max_epochs=2))
        trainer = fitted(again(strategy), half, max_epochs=1)
        found = {}
        for suffix in ("", ".ckpt"):
            path = tmp_path / f"{name_of(strategy).replace(' ', '')}{suffix}"
            plain = suffix and name_of(strategy) != "ddp"
            trainer.save_checkpoint(path, storage_options={"format": "consolidated"} if plain else None)
            rest = Closed(name)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*every rank steps on whole parameters.*")
                resumed = make_trainer(again(strategy), max_epochs=2)
                resumed.fit(rest, batches(2), ckpt_path=path)
            found[suffix] = made(rest, resumed)
            losses = found[suffix]["losses"]
            assert all(map(torch.equal, expected["losses"][-len(losses) :], losses))
        return {**found, "state": trainer.optimizers[0].state_dict()["state"]}

    results = each_strategy(play)
    assert results[0]["ddp"][""]["losses"]
    assert_same(results)


class ByHand(Closed):
    """Manual optimization, with a backward before the step."""

    def __init__(self) -> None:
        super().__init__("SAM")
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = super(ByHand, self).training_step(batch, batch_idx)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


def test_by_hand() -> None:
    def play(strategy: Strategy) -> dict[str, Any]:
        module = ByHand()
        return made(module, fitted(strategy, module))

    assert_same(each_strategy(play))


class Searching(Closed):
    """A line search, which goes by the loss: that has to be the same on every rank, under DDP too."""

    def __init__(self) -> None:
        super().__init__("LBFGS")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of what Lightning calls for it
            return self.all_gather(loss, sync_grads=True).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=4, line_search_fn="strong_wolfe")


def test_a_line_search_and_a_second_fit_with_the_same_optimizer() -> None:
    """In another stage: the state stays with the optimizer."""

    def play(strategy: Strategy) -> dict[str, Any]:
        module = Searching()
        trainer = fitted(strategy, module, count=2)
        first = made(module, trainer)
        (optimizer,) = trainer.optimizers
        module.configure_optimizers = lambda: optimizer  # type: ignore[method-assign]
        other = zero(3 if name_of(strategy) == "stage 1" else 1) if name_of(strategy) != "ddp" else again(strategy)
        second = made(module, fitted(other, module, count=2))
        return {"first": first, "second": second}

    assert_same(each_strategy(play))


def test_mixed_precision_steps_on_the_masters() -> None:
    def play(strategy: Strategy) -> dict[str, Any]:
        module = Closed("steps")
        trainer = fitted(strategy, module, precision="bf16-mixed")
        return {"weights": made(module, trainer)["weights"]}

    results = each_strategy(play)
    assert_same(results, bound=0.02)
    assert_same(results, ["stage 3"], expected="stage 1")


class Apart(Closed):
    """One rank writes something else than the other."""

    def configure_optimizers(self) -> Any:
        class Own(Steps):
            @torch.no_grad()
            def step(self, closure: Any) -> Any:  # type: ignore[override]
                super().step(closure)
                if rank:
                    self.param_groups[0]["params"][0].mul_(2.0)

        rank = self.global_rank
        return Own(self.parameters(), lr=0.1)


class Counts(Closed):
    """One rank calls its closure once more."""

    def configure_optimizers(self) -> Any:
        class Own(Steps):
            @torch.no_grad()
            def step(self, closure: Any) -> Any:  # type: ignore[override]
                for _ in range(1 + rank):
                    with torch.enable_grad():
                        closure()

        rank = self.global_rank
        return Own(self.parameters(), lr=0.1)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (Apart, ("DivergenceError", "The ranks left different weights at the end of a step", "all_gather(loss")),
        (Counts, ("DivergenceError", "closure 2 of a step", "the end of a step of", "after 1 closures")),
    ],
)
def test_ranks_that_part_are_told(make: Any, parts: tuple[str, ...], stage: int) -> None:
    def play(rank: int) -> list[str]:
        errors: list[str] = []
        with quiet(), raised(errors):
            fitted(zero(stage), make("steps"))
        return errors

    for errors in run_world(2, play, timeout=100):
        assert all(part in errors[0] for part in parts), errors


@pytest.mark.parametrize(
    ("strategy", "options", "parts"),
    [
        ({"offload": HostOffload()}, {}, ("Leave `offload` out",)),
        ({}, {"plugins": "16-mixed"}, ("loss scale of 16-mixed",)),
    ],
)
def test_refused_with_the_way(strategy: Any, options: Any, parts: tuple[str, ...]) -> None:
    def play(rank: int) -> list[str]:
        errors: list[str] = []
        given = {key: ZeroPrecision(value) for key, value in options.items()}
        with quiet(), raised(errors):
            fitted(zero(3, **strategy), Closed("SAM"), **given)
        return errors

    for errors in run_world(2, play, timeout=100):
        assert errors[0].startswith("UnsupportedOptimizerError"), errors
        assert all(part in errors[0] for part in parts), errors


def test_what_it_costs_is_said_once() -> None:
    def play(rank: int) -> list[str]:
        with quiet(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(zero(3), Closed("LBFGS"), count=1)
        return [str(one.message) for one in caught if "whole parameters" in str(one.message)]

    first, second = run_world(2, play)
    assert len(first) == 1
    assert "LBFGS" in first[0]
    assert "MiB" in first[0]
    assert second == []
