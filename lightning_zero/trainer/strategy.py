"""Lightning's hooks, in Lightning's order: the composition root of the package."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero._torch import no_subclasses, without_swaps
from lightning_zero.comm.control import current_watch
from lightning_zero.config import (
    ActivationsLike,
    CheckpointLike,
    CheckpointPolicy,
    Compression,
    LoaderPolicy,
    LoadersLike,
    MeshSize,
    Offload,
    OffloadLike,
    Placement,
    SessionSettings,
    ShardWithin,
    StageLike,
    TimeoutLike,
    UnitsLike,
    validate_loaders,
)
from lightning_zero.engine.engine import Announced
from lightning_zero.errors import ParameterAccessError
from lightning_zero.optim.state import ConstantState
from lightning_zero.registry import extension
from lightning_zero.session.checkpoints import Checkpoints, require_lightning
from lightning_zero.session.state import left_out_of
from lightning_zero.trainer.callbacks import (
    TRAINERS,
    Replaced,
    UnmarkedModule,
    adapt_fit,
    adapt_set_up,
    average_slices,
    averaging,
    gather_for_graphs,
    is_running,
    refuse_other_strategies,
    refuse_unsynced,
    undisturbed,
    without_modules,
)
from lightning_zero.trainer.loaders import Signals, lock_loaders
from lightning_zero.trainer.precision import ZeroPrecision, precision_property
from lightning_zero.trainer.processes import DEFAULT_TIMEOUT, Processes, StartMethod

__all__ = ["ZeroStrategy"]

_DEFAULT_POLICY = CheckpointPolicy()
_DEFAULT_LOADERS = LoaderPolicy()
_BEFORE_STEP = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step")
_BEFORE_BACKWARD = ("on_before_zero_grad", "optimizer_zero_grad", "on_before_backward")


class ZeroStrategy(Processes, ParallelStrategy):
    """ZeRO for an ordinary LightningModule: ``Trainer(strategy="zero3")``.

    Args:
        stage: 1 shards optimizer state, 2 also gradients, 3 also parameters. ``"auto"``, as ``strategy="zero"``: the
            first of these that fits by its plan, then with offload to the host, or to files if ``offload`` names them.
        units: classes of the modules whose parameters are gathered together (stage 3), or their names, for example
            ``["TransformerBlock"]``; ``None`` finds them automatically.
        shard_within: shard within groups of ranks (HSDP, MiCS): ``"node"`` or a number of consecutive ranks; ``None``:
            all ranks. Each group holds a full copy and averages gradients with the others: less traffic, more memory.
        compression: round what is sent between nodes; ``None``: round nothing.
        secondary_shards: let the ranks of a node keep a copy of the gathered weights, sharded among them, until the
            weights change (stage 3, hpZ): they cross nodes once per step. Takes the memory of these shards.
        bucket_mib: largest gradient bucket in stages 1 and 2, in MiB. A model has at least 8 buckets, 16 in stage 2,
            of 1 MiB or more. A single larger parameter is a bucket of its own.
        prefetch: units gathered ahead of the one that computes (stage 3); ``None``: one, if a gather takes time.
        offload: what is kept in host memory or in files between uses; ``None``: everything stays on the device.
            ``"cpu"`` or ``True``: the optimizer, in stage 3 the parameters too, on the host, as in ``zero3_offload``.
        activations: activation checkpointing and offload; ``None``: autograd keeps everything on the device.
            ``"units"`` or classes: ``ActivationPolicy(checkpointing=...)`` of these.
        checkpoint: what checkpoints contain and where the initial weights come from. Or the format alone.
        loaders: what to do when some ranks run out of batches before others. Or one word, for all loaders.
        broadcast_buffers: broadcast rank 0's buffers (running statistics) whenever DDP would.
        allocate_memory_from_process_group: take what is sent from memory of the process groups, which nccl registers
            (GPUs with NVLink SHARP). Such memory is not shared with activations.
        tensor_parallel_size: so many neighbouring ranks compute each layer together, which ``configure_model``
            parallelises over ``self.device_mesh["tensor_parallel"]``, or ``"auto"``: those of a node. They get the
            same batches; each shards its part of the layers with the ranks that have the same part.
        data_parallel_size: how many such groups there are, to be checked.
        accelerator, parallel_devices, cluster_environment: as for every Lightning strategy.
        precision_plugin: ``ZeroPrecision``, or one of Lightning's plugins, which is converted.
        process_group_backend: ``gloo``, ``nccl``, ...; ``None`` chooses by device.
        start_method: how the Trainer starts ranks: ``popen`` runs the script again; ``spawn`` and ``fork`` start
            processes that return the full weights and end. ``None``: ``fork`` in notebooks, else ``popen``.
        timeout: how long a rank waits for the others before it raises, as a timedelta or in seconds; also for their
            part of a checkpoint.

    Raises:
        TypeError: for an unknown argument. docs/migrating.md has those of other strategies.
        ValueError: if a setting is not usable.

    Source: ZeRO (arXiv:1910.02054), ZeRO-Offload (arXiv:2101.06840), ZeRO-Infinity (arXiv:2104.07857).
    """

    is_distributed = True  # without it the Trainer switches the distributed sampler and sync_dist off, silently
    _lightning_module = cast("LightningModule | None", UnmarkedModule())  # 2.6

    def __init__(
        self,
        stage: StageLike = 3,
        *,
        units: UnitsLike | None = None,
        shard_within: ShardWithin = None,
        compression: Compression | None = None,
        secondary_shards: bool = False,
        bucket_mib: float = 100.0,
        prefetch: int | None = None,
        offload: OffloadLike = None,
        activations: ActivationsLike = None,
        checkpoint: CheckpointLike = _DEFAULT_POLICY,
        loaders: LoadersLike = _DEFAULT_LOADERS,
        broadcast_buffers: bool = True,
        allocate_memory_from_process_group: bool = False,
        tensor_parallel_size: MeshSize | None = None,
        data_parallel_size: MeshSize = "auto",
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        start_method: StartMethod | None = None,
        timeout: TimeoutLike = DEFAULT_TIMEOUT,
    ) -> None:
        settings = SessionSettings.from_user(
            stage,
            units=units,
            shard_within=shard_within,
            compression=compression,
            secondary_shards=secondary_shards,
            bucket_mib=bucket_mib,
            prefetch=prefetch,
            offload=offload,
            activations=activations,
            checkpoint=checkpoint,
            broadcast_buffers=broadcast_buffers,
            allocate_memory_from_process_group=allocate_memory_from_process_group,
            tensor_parallel_size=tensor_parallel_size,
            data_parallel_size=data_parallel_size,
        )
        super().__init__(
            settings,
            process_group_backend,
            start_method,
            timeout,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision_plugin=precision_plugin,
        )
        self.loaders = validate_loaders(loaders)
        self.num_nodes = 1  # the Trainer sets it
        self._replaced = Replaced()
        self._laid_out = False  # in the running fit, validation, ...

    def __repr__(self) -> str:
        """What Lightning shows where it takes a strategy of another kind."""
        return "<ZeroStrategy for lightning.pytorch.Trainer; Fabric takes lightning_zero.ZeroFabricStrategy>"

    # ------------------------------------------------------------- environment

    @property
    def placement(self) -> Placement:
        """What is sharded, and over which ranks."""
        return self.settings.placement

    @property
    def offload(self) -> Offload | None:
        """What is kept in host memory, or in files, between uses."""
        return self.settings.offload

    @property
    def _module(self) -> LightningModule:
        if self.lightning_module is None:
            raise RuntimeError("The Trainer has not connected a module to the strategy yet.")
        return self.lightning_module

    @property
    def checkpoints(self) -> Checkpoints:
        """What saves and loads this run: ``checkpoints.wait()`` returns when a background save is durable."""
        return self.session.checkpoints

    precision_plugin: Any = precision_property("_precision_plugin")

    def setup_environment(self) -> None:
        """Join the process group, and make callbacks ready for their own set-up. Collective: every rank."""
        super().setup_environment()
        self._module._device_mesh = self._device_mesh  # for ``configure_model``
        reset_seed()
        adapt_set_up(self._module.trainer, self._module, self._replaced)
        self._signals = Signals(self._module.trainer, lambda: self.engine, self._replaced)
        lock_loaders(self, self._module.trainer, self._replaced)

    # -------------------------------------------------------------------- setup

    def model_to_device(self) -> None:
        """Move what is not a parameter or buffer of the engine (metric states, for example)."""
        with without_swaps(), no_subclasses():  # absent parameters would be asked one by one
            self._module.to(self.root_device)

    def setup(self, trainer: Trainer) -> None:
        """Shard the module, build the optimizers, adapt them. Collective: every rank."""
        self._lay_out(trainer)
        if self._absent and trainer.enable_autolog_hparams:  # where every rank is asked to draw
            gather_for_graphs(trainer.loggers, self._module, self._replaced)
        self.model_to_device()
        self.precision_plugin.attach(self.root_device, self.engine.totals, self.adapter)
        fitting = trainer.state.fn == TrainerFn.FITTING
        self.session.begin(training=fitting)
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    @property
    def _absent(self) -> bool:
        """Whether parameters do not hold their values between steps, or not whole."""
        return self.placement.shards_parameters or bool(self.precision_plugin.param_dtype or self._device_mesh)

    def _lay_out(self, trainer: Trainer, stored: Collection[str] = ()) -> None:
        """Shard the module, once in a run: in ``setup``, or before, when its weights are read. Collective.

        Lightning reads them, and gives callbacks their states, before ``configure_optimizers`` and ``on_fit_start``.
        ``stored`` are the names of the weights that it reads.
        """
        if self._laid_out:
            return
        self._laid_out = True
        if self.accelerator is None:
            raise RuntimeError("The Trainer has not connected an accelerator to the strategy yet.")
        TRAINERS.add(trainer)
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        if fitting and self._layer_sync is not None:
            self.model = self._layer_sync.apply(self._module)
        session = self._begin_session()
        session.settings = self.settings
        session.check_trainer = partial(refuse_other_strategies, ZeroStrategy)
        session.before_thaw = self._refuse_averages
        self._localise(self._module)
        session.shard(
            self._module,
            self.precision_plugin,
            is_running,
            stored=stored,
            activations=(lambda: extension("planner").activations_of(trainer, self)) if fitting else None,
        )
        if fitting:
            self.settings = session.settings  # a stage that was chosen stays
        self.checkpoints.begin(training=fitting)
        if self._absent:
            average_slices(callbacks, self.session, self._module, self._replaced)
        if fitting:
            policy, is_underway = self.settings.checkpoint, self.checkpoints.is_underway
            adapt_fit(trainer, self._module, policy, self._absent, is_underway, self._replaced)

    def _refuse_averages(self) -> None:
        if self._absent and (averages := averaging(self._module.trainer.callbacks)):  # type: ignore[attr-defined]
            raise ParameterAccessError(
                f"Parameters thawed in mid-fit, whose slices {type(averages[0]).__name__} averages: they would be "
                "sharded again. Thaw before the fit, or use stage 1 or 2 in full precision."
            )

    def tensor_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:  # type: ignore[override]
        """Where tensors are made while a module is built: on the host, because only parts stay on the device."""
        plugin: ZeroPrecision = self.precision_plugin
        return plugin.tensor_init_context()

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Run ``configure_optimizers`` on the real parameters, then put shards there. Collective: every rank."""
        choosing = nullcontext if self._device_mesh is None else extension("tensor_parallel").choosing
        with ConstantState(), choosing():  # type: ignore[no-untyped-call]
            super().setup_optimizers(trainer)
        self._adopt(self.optimizers)
        schedulers = [vars(config) for config in self.lr_scheduler_configs]
        self.session.shard_optimizers(self.optimizers, schedulers, writable=self.precision_plugin.param_dtype is None)

    # -------------------------------------------------------------------- steps

    def on_train_start(self) -> None:
        """Restore the random states of a resumed run, after all hooks of the start. From here signals reach all."""
        super().on_train_start()
        self._signals.begin()
        self.checkpoints.restore_random_state(self._module.trainer)

    def on_train_end(self) -> None:
        """The last time that signals reach all ranks. Collective: every rank."""
        self._signals.end()
        super().on_train_end()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's ``training_step``, with units gathered as they are called. So are those of the other steps."""
        return self._run("training_step", args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("predict_step", args, kwargs)

    def _run(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, without: bool = False) -> Any:
        """Run a step of the user's, or ``without`` it all that the others need. Collective: every rank."""
        training, averaged = name == "training_step", self._module.automatic_optimization
        step = self.session.step(name, None if without else (args, kwargs), training=training, averaged=averaged)
        with self.precision_plugin.forward_context(), step:
            result = None if without else getattr(self._module, name)(*args, **kwargs)
            if training and averaged and self.placement.shards_parameters:
                trainer: Any = self._module.trainer
                skipped = trainer.fit_loop.epoch_loop.automatic_optimization._skip_backward  # 2.6
                follows = result is not None and not skipped and undisturbed(trainer, _BEFORE_BACKWARD)
                self.engine.progress.follows = "a backward" if follows else ""
        if not training:
            self._signals.heed(between=True)
        return result

    def take_part(self, step: str) -> None:
        """Take part in a step of evaluation that other ranks have a batch for. Collective: every rank."""
        self._run(step, (), {}, without=True)
        if self._signals.connector.received_sigterm:  # as Lightning's loops end between two batches of a validation
            raise SIGTERMException

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward, after which gradients are reduced, then ``on_after_backward``. Collective: every rank."""
        module = self._module
        refuse_unsynced(module)
        self.pre_backward(closure_loss)
        if not module.automatic_optimization:
            self.session.backward_outside_of_steps()
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        with self.session.backward(self._announced(optimizer), closure_loss):
            self.precision_plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        self._signals.heed(between=False)
        return closure_loss

    def _announced(self, optimizer: Optimizer | None) -> Announced | None:
        """What tells of the step that the backward about to run is followed by, if it is."""
        trainer: Any = self._module.trainer
        steps = self._module.automatic_optimization and optimizer is not None and self.precision_plugin.scaler is None
        if not steps or self.settings.offload is not None or trainer.fit_loop._should_accumulate():  # 2.6
            return None
        adapter = self.adapter(cast(Optimizer, optimizer))
        if adapter.rule == "closure":
            return None
        return lambda: adapter.announced() if undisturbed(trainer, _BEFORE_STEP) else None

    def block_backward_sync(self) -> AbstractContextManager[Any]:  # type: ignore[override]
        """Around all but the last micro-step of a step: full gradients stay local where they are replicated anyway."""
        return self.session.accumulating()

    def on_exception(self, exception: BaseException) -> None:
        """Leave no pinned slot and no half-reduced gradient behind."""
        self.tell_failure(exception)
        if self._session is not None:
            self._session.abandon()

    def teardown(self) -> None:
        """End a run. Shards stay where they are, so that the module can be validated, or fitted again, or called."""
        self.precision_plugin.teardown()
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self._replaced.release()
        self._laid_out = False
        if self._session is not None:
            self._session.rest()
        if (watch := current_watch()) is not None:
            watch.run_ends()

    # -------------------------------------------------------------- checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This rank's part of the weights (fp32 masters), by full name. No communication."""
        error = sys.exc_info()[1]
        if self._session is None and error is not None and self._module.trainer.interrupted:
            raise error  # it came before there was anything to save, as it is about to be
        state = self.session.module_state(self._module)
        return state.save(exclude_frozen=self.settings.checkpoint.exclude_frozen)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """This rank's part of an optimizer's state, by parameter name."""
        return self._state_of(optimizer).save()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint as the policy says, whole or not at all, also to a URL. Collective: every rank.

        ``storage_options``: ``{"format": ..., "async": ...}`` to differ from the policy this once.
        """
        if self.settings.checkpoint.exclude_frozen:
            excluded = self.session.module_state(self._module).excluded_frozen()
            checkpoint = {**checkpoint, "lightning_zero": {"excluded_frozen": excluded}}
        precision, checkpoint = self.precision_plugin.precision, without_modules(checkpoint)
        self.checkpoints.save(checkpoint, filepath, self.engine, precision, storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Open a checkpoint of any strategy; tensors are read when they are needed. Collective: every rank."""
        checkpoint = self._begin_session().checkpoints.load(checkpoint_path, weights_only)
        require_lightning(checkpoint, checkpoint_path)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Read this rank's slices of the weights. Collective: every rank."""
        self._lay_out(self._module.trainer, checkpoint["state_dict"].keys())
        state = self.session.module_state(self._module)
        state.load(checkpoint["state_dict"], strict=strict, excluded=left_out_of(checkpoint))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Read this rank's slices of the optimizer states. Collective: every rank."""
        states = checkpoint["optimizer_states"]
        if states and len(states) != len(self.optimizers):  # none: `on_load_checkpoint` wants fresh optimizers
            raise ValueError(
                f"The checkpoint holds the states of {len(states)} optimizers, configure_optimizers returned "
                f"{len(self.optimizers)}. To start with fresh optimizers, set checkpoint['optimizer_states'] = [] in "
                "`on_load_checkpoint`, or load the weights only."
            )
        self.session.adopt_changes()
        for optimizer, state in zip(self.optimizers, states, strict=False):
            self._state_of(optimizer).load(state, weights=checkpoint.get("state_dict"))
        self.checkpoints.load_random_state(checkpoint, self.root_device)
        self.checkpoints.load_wire_state(checkpoint, self.engine)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Delete a checkpoint once its successor is durable: at the next save, or at the end of the run."""
        self.checkpoints.remove(filepath)
