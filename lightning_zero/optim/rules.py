"""Which optimizers step on slices, which need whole parameters, and which cannot be sharded."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from lightning_zero.config import Tier
from lightning_zero.errors import UnsupportedOptimizerError
from lightning_zero.optim.closures import demands_closure, step_of

__all__ = ["check_offloadable", "optimizer_rule"]

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


def _overrides_step(cls: type, base: type) -> bool:
    """Whether a subclass of a torch optimizer brings arithmetic of its own."""
    own = step_of(base)
    for klass in cls.__mro__:
        if klass is base:
            return False
        if "step" in klass.__dict__ and step_of(klass) is not own:
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
    if "_optimizer_step_pre_hooks" not in vars(optimizer):
        raise UnsupportedOptimizerError(
            f"{cls.__name__} cannot be sharded: it has no step hooks, because its __init__ does not call "
            "`super().__init__(params, defaults)`. Have it do so; a wrapper can pass the param_groups of what it wraps."
        )
    for refused, reason in _REFUSED.items():
        if isinstance(optimizer, refused):
            raise UnsupportedOptimizerError(f"{cls.__name__} cannot be sharded: {reason}.")
    refusal = demands_closure(optimizer)
    if refusal is not None:
        raise refusal
    for known in _ELEMENTWISE:
        if isinstance(optimizer, known):
            return "whole" if _overrides_step(cls, known) else "elementwise"
    return "whole"


def check_offloadable(optimizer: Optimizer, label: str, rule: str, tier: Tier, device: torch.device) -> None:
    """Refuse what cannot step on the host.

    Args:
        optimizer: the user's.
        label: how to name it.
        rule: what ``optimizer_rule`` said.
        tier: where its masters rest.
        device: where the module computes.

    Raises:
        UnsupportedOptimizerError: with the reason and what to do.
    """
    name = type(optimizer).__name__
    if rule == "whole" and tier is Tier.DISK:
        raise UnsupportedOptimizerError(
            f"{label}: {name} needs whole parameters at one rank, which cannot be stepped on in pieces from files. Use "
            "HostOffload (on the CPU), leave `offload` out, or use an optimizer of torch that works element by element "
            "such as AdamW."
        )
    if rule == "whole" and tier is Tier.HOST and device.type != "cpu":
        raise UnsupportedOptimizerError(
            f"{label}: {name} needs whole parameters at one rank, which are put together on the {device.type} device "
            "while the masters rest on the host. Leave `offload` out, or use an optimizer of torch that works element "
            "by element such as AdamW."
        )
    for option in ("capturable", "differentiable"):
        if tier is not Tier.DEVICE and any(group.get(option) for group in optimizer.param_groups):
            raise UnsupportedOptimizerError(
                f"{label}: {name}({option}=True) cannot step on the host, where offload keeps what it steps on. Build "
                f"it with {option}=False, or leave `offload` out."
            )
