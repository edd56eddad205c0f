"""Lightning's own callbacks that sharded parameters cannot serve, refused by name before they do harm."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)

from lightning_zero.errors import ParameterAccessError

__all__ = ["refuse_callbacks"]


def refuse_callbacks(callbacks: Iterable[Callback], partial: bool) -> None:
    """Name callbacks that handle parameters in a way sharding cannot serve, and warn of what differs from DDP.

    Args:
        callbacks: the Trainer's.
        partial: whether parameters do not hold their values between steps.

    Raises:
        ParameterAccessError: naming the callback.
    """
    for callback in callbacks:
        name = type(callback).__name__
        if isinstance(callback, BaseFinetuning):
            raise ParameterAccessError(
                f"{name} unfreezes parameters and adds them to the optimizer during training, but gradient memory "
                "is laid out at set-up. Leave them trainable from the start in a param group whose rate is "
                "0 until they are to move, or start a new fit after unfreezing."
            )
        if isinstance(callback, ModelPruning) and callback._use_lottery_ticket_hypothesis:  # 2.6
            warnings.warn(
                f"{name}(use_lottery_ticket_hypothesis=True) makes the weights it remembers the parameters' memory. "
                "Under DDP they are trained along, so that what is given back are weights of the last epoch. Here they "
                "keep the values of the beginning, and results differ from DDP's. With False they are the same.",
                stacklevel=2,
            )
        if partial and isinstance(callback, (StochasticWeightAveraging, WeightAveraging)):
            raise ParameterAccessError(
                f"{name} copies and overwrites parameters between steps, where parameters that are sharded or "
                "computed in 16 bit do not hold their values. Use stage 1 or 2 in full precision, or average in a "
                "callback of your own inside `with lightning_zero.full_parameters(module):`, on every rank."
            )
