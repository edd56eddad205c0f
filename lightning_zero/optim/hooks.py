"""The hooks next to the step of the user's optimizer.

[Note: innermost hooks]
Our pre-hook runs after all others of the optimizer and our post-hook before them: what a user's hook does to gradients
before the step counts, and a user's hook after the step finds them as they were. Hooks may be registered at any time,
and one that runs cannot change the order any more. So a hook of all optimizers, which torch runs before an optimizer's
own, puts ours in their place.

[Note: nested steps]
torch runs step hooks in a wrapper that it puts around ``step`` of every class of which an optimizer was made. A class
whose ``step`` calls that of its base therefore runs them twice, one pair inside of the other, as soon as somebody in
the process has made an optimizer of the base. Only the outer pair may exchange gradients: the inner one would find none
and step on zeros. So steps are counted. One that raised never runs its post-hooks, so that the counter would take the
next step for a nested one: ``optimizer.step`` sets it back then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, cast
from weakref import WeakKeyDictionary, ref

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_zero._torch import count_step_pre_hooks, put_hooks_innermost, runs_hooks

__all__ = ["StepHooks", "is_hooked"]


@dataclass
class _Calls:
    """The ids of the pre-hook and the post-hook on an optimizer, how many of its steps run, one in the other, and
    whether ``optimizer.step`` does."""

    before: int
    after: int
    inside: int = 0
    entered: bool = False


_CALLS: WeakKeyDictionary[Optimizer, _Calls] = WeakKeyDictionary()


def is_hooked(optimizer: Optimizer) -> bool:
    """Whether a run steps with this optimizer, or an earlier one did."""
    return optimizer in _CALLS


class StepHooks:
    """A last pre-hook and a first post-hook of one optimizer: ``before`` gets the arguments of its own ``step`` right
    before that, ``after`` is called right after it. Neither is called for steps inside of a step."""

    def __init__(
        self,
        optimizer: Optimizer,
        before: Callable[[tuple[Any, ...], dict[str, Any]], None],
        after: Callable[[], None],
    ) -> None:
        self._optimizer = optimizer
        self._before, self._after = before, after
        self._handles = optimizer.register_step_pre_hook(self._begin), optimizer.register_step_post_hook(self._end)
        self._calls = _CALLS[optimizer] = _Calls(self._handles[0].id, self._handles[1].id)
        _note_ends(optimizer)
        self._step = optimizer.step
        _watch()

    @property
    def alone(self) -> bool:
        """Whether nothing else comes between a call of ``step`` and ``before``."""
        ours = 2  # that, and the one that puts it in its place
        return self._optimizer.step is self._step and count_step_pre_hooks(self._optimizer) == ours

    def running(self) -> bool:
        """Whether a step of the optimizer is running."""
        return self._calls.inside > 0

    def forget(self) -> None:
        """Let go of a step that raised."""
        self._calls.inside = 0

    def remove(self) -> None:
        """Take the hooks off again."""
        for handle in self._handles:
            handle.remove()
        _CALLS.pop(self._optimizer, None)

    def _begin(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._calls.inside += 1
        if self._calls.inside == 1:
            self._before(args, kwargs)

    def _end(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._calls.inside -= 1
        if not self._calls.inside:
            self._after()


def _note_ends(optimizer: Optimizer) -> None:
    """Have ``optimizer.step`` note that a step is over, also one that raised. As torch's schedulers do, this puts a
    function in its place that does not hold the optimizer, and stays there."""
    step: Any = optimizer.step
    if hasattr(step, "notes_ends"):
        return
    weak, bound = ref(optimizer), hasattr(step, "__func__")
    target = step.__func__ if bound else step
    if not runs_hooks(target):  # it wraps another optimizer, without torch's constructor
        own_step = target if bound else wraps(step)(lambda _, *args, **kwargs: step(*args, **kwargs))
        target, bound = Optimizer.profile_hook_step(own_step), True

    @wraps(target)
    def noting(*args: Any, **kwargs: Any) -> Any:
        own = cast(Optimizer, weak())
        args = (own, *args) if bound else args
        calls = _CALLS.get(own)
        if calls is None or calls.entered:
            return target(*args, **kwargs)
        calls.inside, calls.entered = 0, True
        try:
            return target(*args, **kwargs)
        finally:
            calls.inside, calls.entered = 0, False

    # A scheduler that is made later asks for the function below a bound method.
    vars(noting).update(notes_ends=True, __func__=lambda _, *args, **kwargs: noting(*args, **kwargs))
    optimizer.step = noting  # type: ignore[method-assign]


@cache
def _watch() -> None:
    register_optimizer_step_pre_hook(_arrange)


def _arrange(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if (calls := _CALLS.get(optimizer)) is not None:
        put_hooks_innermost(optimizer, calls.before, calls.after)
