"""What ``optimizer.state`` is between steps: that of the user's parameters, of which this rank has slices.

[Note: the user's view of an optimizer]
Between steps an optimizer's param groups hold the user's own parameters, and its state goes by them, as under plain
torch. What a state has an element of for each element of the parameter is a sharded tensor there: shape and dtype are
the parameter's, and using its values raises by name. Right before a step the shards, with their state, take the
place of the parameters, and right after it the user's view is there again.

A state may be taken out, cleared, or replaced as a whole: whole tensors of ``optimizer.load_state_dict``, and of a new
dictionary in place of the state, are cut. What is put there is a copy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from copy import deepcopy
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.errors import ParameterAccessError, UnsupportedOptimizerError
from lightning_zero.offload.host import OffloadedTensor
from lightning_zero.optim.groups import Note
from lightning_zero.optim.state import StateHomes, copied, covers
from lightning_zero.shards.sharded import ShardedTensor, Source
from lightning_zero.shards.slice import Slice, fingerprint

__all__ = ["OptimizerView", "ParameterState", "VisibleState"]

Put = Callable[[Slice, dict[str, Any]], None]
_ADVICE = (
    "To read it whole: `lightning_zero.full_optimizer_state(module, name, key)`, on every rank. To read or change this "
    "rank's slice: `lightning_zero.local_slices(module)`. To save it: `trainer.save_checkpoint`. `optimizer.state[p]` "
    "may be deleted, and `optimizer.load_state_dict` takes whole tensors."
)


class _State(Source):
    """One tensor of an optimizer's state for a parameter, as long as it is the state."""

    def __init__(self, entry: Slice, key: str, current: Callable[[], bool]) -> None:
        super().__init__(f"optimizer state '{key}' of '{entry.name}'", _ADVICE, place=entry)
        self._current = current

    def check(self, called: str, linear: bool) -> None:
        if not self._current():
            self.refuse(f"{called} uses one that was replaced since it was read")


class VisibleState(MutableMapping[Any, Any]):
    """The state of one optimizer, by the user's parameters, over ``inner``, its own state by what it steps on. A state
    that is not there is made when it is asked for."""

    def __init__(self, view: OptimizerView, inner: MutableMapping[Any, dict[str, Any]]) -> None:
        self.view = view
        self.inner = inner

    def __getitem__(self, key: Any) -> Any:
        entry = self.view.entry(key)
        if entry is None:
            return self.inner[key]
        self.view.check_shown()
        inner = self.inner[entry.target]
        self.view.users[entry.target] = key
        return ParameterState(entry, inner)

    def __setitem__(self, key: Any, value: Any) -> None:
        entry = self.view.entry(key)
        if entry is None:
            self.inner[key] = value
            return
        if value:
            _refuse(entry, "all of it cannot be set")
        self.pop(key, None)

    def __delitem__(self, key: Any) -> None:
        entry = self.view.entry(key)
        if entry is None:
            del self.inner[key]
            return
        self.view.check_shown()
        del self.inner[entry.target]
        self.view.note(entry, "all")

    def __contains__(self, key: object) -> bool:
        entry = self.view.entry(key)
        if entry is None:
            return key in self.inner
        self.view.check_shown()
        return entry.target in self.inner

    def __iter__(self) -> Iterator[Any]:
        self.view.check_shown()
        # The optimizer's own order depends on what this rank has of each parameter.
        known = [user for target, user in self.view.users.items() if target in self.inner]
        return iter([*known, *(key for key in self.inner if key not in self.view.users)])

    def __len__(self) -> int:
        self.view.check_shown()
        return len(self.inner)

    def get(self, key: Any, default: Any = None) -> Any:
        """As of every dictionary: nothing is made."""
        there = key in self
        return self[key] if there else default

    def copy(self) -> dict[Any, Any]:
        return dict(self.items())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return {deepcopy(key, memo): deepcopy(value, memo) for key, value in self.items()}

    def __reduce__(self) -> NoReturn:
        raise UnsupportedOptimizerError(
            f"A pickle of {self.view.label} would hold one process's slices of its state. Save with "
            "`trainer.save_checkpoint`, which writes all of it, for any number of processes."
        )

    def __repr__(self) -> str:
        return f"State of {self.view.label}, sliced over ranks, of {len(self.inner)} parameters"


