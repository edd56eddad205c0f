"""Hooks of an optimizer that stay next to its step, whatever hooks the user registers, and see a nested step as such.

[Note: innermost hooks]
Our pre-hook runs after all others of the optimizer and our post-hook before them: what a user's hook does to gradients
before the step counts, and a user's hook after the step finds them as they were. Hooks may be registered at any time,
and one that runs cannot change the order any more. So a hook of all optimizers, which torch runs before an optimizer's
own, puts ours in their place.

[Note: nested steps]
torch runs step hooks in a wrapper that it puts around ``step`` of every class of which an optimizer was made. A class
whose ``step`` calls that of its base therefore runs them twice, one pair inside of the other, as soon as somebody in
the process has made an optimizer of the base. Only the outer pair may exchange gradients: the inner one would find none
and step on zeros. A step that raised never runs its post-hooks, so that a counter alone would take the next step for a
nested one. What tells is whether the wrapper of the outer step is still running.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_zero._torch import put_hooks_innermost

__all__ = ["StepHooks"]

# The ids of the pre-hook and the post-hook on each optimizer that has them.
_IDS: WeakKeyDictionary[Optimizer, tuple[int, int]] = WeakKeyDictionary()


class StepHooks:
    """A last pre-hook and a first post-hook of one optimizer, which are not called for steps inside of a step.

    Args:
        optimizer: whose; one pair at a time.
        before: called right before the optimizer's own ``step``, with the arguments of that.
        after: called right after it.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        before: Callable[[tuple[Any, ...], dict[str, Any]], None],
        after: Callable[[], None],
    ) -> None:
        self._optimizer = optimizer
        self._before, self._after = before, after
        self._wrapper: FrameType | None = None  # of the outermost step
        self._inside = 0
        self._handles = optimizer.register_step_pre_hook(self._begin), optimizer.register_step_post_hook(self._end)
        _IDS[optimizer] = (self._handles[0].id, self._handles[1].id)
        _watch()

    def running(self) -> bool:
        """Whether the caller was called by a step."""
        return self._is_around(sys._getframe(1))

    def forget(self) -> None:
        """Let go of a step that raised, and of all that its frames hold."""
        self._wrapper, self._inside = None, 0

    def remove(self) -> None:
        """Take the hooks off again."""
        for handle in self._handles:
            handle.remove()
        _IDS.pop(self._optimizer, None)

    def _begin(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        wrapper = sys._getframe(1)
        if self._is_around(wrapper):
            self._inside += 1
            return
        self._wrapper, self._inside = wrapper, 0
        self._before(args, kwargs)

    def _end(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._inside:
            self._inside -= 1
            return
        self._wrapper = None
        self._after()

    def _is_around(self, frame: FrameType | None) -> bool:
        while self._wrapper is not None and frame is not None:
            frame = frame.f_back
            if frame is self._wrapper:
                return True
        return False


@cache
def _watch() -> None:
    register_optimizer_step_pre_hook(_arrange)


def _arrange(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if optimizer in _IDS:
        put_hooks_innermost(optimizer, *_IDS[optimizer])
