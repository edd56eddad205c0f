"""``BaseFinetuning`` and its kin: what Lightning's callbacks that thaw parameters need of sharded ones.

A parameter that is thawed in mid-fit makes the next training step lay the module out anew (``ZeroSession``). What is
left is here: such a callback tells by values which parameters an optimizer has already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from lightning.pytorch.callbacks import BaseFinetuning, Callback
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_zero._torch import no_subclasses, untracked
from lightning_zero.engine import ZeroEngine, engine_of
from lightning_zero.engine.full import gathered
from lightning_zero.shards.binding import is_absent
from lightning_zero.shards.elements import checksum
from lightning_zero.trainer.replaced import ReplacedMethods

__all__ = ["compare_by_value"]


def compare_by_value(callbacks: Iterable[Callback], module: nn.Module, replaced: ReplacedMethods) -> None:
    """Let ``torch.equal`` in these callbacks' ``finetune_function`` compare sharded parameters. Collective there."""
    for callback in callbacks:
        if isinstance(callback, BaseFinetuning):
            replaced.put(callback, "finetune_function", partial(_comparing, module))


def _comparing(module: nn.Module, method: Callable[..., None]) -> Callable[..., None]:
    def call(*args: Any, **kwargs: Any) -> None:
        engine = engine_of(module)
        if engine is None:
            method(*args, **kwargs)
        else:
            with _ValuesCompared(engine):
                method(*args, **kwargs)

    return call


class _ValuesCompared(TorchFunctionMode):
    """While active, two parameters of an engine are equal if all their elements are, wherever these are.

    Units are gathered one after the other when that is first asked for: collective, and asked by every rank alike.
    """

    def __init__(self, engine: ZeroEngine) -> None:
        super().__init__()
        self._engine = engine
        self._sums: dict[Any, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer ``torch.equal`` of absent parameters; let everything else through."""
        if func is not torch.equal or not any(map(is_absent, args)) or not self._engine.names.keys() >= {*args}:
            return func(*args, **(kwargs or {}))
        with no_subclasses():
            alike = args[0].shape == args[1].shape and args[0].dtype == args[1].dtype
        return alike and self._values()[args[0]] == self._values()[args[1]]

    def _values(self) -> dict[Any, int]:
        for unit in self._engine.units if not self._sums else ():
            with gathered(self._engine, unit.parameters), untracked():
                for parameter in unit.parameters:
                    self._sums[parameter] = checksum(parameter.detach() + 0)  # the two zeros are equal
        return self._sums
