"""Methods of callbacks and loggers that a run stands in front of, until it gives them back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["ReplacedMethods"]


class ReplacedMethods:
    """What one run has replaced on other objects: none of it outlives the run, or goes into a pickle after it."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Callable[..., Any] | None]] = []

    def put(self, target: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Let ``target.name`` be ``around`` of what it is."""
        self._before.append((target, name, vars(target).get(name)))
        vars(target)[name] = around(getattr(target, name))

    def release(self) -> None:
        """Give all of them back, the last one first."""
        while self._before:
            target, name, before = self._before.pop()
            vars(target).pop(name, None)
            if before is not None:
                vars(target)[name] = before
