"""Optimizers that need a closure: they run forward and backward themselves, inside of their ``step``."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from lightning_zero.errors import UnsupportedOptimizerError, ZeroError

__all__ = ["demands_closure", "naming_closures", "step_of"]

_REASON = (
    "{name} cannot be sharded: its step() needs a closure, to run forward and backward inside of the step, while here "
    "the gradients of all ranks are averaged, agreed on and handed out before a step. Use an optimizer that steps on "
    "the gradients that are there, for example the one that {name} wraps, or the one its result is closest to."
)


def step_of(cls: type) -> Any:
    """A class's own ``step``, without what torch has wrapped around it; ``None`` if it is that of a base."""
    step = cls.__dict__.get("step")
    while step is not None and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step


def demands_closure(optimizer: Optimizer) -> UnsupportedOptimizerError | None:
    """The error for an optimizer that can be seen to need a closure; ``None`` for all others.

    It is seen if ``step`` has an argument ``closure`` without a default, or if its first statements raise where there
    is none. What is not seen here ends in ``naming_closures``.
    """
    cls = type(optimizer)
    step: Any = next((own for base in cls.__mro__ if (own := step_of(base)) is not None), None)
    try:
        parameters = list(inspect.signature(step).parameters.values())[1:]
        required = any(p.name == "closure" and p.default is p.empty for p in parameters)
        needed = required or any(_refuses_none(step, p.name) for p in parameters if "closure" in p.name)
    except (TypeError, ValueError):
        return None
    return UnsupportedOptimizerError(_REASON.format(name=cls.__name__)) if needed else None


@contextmanager
def naming_closures(optimizer: Optimizer) -> Iterator[None]:
    """Around a step without a closure: the error of an optimizer that wants one says what to do instead."""
    try:
        yield
    except ZeroError:
        raise
    except Exception as error:
        if "closure" not in f"{type(error).__name__} {error}".lower():
            raise
        raise UnsupportedOptimizerError(_REASON.format(name=type(optimizer).__name__)) from error


def _refuses_none(step: Any, closure: str) -> bool:
    """Whether the source of ``step`` begins, before it does anything else, by raising where ``closure`` is ``None``."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(step)))
    except (OSError, TypeError, SyntaxError):
        return False
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef):
        return False
    none, some = {f"{closure} is None", f"not {closure}"}, {f"{closure} is not None", closure, f"callable({closure})"}
    for statement in function.body:
        if isinstance(statement, ast.Assert) and ast.unparse(statement.test) in some:
            return True
        if isinstance(statement, ast.If) and ast.unparse(statement.test) in none:
            return any(isinstance(inner, ast.Raise) for inner in statement.body)
    return False
