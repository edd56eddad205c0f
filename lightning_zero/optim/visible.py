"""What ``optimizer.state`` is between steps: that of the user's parameters, of which this rank has slices.

[Note: the user's view of an optimizer]
Between steps an optimizer's param groups hold the user's own parameters, and its state goes by them, as under plain
torch. What a state has an element of for each element of the parameter is a sliced tensor: it has the parameter's
shape, can be edited element by element, and raises where elements of other ranks are needed. Right before a step the
shards, with the slices as they are, take their place, and right after it the user's view is there again.

What user code puts into the state counts: a whole tensor is cut, also those of ``optimizer.load_state_dict``, and of a
new dictionary in place of the state. What is put there is a copy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from copy import deepcopy
from functools import partial
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.errors import UnsupportedOptimizerError
from lightning_zero.offload.host import OffloadedTensor
from lightning_zero.optim.groups import Note, OwnedParameter
from lightning_zero.optim.state import StateHomes, copied, covers
from lightning_zero.shards.slice import fingerprint
from lightning_zero.shards.sliced_tensor import SlicedTensor
from lightning_zero.shards.sliced_values import state_of

__all__ = ["OptimizerView", "ParameterState", "VisibleState"]

Put = Callable[[OwnedParameter, dict[str, Any]], None]


class VisibleState(MutableMapping[Any, Any]):
    """The state of one optimizer, by the user's parameters, over ``inner``, its own state by what it steps on. A state
    that is not there is made when it is asked for."""

    def __init__(self, view: OptimizerView, inner: MutableMapping[Any, dict[str, Any]]) -> None:
        self.view = view
        self.inner = inner
        # What is in the user's hands stays the same object, as long as anybody holds it.
        self._handed: WeakValueDictionary[nn.Parameter, ParameterState] = WeakValueDictionary()
        self._recent: list[ParameterState] = []  # since the last step

    def refresh(self) -> None:
        """Show what a step, or a checkpoint, has put into the state, also in what was handed out before."""
        self._recent.clear()
        for state in list(self._handed.values()):
            state.refresh()

    def note_numbers(self) -> None:
        """Note step counters and the like that user code has changed in place."""
        for state in {id(state): state for state in [*self._recent, *self._handed.values()]}.values():
            state.note_numbers()

    def __getitem__(self, key: Any) -> Any:
        entry = self.view.entry(key)
        if entry is None:
            return self.inner[key]
        self.view.check_shown()
        inner = self.inner[entry.target]
        found = self._handed.get(key)
        if found is None or found.inner is not inner:
            self.view.users[entry.target] = key
            found = self._handed[key] = ParameterState(entry, inner, self.view)
            self._recent.append(found)
        return found

    def __setitem__(self, key: Any, value: Any) -> None:
        entry = self.view.entry(key)
        if entry is None:
            self.inner[key] = value
            return
        self.view.check_shown()
        for name, part in value.items():
            self.view.note(entry, name, part)
        self.view.users[entry.target] = key
        self.inner[entry.target] = self.view.cut(entry, dict(value))
        self._let_go(key)

    def __delitem__(self, key: Any) -> None:
        entry = self.view.entry(key)
        if entry is None:
            del self.inner[key]
            return
        self.view.check_shown()
        del self.inner[entry.target]
        self.view.note(entry, "all")
        self._let_go(key)

    def _let_go(self, key: nn.Parameter) -> None:
        """Look no more at what was shown: it may be another optimizer's state now, whose steps change it."""
        found = self._handed.pop(key, None)
        self._recent = [state for state in self._recent if state is not found]

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
        found = key in self
        return self[key] if found else default

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
    """What the user has of ``inner``, the optimizer's state for one parameter: what is set in it counts. Made of
    another dictionary, it is an ordinary one."""

    def __new__(cls, *args: Any) -> Any:
        return super().__new__(cls) if len(args) == 3 else dict(*args)

    def __init__(self, entry: OwnedParameter, inner: dict[str, Any], view: OptimizerView) -> None:
        super().__init__()
        self.inner = inner
        self._entry = entry
        self._view = view
        self._numbers: dict[str, Tensor] = {}  # as they were when they were shown
        self.refresh()

    def refresh(self) -> None:
        """Be what ``inner`` is now."""
        super().clear()
        super().update({key: self._shown(key) for key in self.inner})
        numbers = {k: v for k, v in self.items() if type(v) is Tensor and not v.dim() and v.device.type == "cpu"}
        self._numbers = {key: copied(value) for key, value in numbers.items()}

    def note_numbers(self) -> None:
        """Note those that have changed in place."""
        for key, before in self._numbers.items():
            value = self.get(key)
            if isinstance(value, Tensor) and not torch.equal(value, before):
                self._view.note(self._entry, key, value)
                self._numbers[key] = copied(value)

    def _shown(self, key: str) -> Any:
        value, inner = self.inner[key], self.inner
        if not covers(value, self._entry.slice.numel):
            return value
        # What a step has put elsewhere is not the state any more.
        return self._view.sliced(self._entry, key, value, lambda: inner.get(key) is value)

    def __setitem__(self, key: str, value: Any) -> None:
        if key in self and self[key] is value:
            return  # what ``state[key] *= x`` assigns
        self._view.note(self._entry, key, value)
        put = self._view.cut(self._entry, {key: value})[key]
        self._free(key)
        self.inner[key] = put
        super().__setitem__(key, self._shown(key))

    def __delitem__(self, key: str) -> None:
        self._free(key)
        super().__delitem__(key)
        del self.inner[key]
        self._view.note(self._entry, key)

    def _free(self, key: str) -> None:
        """What user code takes out stays as it is: nobody's state any more, but the user's own."""
        if isinstance(shown := self.get(key), SlicedTensor):
            shown.live_on()

    # What a dictionary does without calling the two above.
    pop = MutableMapping.pop
    popitem = MutableMapping.popitem
    clear = MutableMapping.clear
    update = MutableMapping.update
    setdefault = MutableMapping.setdefault

    def __ior__(self, other: Any) -> ParameterState:  # type: ignore[override,misc]
        self.update(other)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {key: deepcopy(value, memo) for key, value in self.items()}

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def _name(entry: OwnedParameter, key: str) -> str:
    return f"the optimizer state '{key}' of '{entry.name}'"


