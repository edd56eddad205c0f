"""Lightning's own callbacks: refused by name where sharded parameters cannot serve them, and told what they ask."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_zero.errors import ParameterAccessError

__all__ = ["WatchedNames", "refuse_callbacks"]


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


class WatchedNames:
    """Lets ``ModelCheckpoint`` know of what is being written in the background: it chooses names that are not taken.

    Args:
        callbacks: the Trainer's.
        is_underway: whether a name is that of a checkpoint which is being written. Collective: every rank asks.
    """

    def __init__(self, callbacks: Iterable[Callback], is_underway: Callable[[Any], bool]) -> None:
        self._watched = [callback for callback in callbacks if isinstance(callback, ModelCheckpoint)]
        for callback in self._watched:
            known = callback.file_exists
            callback.file_exists = lambda path, trainer, known=known: (  # type: ignore[method-assign, misc]
                known(path, trainer) or is_underway(path)
            )
        if any(callback.save_last == "link" for callback in self._watched):
            rank_zero_warn(
                'ModelCheckpoint(save_last="link") points last.ckpt to a new checkpoint at once, but with async_save '
                "the checkpoint is there only a while later: a run that is killed in between has no last.ckpt to go on "
                "from. Use save_last=True."
            )

    def release(self) -> None:
        """Give the callbacks their own method back."""
        for callback in self._watched:
            del callback.file_exists
        self._watched = []
