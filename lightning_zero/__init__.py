"""ZeRO for PyTorch Lightning: ``Trainer(strategy="zero1" | "zero2" | "zero3")``, or ``"zero3_offload"``; and in Fabric.

Importing this package registers the strategy names, and lets Lightning's ``load_from_checkpoint`` take directories.
"""

from __future__ import annotations

__version__ = "0.2.0"

from lightning_zero.cli import answer_early

answer_early()  # `lightning-zero fit --help` and `lightning-zero plan` end here, before the imports that take seconds

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from jsonargparse.typing import class_from_function
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from lightning_zero.activations import measure_activations
from lightning_zero.analysis import ZeroPlan, build_plan, estimate_memory
from lightning_zero.checkpoint.consolidate import consolidate_checkpoint
from lightning_zero.comm import Compression
from lightning_zero.config import ActivationPolicy, CheckpointPolicy, HostOffload, LoaderPolicy, NvmeOffload
from lightning_zero.debug import full_gradient, full_gradients, full_optimizer_state, full_parameters, grad_norm
from lightning_zero.loading import let_lightning_load_directories, load_from_checkpoint, load_full_state_dict
from lightning_zero.trainer.cli import ZeroCLI
from lightning_zero.trainer.fabric import ZeroFabricStrategy
from lightning_zero.trainer.loaders import NoBatch
from lightning_zero.trainer.monitors.communication import CommunicationMonitor
from lightning_zero.trainer.monitors.memory import MemoryMonitor
from lightning_zero.trainer.precision import ZeroPrecision
from lightning_zero.trainer.strategy import ZeroStrategy

__all__ = [
    "ActivationPolicy",
    "CheckpointPolicy",
    "CommunicationMonitor",
    "Compression",
    "HostOffload",
    "LoaderPolicy",
    "MemoryMonitor",
    "NoBatch",
    "NvmeOffload",
    "ZeroCLI",
    "ZeroFabricStrategy",
    "ZeroPlan",
    "ZeroPrecision",
    "ZeroStrategy",
    "build_plan",
    "consolidate_checkpoint",
    "estimate_memory",
    "full_gradient",
    "full_gradients",
    "full_optimizer_state",
    "full_parameters",
    "grad_norm",
    "load_from_checkpoint",
    "load_full_state_dict",
    "measure_activations",
    "register_strategies",
]


def register_strategies() -> None:
    """Make ``zero1``, ``zero2`` and ``zero3`` known to Trainer and Fabric, and the same with ``_offload`` behind.

    Those keep the optimizer in host memory, ``zero3_offload`` the parameters too. A name that somebody registered
    before stays theirs. To command lines and configurations each is also a class, ``lightning_zero.zero3``, with the
    arguments of ``ZeroStrategy`` but for ``stage``: ``--trainer.strategy=zero3 --trainer.strategy.prefetch=2``.
    """
    on_host, parameters_too = HostOffload(), HostOffload(parameters=True)
    for stage, what, offload in (
        (1, "optimizer state", on_host),
        (2, "optimizer state and gradients", on_host),
        (3, "parameters as well", parameters_too),
    ):
        description = f"ZeRO stage {stage}: shards {what}"
        _register(f"zero{stage}", description, stage)
        _register(f"zero{stage}_offload", f"{description}; keeps it in host memory", stage, offload)


def _register(name: str, description: str, stage: Any, default: HostOffload | None = None) -> None:
    def make(offload: HostOffload | NvmeOffload | None = default, **others: Any) -> ZeroStrategy:
        return ZeroStrategy(stage, offload=offload, **others)

    if name not in StrategyRegistry and name not in globals():
        class_from_function(make, ZeroStrategy, name=name)  # becomes an attribute of this module
    for registry, strategy in ((StrategyRegistry, ZeroStrategy), (STRATEGY_REGISTRY, ZeroFabricStrategy)):
        if name not in registry:
            registry.register(name, strategy, description=description, stage=stage, offload=default)


_TWIN = "pytorch_lightning.strategies"


def _tell(twin: Any) -> None:
    """Let the Trainer of ``pytorch_lightning`` take the strategies, which then say that they are not for it."""
    for name, entry in StrategyRegistry.items():
        if entry["strategy"] is ZeroStrategy:
            twin.StrategyRegistry.setdefault(name, entry)
    twin.Strategy.register(ZeroStrategy)


class _TwinFinder(MetaPathFinder):
    """Waits for ``pytorch_lightning``, which this package does not import, to tell it."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname == _TWIN else None
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_tell(module: ModuleType) -> None:
                run(module)
                _tell(module)

            spec.loader.exec_module = run_and_tell  # type: ignore[method-assign]
        return spec


register_strategies()
if _TWIN in sys.modules:
    _tell(sys.modules[_TWIN])
else:
    sys.meta_path.insert(0, _TwinFinder())
let_lightning_load_directories()
