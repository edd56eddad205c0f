"""A user's optimizer whose ``step`` calls that of its base: torch then runs step hooks twice, one inside the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import Strategy

from tests.helpers.runs import Net, again, assert_same, batches, each_strategy, made
from tests.helpers.training import make_trainer


class Derived(torch.optim.SGD):
    """Steps as its base does; fails once, in the middle of a step, if told so."""

    fails_at = 0

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == self.fails_at:
            raise ArithmeticError("in the middle of a step")
        return result


class Module(Net):
    fails_at = 0

    def configure_optimizers(self) -> Any:
        # From the first optimizer of a class on torch wraps the step of that class, which the derived one calls.
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        optimizer = Derived(self.parameters(), lr=0.1, momentum=0.9)
        optimizer.fails_at = self.fails_at
        return optimizer


def test_a_derived_optimizer_trains_as_under_ddp() -> None:
    def play(strategy: Strategy) -> dict[str, Any]:
        module = Module()
        trainer = make_trainer(strategy, max_epochs=1)
        trainer.fit(module, batches(4), batches(1))
        return made(module, trainer)

    assert_same(each_strategy(play))


@pytest.mark.filterwarnings("ignore:.*could not be tried out")
def test_a_step_that_raised_is_not_taken_for_the_outer_one_of_the_next() -> None:
    def play(strategy: Strategy) -> dict[str, Any]:
        module = Module()
        module.fails_at = 2
        trainer = make_trainer(strategy, max_epochs=1)
        with pytest.raises(ArithmeticError):
            trainer.fit(module, batches(4), batches(1))
        module.fails_at = 0
        second = make_trainer(again(strategy), max_epochs=1)
        second.fit(module, batches(4), batches(1))
        return {"steps": second.global_step}

    assert_same(each_strategy(play))
