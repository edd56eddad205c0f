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

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from copy import deepcopy
from typing import Any, NoReturn, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from lightning_zero.errors import UnsupportedOptimizerError
from lightning_zero.optim.groups import OwnedParameter
from lightning_zero.optim.state import copied, covers

__all__ = ["ParameterState", "ShownState", "Slices"]


class Slices(Protocol):
    """How slices of state are shown to user code."""

    def show(self, entry: OwnedParameter, key: str, own: Tensor, alive: Callable[[], bool]) -> Tensor:
        """A tensor of the parameter's shape for this rank's elements ``own``, 1-D, as long as they are ``alive``."""

    def own(self, entry: OwnedParameter, value: Tensor) -> Tensor | None:
        """This rank's elements, 1-D, of what ``show`` gave, or was made from it; ``None`` for any other tensor.

        Raises:
            ParameterAccessError: if they are not those that this rank has of the entry's parameter.
        """

    def note(self, entry: OwnedParameter, key: str, value: Any) -> None:
        """Note what user code put into the state, so that the ranks find out whether all did."""


class ShownState(MutableMapping[Any, Any]):
    """The state of one optimizer, by the user's parameters. A state that is not there is made when it is asked for.

    Args:
        label: how to name the optimizer in messages.
        state: the optimizer's own, by what it steps on. Read and written.
        owned: the engine's parameters by the user's.
        target: what the optimizer steps on in place of a parameter.
        adopt: cuts state of a parameter to this rank's slice.
        slices: how slices are shown; ``None`` where the optimizer has whole parameters at owner ranks.
    """

    def __init__(
        self,
        label: str,
        state: MutableMapping[Any, dict[str, Any]],
        owned: Mapping[nn.Parameter, OwnedParameter],
        target: Callable[[OwnedParameter], nn.Parameter],
        adopt: Callable[[OwnedParameter, dict[str, Any]], dict[str, Any]],
        slices: Slices | None,
    ) -> None:
        self._label = label
        self.state = state
        self.owned = owned
        self.target = target
        self._adopt = adopt
        self._slices = slices
        self._users: dict[nn.Parameter, nn.Parameter] = {}
        # What is in the user's hands stays the same object, as long as anybody holds it.
        self._handed: WeakValueDictionary[nn.Parameter, ParameterState] = WeakValueDictionary()
        self._recent: list[ParameterState] = []  # since the last step

    def know(self, members: Iterable[tuple[nn.Parameter, nn.Parameter]]) -> None:
        """Note which parameters of the user's the optimizer steps on by others: pairs of both."""
        self._users.update((target, user) for user, target in members)

    def refresh(self) -> None:
        """Show what a step, or a checkpoint, has put into the state, also in what was handed out before."""
        self._recent.clear()
        for entry in list(self._handed.values()):
            entry.refresh()

    def note_numbers(self) -> None:
        """Note step counters and the like that user code has changed in place."""
        for entry in {id(state): state for state in [*self._recent, *self._handed.values()]}.values():
            entry.note_numbers()

    def __getitem__(self, key: Any) -> Any:
        entry = self._entry(key)
        if entry is None:
            return self.state[key]
        self._check()
        inner = self.state[self.target(entry)]
        found = self._handed.get(key)
        if found is None or found.inner is not inner:
            self._users[self.target(entry)] = key
            found = self._handed[key] = ParameterState(entry, inner, self)
            self._recent.append(found)
        return found

    def __setitem__(self, key: Any, value: Any) -> None:
        entry = self._entry(key)
        if entry is None:
            self.state[key] = value
            return
        slices = self._check()
        for name, part in value.items():
            slices.note(entry, name, part)
        self._users[self.target(entry)] = key
        self.state[self.target(entry)] = self._adopt(entry, dict(value))
        self._handed.pop(key, None)

    def __delitem__(self, key: Any) -> None:
        entry = self._entry(key)
        if entry is None:
            del self.state[key]
            return
        slices = self._check()
        del self.state[self.target(entry)]
        slices.note(entry, "all", None)
        self._handed.pop(key, None)

    def __contains__(self, key: object) -> bool:
        entry = self._entry(key)
        if entry is None:
            return key in self.state
        self._check()
        return self.target(entry) in self.state

    def __iter__(self) -> Iterator[Any]:
        self._check()
        # The optimizer's own order depends on what this rank has of each parameter.
        known = [user for target, user in self._users.items() if target in self.state]
        return iter([*known, *(key for key in self.state if key not in self._users)])

    def __len__(self) -> int:
        self._check()
        return len(self.state)

    def get(self, key: Any, default: Any = None) -> Any:
        """As of every dictionary: nothing is made."""
        found = key in self
        return self[key] if found else default

    def copy(self) -> dict[Any, Any]:
        """Another dictionary of the same states."""
        return dict(self.items())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return {deepcopy(key, memo): deepcopy(value, memo) for key, value in self.items()}

    def __reduce__(self) -> NoReturn:
        raise UnsupportedOptimizerError(
            f"A pickle of {self._label} would hold one process's slices of its state. Save with "
            "`trainer.save_checkpoint`, which writes all of it, for any number of processes."
        )

    def __repr__(self) -> str:
        return f"State of {self._label}, sliced over ranks, of {len(self.state)} parameters"

    def shown(self, entry: OwnedParameter, key: str, inner: Mapping[str, Any], lives: dict[str, _Life]) -> Any:
        """What the user sees of one value; how long it is that is noted in ``lives``."""
        value = inner[key]
        if not covers(value, entry.slice.numel):
            return value
        # What user code takes out stays as it is; what a step has put elsewhere is not the state any more.
        life = lives[key] = _Life()
        return self._check().show(entry, key, value, lambda: life.free or inner.get(key) is value)

    def put(self, entry: OwnedParameter, key: str, value: Any) -> Any:
        """What is kept of one value that user code sets."""
        self._check().note(entry, key, value)
        return self._adopt(entry, {key: value})[key]

    def note(self, entry: OwnedParameter, key: str, value: Any = None) -> None:
        """Note that user code took a value out, or changed it."""
        self._check().note(entry, key, value)

    def _entry(self, key: object) -> OwnedParameter | None:
        return self.owned.get(key) if isinstance(key, nn.Parameter) else None

    def _check(self) -> Slices:
        if self._slices is None:
            raise UnsupportedOptimizerError(
                f"{self._label} needs whole parameters, so each one's state is at one process only. To read it "
                "anywhere: `lightning_zero.full_optimizer_state(module, name, key)`, on every rank."
            )
        return self._slices


