"""Our step hooks stay next to the step, and are not called for a step inside of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_zero.optim.hooks import StepHooks


def sgd() -> Optimizer:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    return torch.optim.SGD([parameter], lr=0.1)


def test_hooks_registered_at_any_time_stay_outside() -> None:
    optimizer, seen = sgd(), []

    def note(what: str) -> Any:
        return lambda *_: seen.append(what)

    optimizer.register_step_pre_hook(note("early"))
    optimizer.register_step_post_hook(note("early after"))
    hooks = StepHooks(optimizer, note("ours"), note("ours after"))
    handle = optimizer.register_step_pre_hook(note("late"))
    optimizer.register_step_post_hook(note("late after"))
    optimizer.step()
    assert seen == ["early", "late", "ours", "ours after", "early after", "late after"]
    handle.remove()  # still works: the user's handles are not touched
    optimizer.register_step_pre_hook(note("later"))
    seen.clear()
    optimizer.step()
    assert seen == ["early", "later", "ours", "ours after", "early after", "late after"]
    hooks.remove()
    seen.clear()
    optimizer.step()
    assert seen == ["early", "later", "early after", "late after"]


def test_a_hook_that_registers_a_hook_or_steps_another_optimizer() -> None:
    """While hooks run their order cannot change: the new one has its place from the next step on."""
    first, second, seen = sgd(), sgd(), []
    for name, optimizer in (("first", first), ("second", second)):
        StepHooks(
            optimizer,
            lambda *_, name=name: seen.append(f"{name} before"),
            lambda *_, name=name: seen.append(f"{name} after"),
        )

    def once(optimizer: Optimizer, *_: Any) -> None:
        handle.remove()
        optimizer.register_step_post_hook(lambda *_: seen.append("new"))
        second.step()

    handle = first.register_step_post_hook(once)
    first.step()
    assert seen[:4] == ["first before", "first after", "second before", "second after"]
    seen.clear()
    first.step()
    assert seen == ["first before", "first after", "new"]


class Inner(torch.optim.SGD):
    """Steps as its base does, ``times`` times, and raises when it is told to."""

    times = 1
    fails = False

    def step(self, closure: Any = None) -> Any:
        for _ in range(self.times):
            super().step(closure)
        if self.fails:
            raise ArithmeticError


def nested(seen: list[str]) -> tuple[Inner, StepHooks]:
    sgd()  # from now on torch wraps the step of the base, too
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer = Inner([parameter], lr=0.1)
    return optimizer, StepHooks(optimizer, lambda *_: seen.append("before"), lambda: seen.append("after"))


def test_steps_inside_of_a_step_are_not_seen() -> None:
    seen: list[str] = []
    optimizer, hooks = nested(seen)
    optimizer.times = 2
    running: list[bool] = []
    optimizer.register_step_post_hook(lambda *_: running.append(hooks.running()))
    optimizer.step()
    assert seen == ["before", "after"]
    assert running == [True, True, False]  # of the two inside, and of the outer one when it is over
    assert not hooks.running()


def test_a_step_that_never_ended_is_over_when_the_next_begins() -> None:
    seen: list[str] = []
    optimizer, _ = nested(seen)
    optimizer.fails = True
    with pytest.raises(ArithmeticError):
        optimizer.step()
    assert seen == ["before"]
    optimizer.fails = False
    optimizer.step()
    assert seen == ["before", "before", "after"]
