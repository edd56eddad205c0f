"""What hangs on the user's optimizer: hooks next to its step, and between two fits what it has learned.

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

[Note: one optimizer, several fits]
A user may build the optimizer once and return it from ``configure_optimizers`` in every fit: under DDP it goes on with
its state. Here its groups hold shards, and its state slices, which a later fit may cut in another way. So before the
next set-up its groups get the user's own parameters back, and this rank's state waits here, as it was cut, until the
optimizer is adapted anew. Nothing here holds the optimizer: one that nobody needs goes at once, with what is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakMethod, ref

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_zero._torch import put_hooks_innermost
from lightning_zero.comm import Collectives
from lightning_zero.errors import UnsupportedOptimizerError
from lightning_zero.offload.host import in_memory
from lightning_zero.optim.state import StateHomes
from lightning_zero.optim.whole import WholeState, resharded
from lightning_zero.shards.slice import Slice

__all__ = ["Kept", "StepHooks", "holds", "keep_in_memory", "kept_of"]


@dataclass
class _Calls:
    """The ids of the pre-hook and the post-hook on an optimizer, how many of its steps run, one in the other, and
    whether ``optimizer.step`` does."""

    before: int
    after: int
    inside: int = 0
    entered: bool = False


_CALLS: WeakKeyDictionary[Optimizer, _Calls] = WeakKeyDictionary()


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
        _watch()

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


# What gives the state of an optimizer back. The optimizer keeps whose method it is alive, by its hooks.
_KEEP: WeakKeyDictionary[Optimizer, WeakMethod[Callable[[], Kept]]] = WeakKeyDictionary()


def holds(optimizer: Optimizer, keep: Callable[[], Kept]) -> None:
    """Note what gives an optimizer's state back, a bound method."""
    _KEEP[optimizer] = WeakMethod(keep)


def kept_of(optimizer: Optimizer) -> Kept | None:
    """What an earlier fit has left of an optimizer; ``None`` if there was none. Its groups hold the user's parameters
    from now on. Local."""
    keep = _KEEP[optimizer]() if optimizer in _KEEP else None
    return None if keep is None else keep()


def keep_in_memory(optimizers: Iterable[Optimizer]) -> None:
    """Note the state of optimizers for their next set-up, all of it in memory: files are about to go. Local.

    Raises ``OffloadError`` if a disk failed.
    """
    for optimizer in optimizers:
        if (kept := kept_of(optimizer)) is not None:
            kept.read_files()


class Kept:
    """The state of one optimizer between two fits, by parameter name, each rank's slices of it; ``state`` gives it,
    collectively if the optimizer had whole parameters. A step meanwhile is an error, because it would train nothing."""

    def __init__(
        self,
        optimizer: Optimizer,
        label: str,
        entries: Sequence[Slice],
        state: Callable[[], dict[str, WholeState]],
        homes: StateHomes,
    ) -> None:
        self.homes = homes
        self._label = label
        self._entries = list(entries)
        self._state: Callable[[], dict[str, WholeState]] | None = state
        self._in_files = not homes.lasts
        self._handle = optimizer.register_step_pre_hook(self._refuse)
        holds(optimizer, self.keep)

    def keep(self) -> Kept:
        """Itself."""
        return self

    def give_up_files(self) -> None:
        """Let other optimizers have the files. State that was in them is lost, and this optimizer cannot go on."""
        if not self.homes.lasts:
            self._state = None
            self.homes.release()

    def read_files(self) -> None:
        """Hold in memory what is in files."""
        if self.homes.lasts or self._state is None:
            return
        found = self._state()
        for one in found.values():
            one.slices.update({key: in_memory(value) for key, value in one.slices.items()})
        self._state, self._in_files = lambda: found, False

    def let_go(self) -> None:
        """Nothing is kept any more: the optimizer was adapted anew."""
        self._state = None
        self._entries.clear()
        self._handle.remove()

    def state_for(self, owned: Mapping[nn.Parameter, Slice], collectives: Collectives) -> dict[str, WholeState]:
        """The state by parameter name, cut as the shards of ``owned`` are now. Tensors are handed over where they fit.
        Raises ``UnsupportedOptimizerError`` on every rank, if the state was in files that are gone. Collective: every
        rank."""
        pairs = [(entry, owned[entry.user]) for entry in self._entries if entry.user in owned]
        moved = any(new is not old for old, new in pairs)
        found = {} if self._state is None else self._state()
        if self._state is None or (found and self._in_files and moved):
            raise UnsupportedOptimizerError(
                f"{self._label} has trained in an earlier fit that kept its state in files, and these are gone. Build "
                "a new one in configure_optimizers, or resume from a checkpoint: `trainer.fit(..., ckpt_path=...)`."
            )
        state = [found.get(old.name, WholeState()) for old, _ in pairs]
        if moved:
            state = resharded(state, pairs, collectives, next(iter(owned)).device)
        return {new.name: one for (_, new), one in zip(pairs, state, strict=True) if one.slices or one.values}

    def _refuse(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise RuntimeError(
            f"{self._label} is an optimizer of an earlier fit and is not part of the run that the model is in now, so "
            "its step would train nothing. Return it from configure_optimizers in a new fit: it goes on with its state."
        )
