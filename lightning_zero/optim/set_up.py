"""The optimizers that ``configure_optimizers`` has returned, before shards take the place of their parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_zero.comm import ControlGroup
from lightning_zero.optim.comparison import agree_on_optimizers, described
from lightning_zero.optim.groups import ParamGroups
from lightning_zero.optim.kept import kept_of
from lightning_zero.optim.owned import OwnedParameter

__all__ = ["agree_on_set_up"]


def agree_on_set_up(
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[Mapping[str, Any]],
    owned: Mapping[nn.Parameter, OwnedParameter],
    control: ControlGroup,
) -> list[str]:
    """Compare optimizers and schedulers of all ranks. Groups hold the user's parameters from now on.

    Args:
        optimizers: the user's.
        schedulers: settings of each scheduler, with the scheduler itself under ``"scheduler"``.
        owned: the engine's parameters by the user's.
        control: the ranks.

    Returns:
        How messages name each optimizer, the same on every rank.

    Raises:
        DivergenceError: on every rank, naming ranks, optimizer, param group, option or parameter, and the values.

    Collective: every rank.
    """
    names = [type(optimizer).__name__ for optimizer in optimizers]
    labels = [name if len(names) == 1 else f"{name} {index}" for index, name in enumerate(names)]
    descriptions = []
    for optimizer, label in zip(optimizers, labels, strict=True):
        used = kept_of(optimizer) is not None
        members = ParamGroups(optimizer, label, owned).names()
        descriptions.append(described(optimizer, label, members, used))
    agree_on_optimizers(control, descriptions, schedulers, optimizers)
    return labels
