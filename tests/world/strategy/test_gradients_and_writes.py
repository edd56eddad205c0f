"""What user code does to parameters and gradients with plain torch works or is an error; it is never lost quietly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.helpers.cases import WIDTH, Block
from tests.helpers.rows import Row, compared, in_one_world
from tests.helpers.runs import Net, again, assert_same, fit, made, quiet, raised, zero


class BackwardInBackward(Net):
    """A layer that is used twice, each time in a backward inside of the backward; hooks may change the sums."""

    def __init__(self, hooks: bool, reentrant: bool = True) -> None:
        super().__init__(nn.Identity)
        self.reentrant = reentrant
        torch.manual_seed(3)
        self.first, self.shared, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Block()
        self.sums: list[float] = []
        for parameter in self.parameters() if hooks else ():
            parameter.register_post_accumulate_grad_hook(self.change)

    def change(self, parameter: Tensor) -> None:
        self.sums.append(float(parameter.grad.sum()))  # type: ignore[union-attr]
        parameter.grad.mul_(0.9)  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=self.reentrant)
        return self.last(x)


def a_hook_that_asks_for_the_sum_of_backwards_inside_of_one_is_told() -> Row:
    def run(rank: int) -> list[str]:
        errors: list[str] = []
        for stage in (1, 3):
            with quiet(), raised(errors):
                fit(zero(stage), BackwardInBackward(hooks=True))
        return errors

    for errors in (yield run):
        assert len(errors) == 2
        assert all("'shared." in e and "in the middle of an accumulation" in e for e in errors), errors


def gradients_that_arrive_twice_in_a_backward_are_added() -> Row:
    """DDP takes no part in two backwards; the sum of two is the same in one."""

    def play(strategy: Strategy) -> dict[str, Any]:
        module = BackwardInBackward(hooks=False, reentrant=not isinstance(strategy, DDPStrategy))
        return made(module, fit(strategy, module))

    assert_same((yield compared(play)))


class ClearsWhatItKept(Net):
    """Hooks keep a gradient, or another tensor in its memory, and write to it when the next one is there."""

    def __init__(self, accumulated: bool) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        for parameter in self.parameters():
            if accumulated:
                parameter.register_post_accumulate_grad_hook(lambda parameter: self.keep(parameter.grad))  # type: ignore[arg-type]
            else:
                parameter.register_hook(lambda gradient: self.keep(gradient.view(-1)))

    def keep(self, gradient: Tensor) -> None:
        for kept in self.kept:
            kept.zero_()
        self.kept = [gradient]


def a_write_to_a_gradient_that_has_been_handed_over_is_none_to_the_average(accumulated: bool) -> Row:
    def play(strategy: Strategy) -> dict[str, Any]:
        module = ClearsWhatItKept(accumulated)
        return made(module, fit(strategy, module, count=2))

    assert_same((yield compared(play)))


class UsesAWeightAheadOfItsBlock(Net):
    """One rank alone: there, a gradient comes when the block's others have been averaged."""

    def __init__(self, late: int) -> None:
        super().__init__(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), Block()))
        self.late = late

    def forward(self, x: Tensor) -> Tensor:
        x = self.model[0](x)
        if self.global_rank == self.late:
            x = x @ self.model[2].up.weight.t() @ self.model[2].up.weight
        return self.model[1:](x)


def a_late_gradient_is_added_to_those_of_all_ranks(late: int) -> Row:
    """Also to those of a parameter that had none, so far, on the rank that owns it."""

    def play(strategy: Strategy) -> dict[str, Any]:
        module = UsesAWeightAheadOfItsBlock(late)
        return made(module, fit(strategy, module, count=2))

    assert_same((yield compared(play)), bound=1e-4)


class WritesToItsWeights(Net):
    """Zeroes a weight after every step, as weight clamping does."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters(), lr=1e-3)

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        with torch.no_grad():
            self.model.layers[0].up.weight.zero_()


def a_write_to_whole_parameters_is_kept_by_whole_matrix_optimizers() -> Row:
    """The owner of a matrix has a copy of its own, which must not bring the old values back."""

    def play(strategy: Strategy) -> dict[str, Any]:
        if not isinstance(strategy, DDPStrategy) and strategy.placement.shards_parameters:  # type: ignore[attr-defined]
            return {}
        module = WritesToItsWeights()
        return made(module, fit(strategy, module))

    assert_same((yield compared(play)), names=["stage 1", "stage 2"])


class Derived(torch.optim.SGD):
    """Steps as its base does; fails once, in the middle of a step, if told so."""

    fails_at = 0

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == self.fails_at:
            raise ArithmeticError("in the middle of a step")
        return result


class Derives(Net):
    fails_at = 0

    def configure_optimizers(self) -> Any:
        # From the first optimizer of a class on torch wraps the step of that class, which the derived one calls.
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        optimizer = Derived(self.parameters(), lr=0.1, momentum=0.9)
        optimizer.fails_at = self.fails_at
        return optimizer


def a_step_that_calls_that_of_its_base_is_one() -> Row:
    """Torch runs step hooks twice, one inside the other; also after a step that raised."""

    def play(strategy: Strategy) -> dict[str, Any]:
        module = Derives()
        module.fails_at = 2
        with pytest.raises(ArithmeticError):
            fit(strategy, module)
        module = Derives()
        return made(module, fit(again(strategy), module))

    assert_same((yield compared(play)))


@pytest.mark.filterwarnings("ignore:.*used in a forward or backward while no module")
@pytest.mark.filterwarnings("ignore:.*could not be tried out")
def test_what_user_code_does_to_gradients_weights_and_steps() -> None:
    in_one_world(
        2,
        a_hook_that_asks_for_the_sum_of_backwards_inside_of_one_is_told(),
        gradients_that_arrive_twice_in_a_backward_are_added(),
        *map(a_write_to_a_gradient_that_has_been_handed_over_is_none_to_the_average, (False, True)),
        *map(a_late_gradient_is_added_to_those_of_all_ranks, (0, 1)),
        a_write_to_whole_parameters_is_kept_by_whole_matrix_optimizers(),
        a_step_that_calls_that_of_its_base_is_one(),
    )
