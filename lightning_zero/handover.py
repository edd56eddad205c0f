"""What a module brings along from an earlier fit: into a Trainer with another strategy, or into another module."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerStatus
from torch import nn

from lightning_zero.engine import ZeroEngine, engine_of
from lightning_zero.engine.full import give_back
from lightning_zero.errors import ParameterAccessError
from lightning_zero.shards.binding import is_absent

__all__ = ["own_engine", "refuse_other_strategies"]


def own_engine(module: nn.Module) -> ZeroEngine | None:
    """The engine of an earlier fit of ``module`` itself. Those end that its parts bring along from other modules.

    Args:
        module: the root. A part is an encoder that was pretrained in another module, say.

    Raises:
        ParameterAccessError: for a part of a module that a Trainer runs at this moment, and for a parameter whose
            shards have gone with the module it was sharded in.

    Collective: every rank.
    """
    own = engine_of(module)
    for name, child in module.named_modules():
        other = engine_of(child)
        if other is None or other is own:
            continue
        if _running_trainer(other.module) is not None:
            raise ParameterAccessError(
                f"'{name}' is a part of {type(other.module).__name__}, which another Trainer runs at this moment with "
                "sharded parameters. Put a copy there, made on every rank: `with lightning_zero.full_parameters"
                "(part): part = copy.deepcopy(part)`."
            )
        give_back(other)
    for name, parameter in module.named_parameters():
        if is_absent(parameter) and (own is None or parameter not in own.names):
            raise ParameterAccessError(
                f"'{name}' was sharded in a module that does not exist any more, and its values went with that. Keep "
                "the module until the next fit has begun, or take a `copy.deepcopy` of the part before, inside `with "
                "lightning_zero.full_parameters(module):`, on every rank."
            )
    return own


def refuse_other_strategies(kind: type[Strategy], module: nn.Module) -> None:
    """Raise if a Trainer with a strategy of another kind trains a module that was laid out by an earlier fit.

    Its gradients would go to the shards, and its optimizer would find none.

    Args:
        kind: of the strategies that know the layout.
        module: the root.

    Raises:
        ParameterAccessError: naming the module and both strategies.
    """
    trainer = _running_trainer(module)
    if trainer is not None and not isinstance(trainer.strategy, kind):
        raise ParameterAccessError(
            f"{type(module).__name__} was trained with {kind.__name__}, and its gradients still go to what that has "
            f"laid out: {type(trainer.strategy).__name__} would train nothing. Give its Trainer an ordinary copy, made "
            "on every rank: `with lightning_zero.full_parameters(module): module = copy.deepcopy(module)`."
        )


def _running_trainer(module: nn.Module) -> Trainer | None:
    trainer: Trainer | None = getattr(module, "_trainer", None)
    return trainer if trainer is not None and trainer.state.status == TrainerStatus.RUNNING else None
