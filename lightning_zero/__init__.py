"""ZeRO for PyTorch Lightning: ``Trainer(strategy="zero1" | "zero2" | "zero3")``, or ``"zero3_offload"``; and in Fabric.

Importing this package registers the strategy names, and lets Lightning's ``load_from_checkpoint`` take directories.
"""

from __future__ import annotations

__version__ = "0.3.0"

from lightning_zero.cli import answer_early

answer_early()  # `lightning-zero fit --help` and `lightning-zero plan` end here, before the imports that take seconds

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from lightning_zero.config import (
    ActivationPolicy,
    CheckpointPolicy,
    Compression,
    HostOffload,
    LoaderPolicy,
    NvmeOffload,
    Offload,
    OffloadLike,
)
from lightning_zero.debug import (
    ema_update,
    full_gradient,
    full_gradients,
    full_optimizer_state,
    full_parameters,
    grad_norm,
    local_slices,
)
from lightning_zero.errors import ZeroError
from lightning_zero.loading import (
    let_command_lines_load_directories,
    let_lightning_load_directories,
    load_from_checkpoint,
    load_full_state_dict,
)
from lightning_zero.plan.plan import ZeroPlan, build_plan
from lightning_zero.registry import extension
from lightning_zero.trainer.fabric import ZeroFabricStrategy
from lightning_zero.trainer.precision import ZeroPrecision
from lightning_zero.trainer.strategy import ZeroStrategy

# Names of extensions, by the extension that has them.
_OF_EXTENSIONS = {
    "AdamW8bit": "eight_bit",
    "CommunicationMonitor": "monitors",
    "InstabilityMonitor": "monitors",
    "MemoryMonitor": "monitors",
    "estimate_memory": "planner",
    "measure_activations": "planner",
    "verify_checkpoint": "inspection",
}
# What a training does not need, and takes long to import.
_LATER = {"ZeroCLI": "trainer.cli", "consolidate_checkpoint": "checkpoint.consolidated"}
if TYPE_CHECKING:
    from lightning_zero.checkpoint.consolidated import consolidate_checkpoint
    from lightning_zero.trainer.cli import ZeroCLI

    AdamW8bit: Any
    CommunicationMonitor: Any
    InstabilityMonitor: Any
    MemoryMonitor: Any
    estimate_memory: Any
    measure_activations: Any
    verify_checkpoint: Any
else:

    def __getattr__(name: str) -> Any:
        if name == "NoBatch":
            raise ImportError(
                'NoBatch has gone: LoaderPolicy(training="stop") ends all ranks with the first.', name=name
            )
        if name not in {**_OF_EXTENSIONS, **_LATER}:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        place = _LATER.get(name)
        module = import_module(f"{__name__}.{place}") if place else extension(_OF_EXTENSIONS[name])
        return globals().setdefault(name, getattr(module, name))

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = [
    "ActivationPolicy",
    "AdamW8bit",
    "CheckpointPolicy",
    "CommunicationMonitor",
    "Compression",
    "HostOffload",
    "InstabilityMonitor",
    "LoaderPolicy",
    "MemoryMonitor",
    "NvmeOffload",
    "ZeroCLI",
    "ZeroError",
    "ZeroFabricStrategy",
    "ZeroPlan",
    "ZeroPrecision",
    "ZeroStrategy",
    "build_plan",
    "consolidate_checkpoint",
    "ema_update",
    "estimate_memory",
    "full_gradient",
    "full_gradients",
    "full_optimizer_state",
    "full_parameters",
    "grad_norm",
    "load_from_checkpoint",
    "load_full_state_dict",
    "local_slices",
    "measure_activations",
    "register_strategies",
    "verify_checkpoint",
]


def register_strategies() -> None:
    """Register ``zero``, ``zero1``, ``zero2``, ``zero3`` and the ``_offload`` variants with Trainer and Fabric.

    ``zero`` takes the first of them that fits when a fit begins.
    ``_offload`` keeps the optimizer in host memory, ``zero3_offload`` the parameters too, and ``zero3_offload_nvme``
    both in files in ``/local_nvme``, as ``deepspeed_stage_3_offload_nvme`` does. A name that is already registered is
    not replaced. On command lines and in configurations each name is also a class, ``lightning_zero.zero3``, with the
    arguments of ``ZeroStrategy`` except ``stage``: ``--trainer.strategy=zero3 --trainer.strategy.prefetch=2``.
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
    _register("zero", "The first ZeRO stage that fits, with offload if none does without", "auto")
    in_files = NvmeOffload("/local_nvme", parameters=True)  # the default of Lightning's DeepSpeedStrategy
    _register(f"zero{stage}_offload_nvme", f"{description}; keeps it in files", stage, in_files)


def _register(name: str, description: str, stage: Any, default: Offload | None = None) -> None:
    if name not in StrategyRegistry and name not in globals():
        globals()[name] = _class_with_arguments(name, stage, default)
    for registry, strategy in ((StrategyRegistry, ZeroStrategy), (STRATEGY_REGISTRY, ZeroFabricStrategy)):
        if name not in registry:
            registry.register(name, strategy, description=description, stage=stage, offload=default)
            spellings = {name.replace("zero", "zero_"), name.replace("zero", "zero-"), name.replace("_", "-")}
            for earlier in spellings - {name}:
                registry.register(earlier, _renamed, now=name)


def _renamed(now: str) -> None:
    raise ValueError(f"This name of a strategy has gone: write strategy='{now}'.")


def _class_with_arguments(name: str, stage: Any, default: Offload | None) -> type:
    """What jsonargparse takes a name for: a class whose instances are ``ZeroStrategy`` of a stage.

    ``class_from_function`` of jsonargparse does the same, but reads the source of all callers: half of the import.
    """

    def make(cls: type, offload: OffloadLike = default, **others: Any) -> ZeroStrategy:
        return ZeroStrategy(stage, offload=offload, **others)

    return type(name, (ZeroStrategy,), {"__new__": make, "__module__": __name__, "__doc__": ZeroStrategy.__doc__})


class _LightningCLIFinder(MetaPathFinder):
    """Patches ``lightning.pytorch.cli`` when somebody imports it: this package does not, because it takes long."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname == "lightning.pytorch.cli" else None
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_patch(module: ModuleType) -> None:
                run(module)
                let_command_lines_load_directories(module)

            spec.loader.exec_module = run_and_patch  # type: ignore[method-assign]
        return spec


register_strategies()
let_lightning_load_directories()
if "lightning.pytorch.cli" in sys.modules:
    let_command_lines_load_directories(sys.modules["lightning.pytorch.cli"])
else:
    sys.meta_path.insert(0, _LightningCLIFinder())