class _Life:
    """Whether a value that was shown is nobody's state any more, but the user's own."""

    free = False


class ParameterState(dict[str, Any]):
    """The state of one parameter: what is set in it counts. Made of another dictionary, it is an ordinary one.

    Args:
        entry: the parameter.
        inner: what the optimizer has.
        shown: whose it is.
    """

    def __new__(cls, *args: Any) -> Any:
        """See the class."""
        return super().__new__(cls) if len(args) == 3 else dict(*args)

    def __init__(self, entry: OwnedParameter, inner: dict[str, Any], shown: ShownState) -> None:
        super().__init__()
        self.inner = inner
        self._entry = entry
        self._shown = shown
        self._lives: dict[str, _Life] = {}
        self._numbers: dict[str, Tensor] = {}  # as they were when they were shown
        self.refresh()

    def refresh(self) -> None:
        """Be what ``inner`` is now."""
        super().clear()
        super().update({key: self._shown.shown(self._entry, key, self.inner, self._lives) for key in self.inner})
        self._numbers = {key: copied(value) for key, value in self.items() if self._is_number(value)}

    def note_numbers(self) -> None:
        """Note those that have changed in place."""
        for key, before in self._numbers.items():
            value = self.get(key)
            if isinstance(value, Tensor) and not torch.equal(value, before):
                self._shown.note(self._entry, key, value)
                self._numbers[key] = copied(value)

    @staticmethod
    def _is_number(value: Any) -> bool:
        return type(value) is Tensor and not value.dim() and value.device.type == "cpu"

    def __setitem__(self, key: str, value: Any) -> None:
        if key in self and self[key] is value:
            return  # what ``state[key] *= x`` assigns
        put = self._shown.put(self._entry, key, value)
        self._free(key)
        self.inner[key] = put
        super().__setitem__(key, self._shown.shown(self._entry, key, self.inner, self._lives))

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        self._free(key)
        del self.inner[key]
        self._shown.note(self._entry, key)

    def _free(self, key: str) -> None:
        life = self._lives.pop(key, None)
        if life is not None:
            life.free = True

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
