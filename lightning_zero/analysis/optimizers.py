"""What an optimizer keeps for each element it updates, and what a step of it makes beside that.

[Note: memory of a step]

A step passes over the masters in one of three ways. *Loop*, torch's default on the CPU: one parameter after the other,
so what it makes has the size of the largest, beside what Python still holds of the one before; small ones are left out,
which are put together and are few bytes. *Foreach*, the default on accelerators: each operation passes over all
parameters of a group before the next one begins, so what it makes has the size of all of them. *Fused*: one pass, which
makes nothing. Numbers are those of torch 2.11 to 2.15; a test counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch.optim import Optimizer

from lightning_zero._torch import without_hooks

__all__ = ["ADAM", "SEGMENT_NUMEL", "SMALL_NUMEL", "OptimizerCost"]

SMALL_NUMEL = 4_096
"""Elements of the largest parameter that a step on a CPU puts together with others."""

SEGMENT_NUMEL = 65_536
"""Elements that are put together at most: in float32 256 KiB, which a core's cache holds."""


@dataclass(frozen=True, kw_only=True)
class OptimizerCost:
    """What an optimizer costs, in tensors as large as what it updates. See [Note: memory of a step].

    Attributes:
        name: of its class, for people.
        state: kept between steps: 2 for Adam, 1 for SGD with momentum, 0 for plain SGD.
        loop: made for a parameter by a step that takes one after the other.
        kept: of those, left over while the next parameter has its turn.
        foreach: made during a step that takes all at once, each as large as all.
        way: ``"loop"``, ``"foreach"`` or ``"fused"``; ``None``: torch chooses by the device.
        whole: it needs whole parameters, so each parameter has an owner rank that keeps a copy of it, and during the
            step its whole gradient.

    Raises:
        ValueError: if a number is negative or the way unknown.
    """

    name: str
    state: int
    loop: int = 0
    kept: int = 0
    foreach: int = 0
    way: str | None = None
    whole: bool = False

    def __post_init__(self) -> None:
        if min(self.state, self.loop, self.kept, self.foreach) < 0:
            raise ValueError(f"An optimizer holds 0 tensors or more, got {self}.")
        if self.way not in (None, "loop", "foreach", "fused"):
            raise ValueError(f"way must be 'loop', 'foreach' or 'fused', got {self.way!r}.")

    def way_on(self, accelerator: bool) -> str:
        """How it steps on such a device. Whole parameters are stepped on one by one."""
        return self.way or ("foreach" if accelerator and not self.whole else "loop")

    def step_nbytes(self, sizes: Sequence[int], accelerator: bool) -> int:
        """Most bytes that a step makes and holds at once, for tensors of these sizes in bytes, in its order."""
        way = self.way_on(accelerator)
        if way == "foreach":
            return self.foreach * sum(sizes)
        if way == "fused":
            return 0
        return max((self.loop * size + self.kept * before for before, size in pairwise([0, *sizes])), default=0)

    @classmethod
    def of(cls, optimizer: Optimizer | type | str | OptimizerCost, **options: Any) -> OptimizerCost:
        """What is known about an optimizer; a cost stays as it is.

        A class that is not torch's, nor derived from one, counts as one that needs whole parameters and keeps two
        tensors for each, as most of them do. One with a ``step`` of its own, or an ``_init_group``, needs whole
        parameters, too.

        Args:
            optimizer: an instance, whose largest param group's options count; a class; or the name of one of torch's.
            options: arguments that a class is used with, such as ``momentum=0.9`` or ``fused=True``.

        Raises:
            ValueError: if it is none of these.
        """
        if isinstance(optimizer, OptimizerCost):
            return optimizer
        if isinstance(optimizer, Optimizer):
            groups = optimizer.param_groups
            largest = max(groups, key=lambda group: sum(p.numel() for p in group["params"]), default={})
            options = {**largest, **options}
            changed = "_init_group" in vars(optimizer)
            optimizer = type(optimizer)
        else:
            changed = False
        if isinstance(optimizer, type):
            name = optimizer.__name__
            known, own_step = _of_torch(optimizer)
        elif isinstance(optimizer, str):
            module, _, name = optimizer.rpartition(".")
            known = name if name in _COSTS and (not module or module.startswith("torch.optim")) else None
            own_step = False
            if known is None and not module:
                raise ValueError(f"torch has no optimizer {name!r} that is known here: give its class.")
        else:
            raise ValueError(f"An optimizer, its class or its name is needed, got {optimizer!r}.")
        state, loop, kept, foreach = _COSTS[known](options) if known is not None else (2, 2, 1, 0)
        way = next((way for way in ("fused", "foreach") if options.get(way)), None)
        if way is None and options.get("foreach") is False:
            way = "loop"
        whole = changed or own_step or known is None or known in _WHOLE
        return cls(name=name, state=state, loop=loop, kept=kept, foreach=foreach, way=way, whole=whole)


