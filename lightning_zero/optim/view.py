"""Two views of one optimizer: the user's between steps, and what it steps on.

See [Note: the user's view of an optimizer].
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.errors import UnsupportedOptimizerError
from lightning_zero.optim.groups import OwnedParameter, Targets
from lightning_zero.optim.shown import ShownState, Slices
from lightning_zero.optim.state import StateHomes, copied
from lightning_zero.storage.file_tensor import FileTensor

__all__ = ["OptimizerView"]


class OptimizerView:
    """Puts one view in the place of the other.

    Args:
        optimizer: the user's. Its state may hold what its constructor has made, until ``take_over``.
        label: how to name it in messages.
        owned: the engine's parameters by the user's.
        homes: where slices of state rest.
        slices: how they are shown to user code.
        whole: whether state is at owner ranks, and not shown.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        label: str,
        owned: Mapping[nn.Parameter, OwnedParameter],
        homes: StateHomes,
        slices: Slices,
        whole: bool,
    ) -> None:
        self._optimizer = optimizer
        self._label = label
        self._owned = owned
        self._homes = homes
        self._slices = slices
        self._users = {id(entry): parameter for parameter, entry in owned.items()}
        self.target = Targets().of
        """The shard that stands for a parameter in a step."""
        self.state: MutableMapping[Any, dict[str, Any]] = optimizer.state
        """The state as the optimizer steps with it: this rank's slices, by what stands for the parameters."""
        # Of a wrapper, for example, that shows the state of what it wraps: there it is as it steps with it at any time.
        state = getattr(type(optimizer), "state", None)
        self._fixed = isinstance(state, property) and state.fset is None
        self._taken = False
        self._whole = whole
        self._shown = self._show_of(self.state)
        self.members: list[list[OwnedParameter]] = []
        """The parameters of each group that ``enter`` puts there."""
        self._lists: list[list[nn.Parameter]] = []
        self._held: list[tuple[dict[str, Any], list[nn.Parameter]]] | None = None

    def _show_of(self, state: MutableMapping[Any, dict[str, Any]]) -> ShownState:
        slices = None if self._whole else self._slices
        return ShownState(self._label, state, self._owned, self.target, self.cut, slices)

    def user(self, entry: OwnedParameter) -> nn.Parameter:
        """The user's parameter."""
        return self._users[id(entry)]

    @property
    def entered(self) -> bool:
        """Whether groups and state are those of a step now."""
        return self._held is not None

    @property
    def replaced(self) -> bool:
        """Whether user code, or a constructor, has put a state of its own into the optimizer."""
        state: Any = self._optimizer.state
        return not self.entered and (not self._taken if self._fixed else state is not self._shown)

    def step_on(self, members: list[list[OwnedParameter]], lists: list[list[nn.Parameter]]) -> None:
        """Say what groups hold in a step from now on.

        Args:
            members: the parameters of each group.
            lists: what the optimizer steps on, of each group.
        """
        self.members, self._lists = members, lists
        self._know()

    def _know(self) -> None:
        self._shown.know((self.user(entry), self.target(entry)) for group in self.members for entry in group)

    def enter(self) -> None:
        """Put shards, and the state that goes by them, in the place of what the user sees."""
        groups = self._optimizer.param_groups
        self._held = [(group, group["params"]) for group in groups]
        for group, parameters in zip(groups, self._lists, strict=True):
            group["params"] = parameters
        self._set_state(self.state)

    def pass_over(self, stepped: Iterable[nn.Parameter] | None) -> None:
        """Leave what is stepped on already, or everything, to no other step than that."""
        done = None if stepped is None else set(stepped)
        for group, parameters in zip(self._optimizer.param_groups, self._lists, strict=True):
            group["params"] = [p for p in parameters if p not in done] if done is not None else []

    def leave(self) -> None:
        """Let the user see groups and state again. May be called again."""
        held, self._held = self._held, None
        if held is None:
            return
        for group, parameters in held:
            group["params"] = parameters
        self.show()

    def show(self) -> None:
        """Let the user see the state as it is now."""
        self._set_state(self._shown)
        self._shown.refresh()

    def note_numbers(self) -> None:
        """Note what user code has changed in place that is no slice, before the ranks compare."""
        if not self._whole:
            self._shown.note_numbers()

    def let_go(self) -> None:
        """Give the optimizer back, without state."""
        self._set_state(self.state)
        self.state.clear()

    def _set_state(self, state: Any) -> None:
        if not self._fixed:
            self._optimizer.state = state

    def take_over(self, put: Callable[[OwnedParameter, dict[str, Any]], None]) -> None:
        """Take over a state that is ``replaced``. Local.

        Args:
            put: takes the state of one parameter, which is its own to change.

        Raises:
            UnsupportedOptimizerError: if it was rounded.
        """
        found: Any = self._optimizer.state
        self._taken = True
        if found is self.state:  # a constructor's: nothing is kept twice
            for key in list(found):
                self._take(key, found.pop(key), put)
            self.show()
            return
        for first in self.members[0][:1] if self.members else ():
            self._slices.note(first, "all", None)
        if isinstance(found, ShownState) and found.owned is self._owned and found.target == self.target:
            self.state, self._shown, given = found.state, found, []  # one that was there before
        else:
            given = list(found.items())
            for parameter, values in given:
                self._check_rounded(parameter, values)
            # What was shown goes on being what it was, in the user's hands.
            self.state = type(self.state)(*([dict] if isinstance(self.state, defaultdict) else []))
            self._shown = self._show_of(self.state)
        self._know()
        for key, values in given:
            entry = self._owned.get(key)
            if entry is not None:
                for name, value in values.items():
                    self._slices.note(entry, name, value)
                values = {name: _own_scalar(value) for name, value in values.items()}
            self._take(key, values, put)
        self.show()

    def _take(self, key: Any, values: Any, put: Callable[[OwnedParameter, dict[str, Any]], None]) -> None:
        entry = self._owned.get(key)
        if entry is None:
            self.state[key] = values
        else:
            put(entry, values)

    def cut(self, entry: OwnedParameter, state: dict[str, Any]) -> dict[str, Any]:
        """This rank's slices of state of a parameter, in their places.

        Args:
            entry: the parameter.
            state: whole, or as it is shown. Emptied.
        """
        keys, sliced = list(state), {}
        for key in keys:
            own = self._slices.own(entry, state[key]) if isinstance(state[key], Tensor) else None
            if own is not None:
                sliced[key] = own if isinstance(own, FileTensor) else self._homes.put(entry, key, own.clone())
                del state[key]
        sliced |= self._homes.adopt(entry, state)
        return {key: sliced[key] for key in keys}

    def _check_rounded(self, parameter: Any, values: Mapping[str, Any]) -> None:
        """``load_state_dict`` gives state the parameter's dtype, which is not that of the state in mixed precision."""
        entry = self._owned.get(parameter)
        if entry is None or parameter.dtype == entry.layout.dtype:
            return
        for key, value in values.items():
            if isinstance(value, Tensor) and value.dim() and value.dtype == parameter.dtype:
                raise UnsupportedOptimizerError(
                    f"{self._label} got the state '{key}' of '{entry.shard.spec.name}' in {value.dtype}, which "
                    f"`load_state_dict` makes of it because the parameter is; the optimizer has it in "
                    f"{entry.layout.dtype}. Resume with `trainer.fit(..., ckpt_path=...)`, which rounds nothing."
                )


def _own_scalar(value: Any) -> Any:
    """A step counter that does not change with the one that it was loaded from; anything else as it is, to be cut."""
    return copied(value) if isinstance(value, Tensor) and not value.dim() else value