class OptimizerView:
    """Two views of one optimizer: the user's between steps, and what it steps on. Puts one in the place of the other.

    Its state may hold what its constructor has made, until ``take_over``. If it is ``whole``, at owner ranks, it is not
    shown.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        label: str,
        owned: Mapping[nn.Parameter, OwnedParameter],
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
        self.members: list[list[OwnedParameter]] = []
        """The parameters of each group that ``enter`` puts there."""
        self._lists: list[list[nn.Parameter]] = []
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
        return not self.entered and (not self._taken if self._fixed else state is not self._visible)

    def entry(self, key: object) -> OwnedParameter | None:
        """The parameter that a key of the state is."""
        return self._owned.get(key) if isinstance(key, nn.Parameter) else None

    def check_shown(self) -> None:
        """Refuse to show state that is at one process only, and say how to read it anywhere."""
        if self._whole:
            raise UnsupportedOptimizerError(
                f"{self.label} needs whole parameters, so each one's state is at one process only. To read it "
                "anywhere: `lightning_zero.full_optimizer_state(module, name, key)`, on every rank."
            )

    def sliced(self, entry: OwnedParameter, key: str, own: Tensor, alive: Callable[[], bool]) -> Tensor:
        """A tensor of the parameter's shape for this rank's elements ``own``, 1-D, as long as they are ``alive``."""
        start, shape = entry.shard.start if own.numel() else 0, entry.shard.spec.shape
        edited, meaning = partial(self._note, _name(entry, key)), state_of(entry.name, key)
        cut = entry.layout.cut_of(entry.position)
        return SlicedTensor(own, start, shape, entry.name, alive, edited, entry.user.device, meaning, cut)

    def note(self, entry: OwnedParameter, key: str, value: Any = None) -> None:
        """Note that user code took a value out, or changed it."""
        if isinstance(value, SlicedTensor):
            value = value.history
        self._note(_name(entry, key), value if isinstance(value, Tensor) else fingerprint(value))

    def note_numbers(self) -> None:
        """Note what user code has changed in place that is no slice, before the ranks compare."""
        if not self._whole:
            self._visible.note_numbers()

    def step_on(self, members: list[list[OwnedParameter]], lists: list[list[nn.Parameter]]) -> None:
        """Say what groups hold in a step from now on: their parameters, and what the optimizer steps on for these."""
        self.members, self._lists = members, lists
        self.users.update((entry.target, entry.user) for group in members for entry in group)

    def enter(self) -> None:
        """Put shards, and the state that goes by them, in the place of what the user sees."""
        groups = self._optimizer.param_groups
        self._held = [(group, group["params"]) for group in groups]
        for group, parameters in zip(groups, self._lists, strict=True):
            group["params"] = parameters
        self._set_state(self.state)

    def pass_over(self, stepped: Collection[nn.Parameter]) -> None:
        """Leave what is stepped on already to no other step."""
        done = set(stepped)
        for group, parameters in zip(self._optimizer.param_groups, self._lists, strict=True):
            group["params"] = [parameter for parameter in parameters if parameter not in done]

    def leave(self) -> None:
        """Let the user see groups and state again. May be called again."""
        held, self._held = self._held, None
        if held is not None:
            for group, parameters in held:
                group["params"] = parameters
            self.show()

    def show(self) -> None:
        """Let the user see the state as it is now."""
        self._set_state(self._visible)
        self._visible.refresh()

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

    def cut(self, entry: OwnedParameter, state: dict[str, Any]) -> dict[str, Any]:
        """This rank's slices of a parameter's state, whole or as it is shown, in their places. ``state`` is emptied."""
        keys, sliced = list(state), {}
        for key in keys:
            value = state[key]
            if isinstance(value, SlicedTensor):
                own = value.elements(entry.layout.cut_of(entry.position))
                sliced[key] = own if isinstance(own, OffloadedTensor) else self._homes.put(entry, key, own.clone())
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
