"""Which engine looks after a module.

The one global of the package: user code that wants to look inside has only its module in hand, and nothing is ever
attached to the user's objects. Keys are held weakly.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, ref

from torch import nn

if TYPE_CHECKING:
    from lightning_zero.engine.engine import ZeroEngine

__all__ = ["engine_of", "forget", "register"]

_ENGINES: WeakKeyDictionary[nn.Module, ref[ZeroEngine]] = WeakKeyDictionary()


def register(modules: Iterable[nn.Module], engine: ZeroEngine) -> None:
    """Note that ``engine`` looks after ``modules``."""
    for module in modules:
        _ENGINES[module] = ref(engine)


def forget(modules: Iterable[nn.Module]) -> None:
    """Note that nobody looks after ``modules``."""
    for module in modules:
        _ENGINES.pop(module, None)


def engine_of(module: nn.Module) -> ZeroEngine | None:
    """The engine that looks after ``module`` (the root or any module below it), if there is one."""
    engine = _ENGINES.get(module)
    return None if engine is None else engine()