def _of_torch(cls: type) -> tuple[str | None, bool]:
    """The name of torch's optimizer that a class is or derives from, and whether it steps in a way of its own."""
    base: Any = next((base for base in cls.__mro__ if base.__module__.startswith("torch.optim")), None)
    if base is None or base.__name__ not in _COSTS:
        return None, False
    derived = [vars(each) for each in cls.__mro__[: cls.__mro__.index(base)]]
    # Without what torch puts around a class's step when the first optimizer of it is made, also where it inherits it.
    own_step = any(without_hooks(own["step"]) is not without_hooks(base.step) for own in derived if "step" in own)
    # An `_init_group` sees, and may change, all that is about to be stepped on.
    init_group = base._init_group
    return base.__name__, own_step or any(own.get("_init_group", init_group) is not init_group for own in derived)


_Options = Mapping[str, Any]
_Cost = Callable[[_Options], tuple[int, int, int, int]]


def _on(options: _Options, *names: str) -> int:
    """How many of these options are given and not zero."""
    return sum(bool(options.get(name)) for name in names)


def _sgd(options: _Options) -> tuple[int, int, int, int]:
    momentum, changed = _on(options, "momentum"), min(1, _on(options, "weight_decay", "maximize"))
    return momentum, changed + _on(options, "nesterov"), 0, changed


def _adam(options: _Options, decoupled: bool = False) -> tuple[int, int, int, int]:
    changed = _on(options, "maximize") or (not decoupled and _on(options, "weight_decay"))
    return 2 + _on(options, "amsgrad"), 2 + changed, 1, 1


def _decayed(state: int, loop: int, kept: int, foreach: int, *, more: int = 0, states: tuple[str, ...] = ()) -> _Cost:
    """With weight decay a step makes the decayed gradients, in foreach ``more`` tensors. ``states``: options that each
    keep another tensor."""

    def cost(options: _Options) -> tuple[int, int, int, int]:
        decay = _on(options, "weight_decay")
        return state + _on(options, *states), loop + decay, kept, foreach + more * decay

    return cost


# Class to (state, made in a loop, of it kept, made by foreach).
_COSTS: Mapping[str, _Cost] = {
    "SGD": _sgd,
    "Adam": _adam,
    "AdamW": lambda options: _adam(options, decoupled=True),
    "Adamax": _decayed(2, 1, 0, 1),
    "NAdam": _decayed(2, 2, 1, 1, more=1),
    "RAdam": _decayed(2, 2, 0, 1),
    "Adagrad": _decayed(1, 1, 1, 2),
    "Adadelta": _decayed(2, 2, 1, 2, more=1),
    "RMSprop": _decayed(1, 1, 1, 1, more=1, states=("momentum", "centered")),
    "Rprop": lambda options: (2, 3, 0, 2),
    "ASGD": _decayed(1, 0, 0, 1),
    "Muon": lambda options: (1, 3, 0, 0),
    "Adafactor": lambda options: (0, 3, 0, 0),  # its state is a row and a column of a matrix
}
_WHOLE = frozenset({"Muon", "Adafactor"})

ADAM = OptimizerCost.of("AdamW")
