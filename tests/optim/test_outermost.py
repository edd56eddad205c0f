"""Which step is the outermost one."""

from __future__ import annotations

import sys

from lightning_zero.optim.step_hooks import OutermostStep


def step(steps: OutermostStep, *inner: bool) -> list[bool]:
    """A wrapper of ``step``, with one inside of it for each of ``inner``; a false one raises and is caught here."""
    found = [steps.begins(sys._getframe())]
    for ends in inner:
        found += nested(steps, ends)
    return [*found, steps.ends()]


def nested(steps: OutermostStep, ends: bool) -> list[bool]:
    begins = steps.begins(sys._getframe())
    return [begins, steps.ends()] if ends else [begins]


def test_steps_inside_of_a_step_are_not_outermost() -> None:
    steps = OutermostStep()
    assert step(steps) == [True, True]
    assert step(steps, True, True) == [True, False, False, False, False, True]


def test_a_step_that_never_ended_is_over_when_the_next_begins() -> None:
    steps = OutermostStep()
    assert nested(steps, False) == [True]
    assert step(steps, True) == [True, False, False, True]


def test_what_was_forgotten_keeps_no_frame() -> None:
    steps = OutermostStep()
    nested(steps, False)
    steps.forget()
    assert steps._wrapper is None
