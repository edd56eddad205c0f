"""What a run stands in front of: methods of callbacks and loggers, until it gives them back, and Lightning's mark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy

__all__ = ["ReplacedMethods", "UnmarkedModule"]


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


class UnmarkedModule:
    """The module of a strategy, read as any attribute, without the mark of a Trainer that was given a compiled one.

    That has put compiled steps into it by then, and would refuse a marked one, as it does not know the strategy.
    """

    def __set__(self, strategy: Strategy, module: LightningModule | None) -> None:
        if module is not None:
            module._compiler_ctx = None
        strategy.__dict__["_lightning_module"] = module