class ParameterState(dict[str, Any]):
    """What the user reads of the optimizer's state ``inner`` for one parameter. Made of another dictionary, it is an
    ordinary one."""

    def __new__(cls, *args: Any) -> Any:
        return super().__new__(cls) if len(args) == 2 and isinstance(args[0], Slice) else dict(*args)

    def __init__(self, entry: Slice, inner: dict[str, Any]) -> None:
        def shown(key: str, value: Any) -> Any:
            if not covers(value, entry.place.numel):
                return value
            source = _State(entry, key, lambda: inner.get(key) is value)
            return ShardedTensor(value, entry.user.shape, source, entry.user.device)

        super().__init__({key: shown(key, value) for key, value in inner.items()})
        self._entry = entry

    def _refuse_writes(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(self._entry, f"{args[0]!r} cannot be set or removed" if args else "it cannot be written to")

    __setitem__ = __delitem__ = pop = popitem = clear = update = setdefault = __ior__ = _refuse_writes

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {key: deepcopy(value, memo) for key, value in self.items()}

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def _refuse(entry: Slice, problem: str) -> NoReturn:
    raise ParameterAccessError(f"The optimizer state of '{entry.name}' shows slices: {problem}. {_ADVICE}")


class OptimizerView:
    """Two views of one optimizer: the user's between steps, and what it steps on. Puts one in the place of the other.

    Its state may hold what its constructor has made, until ``take_over``. If it is ``whole``, at owner ranks, it is not
    shown.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        label: str,
        owned: Mapping[nn.Parameter, Slice],
        homes: StateHomes,
        note: Note,
        whole: bool,
    ) -> None:
        self.label = label
        self.users: dict[nn.Parameter, nn.Parameter] = {}
        """The user's parameters by their targets, in the order of groups."""
        self._optimizer = optimizer
        self._owned = owned
        self._homes = homes
        self._note = note
        self._whole = whole
        # Of a wrapper, for example, that shows the state of what it wraps: there it is as it steps with it at any time.
        state = getattr(type(optimizer), "state", None)
        self._fixed = isinstance(state, property) and state.fset is None
        self._taken = False
        self._visible = VisibleState(self, optimizer.state)
        self.members: list[list[Slice]] = []
        """The parameters of each group that ``enter`` puts there."""
        self._lists: list[list[nn.Parameter]] = []
        self._stepped: list[nn.Parameter] | None = None  # what `pass_over` got
        self._rest: list[list[nn.Parameter]] = []  # and leaves
        self._held: list[tuple[dict[str, Any], list[nn.Parameter]]] | None = None

    @property
    def state(self) -> MutableMapping[Any, dict[str, Any]]:
        """The state as the optimizer steps with it: this rank's slices, by what stands for the parameters."""
        return self._visible.inner

    @property
    def entered(self) -> bool:
        """Whether groups and state are those of a step now."""
        return self._held is not None

    @property
    def replaced(self) -> bool:
        """Whether user code, or a constructor, has put a state of its own into the optimizer."""
        state: Any = self._optimizer.state
        return self._held is None and (not self._taken if self._fixed else state is not self._visible)

    def entry(self, key: object) -> Slice | None:
        """The parameter that a key of the state is."""
        return self._owned.get(key) if isinstance(key, nn.Parameter) else None

    def check_shown(self) -> None:
        """Refuse to show state that is at one process only, and say how to read it anywhere."""
        if self._whole:
            raise UnsupportedOptimizerError(
                f"{self.label} needs whole parameters, so each one's state is at one process only. To read it "
                "anywhere: `lightning_zero.full_optimizer_state(module, name, key)`, on every rank."
            )

    def note(self, entry: Slice, key: str, value: Any = None) -> None:
        """Note that user code took a value out, or put one there."""
        value = value.history if isinstance(value, ShardedTensor) else value
        self._note(f"the optimizer state '{key}' of '{entry.name}'", fingerprint(value))

    def step_on(self, members: list[list[Slice]], lists: list[list[nn.Parameter]]) -> None:
        """Say what groups hold in a step from now on: their parameters, and what the optimizer steps on for these."""
        self.members, self._lists, self._stepped = members, lists, None
        self.users.update((entry.target, entry.user) for group in members for entry in group)

    def enter(self) -> None:
        """Put shards, and the state that goes by them, in the place of what the user sees."""
        groups = self._optimizer.param_groups
        self._held = held = []
        for group, parameters in zip(groups, self._lists, strict=True):
            held.append((group, group["params"]))
            group["params"] = parameters
        if not self._fixed:
            self._optimizer.state = self._visible.inner  # type: ignore[assignment]

    def pass_over(self, stepped: list[nn.Parameter]) -> None:
        """Leave what is stepped on already to no other step. The same list means the same parameters."""
        if stepped is not self._stepped:
            done, self._stepped = set(stepped), stepped
            self._rest = [[parameter for parameter in group if parameter not in done] for group in self._lists]
        for group, parameters in zip(self._optimizer.param_groups, self._rest, strict=True):
            group["params"] = parameters

    def leave(self) -> None:
        """Let the user see groups and state again. May be called again."""
        held, self._held = self._held, None
        for group, parameters in held or ():
            group["params"] = parameters
        if held is not None and not self._fixed:
            self._optimizer.state = self._visible  # type: ignore[assignment]

    def show(self) -> None:
        """Let the user see the state as it is now."""
        self._set_state(self._visible)

    def let_go(self) -> None:
        """Give the optimizer back, without state."""
        self._set_state(self.state)
        self.state.clear()

    def _set_state(self, state: Any) -> None:
        if not self._fixed:
            self._optimizer.state = state

    def take_over(self, put: Put) -> None:
        """Take over a state that is ``replaced``, unless it was rounded: ``put`` gets that of each parameter. Local."""
        found: Any = self._optimizer.state
        self._taken = True
        if found is self.state:  # a constructor's: nothing is kept twice
            for key in list(found):
                self._take(key, found.pop(key), put)
            self.show()
            return
        for first in self.members[0][:1] if self.members else ():
            self.note(first, "all")
        given: list[tuple[Any, Any]] = []
        if isinstance(found, VisibleState) and found.view is self:  # one that was there before
            self._visible = found
        else:
            given = list(found.items())
            for parameter, values in given:
                self._check_rounded(parameter, values)
            # What was shown goes on being what it was, in the user's hands.
            kind = type(self.state)
            self._visible = VisibleState(self, kind(dict) if issubclass(kind, defaultdict) else kind())
        for key, values in given:
            entry = self.entry(key)
            if entry is not None:
                for name, value in values.items():
                    self.note(entry, name, value)
                # A step counter does not change with the one that it was loaded from; anything else is cut.
                values = {k: copied(v) if isinstance(v, Tensor) and not v.dim() else v for k, v in values.items()}
            self._take(key, values, put)
        self.show()

    def _take(self, key: Any, values: Any, put: Put) -> None:
        entry = self.entry(key)
        if entry is None:
            self.state[key] = values
        else:
            self.users[entry.target] = key
            put(entry, values)

    def cut(self, entry: Slice, state: dict[str, Any]) -> dict[str, Any]:
        """This rank's slices of a parameter's state, whole or as it is shown, in their places. ``state`` is emptied."""
        keys, sliced = list(state), {}
        for key in keys:
            value = state[key]
            if isinstance(value, ShardedTensor):
                if value.source.place is not entry:
                    value.source.refuse(f"it was put where the state '{key}' of '{entry.name}' belongs")
                own = value.own if isinstance(value.own, OffloadedTensor) else value.own.clone()
                sliced[key] = self._homes.put(entry, key, own)
                del state[key]
        sliced |= self._homes.adopt(entry, state)
        return {key: sliced[key] for key in keys}

    def _check_rounded(self, parameter: Any, values: Mapping[str, Any]) -> None:
        """``load_state_dict`` gives state the parameter's dtype, which is not that of the state in mixed precision."""
        entry = self.entry(parameter)
        if entry is None or parameter.dtype == entry.layout.dtype:
            return
        for key, value in values.items():
            if isinstance(value, Tensor) and value.dim() and value.dtype == parameter.dtype:
                raise UnsupportedOptimizerError(
                    f"{self.label} got the state '{key}' of '{entry.name}' in {value.dtype}, which "
                    f"`load_state_dict` makes of it because the parameter is; the optimizer has it in "
                    f"{entry.layout.dtype}. Resume with `trainer.fit(..., ckpt_path=...)`, which rounds nothing."
                )
