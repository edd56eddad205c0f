"""Lightning's hooks, in Lightning's order: the composition root of the package."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer

from lightning_zero.checkpoints import Checkpoints
from lightning_zero.comm import Groups, Streams, choose_collectives
from lightning_zero.comm.groups import destroy_default_group_at_exit
from lightning_zero.config import (
    ActivationPolicy,
    CheckpointPolicy,
    HostOffload,
    NvmeOffload,
    Placement,
    validate_activations,
    validate_bucket_mib,
    validate_checkpoint,
    validate_offload,
    validate_prefetch,
    validate_units,
)
from lightning_zero.debug import note_optimizers
from lightning_zero.engine import Activations, BufferBroadcast, ZeroEngine
from lightning_zero.engine.full import give_back
from lightning_zero.handover import own_engine, refuse_other_strategies
from lightning_zero.init import InitRecorder
from lightning_zero.offloading import make_tiers, offloaded_steps
from lightning_zero.optim.agreement import agree_on_set_up
from lightning_zero.optim.sharded import OwnedParameter, ShardedOptimizer
from lightning_zero.optim.state import ConstantState
from lightning_zero.plan import ZeroPlan, build_plan, refuse_shared_memory, warn_of_views
from lightning_zero.precision import ZeroPrecision
from lightning_zero.refusals import refuse_callbacks
from lightning_zero.shown_state import StateSlices
from lightning_zero.state import ModuleState, OptimizerState

__all__ = ["ZeroStrategy"]

_DEFAULT_POLICY = CheckpointPolicy()


class ZeroStrategy(ParallelStrategy):
    """ZeRO for an ordinary LightningModule: ``Trainer(strategy="zero3")``.

    Args:
        stage: 1 shards optimizer state, 2 also gradients, 3 also parameters.
        units: class names of the modules whose parameters are gathered together (stage 3), for example
            ``["TransformerBlock"]``; ``None`` finds them automatically.
        bucket_mib: gradients reduced together in stages 1 and 2, in MiB. A single larger parameter is a bucket of its
            own.
        prefetch: units gathered ahead of the one that computes (stage 3); 0 switches it off.
        offload: what rests in host memory, or in files, between uses; ``None``: everything stays on the device.
        activations: what is computed again in backward, or kept on the host until then; ``None``: autograd keeps all.
        checkpoint: what is saved and how, and where the first weights come from.
        broadcast_buffers: whether all ranks get rank 0's buffers (running statistics) whenever DDP would give them.
        accelerator: as for every Lightning strategy.
        parallel_devices: as for every Lightning strategy.
        cluster_environment: as for every Lightning strategy.
        precision_plugin: ``ZeroPrecision``, or one of Lightning's plugins, which is converted.
        process_group_backend: ``gloo``, ``nccl``, ...; ``None`` chooses by device.
        timeout: how long a rank waits for the others before it raises; also for their part of a checkpoint.

    Raises:
        ValueError: if a setting is not usable.

    Source: ZeRO (arXiv:1910.02054), ZeRO-Offload (arXiv:2101.06840), ZeRO-Infinity (arXiv:2104.07857).
    """

    is_distributed = True  # without it the Trainer switches the distributed sampler and sync_dist off, silently

    def __init__(
        self,
        stage: Literal[1, 2, 3] = 3,
        *,
        units: Sequence[str] | None = None,
        bucket_mib: float = 25.0,
        prefetch: int = 1,
        offload: HostOffload | NvmeOffload | None = None,
        activations: ActivationPolicy | None = None,
        checkpoint: CheckpointPolicy = _DEFAULT_POLICY,
        broadcast_buffers: bool = True,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        self.placement = Placement.from_stage(stage)
        self._units = validate_units(units)
        self._bucket_mib = validate_bucket_mib(bucket_mib)
        self._prefetch = validate_prefetch(prefetch)
        self.offload = validate_offload(offload, self.placement)
        self._activation_policy = validate_activations(activations)
        self._policy = validate_checkpoint(checkpoint)
        if not isinstance(broadcast_buffers, bool):
            raise ValueError(f"broadcast_buffers must be True or False, got {broadcast_buffers!r}.")
        self._broadcast_buffers = broadcast_buffers
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision_plugin=precision_plugin,
        )
        self._num_nodes = 1
        self._backend = process_group_backend
        self._timeout = timeout
        self._checkpoints: Checkpoints | None = None
        self._engine: ZeroEngine | None = None
        self._buffers: BufferBroadcast | None = None
        self._recorder = InitRecorder()
        self._activations: Activations | None = None
        self._adapters: dict[int, ShardedOptimizer] = {}
        self._held: list[tuple[LRSchedulerConfig, int]] = []

    # ------------------------------------------------------------- environment

    @property
    def engine(self) -> ZeroEngine:
        """The engine of the running module.

        Raises:
            RuntimeError: before the strategy was set up.
        """
        if self._engine is None:
            raise RuntimeError("The strategy is not set up yet: its engine exists from `Trainer.fit` (or validate) on.")
        return self._engine

    @property
    def checkpoints(self) -> Checkpoints:
        """What saves and loads this run: ``checkpoints.wait()`` returns when a background save is durable.

        Raises:
            RuntimeError: before the strategy was set up.
        """
        if self._checkpoints is None:
            raise RuntimeError("The strategy is not set up yet: it saves from `Trainer.fit` (or validate) on.")
        return self._checkpoints

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        if self.parallel_devices is None:
            raise RuntimeError("The Trainer has not assigned devices to the strategy yet.")
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        """How many machines take part."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """How many processes run on this machine."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def process_group_backend(self) -> str | None:
        """The backend in use, or asked for."""
        return self._backend

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """How the Trainer shards the data."""
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}

    @property
    def precision_plugin(self) -> ZeroPrecision:
        """The precision in this package's terms, whatever the Trainer was given."""
        if self._precision_plugin is None:
            self._precision_plugin = ZeroPrecision()
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin: ZeroPrecision | None = (
            None if precision_plugin is None else ZeroPrecision.convert(precision_plugin)
        )

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Lightning's plain IO; sharded directories do not go through it."""
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        if io is not None:
            raise ValueError(
                "ZeroStrategy writes sharded directories itself and takes no checkpoint plugin, got "
                f"{type(io).__name__}."
            )

    def _configure_launcher(self) -> None:
        # Also where others start the processes: the launcher then only shares the cores out among them.
        if self.cluster_environment is not None:
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def set_world_ranks(self) -> None:
        """Tell the cluster environment who this process is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def setup_environment(self) -> None:
        """Join the process group. Collective: every rank."""
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        self._backend = self._backend or _get_default_process_group_backend_for_device(self.root_device)
        if self.cluster_environment is None:
            raise RuntimeError("ZeroStrategy has no cluster environment; create it through Trainer(strategy=...).")
        kwargs: dict[str, Any] = {"timeout": self._timeout}
        if self.root_device.type != "cpu":
            kwargs["device_id"] = self.root_device
        if not dist.is_initialized():
            _init_dist_connection(self.cluster_environment, self._backend, **kwargs)
            destroy_default_group_at_exit()  # Lightning does so for nccl only
        expected = self.num_nodes * self.num_processes
        if dist.get_world_size() != expected:
            raise RuntimeError(
                f"The process group has {dist.get_world_size()} ranks, but Trainer(devices={self.num_processes}, "
                f"num_nodes={self.num_nodes}) asks for {expected}. Start as many processes as devices times nodes, or "
                "let the Trainer start them."
            )

    # -------------------------------------------------------------------- setup

    def model_to_device(self) -> None:
        """Move what is not a parameter or buffer of the engine (metric states, for example)."""
        if self.lightning_module is not None:
            self.lightning_module.to(self.root_device)

    def setup(self, trainer: Trainer) -> None:
        """Shard the module, build the optimizers, adapt them. Collective: every rank."""
        if self.accelerator is None or self.lightning_module is None:
            raise RuntimeError("The Trainer has not connected an accelerator and a module to the strategy yet.")
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            partial = self.placement.shards_parameters or self.precision_plugin.param_dtype is not None
            refuse_callbacks(trainer.callbacks, partial)  # type: ignore[attr-defined]
        if fitting and self._layer_sync is not None:
            self.model = self._layer_sync.apply(self.lightning_module)
        self._setup_engine(self.lightning_module)
        self.checkpoints.begin(trainer.callbacks, training=fitting)  # type: ignore[attr-defined]
        self.model_to_device()
        self._buffers = BufferBroadcast(self.engine, fitting=fitting, enabled=self._broadcast_buffers)
        self.precision_plugin.attach(self.root_device, self.engine.control, self.adapter, self._hold_schedulers)
        if fitting:
            self.engine.prepare_training()
            if self._activation_policy is not None:
                self._activations = Activations(self.engine, self._activation_policy, self._units)
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _setup_engine(self, module: LightningModule) -> None:
        groups = Groups.create(self._backend, self._timeout)
        if self._checkpoints is None:
            self._checkpoints = Checkpoints(self._policy, groups)
        existing, torn = own_engine(module), False
        if existing is not None:
            fits = existing.device == self.root_device and not self.precision_plugin.would_cast(module)
            fits = fits and self.offload == existing.plan.offload and existing.names.keys() >= {*module.parameters()}
            plan = self._plan(module) if fits else None
            if plan is not None and plan.fingerprint() == existing.plan.fingerprint():
                self._engine = existing  # sharded by an earlier fit, or by another Trainer, just as it is wanted now
                existing.plan = plan  # buffers may have been added or replaced
                existing.tiers.wake()
                return
            torn = existing.updating
            give_back(existing)  # other settings, or parameters that were frozen or thawed since
        self.precision_plugin.convert_module(module)
        streams = Streams(self.root_device)
        collectives = choose_collectives(groups, streams, self.root_device)
        plan = self._plan(module)
        refuse_shared_memory(module, self.root_device)
        warn_of_views(module, self.root_device)
        tiers = make_tiers(self.offload, plan, groups.control, self.root_device, streams, self.local_rank)
        try:
            self._engine = ZeroEngine(module, plan, collectives, groups.control, tiers, self._recorder.record)
        except BaseException:
            tiers.close()
            raise
        self._recorder = InitRecorder()
        self._engine.updating = torn
        self._engine.access.check_trainer = lambda module: refuse_other_strategies(ZeroStrategy, module)
        if existing is None:  # what was sharded before has been trained, and goes on from there
            self.checkpoints.load_initial_weights(ModuleState(self._engine, module))

    def _plan(self, module: LightningModule) -> ZeroPlan:
        return build_plan(
            module,
            placement=self.placement,
            world_size=self.world_size,
            units=self._units,
            bucket_mib=self._bucket_mib,
            prefetch=self._prefetch,
            offload=self.offload,
            param_dtype=self.precision_plugin.param_dtype,
            reduce_dtype=self.precision_plugin.reduce_dtype,
            broadcast_buffers=self._broadcast_buffers,
        )

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Where tensors are made while a module is built: on the host, because only parts stay on the device."""
        with self.precision_plugin.tensor_init_context():
            yield

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Around ``configure_model``: initialisation on the meta device is recorded, to be replayed by unit."""
        with self._recorder:
            yield

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Run ``configure_optimizers`` on the real parameter objects, then put shards in their place.

        Collective: every rank.
        """
        engine = self.engine
        with ConstantState():
            super().setup_optimizers(trainer)
        for former in self._adapters.values():
            if former.optimizer not in self.optimizers:
                former.keep().give_up_files()
        self._adapters.clear()
        owned = {
            parameter: OwnedParameter(shard, unit.index, flat, position)
            for unit in engine.units
            for flat in unit.flats
            for position, (parameter, shard) in enumerate(zip(flat.parameters, flat.shards, strict=True))
        }
        schedulers = [vars(config) for config in self.lr_scheduler_configs]
        labels = agree_on_set_up(self.optimizers, schedulers, owned, engine.control)
        steps = offloaded_steps(engine, self.num_processes)
        for label, optimizer in zip(labels, self.optimizers, strict=True):
            self._adapters[id(optimizer)] = ShardedOptimizer(
                optimizer,
                label,
                owned,
                engine.collectives,
                engine.before_optimizer_step,
                engine.after_optimizer_step,
                StateSlices(engine),
                writable=not self.placement.shards_parameters and self.precision_plugin.param_dtype is None,
                offload=steps,
            )
        engine.listeners = [adapter.masters_changed for adapter in self._adapters.values()]
        note_optimizers(engine, list(self._adapters.values()))

    def adapter(self, optimizer: Optimizer) -> ShardedOptimizer:
        """The sharded view of one of the run's optimizers.

        Raises:
            ValueError: if it is not one that ``configure_optimizers`` returned.
        """
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        if id(optimizer) not in self._adapters:
            raise ValueError(
                f"{type(optimizer).__name__} is not an optimizer of this run: only optimizers that "
                "configure_optimizers returned are sharded. For another one in mid-fit, have configure_optimizers "
                "return it and call `trainer.strategy.setup_optimizers(trainer)` on every rank."
            )
        return self._adapters[id(optimizer)]

    # -------------------------------------------------------------------- steps

    def on_train_start(self) -> None:
        """Give random numbers back where a resumed run goes on: after all hooks of the start."""
        if self.lightning_module is not None:
            self.checkpoints.random.go_on(self.lightning_module.trainer, self.root_device)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's ``training_step``, with units gathered as they are called."""
        for adapter in self._adapters.values():
            adapter.adopt_new_groups()
        with self.precision_plugin.train_step_context(), self._saving():
            return self._run("training_step", nullcontext(), args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's ``validation_step``, likewise."""
        return self._run("validation_step", self.precision_plugin.val_step_context(), args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's ``test_step``, likewise."""
        return self._run("test_step", self.precision_plugin.test_step_context(), args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's ``predict_step``, likewise."""
        return self._run("predict_step", self.precision_plugin.predict_step_context(), args, kwargs)

    def _saving(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._activations is None else self._activations.training()

    def _run(self, name: str, context: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module, buffers = self.lightning_module, self._buffers
        if module is None or buffers is None:
            raise RuntimeError(f"The strategy is not set up yet: there is no module to run {name} of.")
        with context:
            buffers.before_forward(name)
            with self.engine.step(name):
                output = getattr(module, name)(*args, **kwargs)
            buffers.after_forward(averaged=module.automatic_optimization)
            return output

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward; gradients are reduced when the user's ``on_after_backward`` runs.

        Collective: every rank.
        """
        module = self.lightning_module
        if module is None:
            raise RuntimeError("No module is connected to the strategy.")
        self.pre_backward(closure_loss)
        if self._buffers is not None and not module.automatic_optimization:
            self._buffers.after_forward(averaged=True)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        with self.engine.backward():
            self.precision_plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Around all but the last micro-step of a step: full gradients stay local where they are replicated anyway."""
        self.engine.reduce_gradients = False
        try:
            yield
        finally:
            self.engine.reduce_gradients = True

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """One optimizer step. Collective: every rank."""
        self._let_schedulers_go()
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    def _hold_schedulers(self, optimizer: Optimizer) -> None:
        """Keep per-step schedulers of a skipped optimizer step from advancing: their next turn is put out of reach."""
        for config in self.lr_scheduler_configs:
            if config.interval == "step" and config.scheduler.optimizer is optimizer:
                self._held.append((config, config.frequency))
                config.frequency = sys.maxsize

    def _let_schedulers_go(self) -> None:
        for config, frequency in self._held:
            config.frequency = frequency
        self._held.clear()

    def on_exception(self, exception: BaseException) -> None:
        """Leave no pinned slot and no half-reduced gradient behind."""
        if self._activations is not None:
            self._activations.abandon()
        if self._engine is not None:
            self._engine.abandon()
        for adapter in self._adapters.values():
            adapter.abandon()

    def teardown(self) -> None:
        """End a run. Shards stay where they are, so that the module can be validated, or fitted again, or called."""
        self._let_schedulers_go()
        self.precision_plugin.teardown()
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        if self._checkpoints is not None:
            self._checkpoints.finish()
        if self._activations is not None:
            self._activations.detach()
            self._activations = None
        if self._engine is not None:
            self._engine.weights.settle()
            self._engine.tiers.rest()

    # -------------------------------------------------------------- collectives

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks. Collective: every rank."""
        if not dist.is_initialized():
            return
        dist.barrier(device_ids=[self.root_device.index] if dist.get_backend() == "nccl" else None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Give rank ``src``'s object to all ranks. Collective: every rank."""
        if not dist.is_initialized():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the ranks; anything else is returned as it is. Collective: every rank."""
        return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op) if isinstance(tensor, Tensor) else tensor

    # -------------------------------------------------------------- checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Shards exist only after set-up."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This rank's part of the weights (fp32 masters), by full name. No communication."""
        return ModuleState(self.engine, self.lightning_module).save(exclude_frozen=self._policy.exclude_frozen)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """This rank's part of an optimizer's state, by parameter name."""
        return OptimizerState(self.engine, self.adapter(optimizer)).save()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint as the policy says, whole or not at all. Collective: every rank.

        Args:
            checkpoint: Lightning's dictionary.
            filepath: where, also a URL.
            storage_options: ``{"format": ..., "async": ...}`` to differ from the policy this once.
        """
        if self._policy.exclude_frozen:
            excluded = ModuleState(self.engine, self.lightning_module).excluded_frozen()
            checkpoint = {**checkpoint, "lightning_zero": {"excluded_frozen": excluded}}
        precision = self.precision_plugin.precision
        self.checkpoints.save(checkpoint, filepath, self.engine, precision, storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Open a checkpoint of this or another strategy; tensors are read when they are needed.

        Collective: every rank.
        """
        return self.checkpoints.load(checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Read this rank's slices of the weights. Collective: every rank."""
        excluded = checkpoint.get("lightning_zero", {}).get("excluded_frozen", ())
        ModuleState(self.engine, self.lightning_module).load(checkpoint["state_dict"], strict=strict, excluded=excluded)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Read this rank's slices of the optimizer states. Collective: every rank."""
        states = checkpoint["optimizer_states"]
        if len(states) != len(self.optimizers):
            raise ValueError(
                f"The checkpoint holds the states of {len(states)} optimizers, configure_optimizers returned "
                f"{len(self.optimizers)}. To start with fresh optimizers, load the weights only."
            )
        strict = self.lightning_module is None or self.lightning_module.strict_loading
        for optimizer, state in zip(self.optimizers, states, strict=True):
            adapted = OptimizerState(self.engine, self.adapter(optimizer))
            adapted.load(state, strict=strict, weights=checkpoint.get("state_dict"))
        self.checkpoints.load_random_state(checkpoint, self.root_device)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Delete a checkpoint once its successor is durable: at the next save, or at the end of the run."""
        self.checkpoints.remove(filepath)

    def on_validation_end(self) -> None:
        """Say so if a background save has failed meanwhile. Collective: every rank."""
        if self._checkpoints is not None:
            self._checkpoints.raise_failure(self.engine.control)
