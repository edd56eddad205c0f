"""What of Lightning sharded parameters cannot serve, callbacks and strategies, refused by name before it does harm."""

from __future__ import annotations

from collections.abc import Iterable

from lightning.pytorch.callbacks import BaseFinetuning, Callback, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerStatus
from torch import nn

from lightning_zero.errors import ParameterAccessError

__all__ = ["refuse_callbacks", "refuse_other_strategies"]


def refuse_other_strategies(kind: type[Strategy], module: nn.Module) -> None:
    """Raise if a Trainer with a strategy of another kind trains a module that was laid out by an earlier fit.

    Its gradients would go to the shards, and its optimizer would find none.

    Args:
        kind: of the strategies that know the layout.
        module: the root.

    Raises:
        ParameterAccessError: naming the module and both strategies.
    """
    trainer = getattr(module, "_trainer", None)
    if trainer is not None and trainer.state.status == TrainerStatus.RUNNING and not isinstance(trainer.strategy, kind):
        raise ParameterAccessError(
            f"{type(module).__name__} was trained with {kind.__name__}, and its gradients still go to what that has "
            f"laid out: {type(trainer.strategy).__name__} would train nothing. Give its Trainer an ordinary copy, made "
            "on every rank: `with lightning_zero.full_parameters(module): module = copy.deepcopy(module)`."
        )


def refuse_callbacks(callbacks: Iterable[Callback], partial: bool) -> None:
    """Name callbacks that handle parameters in a way sharding cannot serve.

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
        if partial and isinstance(callback, (StochasticWeightAveraging, WeightAveraging)):
            raise ParameterAccessError(
                f"{name} copies and overwrites parameters between steps, where parameters that are sharded or "
                "computed in 16 bit do not hold their values. Use stage 1 or 2 in full precision, or average in a "
                "callback of your own inside `with lightning_zero.full_parameters(module):`, on every rank."
            )
