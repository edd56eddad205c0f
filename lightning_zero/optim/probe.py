"""What state an optimizer will make for a parameter: found out before it has made any."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero._torch import untracked
from lightning_zero.optim.bare import BareStep
from lightning_zero.optim.slices import SCALARS, covers
from lightning_zero.plan.flat import ALIGNMENT

__all__ = ["probe_state"]


def probe_state(optimizer: Optimizer, group: int, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The optimizer's state of which every element of a parameter has one.

    A constructor that makes state for its parameters has told already. Otherwise the optimizer steps once on a tiny
    parameter of zeros with a gradient of zeros; nothing of that is left behind.

    Args:
        optimizer: an elementwise one, over the user's parameters or over shards.
        group: index of the param group whose options hold.
        dtype: of the master.

    Returns:
        State key to dtype; empty for an optimizer without such state.
    """
    options = optimizer.param_groups[group]
    for parameter in options["params"]:
        if parameter.dtype == dtype and optimizer.state.get(parameter):
            return _like(optimizer.state[parameter], parameter)
    with untracked():
        tiny = nn.Parameter(torch.zeros(ALIGNMENT, dtype=dtype))
        tiny.grad = torch.zeros(ALIGNMENT, dtype=dtype)
    attributes = dict(vars(optimizer))
    stand_ins: list[list[nn.Parameter]] = [[] for _ in optimizer.param_groups]
    stand_ins[group].append(tiny)
    try:
        BareStep(optimizer)(stand_ins)
        return {key: value.dtype for key, value in optimizer.state.get(tiny, {}).items() if covers(value, ALIGNMENT)}
    finally:
        optimizer.state.pop(tiny, None)
        vars(optimizer).clear()  # torch notes there which checks of a first step it has made
        vars(optimizer).update(attributes)


def _like(state: dict[str, Any], parameter: Tensor) -> dict[str, torch.dtype]:
    return {
        key: value.dtype
        for key, value in state.items()
        if isinstance(value, Tensor) and value.shape == parameter.shape and (value.dim() or key not in SCALARS)
    }
