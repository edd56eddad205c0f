"""Step hooks that stay next to the step, whatever hooks the user registers, and when.

[Note: innermost hooks]
Our pre-hook runs after all others of the optimizer and our post-hook before them: what a user's hook does to gradients
before the step counts, and a user's hook after the step finds them as they were. Hooks may be registered at any time,
and one that runs cannot change the order any more. So a hook of all optimizers, which torch runs before an optimizer's
own, puts ours in their place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_zero._torch import put_hooks_innermost

__all__ = ["InnermostHooks"]

StepHook = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], None]

# The ids of the pre-hook and the post-hook on each optimizer that has them.
_IDS: WeakKeyDictionary[Optimizer, tuple[int, int]] = WeakKeyDictionary()


class InnermostHooks:
    """A last pre-hook and a first post-hook of one optimizer.

    Args:
        optimizer: whose; one pair at a time.
        before: called right before the optimizer's own ``step``.
        after: called right after it.
    """

    def __init__(self, optimizer: Optimizer, before: StepHook, after: StepHook) -> None:
        self._optimizer = optimizer
        self._handles = optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)
        _IDS[optimizer] = (self._handles[0].id, self._handles[1].id)
        _watch()

    def remove(self) -> None:
        """Take the hooks off again."""
        for handle in self._handles:
            handle.remove()
        _IDS.pop(self._optimizer, None)


@cache
def _watch() -> None:
    register_optimizer_step_pre_hook(_arrange)


def _arrange(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if optimizer in _IDS:
        put_hooks_innermost(optimizer, *_IDS[optimizer])
