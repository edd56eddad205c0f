"""Trying out, on tiny tensors, whether an optimizer nobody knows gives the same numbers when ranks share its work.

[Note: optimizers that relate parameters to one another]
An optimizer with a ``step`` of its own gets whole parameters, each at one rank. That is right as long as it treats each
parameter on its own. One that takes a norm over all of them, counts them, goes by their places, or draws random
numbers would train something else on every rank, and nobody would see it. So before the first step a copy of it steps
on small tensors in place of the parameters: once with all of them, and once as each of two ranks would see them.
"""

from __future__ import annotations

import copy
import random
import sys
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves  # private: 2.11 to 2.15

from lightning_zero._torch import bare_step
from lightning_zero.errors import UnsupportedOptimizerError
from lightning_zero.optim.closures import naming_closures

__all__ = ["try_in_parts"]

_LENGTH = 4  # of a stand-in, in each dimension at most
_SCALES = (1e-3, 1.0, 1e3)  # of gradients: some clip only large ones, others raise small ones
_STEPS = 2
_WHY = (
    "{label} cannot be sharded. Tried out on small tensors, its step() {found} when each rank steps on some of "
    "the parameters only. So it takes a norm over all parameters, counts them or goes by their places, draws random "
    "numbers, uses parameters whose `grad` is None, or keeps parameters beside `self.param_groups`. Have step() treat "
    "each parameter on its own, pass over those without `grad`, keep what belongs to one in `self.state[parameter]`, "
    "and do the rest outside: `Trainer(gradient_clip_val=...)` for a norm of gradients, `full_gradients` in "
    "`on_before_optimizer_step`, options of param groups for what differs between parameters."
)


def try_in_parts(optimizer: Optimizer, label: str) -> None:
    """Refuse an optimizer whose parameters cannot be dealt out to ranks. See the note of the file. Local.

    An optimizer that does not step on small tensors at all, or cannot be copied, is let through with a warning.

    Args:
        optimizer: over the user's parameters, whose values need not be there; it is not changed.
        label: how to name it.

    Raises:
        UnsupportedOptimizerError: if the numbers differ, only a part of the parameters makes it raise, or it asks for a
            closure.
    """
    if type(optimizer).__module__.startswith("torch.optim"):
        return
    try:
        with _own_random_numbers(), naming_closures(optimizer), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = next(filter(None, (_difference(optimizer, scale) for scale in _SCALES)), "")
    except UnsupportedOptimizerError:
        raise
    except Exception as error:
        warnings.warn(
            f"{label} could not be tried out on small tensors ({type(error).__name__}: {error}). It gets "
            "whole parameters, each at one rank, which is right if its step() treats every parameter on its own.",
            stacklevel=2,
        )
        return
    if found:
        raise UnsupportedOptimizerError(_WHY.format(label=label, found=found))


def _difference(optimizer: Optimizer, scale: float) -> str:
    """What is different if two ranks step on half of the parameters each; empty if nothing is."""
    whole = _stepped(optimizer, scale, None)
    try:
        parts = [_stepped(optimizer, scale, rank) for rank in (0, 1)]
    except Exception as error:
        return f"raises {type(error).__name__} ({shorten(str(error), 120)})"
    dealt = [parts[place % 2][place] for place in range(len(whole))]
    same = all(torch.allclose(a, b, 1e-4, 0.0, equal_nan=True) for a, b in zip(whole, dealt, strict=True))
    return "" if same else "gives other numbers"


@contextmanager
def _own_random_numbers() -> Iterator[None]:
    """Whatever is drawn or seeded inside, generators go on afterwards as if nothing had been."""
    numpy: Any = sys.modules.get("numpy")
    states = random.getstate(), None if numpy is None else numpy.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(states[0])
        if numpy is not None:
            numpy.random.set_state(states[1])


def _stepped(optimizer: Optimizer, scale: float, rank: int | None) -> list[Tensor]:
    """All stand-ins after some steps of a copy; ``rank``: which of two it is, ``None``: the only one."""
    torch.manual_seed(0)
    random.seed(0)
    originals = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    stand_ins = [_stand_in(parameter) for parameter in originals]
    gradients = [[scale * torch.randn_like(s) for s in stand_ins] for _ in range(_STEPS)]
    twin = _copied(optimizer, {id(p): s for p, s in zip(originals, stand_ins, strict=True)})
    stepped = list(stand_ins)
    if rank is not None:  # what it owns, as parameters that the optimizer has not seen, and behind that slices of all
        owned = {s: nn.Parameter(s.detach(), s.requires_grad) for s in stand_ins[rank::2]}
        stepped = [owned.get(s, s) for s in stand_ins]
        for group in twin.param_groups:
            slices = [p.detach().flatten()[: 0 if p in owned else 2].clone() for p in group["params"]]
            group["params"] = [*(owned[p] for p in group["params"] if p in owned), *map(nn.Parameter, slices)]
    for step in gradients:
        for place, (parameter, gradient) in enumerate(zip(stepped, step, strict=True)):
            parameter.grad = gradient if parameter.requires_grad and rank in (None, place % 2) else None
        bare_step(twin)()
    return [stand_in.detach() for stand_in in stand_ins]


def _stand_in(parameter: Tensor) -> nn.Parameter:
    shape = [min(length, _LENGTH) for length in parameter.shape]
    values = torch.randn(shape, dtype=parameter.dtype)
    return nn.Parameter(values, requires_grad=parameter.requires_grad)


def _cut(state: Tensor) -> Tensor:
    """What goes with a parameter in an attribute of the optimizer (``self.bufs``), as small as its stand-in."""
    return state.detach()[tuple(slice(_LENGTH) for _ in state.shape)].to("cpu", copy=True)


def _copied(optimizer: Optimizer, stand_ins: dict[int, Any]) -> Optimizer:
    """The same optimizer over other parameters, without hooks and schedulers, before its first step."""
    twin: Optimizer = object.__new__(type(optimizer))
    memo: dict[int, Any] = {**stand_ins, id(optimizer): twin}
    shapes = {parameter.shape for group in optimizer.param_groups for parameter in group["params"]}
    for value in tree_leaves(vars(optimizer)):
        if isinstance(value, Tensor) and value.shape in shapes and id(value) not in memo:
            memo[id(value)] = _cut(value)
    for key, value in vars(optimizer).items():
        if key == "state":
            vars(twin)[key] = defaultdict(dict)
        elif "hooks" in key:
            vars(twin)[key] = OrderedDict()
        elif key != "step":
            vars(twin)[key] = copy.deepcopy(value, memo)
    return twin
