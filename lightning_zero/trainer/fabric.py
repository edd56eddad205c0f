"""Fabric's questions to a strategy, answered by the session that a Trainer runs on, too.

Fabric calls what ``setup_module`` returns in place of the user's module. Each such call is a step of the session: with
gradients it is one of training, under ``no_grad`` one of evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.fabric import wrappers
from lightning.fabric.accelerators.accelerator import Accelerator
from lightning.fabric.plugins import ClusterEnvironment, Precision
from lightning.fabric.plugins.precision.utils import _convert_fp_tensor
from lightning.fabric.strategies.launchers import _MultiProcessingLauncher
from lightning.fabric.strategies.parallel import ParallelStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl, _validate_keys_for_strict_loading
from lightning.fabric.utilities.types import _Stateful
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero._torch import compiler_of_frames, opaque_to_dynamo, tree_map_only, without_swaps
from lightning_zero.checkpoint import StoredTensor
from lightning_zero.checkpoint.consolidated import SUMMARY_KEY
from lightning_zero.config import SessionSettings, StageLike, TimeoutLike
from lightning_zero.errors import ParameterAccessError
from lightning_zero.optim.gradients import clip_by_norm
from lightning_zero.registry import extension
from lightning_zero.session.session import ZeroSession
from lightning_zero.session.state import left_out_of
from lightning_zero.trainer.precision import precision_property
from lightning_zero.trainer.processes import DEFAULT_TIMEOUT, Processes, StartMethod, leave_group_of_one

__all__ = ["ZeroFabricStrategy"]

_WEIGHTS, _STATES = "state_dict", "optimizer_states"  # as Lightning's Trainer calls them


class _ShardedModule(nn.Module):
    """What Fabric calls in place of ``module``, as it calls ``DistributedDataParallel`` under that strategy."""

    def __init__(self, module: nn.Module, session: ZeroSession, param_dtype: torch.dtype | None) -> None:
        super().__init__()
        self.module = module
        self._session, self._param_dtype = session, param_dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """One step of the module's. Collective: every rank."""
        _refuse_compilation()
        if self._param_dtype is not None:  # as Fabric does under mixed precision
            args, kwargs = apply_to_collection((args, kwargs), Tensor, _convert_fp_tensor, dst_type=self._param_dtype)
        training, batch = torch.is_grad_enabled(), (args, kwargs)
        with self._session.step("training_step" if training else "validation_step", batch, training=training):
            return self.module(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Around the backward of all but the last micro-step, as of ``DistributedDataParallel``."""
        return self._session.accumulating()

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backwards average gradients now."""
        return self._session.engine.reduce_gradients

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._session.engine.reduce_gradients = bool(value)


@opaque_to_dynamo
def _refuse_compilation() -> None:
    """RuntimeError if ``torch.compile`` runs around a step: Fabric has put it there, or the user."""
    if compiler_of_frames() is not None:
        raise RuntimeError(
            "torch.compile cannot look into the step of a sharded module. In place of `fabric.setup(torch.compile("
            "model))`, call `model.compile()` (or `layer.compile()`), then `fabric.setup(model)`."
        )


class _Workers(_MultiProcessingLauncher):
    """Fabric's, which give back what the function returns, however large."""

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the function in processes of this machine. Returns what the first one returned."""
        leave_group_of_one()
        with TemporaryDirectory() as folder:
            path = Path(folder, "returned")
            super().launch(self._strategy.run_in_worker, function, path, *args, **kwargs)  # type: ignore[attr-defined]
            return torch.load(path, map_location="cpu", weights_only=False)


class ZeroFabricStrategy(Processes, ParallelStrategy, _BackwardSyncControl):
    """ZeRO for your own training loop: ``Fabric(strategy="zero3")``.

    Shards one module with all its optimizers. Every rank must call the module equally often, in evaluation too. These
    calls of Fabric are collective here: ``setup``, ``backward``, ``clip_gradients``, ``optimizer.step``, ``save`` and
    ``load``.

    Args:
        stage: 1 shards optimizer state, 2 also gradients, 3 also parameters; ``"auto"``: 3, with offload if need be.
        accelerator, parallel_devices, cluster_environment: as for every strategy of Fabric.
        precision: ``ZeroPrecision``, or one of Fabric's plugins, which is converted.
        process_group_backend: ``gloo``, ``nccl``, ...; ``None`` chooses by device.
        start_method: how ``fabric.launch`` starts ranks: ``popen`` runs the script again; ``spawn`` and ``fork`` start
            processes that run the given function and end with it. ``None``: ``popen``, in notebooks ``fork``.
        timeout: how long a rank waits for the others before it raises, as a timedelta or in seconds; also for their
            part of a checkpoint.
        settings: ``units``, ``shard_within``, ``compression``, ``secondary_shards``, ``bucket_mib``, ``prefetch``,
            ``offload``, ``activations``, ``checkpoint``, ``broadcast_buffers`` and
            ``allocate_memory_from_process_group``, as for ``ZeroStrategy``.

    Raises:
        TypeError: for an unknown argument. docs/migrating.md has those of other strategies.
        ValueError: if a setting is not usable.
    """

    num_nodes: Any = property(lambda self: self._num_nodes)  # Fabric sets `_num_nodes`
    _set_world_ranks, _workers = Processes.set_world_ranks, _Workers
    all_reduce = Processes.reduce

    def __init__(
        self,
        stage: StageLike = 3,
        *,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        precision: Precision | None = None,
        process_group_backend: str | None = None,
        start_method: StartMethod | None = None,
        timeout: TimeoutLike = DEFAULT_TIMEOUT,
        **settings: Any,
    ) -> None:
        super().__init__(
            SessionSettings.from_user(stage, **settings),
            process_group_backend,
            start_method,
            timeout,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision=precision,
        )
        self._num_nodes = 1
        self._backward_sync_control = self
        self._in_backward = False
        self._module: _ShardedModule | None = None
        self._optimizers: list[Optimizer] = []

    def __repr__(self) -> str:
        """What Lightning shows where it takes a strategy of another kind."""
        return "<ZeroFabricStrategy for lightning.Fabric; a Trainer takes lightning_zero.ZeroStrategy>"

    # ------------------------------------------------------------- environment

    precision: Any = precision_property("_precision")

    def run_in_worker(self, function: Callable[..., Any], path: Path, *args: Any, **kwargs: Any) -> None:
        """Run what ``fabric.launch`` was given, and write what this machine's first process returns to ``path``.

        Sharded modules and their optimizers cannot be pickled. Collective: every rank.
        """
        try:
            returned = function(*args, **kwargs)
            self._begin_session().rest()
            if self.local_rank == 0:
                torch.save(returned, path)
            self.barrier()  # the others do not end before
        except BaseException as error:
            self.tell_failure(error)
            raise

    # -------------------------------------------------------------------- setup

    @contextmanager
    def module_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Where a module is built: on the host, because only parts stay on the device.

        With ``empty_init`` it takes no memory: it is on the meta device, and initialised while it is sharded.
        """
        with torch.device("meta" if empty_init else "cpu"), self.precision.tensor_init_context():
            yield

    def module_to_device(self, module: nn.Module) -> None:
        """Nothing: what is sharded gets to the device part by part. Move other modules by ``.to(fabric.device)``."""

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None) -> Any:
        """Shard a module and its optimizers, which may hold its DTensors until now. Collective: every rank."""
        if self._device_mesh is not None and self._module is None:
            self._begin_session()
            self._localise(module)
            extension("tensor_parallel").take_local(optimizers)
        return super().setup_module_and_optimizers(module, optimizers, scheduler)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard the module; ``ValueError`` for a second one. Collective: every rank."""
        if self._module is not None:
            raise ValueError(
                f"ZeroFabricStrategy shards one module, and {type(self._module.module).__name__} is set up already. "
                f"Make {type(module).__name__} a part of that, or if it is not trained, only `.to(fabric.device)` it."
            )
        session = self._begin_session()
        session.check_trainer = self._refuse_other_strategies
        self._localise(module)
        session.shard(module, self.precision)
        self.settings = session.settings  # with a stage that was chosen
        session.checkpoints.begin(training=True)
        with without_swaps():
            module.to(self.root_device)  # what is neither a parameter nor a buffer of the engine (metric states)
        self.precision.attach(self.root_device, session.engine.totals, self.adapter)
        session.begin(training=any(parameter.requires_grad for parameter in module.parameters()))
        self._module = _ShardedModule(module, session, self.precision.param_dtype)
        return self._module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Shard one more optimizer of the module that is set up. Collective: every rank."""
        optimizers = [*self._optimizers, optimizer]
        self._adopt([optimizer])
        self.session.shard_optimizers(optimizers, writable=self.precision.param_dtype is None)
        self._optimizers = optimizers
        return optimizer

    def _refuse_other_strategies(self, module: nn.Module) -> None:
        if wrappers._in_fabric_backward and not self._in_backward:
            raise ParameterAccessError(
                f"{type(module).__name__} was set up with ZeroFabricStrategy, where its gradients still go: another "
                "strategy would train nothing. Set up a copy, made on every rank: `with lightning_zero.full_parameters"
                "(module): module = copy.deepcopy(module)`."
            )

    # -------------------------------------------------------------------- steps

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run the backward, after which gradients are those of all ranks. Collective: every rank."""
        self._in_backward, scaler = True, self.precision.scaler
        try:
            with self.session.backward(loss=tensor):
                (tensor if scaler is None else scaler.scale(tensor)).backward(*args, **kwargs)
        finally:
            self._in_backward = False

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Around all but the last micro-step of a step: full gradients stay local where they are replicated anyway."""
        return self.session.accumulating() if enabled else nullcontext()

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """One optimizer step. The closure runs before, but where the optimizer needs it. Collective: every rank."""
        adapter = self.adapter(optimizer)
        if closure is None and adapter.rule == "closure":
            raise ValueError(f"{adapter.label} needs a closure in step(): write `optimizer.step(closure)`.")
        run = torch.enable_grad()(closure or (lambda: None))
        return self.precision.step(optimizer, run, **kwargs)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip the gradients of one optimizer over all ranks. Collective: every rank.

        Returns their norm before. ``RuntimeError`` on every rank if it is not finite, with ``error_if_nonfinite``.
        """
        self.precision.unscale_gradients(optimizer)
        norm: Tensor = self.precision.gradient_norm(optimizer, float(norm_type))
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(
                f"The gradients' norm of order {norm_type} is {norm.item()}, and cannot be clipped. To go on all the "
                "same, pass `error_if_nonfinite=False`."
            )
        clip_by_norm(self.adapter(optimizer).gradients(), float(max_norm), norm)
        return norm

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float | int) -> None:
        """Clamp every element of the gradients of one optimizer. Collective: every rank."""
        self.precision.unscale_gradients(optimizer)
        self.precision.clip_grad_by_value(optimizer, clip_val)

    # -------------------------------------------------------------- checkpoints

    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write a checkpoint as the policy says, whole or not at all. Collective: every rank.

        Weights and optimizer states are where a Trainer's checkpoint has them, and the names that ``state`` has for
        them are beside it. ``ValueError`` if ``state`` uses a name of the format for something else.
        """
        modules = [key for key, value in state.items() if self._is_sharded(value)]
        optimizers = [key for key, value in state.items() if isinstance(value, Optimizer)]
        taken = {_WEIGHTS, _STATES, SUMMARY_KEY} & state.keys() - {*modules, *optimizers}
        if taken or len(modules) > 1:
            raise ValueError(
                f"`state` must have the model once, but has {modules}, and other things under other names than "
                f"{_WEIGHTS}, {_STATES} and {SUMMARY_KEY}, but has {sorted(taken)}."
            )
        saved = {key: self._state_of(state[key]).save() for key in optimizers}
        exclude, weights = self.settings.checkpoint.exclude_frozen, self.session.module_state()
        saved |= {key: weights.save(exclude_frozen=exclude) for key in modules}
        content = self._convert_stateful_objects_in_state({**state, **saved}, filter or {})
        told: dict[str, Any] = {"fabric": {"modules": modules, "optimizers": optimizers}}
        if modules and exclude:
            told["excluded_frozen"] = weights.excluded_frozen()
        states = [content.pop(key) for key in optimizers]
        if modules:
            content[_WEIGHTS] = content.pop(modules[0])
        checkpoint = {**content, _STATES: states, SUMMARY_KEY: told}
        self.session.checkpoints.save(checkpoint, path, self.engine, self.precision.precision, storage_options)

    def load_checkpoint(
        self,
        path: str | Path,
        state: nn.Module | Optimizer | dict[str, Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint of Fabric or a Trainer, with any strategy, or plain weights. Collective: every rank.

        Weights and optimizer states of a Trainer go to the model and the optimizers in ``state``, whatever their names
        there. Returns what was not restored; without ``state`` that is all, with tensors that are read when needed.
        """
        found = self._begin_session().checkpoints.load(path, weights_only)
        weights, excluded = found.get(_WEIGHTS), left_out_of(found)
        if isinstance(state, Optimizer):
            raise ValueError("Load an optimizer's state by `fabric.load(path, {'optimizer': optimizer})`.")
        wanted: dict[str, Any] = {_WEIGHTS: state} if isinstance(state, nn.Module) else state or {}
        if any(isinstance(value, Optimizer) for value in wanted.values()):
            self.session.adopt_changes()
            self.session.checkpoints.load_wire_state(found, self.engine)
        if not isinstance(state, nn.Module):
            self._rename(found, wanted)
        if wanted:
            _validate_keys_for_strict_loading(wanted.keys(), found.keys(), strict=strict)
        for name in [name for name in wanted if name in found]:
            target, value = wanted[name], found.pop(name)
            if self._is_sharded(target):
                self.session.module_state().load(value, strict, excluded)
            elif isinstance(target, Optimizer):
                self._state_of(target).load(value, weights=weights)
            else:
                value = tree_map_only(StoredTensor, StoredTensor.read, value)
                if isinstance(target, _Stateful):
                    target.load_state_dict(value, **({"strict": strict} if isinstance(target, nn.Module) else {}))
                else:
                    wanted[name] = value
        return found

    def _rename(self, checkpoint: dict[str, Any], wanted: Mapping[str, Any]) -> None:
        """Put weights and optimizer states under the names that they were saved under, or are wanted under."""
        told = checkpoint.pop(SUMMARY_KEY, {}).get("fabric", {})
        free = {key: value for key, value in wanted.items() if key not in checkpoint}
        modules = [key for key, value in free.items() if isinstance(value, nn.Module)]
        modules = told.get("modules", sorted(modules, key=lambda key: not self._is_sharded(free[key])))
        optimizers = told.get("optimizers", [key for key, value in free.items() if isinstance(value, Optimizer)])
        if modules and _WEIGHTS in checkpoint:
            checkpoint[modules[0]] = checkpoint.pop(_WEIGHTS)
        if (optimizers or told) and _STATES in checkpoint:
            states = checkpoint.pop(_STATES)
            if len(states) != len(optimizers):
                raise ValueError(
                    f"The checkpoint holds the states of {len(states)} optimizers, and `state` has {len(optimizers)}. "
                    "Load all of them at once, in the order that the Trainer had them, or the weights only."
                )
            checkpoint.update(zip(optimizers, states, strict=True))

    def _is_sharded(self, value: Any) -> bool:
        return self._module is not None and (value is self._module or value is self._module.module)
