"""Which optimizers step on slices, which need whole parameters, and which cannot be sharded."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from lightning_zero.errors import UnsupportedOptimizerError

__all__ = ["optimizer_rule"]

_ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.AdamW,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)
_REFUSED = {
    torch.optim.LBFGS: "its line search takes dot products over all parameters at once; use AdamW or Adam instead",
    torch.optim.SparseAdam: (
        "it needs sparse gradients and sharded gradients are dense; use Adam with the same options instead"
    ),
}


def _step_of(cls: type) -> Any:
    step = cls.__dict__.get("step")
    while step is not None and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step


def _overrides_step(cls: type, base: type) -> bool:
    """Whether a subclass of a torch optimizer brings arithmetic of its own."""
    own = _step_of(base)
    for klass in cls.__mro__:
        if klass is base:
            return False
        if "step" in klass.__dict__ and _step_of(klass) is not own:
            return True
    return False


def optimizer_rule(optimizer: Optimizer) -> str:
    """How an optimizer is served: ``elementwise`` (on slices) or ``whole`` (on whole parameters at their owner).

    Optimizers we do not know treat each parameter on its own as a rule, so they get whole parameters: always right, at
    the price of two more exchanges per step.

    Raises:
        UnsupportedOptimizerError: for an optimizer neither way can serve, with the reason and an alternative.
    """
    cls = type(optimizer)
    for refused, reason in _REFUSED.items():
        if isinstance(optimizer, refused):
            raise UnsupportedOptimizerError(f"{cls.__name__} cannot be sharded: {reason}.")
    for known in _ELEMENTWISE:
        if isinstance(optimizer, known):
            return "whole" if _overrides_step(cls, known) else "elementwise"
    return "whole"
