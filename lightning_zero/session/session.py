"""One sharded run without a Trainer: a module, its optimizers, its steps and its checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.activations import Activations
from lightning_zero.comm import Collectives, ControlGroup, Exchange, Groups, Streams, choose_collectives
from lightning_zero.config import HostOffload, NvmeOffload, Offload, SessionSettings
from lightning_zero.engine import BufferBroadcast, ZeroEngine, engine_of
from lightning_zero.engine.engine import Announced
from lightning_zero.engine.full import give_back, whole_gradients
from lightning_zero.errors import ParameterAccessError, some
from lightning_zero.meta import MetaValues
from lightning_zero.offload import MemoryTiers
from lightning_zero.optim.agreement import agree_on_set_up
from lightning_zero.optim.rules import optimizer_rule
from lightning_zero.optim.sharded import ShardedOptimizer
from lightning_zero.optim.stepper import Steps
from lightning_zero.plan.plan import Plan, build_plan
from lightning_zero.plan.tree import check_memory
from lightning_zero.registry import extension
from lightning_zero.session.checkpoints import Checkpoints
from lightning_zero.session.state import (
    ModuleState,
    OptimizerState,
    cut_anew,
    load_initial_weights,
    read_into_memory,
)
from lightning_zero.shards.binding import is_absent

__all__ = ["Dtypes", "ZeroSession", "make_steps", "make_tiers", "step_threads"]


class Dtypes:
    """The precision of a run, where all keeps its own dtype. ``ZeroPrecision`` has what it changes.

    Attributes:
        param_dtype: what units compute in; ``None``: each parameter's own dtype.
        reduce_dtype: what gradients are averaged in; ``None``: each parameter's own dtype.
        scales_loss: whether gradients are multiplied by a scale that changes.
        full_precision: class names of modules whose parameters keep their own dtype in units.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    scales_loss: bool = False
    full_precision: Sequence[str] = ()

    def would_cast(self, module: nn.Module) -> bool:
        """Whether ``convert_module`` would change a parameter, so that its values must be in memory first."""
        return False

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Cast the masters, in place, and what else the precision wants to be cast."""
        return module


class ZeroSession:
    """What a Trainer's strategy puts Lightning's hooks in front of, and a training loop of one's own may call.

    In this order: ``shard``, ``shard_optimizers``, then for each step ``with step(...)``, ``with backward()`` and
    ``optimizer.step()``; ``rest`` at the end. A module that was sharded before, by any session, goes on from there.

    ``local_ranks``: how many ranks share the cores of a host. ``wire`` gives what carries weights and gradients, in
    place of ``choose_collectives``.

    Attributes:
        checkpoints: what saves and loads.
        check_trainer: refuses a module that something else trains now, by raising; called with it before a step.
        before_thaw: called before the module is laid out anew in the middle of a run, which it may refuse.
    """

    def __init__(
        self,
        settings: SessionSettings,
        groups: Groups,
        device: torch.device,
        local_ranks: int = 1,
        wire: Callable[[Groups, Streams, torch.device], Collectives] | None = None,
    ) -> None:
        self.settings, self.groups = settings, groups
        if settings.shard_within == "node":
            groups.check_hosts()
        self.device, self.local_ranks = device, local_ranks
        self.wire = wire or partial(choose_collectives, exchange=self._exchange)
        self.checkpoints = Checkpoints(settings.checkpoint, groups)
        self._engine: ZeroEngine | None = None
        self._buffers: BufferBroadcast | None = None
        self._activations: Activations | None = None
        self._adapters: dict[int, ShardedOptimizer] = {}
        self.check_trainer: Callable[[nn.Module], object] = lambda module: None
        self.before_thaw: Callable[[], object] = lambda: None
        self._dtypes: Dtypes = Dtypes()
        self._stepped: dict[str, Any] = {}  # what `shard_optimizers` got beside the optimizers

    @property
    def _exchange(self) -> Exchange:
        """What the settings ask of the wire."""
        asked = self.settings
        return Exchange(asked.compression, asked.secondary_shards, asked.allocate_memory_from_process_group)

    @property
    def engine(self) -> ZeroEngine:
        """Who runs the module, from ``shard`` on."""
        if self._engine is None:
            raise RuntimeError("No module is sharded yet: its engine exists from `ZeroSession.shard` on.")
        return self._engine

    @property
    def adapters(self) -> list[ShardedOptimizer]:
        """The optimizers, as they step on shards."""
        return list(self._adapters.values())

    # -------------------------------------------------------------------- set-up

    def shard(
        self,
        module: nn.Module,
        dtypes: Dtypes | None = None,
        is_running: Callable[[nn.Module], bool] = lambda module: False,
        cast: bool = True,
        stored: Collection[str] = (),
        activations: Callable[[], tuple[int, str]] | None = lambda: (0, "Activations are not known."),
    ) -> None:
        """Lay the module out over the ranks, with rank 0's values, or with the weights that the settings name.

        ``is_running``: whether somebody trains a module now. ``cast``: whether it gets the precision's dtypes.
        ``stored``: names of tensors that the caller reads next, which need not be initialised. ``activations``: their
        bytes, or why they are not known, for a stage that is chosen here; None: nothing is trained.
        ``ParameterAccessError`` for a part of a module that is running, or whose values have gone. Collective.
        """
        self._dtypes = dtypes = dtypes or Dtypes()
        existing, torn = _own_engine(module, is_running), False
        convert = dtypes.convert_module if cast else lambda module: module
        if existing is not None:
            settings = self.settings
            had = (existing.device, existing.plan.offload, existing.collectives.asked)
            fits = had == (self.device, settings.offload, self._exchange) and not settings.automatic
            fits = fits and not dtypes.would_cast(module) and existing.names.keys() >= {*module.parameters()}
            plan = self._plan(convert(module), dtypes, existing.collectives) if fits else None
            if plan is not None and plan.fingerprint() == existing.plan.fingerprint():
                self._engine = existing  # sharded by an earlier run just as it is wanted now
                existing.plan = plan  # buffers may have been added or replaced
                existing.tiers.wake()
                existing.access.check_trainer = self.check_trainer
                return
            torn = existing.updating
            give_back(existing)  # other settings, or parameters that were frozen or thawed since
        convert(module)
        control, streams = self.groups.control, Streams(self.device, self.groups.one_order)
        collectives = self.wire(self.groups, streams, self.device)
        if self.settings.automatic:
            plan_of = partial(self._plan, module, dtypes, collectives)
            self.settings = extension("planner").choose_stage(self, module, plan_of, collectives.receives, activations)
        plan = self._plan(module, dtypes, collectives)
        check_memory(module, self.device)
        tiers = make_tiers(self.settings.offload, plan, control, self.device, streams)
        try:
            values = MetaValues.by_unit(module, plan)
            self._engine = ZeroEngine(module, plan, collectives, control, tiers, values)
        except BaseException:
            tiers.close()
            raise
        self._engine.updating, self._engine.access.check_trainer = torn, self.check_trainer
        policy = self.settings.checkpoint
        if existing is None and policy.initial_weights is not None:  # otherwise it has been trained, and goes on
            stored = load_initial_weights(
                ModuleState(self._engine, module),
                policy.initial_weights,
                self.groups.checkpoint,
                strict=policy.strict_initial_weights,
                verify=policy.verify,
                frozen_as_built=policy.frozen_as_built,
            )
        values.check(control, stored)

    def _plan(
        self, module: nn.Module, dtypes: Dtypes, collectives: Collectives, settings: SessionSettings | None = None
    ) -> Plan:
        settings = settings or self.settings
        plan = build_plan(
            module,
            placement=collectives.placed(replace(settings.placement, span=self.groups.span)),
            world_size=self.groups.control.world_size // self.groups.shard.tensor,
            units=settings.units,
            bucket_mib=settings.bucket_mib,
            prefetch=int(not collectives.gathers_at_once) if settings.prefetch is None else settings.prefetch,
            offload=settings.offload,
            param_dtype=dtypes.param_dtype,
            reduce_dtype=dtypes.reduce_dtype,
            full_precision=dtypes.full_precision,
            broadcast_buffers=settings.broadcast_buffers,
        )
        if settings.compression is not None:
            extension("compression").check(settings.compression, plan, dtypes.scales_loss)
        return plan

    def begin(self, training: bool) -> None:
        """Send rank 0's buffers, and make what training needs ready. Collective: every rank, after ``shard``."""
        engine = self.engine
        if engine.collectives.alters and not engine.plan.placement.shards_parameters:
            engine.masters_changed(range(len(engine.units)))  # weights go over the wire from the first batch on
        self._buffers = BufferBroadcast(engine, fitting=training, enabled=self.settings.broadcast_buffers)
        if training:
            if engine.collectives.state is not None:
                engine.collectives.state.clear()  # of an earlier run
            self._prepare_training()

    def _prepare_training(self) -> None:
        self.engine.prepare_training()
        if self.settings.activations is not None:
            self._activations = Activations(self.engine, self.settings.activations, self.settings.units)

    def _lay_out_anew(self, thawed: Sequence[str]) -> None:
        """Let parameters train that were frozen when the module was laid out: between steps, with all that was learned.

        The whole module is in memory on every rank for a moment. Collective: every rank, with the same parameters.
        """
        former = self.engine
        former.control.alike("list of parameters that thawed in mid-fit", thawed, "Thaw the same on every rank.")
        if former.accumulates:
            raise ParameterAccessError(
                f"{some(thawed)} thawed in the middle of an accumulation, whose gradients every rank still has for "
                "itself. Set `requires_grad` when an epoch starts, or after an optimizer step."
            )
        if any(adapter.rule == "closure" for adapter in self._adapters.values()):
            raise ParameterAccessError(
                f"{some(thawed)} thawed in the middle of a fit, with an optimizer that needs a closure: it keeps whole "
                "parameters. Thaw before the fit."
            )
        trained = [one for one in former.shards.values() if one.parameter is not None]
        there = {*former.module.parameters()}
        if gone := [one.name for one in trained if one.user not in there]:
            raise ParameterAccessError(
                f"{some(map(repr, gone))} left the module before {some(thawed)} thawed, and an optimizer still has it. "
                "Freeze what is not to train (`requires_grad_(False)`), and leave it in its module."
            )
        self.before_thaw()
        gradients = whole_gradients(former, trained, "gradients of the whole module")
        optimizers = [adapter.optimizer for adapter in self._adapters.values()]
        states = [adapter.named_state() for adapter in self._adapters.values()]
        former.control.together("read optimizer state from files", lambda: read_into_memory(states))
        for adapter in self._adapters.values():
            adapter.hand_over()
        self._adapters.clear()
        if self._activations is not None:
            self._activations.detach()
        self.shard(former.module, self._dtypes, cast=False)
        engine, former.updating = self.engine, True  # slices that user code has kept are not of this engine
        engine.means.spans.observers, engine.reduce_gradients = former.means.spans.observers, former.reduce_gradients
        if self._buffers is not None:
            self._buffers.engine = engine
        self._prepare_training()
        states = [cut_anew(state, former, engine) for state in states]
        self.shard_optimizers(optimizers, **self._stepped)
        for adapter, state in zip(self._adapters.values(), states, strict=True):
            adapter.load_named_state(state, [{} for _ in adapter.optimizer.param_groups])
        for parameter, gradient in gradients.items():
            binding = engine.access.bindings[parameter]
            if (
                gradient is not None and binding.bucket is not None
            ):  # else it was frozen at the same time, and its gradient goes
                engine.access.keep_gradient(binding, gradient)

    def shard_optimizers(
        self, optimizers: Sequence[Optimizer], schedulers: Sequence[Mapping[str, Any]] = (), writable: bool = True
    ) -> None:
        """Put this rank's shards in the place of the parameters in the optimizers' groups.

        Optimizers that step on the engine's shards already go on. The ranks compare the settings of optimizers and
        ``schedulers``: ``DivergenceError`` if they differ. ``writable``: whether what user code writes to parameters
        reaches the masters. Collective: every rank.
        """
        engine = self.engine
        self._stepped = {"schedulers": schedulers, "writable": writable}
        former, self._adapters = self._adapters, {}
        stay = {k: v for k, v in former.items() if v.optimizer in optimizers and v in engine.optimizers}
        for key in former.keys() - stay.keys():
            former[key].retire()
        owned = {one.user: one for one in engine.shards.values()}
        labels = agree_on_set_up(list(optimizers), schedulers, owned, engine.control)
        steps = make_steps(engine, self.local_ranks)
        for label, optimizer in zip(labels, optimizers, strict=True):
            if id(optimizer) in stay:
                self._adapters[id(optimizer)] = stay[id(optimizer)]
                continue
            if optimizer_rule(optimizer) == "closure":
                closures = extension("closures", "use an optimizer whose step needs no closure")
                self._adapters[id(optimizer)] = closures.ClosureOptimizer(optimizer, label, owned, engine)
                continue
            self._adapters[id(optimizer)] = ShardedOptimizer(
                optimizer,
                label,
                owned,
                engine.collectives,
                engine.before_optimizer_step,
                engine.after_optimizer_step,
                engine.access.writes.note,
                writable=writable and not engine.plan.placement.shards_parameters,
                steps=steps,
            )
        engine.optimizers = self.adapters

    def adapter(self, optimizer: Optimizer) -> ShardedOptimizer:
        """The sharded view of one of the optimizers of ``shard_optimizers``; ``KeyError`` for any other."""
        return self._adapters[id(optimizer)]

    def adopt_changes(self) -> None:
        """Take over what user code has thawed, and the param groups it has added, since the last step or set-up.

        Whoever loads optimizer states calls this first, so that every parameter that trains is there to take its own.
        Collective: every rank.
        """
        if thawed := self.engine.thawed():
            self._lay_out_anew(thawed)
        for adapter in self._adapters.values():
            adapter.adopt_new_groups()

    # -------------------------------------------------------------------- steps

    @contextmanager
    def step(self, name: str, batch: Any = None, *, training: bool, averaged: bool = True) -> Iterator[None]:
        """Around the forward of one ``batch``: ``training`` if a backward may follow, and ``averaged`` if that averages
        gradients (``engine/buffers.py`` says why). Tensor groups compare the first one. Collective: every rank."""
        if self._buffers is None:
            raise RuntimeError(f"The run has not begun: there is no module to run {name} of.")
        if (tensor := self.groups.shard.tensor) > 1:
            extension("tensor_parallel").compare_batches(self.engine, name, batch, tensor)
        if training:
            self.adopt_changes()
        with self._activations.training() if training and self._activations is not None else nullcontext():
            self._buffers.before_forward(name, training)
            with self.engine.step(name):
                yield
            self._buffers.after_forward(averaged=averaged)

    def backward(self, step: Announced | None = None, loss: Tensor | None = None) -> AbstractContextManager[None]:
        """Around the backward of ``loss``; afterwards gradients are those of all ranks. ``step``: what follows at once,
        as ``ZeroEngine.backward`` says. Collective: every rank."""
        if self.groups.shard.tensor > 1 and loss is not None:
            extension("tensor_parallel").note_loss(self.engine, loss)
        return self.engine.backward(step)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Around all micro-steps of a step but the last: full gradients stay local where they are replicated anyway."""
        before, self.engine.reduce_gradients = self.engine.reduce_gradients, False
        try:
            yield
        finally:
            self.engine.reduce_gradients = before

    def backward_outside_of_steps(self) -> None:
        """Note that a backward begins that no ``step`` has announced: buffers are sent before the next forward."""
        if self._buffers is not None:
            self._buffers.after_forward(averaged=True)

    def abandon(self) -> None:
        """Leave no pinned slot and no half-reduced gradient behind after an error."""
        if self._engine is not None:
            self._engine.abandon()
        for adapter in self._adapters.values():
            adapter.abandon()

    def rest(self) -> None:
        """End a run: what is saved is durable. Shards stay where they are, for the next run.

        Collective: every rank, but for one that is handling an exception.
        """
        self.checkpoints.finish()
        if self._activations is not None:
            self._activations.detach()
            self._activations = None
        if self._engine is not None:
            self._engine.weights.settle()
            self._engine.tiers.rest()

    # -------------------------------------------------------------------- state

    def module_state(self, module: nn.Module | None = None) -> ModuleState:
        """Weights and buffers, to save and to load, under the names of a module; by default the one that is sharded."""
        return ModuleState(self.engine, module)

    def optimizer_state(self, optimizer: Optimizer) -> OptimizerState:
        """State and options of one optimizer, to save and to load."""
        return OptimizerState(self.engine, self.adapter(optimizer))


def _own_engine(module: nn.Module, is_running: Callable[[nn.Module], bool]) -> ZeroEngine | None:
    """The engine of an earlier fit of ``module`` itself. Those end that its parts bring along from other modules.

    A part is an encoder that was pretrained in another module, say. Collective: every rank.
    """
    own = engine_of(module)
    for name, child in module.named_modules():
        other = engine_of(child)
        if other is None or other is own:
            continue
        if is_running(other.module):
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


def make_tiers(
    offload: Offload | None,
    plan: Plan,
    control: ControlGroup,
    device: torch.device,
    streams: Streams | None = None,
) -> MemoryTiers:
    """Memory for an engine, by tier.

    Collective: every rank; ``OffloadError`` on all, if the file of one cannot be made.
    """
    if isinstance(offload, NvmeOffload):
        return cast(MemoryTiers, extension("nvme").make_tiers(offload, plan, control, device, streams))
    pin = offload.pin_mib if isinstance(offload, HostOffload) else None
    return MemoryTiers(device, streams, pin_nbytes=None if pin is None else int(pin * 2**20))


def make_steps(engine: ZeroEngine, local_ranks: int) -> Steps | None:
    """How optimizers update an engine's offloaded masters; ``None`` without offload."""
    offload = engine.plan.offload
    if offload is None or not offload.optimizer:
        return None
    threads = step_threads(offload, local_ranks, engine.device)
    steps = Steps(threads=threads, publish=engine.weights.unit_stepped, agree=engine.agree_stepped)
    return cast(Steps, extension("nvme").make_steps(engine, steps)) if isinstance(offload, NvmeOffload) else steps


def step_threads(offload: Offload, local_ranks: int, device: torch.device) -> int:
    """Threads a step on the host computes with: what the policy says, or this rank's share of the cores.

    On a CPU not more than torch computes with there anyway: more could be against the user's will, and would hang in a
    process that was forked from one which has used them (OpenMP does not survive a fork).
    """
    if offload.threads is not None:
        return offload.threads
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = max(1, cores // max(1, local_ranks))
    return min(share, torch.get_num_threads()) if device.type == "cpu" else share
