"""Which optimizers can be seen to need a closure."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_zero import AdamW8bit
from lightning_zero.errors import OffloadError, UnsupportedOptimizerError
from lightning_zero.extensions.planner.costs import OptimizerCost
from lightning_zero.optim.rules import optimizer_rule, refuse_closure

KNOWN = [
    cls
    for cls in vars(torch.optim).values()
    if isinstance(cls, type) and issubclass(cls, Optimizer) and cls not in (Optimizer, torch.optim.LBFGS)
]


class Base(torch.optim.SGD):
    """Gives the steps below something to inherit."""


class Required(Base):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()


class Asserting(Base):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Says so first."""
        assert closure is not None, "needed"
        closure()


class Raising(Base):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not closure:
            raise ValueError("needed")
        closure()


class Inheriting(Raising):
    pass


class Calling(Base):
    def step(self, closure: Any = None) -> Any:
        return torch.enable_grad()(closure)()


class Ignoring(Base):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None


class Guarding(Base):
    def step(self, closure: Any = None) -> Any:
        if closure is None:
            closure = int
        return closure()


def made(cls: type[Optimizer]) -> Optimizer:
    return cls([nn.Parameter(torch.zeros(2, 2))], lr=0.1)  # type: ignore[call-arg]


@pytest.mark.parametrize("cls", [Required, Asserting, Raising, Inheriting, Calling, torch.optim.LBFGS])
def test_an_argument_without_a_default_or_a_trial_says_that_one_is_needed(cls: type[Optimizer]) -> None:
    assert optimizer_rule(made(cls)) == "closure"


@pytest.mark.parametrize("cls", [*KNOWN, Base, Guarding, Ignoring])
def test_no_other_needs_one(cls: type[Optimizer]) -> None:
    if cls is not torch.optim.SparseAdam:
        assert optimizer_rule(made(cls)) != "closure"


@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_a_derived_class_is_elementwise_unless_its_step_is_its_own(base: Any) -> None:
    """AdamW inherits its step; from the first optimizer of a class on, the class has it wrapped by torch."""

    def init_group(self: Any, *arguments: Any) -> Any:  # where it sees what is stepped on, and may change it
        return base._init_group(self, *arguments)

    inherited = {"step": Optimizer.profile_hook_step(base.step), "_init_group": base._init_group}
    copied = [functools.wraps(found)(lambda *arguments: None) for found in (base.step, base._init_group)]
    own = [{"step": Guarding.step}, {"_init_group": init_group}, {"step": copied[0]}, {"_init_group": copied[1]}]
    cases = (({}, "elementwise"), (inherited, "elementwise"), *((members, "whole") for members in own))
    for members, rule in cases:
        optimizer: Any = made(type("Derived", (base,), members))
        assert optimizer_rule(optimizer) == rule
        assert OptimizerCost.of(optimizer).whole == (rule == "whole")
        optimizer._init_group = init_group
        assert optimizer_rule(optimizer) == "whole"


def test_state_in_blocks_that_are_cut_is_refused_and_ours_steps_on_slices() -> None:
    theirs = type("AdamW8bit", (Base,), {"__module__": "torchao.optim.adam"})
    for cls in (theirs, type("Mine", (theirs,), {})):
        with pytest.raises(UnsupportedOptimizerError, match=r"cannot be sharded: .*torchao.*lightning_zero\.AdamW8bit"):
            optimizer_rule(made(cls))
    assert optimizer_rule(made(AdamW8bit)) == optimizer_rule(made(type("Ours", (AdamW8bit,), {}))) == "elementwise"
    assert optimizer_rule(made(type("Own", (AdamW8bit,), {"step": Guarding.step}))) == "whole"


def test_only_errors_about_closures_are_renamed() -> None:
    optimizer = made(Base)
    with pytest.raises(UnsupportedOptimizerError, match="Base cannot be sharded"):
        refuse_closure(optimizer, TypeError("step() missing 1 required positional argument: 'closure'"))
    refuse_closure(optimizer, ValueError("a shape"))
    refuse_closure(optimizer, OffloadError("a closure of the disk"))
