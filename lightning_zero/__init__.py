"""ZeRO for PyTorch Lightning: ``Trainer(strategy="zero1" | "zero2" | "zero3")``.

Importing this package registers the strategy names.
"""

from __future__ import annotations

from lightning.pytorch.strategies import StrategyRegistry

from lightning_zero.checkpoint.consolidate import consolidate_checkpoint
from lightning_zero.cli import ZeroCLI
from lightning_zero.config import CheckpointPolicy
from lightning_zero.debug import full_gradient, full_optimizer_state, full_parameters, grad_norm
from lightning_zero.loading import load_from_checkpoint, load_full_state_dict
from lightning_zero.plan import ZeroPlan, build_plan
from lightning_zero.precision import ZeroPrecision
from lightning_zero.strategy import ZeroStrategy

__all__ = [
    "CheckpointPolicy",
    "ZeroCLI",
    "ZeroPlan",
    "ZeroPrecision",
    "ZeroStrategy",
    "build_plan",
    "consolidate_checkpoint",
    "full_gradient",
    "full_optimizer_state",
    "full_parameters",
    "grad_norm",
    "load_from_checkpoint",
    "load_full_state_dict",
    "register_strategies",
]

__version__ = "0.1.0"


def register_strategies() -> None:
    """Make ``zero1``, ``zero2`` and ``zero3`` known to the Trainer.

    A name that somebody registered before stays theirs.
    """
    for stage, what in ((1, "optimizer state"), (2, "optimizer state and gradients"), (3, "parameters as well")):
        name = f"zero{stage}"
        if name not in StrategyRegistry:
            StrategyRegistry.register(name, ZeroStrategy, description=f"ZeRO stage {stage}: shards {what}", stage=stage)


register_strategies()
