"""What ``optimizer.state`` is between steps: read-only, by the user's parameters, of which this rank has slices.

[Note: the user's view of an optimizer]
Between steps an optimizer's param groups hold the user's own parameters, and its state goes by them, as in plain torch.
State that has an element for each element of the parameter is a ``ShardedTensor`` there: using its values raises by
name. Right before a step the shards, with their state, take the place of the parameters, and right after it the user's
view is back.

State may be deleted, for one parameter or all, or replaced as a whole by whole tensors, as ``load_state_dict`` does:
this rank's slices of them are copied before the next step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from copy import deepcopy
from typing import Any, NoReturn

from torch import Size, Tensor, nn
from torch.optim import Optimizer

from lightning_zero.errors import ParameterAccessError, UnsupportedOptimizerError
from lightning_zero.optim.state import copied, covers, shape_of
from lightning_zero.shards.sharded import ShardedTensor, Source
from lightning_zero.shards.slice import Slice, fingerprint

__all__ = ["OptimizerView", "ParameterState", "VisibleState"]

_ADVICE = (
    "To read it whole: `lightning_zero.full_optimizer_state(module, name, key)`, on every rank. To read or change this "
    "rank's slice: `lightning_zero.local_slices(module)`. To save it: `trainer.save_checkpoint`. `optimizer.state[p]` "
    "may be deleted, and `optimizer.load_state_dict` takes whole tensors."
)


class ParameterState(dict[str, Any]):
    """What the user reads of the optimizer's state for one parameter: numbers, and a sharded tensor for each slice."""

    name = ""
    """The parameter's."""

    @classmethod
    def of(cls, entry: Slice, state: Mapping[str, Any]) -> ParameterState:
        """Show the state of one parameter."""
        found = cls(state)
        for key, value in state.items():
            if covers(key, value, entry.place.numel):
                source = Source(f"optimizer state '{key}' of '{entry.name}'", _ADVICE, place=entry)
                shown = ShardedTensor(value, Size(shape_of(key, entry.user.shape)), source, entry.user.device)
                dict.__setitem__(found, key, shown)
        found.name = entry.name
        return found

    def _refuse_writes(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ParameterAccessError(f"The optimizer state of '{self.name}' cannot be written to. {_ADVICE}")

    __setitem__ = __delitem__ = pop = popitem = clear = update = setdefault = __ior__ = _refuse_writes

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class VisibleState(MutableMapping[Any, Any]):
    """The state of one optimizer by the user's parameters, over ``inner``, its state by shards."""

    def __init__(self, view: OptimizerView, inner: MutableMapping[Any, dict[str, Any]]) -> None:
        self._view = view
        self.inner = inner

    def _place(self, key: Any) -> tuple[Slice | None, Any]:
        entry = self._view.owned.get(key)
        if entry is None:
            return None, key
        self._view.check_shown()
        return entry, entry.target

    def __getitem__(self, key: Any) -> Any:
        entry, place = self._place(key)
        return self.inner[key] if entry is None else ParameterState.of(entry, self.inner.get(place, {}))

    def get(self, key: Any, default: Any = None) -> Any:
        there = key in self  # nothing is made
        return self[key] if there else default

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        entry, _ = self._place(key)
        what = repr(key) if entry is None else f"'{entry.name}'"
        raise ParameterAccessError(f"The optimizer state of {what} cannot be set. {_ADVICE}")

    def __delitem__(self, key: Any) -> None:
        entry, place = self._place(key)
        del self.inner[place]
        if entry is not None:
            self._view.note(f"the optimizer state 'all' of '{entry.name}'", 0)

    def pop(self, key: Any, *default: Any) -> Any:
        found = self.get(key, *default)  # the mapping's own would ask `[]`, which answers as a defaultdict does
        if key in self or not default:
            del self[key]
        return found

    def clear(self) -> None:
        self._view.check_shown()
        self.inner.clear()
        self._view.note(f"all of the state of {self._view.label}", 0)

    def __contains__(self, key: object) -> bool:
        return self._place(key)[1] in self.inner

    def __iter__(self) -> Iterator[Any]:
        self._view.check_shown()
        # The order of the optimizer's own state depends on what this rank has of each parameter.
        users = {entry.target: entry.user for entry in self._view.entries()}
        known = [user for target, user in users.items() if target in self.inner]
        return iter([*known, *(key for key in self.inner if key not in users)])

    def __len__(self) -> int:
        self._view.check_shown()
        return len(self.inner)

    def copy(self) -> dict[Any, Any]:
        return dict(self.items())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return deepcopy(self.copy(), memo)

    def __reduce__(self) -> NoReturn:
        raise UnsupportedOptimizerError(
            f"A pickle of {self._view.label} would hold one rank's slices of its state. Save with "
            "`trainer.save_checkpoint`, which writes all of it, for any number of ranks."
        )

    def __repr__(self) -> str:
        return f"State of {self._view.label}, sliced over ranks, of {len(self.inner)} parameters"


class OptimizerView:
    """Puts shards and their state in the place of what the user sees, for a step, and back.

    Before the first ``take_over`` the state is what a constructor has made. With ``whole`` parameters at owner ranks it
    is not shown. ``note`` is called with what user code writes.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        label: str,
        owned: Mapping[nn.Parameter, Slice],
        note: Callable[[str, int], None],
        whole: bool,
    ) -> None:
        self.label = label
        self.owned = owned
        self.note = note
        self.members: list[list[Slice]] = []
        """The parameters of each param group."""
        self.stand_ins: list[list[nn.Parameter]] = []
        """What each group holds during a step."""
        self._optimizer = optimizer
        self._whole = whole
        # A wrapper may show the state of the optimizer that it wraps: then it stays as the optimizer steps with it.
        state = getattr(type(optimizer), "state", None)
        self._fixed = isinstance(state, property) and state.fset is None
        self.wraps = False
        """Whether the state is that of another optimizer, which this one wraps."""
        for inner in vars(optimizer).values():
            if isinstance(inner, Optimizer) and inner.param_groups is optimizer.param_groups:
                if not optimizer.state and not self._fixed:  # as timm's Lookahead, with the `state_dict` of the other
                    optimizer.state = inner.state
                self.wraps |= optimizer.state is inner.state
        self._taken = False
        self._visible = VisibleState(self, optimizer.state)
        self._former: list[tuple[dict[str, Any], list[nn.Parameter]]] | None = None  # groups, and what the user sees

    @property
    def state(self) -> MutableMapping[Any, dict[str, Any]]:
        """The state as the optimizer steps with it: this rank's slices, by shards."""
        return self._visible.inner

    @property
    def entered(self) -> bool:
        """Whether groups and state are those of a step now."""
        return self._former is not None

    @property
    def replaced(self) -> bool:
        """Whether user code, or a constructor, has put a state of its own into the optimizer."""
        if self._fixed or self._former is not None:
            return self._former is None and not self._taken
        state: Any = self._optimizer.state
        return state is not self._visible

    def entries(self) -> list[Slice]:
        """Those of the groups in their order, then what the user has taken out of them."""
        return [*dict.fromkeys([*(entry for group in self.members for entry in group), *self.owned.values()])]

    def check_shown(self) -> None:
        """Refuse to show state that is on one rank only."""
        if self._whole:
            raise UnsupportedOptimizerError(
                f"{self.label} needs whole parameters, so each one's state is on one rank only. To read it "
                "anywhere: `lightning_zero.full_optimizer_state(module, name, key)`, on every rank."
            )

    def enter(self) -> None:
        """Put shards, and the state that goes by them, in the place of what the user sees."""
        self._former = former = []
        for group, parameters in zip(self._optimizer.param_groups, self.stand_ins, strict=True):
            former.append((group, group["params"]))
            group["params"] = parameters
        if not self._fixed:
            self._optimizer.state = self._visible.inner  # type: ignore[assignment]

    def leave(self) -> None:
        """Let the user see groups and state again. May be called again."""
        if self._former is None:
            return
        for group, parameters in self._former:
            group["params"] = parameters
        self._former = None
        self.show()

    def let_go(self) -> None:
        """Give the optimizer back, without state."""
        self.leave()
        self.state.clear()
        if not self._fixed:
            self._optimizer.state = self._visible.inner  # type: ignore[assignment]

    def show(self) -> None:
        """Let the user see the state as it is now."""
        self._taken = True
        if not self._fixed:
            self._optimizer.state = self._visible  # type: ignore[assignment]

    def take_over(self, put: Callable[[Slice, dict[str, Any]], None]) -> None:
        """Take over a ``replaced`` state: ``put`` gets that of each parameter, whole. Local."""
        found: Any = self._optimizer.state
        if isinstance(found, VisibleState):
            raise UnsupportedOptimizerError(f"{self.label} got back a state that it had before. {_ADVICE}")
        given = list(found.items())
        if found is self.state:  # a constructor's: nothing is kept twice
            found.clear()
        else:
            self.note(f"the state of {self.label}", len(given))
            for parameter, values in given:
                if (entry := self.owned.get(parameter)) is not None:
                    self._check_rounded(entry, values)
                    plain = {k: v.history if isinstance(v, ShardedTensor) else v for k, v in values.items()}
                    self.note(f"the optimizer state of '{entry.name}'", fingerprint(plain))
            self._visible = VisibleState(self, defaultdict(dict))
        for key, values in given:
            if (entry := self.owned.get(key)) is None:
                self.state[key] = values
            else:
                # A step counter must not change with the one that it was loaded from. Anything else is copied by parts.
                put(entry, {k: v if isinstance(v, Tensor) and v.dim() else copied(v) for k, v in values.items()})
        self.show()

    def _check_rounded(self, entry: Slice, values: Mapping[str, Any]) -> None:
        """``load_state_dict`` gives state the parameter's dtype, which is not that of the state in mixed precision."""
        dtype = entry.user.dtype
        for key, value in values.items() if dtype != entry.layout.dtype else ():
            if isinstance(value, Tensor) and value.dim() and value.dtype == dtype:
                raise UnsupportedOptimizerError(
                    f"{self.label} got the state '{key}' of '{entry.name}' in {value.dtype}, which "
                    f"`load_state_dict` makes of it because the parameter is; the optimizer has it in "
                    f"{entry.layout.dtype}. Resume with `trainer.fit(..., ckpt_path=...)`, which rounds nothing."
                )
