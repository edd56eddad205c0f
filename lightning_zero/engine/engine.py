"""The engine: forward and backward of a module, and optimizer steps on its masters, whose results it publishes.

Forward: ``enter`` (a Lightning step method, or any call of the model) -> for each unit ``before_unit_forward``,
``after_unit_forward`` -> ``leave``. Backward: ``begin_backward`` -> for each unit ``before_unit_backward``, for each
gradient ``gradient_arrived`` -> ``end_backward``. A step: ``before_optimizer_step`` -> ``after_optimizer_step``; where
masters are on the host, in between for each unit ``unit_stepped``, and ``agree_stepped``.

[Note: when a unit's backward is over]
Autograd runs the nodes of one thread strictly from the last created to the first. So when the first node of unit j
runs, all units that ran after j in the forward are finished, whatever gradients they got. A unit is resharded then,
never when its own gradients have arrived: a frozen or detached reader may still need its weights.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from lightning_zero._torch import (
    current_graph_task,
    next_sequence_number,
    no_subclasses,
    queue_backward_callback,
)
from lightning_zero.comm import Collectives, ControlGroup, Totals, raising
from lightning_zero.comm.control import Met, parent_rank
from lightning_zero.config import Tier
from lightning_zero.engine.access import ParameterAccess
from lightning_zero.engine.agreement import Agreement, Means
from lightning_zero.engine.build import UnitBuilder, build_reducer
from lightning_zero.engine.events import Phase, Spans
from lightning_zero.engine.guard import check_weights
from lightning_zero.engine.hooks import EngineHooks, ForwardCall, hook_outputs, warn_of_formats
from lightning_zero.engine.pool import BufferPool, FlatBuffer
from lightning_zero.engine.reducer import GradientBucket, GradientReducer, report_width
from lightning_zero.engine.schedule import UnitSchedule
from lightning_zero.engine.unit import ShardedUnit, Unit
from lightning_zero.engine.weights import HALF_UPDATED, PublishedWeights
from lightning_zero.errors import DivergenceError, OffloadError, ParameterAccessError
from lightning_zero.meta import MetaValues
from lightning_zero.offload.transfers import MemoryTiers
from lightning_zero.plan.plan import Plan
from lightning_zero.shards.binding import binding_of
from lightning_zero.shards.slice import Slice

__all__ = ["ZeroEngine", "engine_of"]

_NOTHING = nullcontext()
Announced = Callable[[], tuple[str, Sequence[int]] | None]

# Which engine looks after a module: user code that wants to look inside has only its module in hand, and nothing is
# ever attached to the user's objects. The one global of the package; both sides are weak.
_ENGINES: WeakKeyDictionary[nn.Module, ref[ZeroEngine]] = WeakKeyDictionary()


def engine_of(module: nn.Module) -> ZeroEngine | None:
    """The engine that looks after ``module`` (the root or any module below it), if there is one."""
    engine = _ENGINES.get(module)
    return None if engine is None else engine()


def _engines() -> set[ZeroEngine]:
    return {engine for weak in list(_ENGINES.values()) if (engine := weak()) is not None}


def _before_fork() -> None:
    for engine in _engines():
        engine.means.collectives.freeze(engine.access.plain_memory)  # they see what parameters show now


def _after_fork() -> None:
    if parent_rank() is None:  # what is forked becomes a rank itself
        return
    for engine in _engines():  # the child has none of its threads and must not use its connections
        engine._hooks.remove()
        engine.access.leave_to_worker()
    _ENGINES.clear()


os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


def _torn(doing: str) -> RuntimeError:
    """The error of whoever needs weights, or updates them, after an optimizer step on them has failed."""
    return RuntimeError(
        f"{doing}: an optimizer step on offloaded weights failed half-way, so they are partly old, partly new. Resume "
        "from the last checkpoint (`trainer.fit(..., ckpt_path=...)`), which is intact, or build the module again."
    )


@dataclass(eq=False)
class Progress:
    """Where in the training program this rank is."""

    scope: str = ""  # the step method, or the call of a module, that runs or ran last
    depth: int = 0  # how many scopes run, one inside of the other
    segment: int = 0  # how many stretches of forward and backwards the scope has had
    thread: int = 0  # that runs scopes
    forwards: int = 0
    trained: int = 0  # forwards of training steps
    backwards: int = 0
    steps: int = 0
    in_backward: bool = False
    explicit: bool = False  # ``ZeroEngine.backward`` says when the running one is over
    reduces: bool = True  # whether the running backward reduces gradients
    follows: str = ""  # what comes next, before any code of the user's: a backward, or the step that all have agreed on
    between_micro_steps: bool = False  # the last backward was not the last one before a step
    calls: list[ForwardCall] = field(default_factory=list)  # forwards of units that run, the innermost last
    lost: str = ""  # what forwards that raised have written to weights, and why that is an error


class ZeroEngine:
    """Runs one module as its plan says, and brings what optimizers do to its masters to all ranks.

    Args:
        module: the user's module. Its parameter objects stay; what they point to is the engine's from now on.
        plan: who owns what.
        collectives: the wire.
        control: agreements between hosts.
        tiers: where shards are, by tier; and where the module computes.
        initial: gives values to what is on the meta device; who gives one asks it afterwards what has none.

    Raises:
        DivergenceError: on every rank, if the ranks' plans differ.

    Collective: every rank.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        collectives: Collectives,
        control: ControlGroup,
        tiers: MemoryTiers,
        initial: MetaValues | None = None,
    ) -> None:
        warn_of_formats(module)
        collectives.settle()  # what an engine before this one was doing when an error stopped it
        control.alike("model or plan", plan.summary_lines())
        values = initial or MetaValues.by_unit(module, plan)
        self.module, self.plan = module, plan
        spans, pool = Spans(), BufferPool(collectives, tiers.device, tiers.streams, plan)
        marks = 1 + report_width(sum(layout.trainable for layout in plan.layouts))
        self.means = means = Means(collectives, control, Agreement(control, 5, marks, spans), tiers, pool, spans)
        self.units: list[Unit] = UnitBuilder(module, plan, means, values).build()
        values.place_buffers(tiers.device)
        if initial is None:
            values.check(control)
        shards = [shard for unit in self.units for flat in unit.flats for shard in flat.shards]
        self.names: dict[nn.Parameter, str] = {shard.user: shard.spec.name for shard in shards}
        self.shards: dict[str, Slice] = {shard.spec.name: shard for shard in shards}
        self.progress = Progress(thread=threading.get_ident())
        self.reduce_gradients = True
        self.updating = False
        """Whether an optimizer step has begun and not ended: masters may be half updated."""
        self.optimizers: list[Any] = []
        """Those that step on shards; they learn when masters were written from outside."""
        self._reducer: GradientReducer | None = None  # while training
        self.access = ParameterAccess(self)
        self._hooks = EngineHooks(self)
        self._schedule = UnitSchedule(plan, self.units, means, self._bring_for_backward, self._hooks)
        self.weights = PublishedWeights(self.units, means, module)
        self._hooks.watch_module(self.units, plan.root)
        for part in module.modules():
            _ENGINES[part] = ref(self)

    @property
    def collectives(self) -> Collectives:
        """The wire."""
        return self.means.collectives

    @property
    def control(self) -> ControlGroup:
        """Agreements between hosts."""
        return self.means.control

    @property
    def tiers(self) -> MemoryTiers:
        """Where shards are."""
        return self.means.tiers

    @property
    def device(self) -> torch.device:
        """Where the module computes."""
        return self.means.tiers.device

    @property
    def computes(self) -> bool:
        """Whether a forward or a backward runs, in which units are gathered."""
        return self.progress.depth > 0 or self.progress.in_backward

    @property
    def accumulates(self) -> bool:
        """Whether this rank has sums of gradients for itself, to be averaged with those of a later micro-step."""
        return self._reducer is not None and self._reducer.holds_local

    @property
    def totals(self) -> Totals:
        """Who puts numbers about gradients together, where these are."""
        on_host = self.device.type == "cpu" or (self.plan.offload is not None and self.plan.offload.optimizer)
        return self.means.control if on_host else self.means.collectives

    def thawed(self) -> list[str]:
        """What is trainable and was not when the module was laid out. Local."""
        with no_subclasses():  # absent parameters would be asked one by one
            return [
                spec.name
                for unit in self.units
                for flat in unit.flats
                if not flat.layout.trainable
                for spec, parameter in zip(flat.layout.parameters, flat.parameters, strict=True)
                if parameter.requires_grad
            ]

    def agree(self, place: str, values: Sequence[int] = ()) -> list[list[int]]:
        """Meet the other ranks outside of a phase and exchange a few numbers: see ``Agreement.round``. Returns every
        rank's, in rank order; only one row if all are alike."""
        return self.means.agreement.round(place, values).rows

    def prepare_training(self) -> None:
        """Allocate what gradients need and start to collect them. Once; evaluation needs neither."""
        if self._reducer is None:
            self._reducer = build_reducer(self.plan, self.units, self.means)
            self._hooks.watch_gradients(self._reducer.buckets)
            self.access.watch_gradients(self._reducer.buckets)
            named = {spec.name for spec in self.plan.parameters if spec.aliases and spec.trainable}
            self._hooks.sum_tied({p for p, name in self.names.items() if name in named}, self._hold)

    # ----------------------------------------------------------------- forward

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Everything a Lightning step method does. Calls of one name share an order of units.

        Collective: every rank, with the same names of methods in the same order.
        """
        outermost, training = self.progress.depth == 0, torch.is_grad_enabled()
        if outermost:
            if self.updating and self.plan.offload is not None:
                raise _torn(f"{name} cannot run")
            if training:
                self._refuse_thawed()
            for unit in self._schedule.sharded.values():
                unit.outstanding = 0
            self.means.collectives.freeze(())
        self.enter(name)
        try:
            with self._hooks.tied() if outermost and training else _NOTHING:
                yield
            self.leave(failed=False)
        except BaseException:
            self.abandon()
            raise

    def enter(self, name: str, called: bool = False) -> None:
        """Begin a scope in which units may be needed; scopes nest. ``called``: by the call of a module."""
        self._recover()
        self.means.control.settle()
        progress = self.progress
        progress.depth += 1
        if progress.depth > 1 or progress.in_backward:
            return
        self.means.spans.listen()
        self.means.collectives.settle()
        progress.scope, progress.segment, progress.thread = name, 0, threading.get_ident()
        self.weights.bind(late=True)
        self._open_forward()
        if called:
            self._schedule.guard_root()
        if not self._schedule.sharded:
            self.means.spans.begin(Phase.FORWARD, name)

    def leave(self, failed: bool) -> None:
        """End a scope. ``failed``: by an exception; nothing is agreed then, because the others may not get here."""
        progress = self.progress
        if progress.depth != 1:  # an inner scope's exception may still be caught by the user's code
            progress.depth = max(0, progress.depth - 1)
            return
        progress.depth = 0
        if self._schedule.guard.of_root:
            self._schedule.guard.of_root = False
            self._schedule.guard.pop()
        if progress.in_backward:
            return
        if failed:
            self.abandon()
            return
        self.means.spans.stop(Phase.FORWARD)
        follows, progress.follows = progress.follows, ""
        if follows and self._schedule.order.is_open and not progress.lost:
            self._schedule.end()
            self.means.control.before = self._close_forward
        else:
            self._close_forward()
        self.weights.unbind()

    def pass_forward(self, name: str, place: str) -> None:
        """Meet the other ranks at ``place``, though they may be in a forward: a rank takes part in their gathers.

        ``name``: of the step method, which has not begun here. Collective, and an error on all if some are in it.
        """
        if self._schedule.sharded:
            try:
                self._schedule.open(f"forward 0 of {name}", place)
                self._schedule.close()
            except BaseException:
                self.abandon()
                raise

    @contextmanager
    def paused(self) -> Iterator[bool]:
        """Interrupt a running forward, if there is one, for other collectives. Collective: every rank."""
        depth = 0 if self.progress.in_backward else self.progress.depth
        if depth:
            self._close_forward()
            self.progress.depth = 0
        yield depth > 0
        if depth:
            self.progress.depth = depth
            self._open_forward()

    def before_unit_forward(self, unit: ShardedUnit, *called: Any) -> None:
        """Make a unit's full parameters available for its forward. ``called``: what its module is called with."""
        progress = self.progress
        implicit = progress.depth == 0 and not progress.in_backward
        if implicit:
            self.enter(f"forward of '{unit.name}'")
        self._schedule.unshard(unit)
        guarded = torch.is_grad_enabled()
        call = ForwardCall(self, unit, unit.version, next_sequence_number(), guarded, implicit, progress.in_backward)
        if self.means.spans.heard:
            call.span = self.means.spans.begin(Phase.FORWARD, unit.name, unit.nbytes)
        progress.calls.append(call)
        if guarded:
            self._schedule.guard.push()

    def after_unit_forward(self, unit: ShardedUnit, *called: Any, failed: bool | None = None) -> None:
        """Reshard a unit after its forward, and arrange that its backward unshards it again.

        ``called``: the module, what it was called with, and its output; ``None`` after an error, but not only then.
        """
        output = called[-1] if called else None
        if failed is None:
            failed = output is None and sys.exc_info()[1] is not None
        calls = self.progress.calls
        if not calls or calls[-1].unit is not unit:
            return  # abandoned in between
        call = calls.pop()
        if call.span is not None:
            self.means.spans.end(call.span)
        if call.guarded:
            self._schedule.guard.pop()
            if not failed and hook_outputs(output, call) and not call.recomputed:
                call.counted = True
                unit.outstanding += 1
        try:
            self._schedule.reshard(unit)
        except ParameterAccessError as error:
            if not failed:
                failed = True
                raise
            self.progress.lost = str(error)  # torch drops it where a forward has raised, which user code may catch
        finally:
            if call.implicit:
                self.leave(failed)

    def stay(self, unit: ShardedUnit, parameter: str) -> None:
        """Make a unit whole though no module of it runs: see ``UnitSchedule.stay``. Not on a thread of the user's."""
        if threading.get_ident() == self.progress.thread or current_graph_task() != -1:
            self._schedule.stay(unit, parameter)

    # ---------------------------------------------------------------- backward

    @contextmanager
    def backward(self, step: Announced | None = None) -> Iterator[None]:
        """One whole backward, whose end is known even if activation checkpointing runs others inside. Collective.

        ``step``, where one follows, is called at the end. It returns what ``before_optimizer_step`` is to get, if no
        code of the user's comes before that: then the ranks agree on it here. ``None``, or not, alike on every rank.
        """
        self._recover()
        self.begin_backward()
        progress = self.progress
        progress.explicit = True
        try:
            yield
        except BaseException:
            self.abandon()
            raise
        finally:
            progress.explicit = False
        self.end_backward(step)
        self._refuse_thawed()

    def begin_backward(self) -> None:
        """Note that a backward runs. Called by whatever is seen of it first."""
        progress, sharded = self.progress, self._schedule.sharded
        if progress.in_backward:
            return
        self.access.check_trainer(self.module)
        put_off = self._schedule.order.has_ended
        if put_off:
            self.means.control.before = None
        place = f"backward {progress.backwards + 1} (of {progress.scope})"
        begun = (progress.depth > 0 or put_off) and self._close_forward(then=f"begin of {place}")
        if progress.depth == 0:
            progress.segment = 0
        self.means.spans.listen()
        self.weights.bind()
        progress.in_backward = True
        progress.between_micro_steps = not self.reduce_gradients
        progress.reduces = self.reduce_gradients or self.plan.placement.shards_gradients
        progress.backwards += 1
        if progress.reduces or sharded:
            # Before anything is sent: a rank that runs no backward here would pair its next transfer with this one's.
            if not begun:
                self.means.agreement.round(f"begin of {place}")
            self.means.collectives.settle()  # what a backward before this one was doing when an error stopped it
        if not progress.explicit and current_graph_task() != -1:
            queue_backward_callback(lambda: None if progress.explicit else self.end_backward())
        name = f"backward {progress.segment} of {progress.scope}"
        if not sharded:
            self.means.spans.begin(Phase.BACKWARD, progress.scope)
        self._schedule.open(name, place)
        if self._reducer is not None:
            self._reducer.open(name, self.reduce_gradients)

    def before_unit_backward(self, call: ForwardCall) -> None:
        """Make a unit available for its backward, and reshard those whose backward is over.

        An embedding is not gathered. What is saved of it all the same, on this rank alone perhaps, the guard brings.
        """
        unit, active = call.unit, self._schedule.guard.active
        if unit.version != call.version:
            check_weights(unit, call.version)
        if not self.progress.in_backward:
            self.begin_backward()
        if call.counted:
            call.counted = False
            unit.outstanding = max(0, unit.outstanding - 1)
        for other in list(active):
            if other is not unit and other.plan.index not in unit.plan.ancestors:
                self._finish(other)
        if unit not in active and (not unit.plan.looks_up or unit.read_in_backward):
            self._schedule.unshard(unit)
            active[unit] = (
                self.means.spans.begin(Phase.BACKWARD, unit.name, unit.nbytes) if self.means.spans.heard else None
            )

    def gradient_arrived(self, bucket: GradientBucket, position: int, gradient: Tensor | None) -> None:
        """Take over one finished gradient, which autograd has no more."""
        if gradient is None or self._reducer is None:
            return
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward(create_graph=True) is not supported: gradients are sent as they arrive, without a graph. "
                "Take them with torch.autograd.grad(loss, inputs, create_graph=True), which works."
            )
        if not self.progress.in_backward:
            self.begin_backward()
        self._reducer.arrive(bucket, position, gradient, self.progress.reduces)

    def room_for(self, bucket: GradientBucket) -> FlatBuffer | None:
        """Memory for a bucket's gradients, the first of which has arrived in this backward."""
        if not self.progress.in_backward:
            self.begin_backward()
        if self._reducer is not None:
            self._reducer.claim(bucket)
        return bucket.room

    def bucket_filled(self, bucket: GradientBucket) -> None:
        """Reduce a bucket whose last gradient has arrived, if no forward of its unit waits for its backward."""
        if self.progress.reduces and self._reducer is not None and bucket.unit.outstanding == 0:
            self._reducer.finish([bucket])

    def end_backward(self, step: Announced | None = None) -> None:
        """Reduce what is left, agree that the backward is over, and show gradients to optimizers. Collective.

        ``step``: see ``backward``.
        """
        progress = self.progress
        if not progress.in_backward:
            return
        for unit in list(self._schedule.guard.active):
            self._finish(unit)
        self.means.spans.stop(Phase.BACKWARD)
        reduces = self._reducer is not None and progress.reduces
        report = self._reducer.report() if self._reducer is not None and reduces else []
        met, begun, then = Met([], report, [True]), False, self._announce(step)
        if self._schedule.sharded:
            met, begun = self._schedule.close(report, then)
            if self.reduce_gradients and not progress.depth:  # a step follows, before which the last shard takes memory
                self._schedule.vacate()
        elif reduces:
            place, writes = f"backward {progress.backwards} (of {progress.scope})", self.means.writes
            met, begun = self.means.agreement.end(place, then, [writes.digest if step else 0], report)
            writes.compare([row[0] for row in met.rows], self.means.control)
        if self._reducer is not None:
            self._reducer.close(met.marks, all(met.alike)) if reduces else self._reducer.keep_local()
        progress.in_backward, progress.follows = False, then if begun else ""
        if progress.depth > 0:
            self._refuse_thawed()
            self._open_forward()
        else:
            self.weights.unbind()

    # -------------------------------------------------------------------- step

    def before_optimizer_step(
        self,
        label: str,
        values: Sequence[int] = (),
        differ: Callable[[ControlGroup], None] | None = None,
        running: Callable[[], bool] = bool,
    ) -> None:
        """Agree with the other ranks that all are about to take the same optimizer step.

        Args:
            label: which optimizer, in words that mean the same on every rank.
            values: 64-bit numbers that have to be equal on all ranks; ``differ`` raises if something is not.
            differ: see ``values``.
            running: tells whether the step is what called.

        Collective: every rank.
        """
        self._recover()
        progress = self.progress
        self._schedule.check_holders()
        if self.accumulates or progress.between_micro_steps:
            raise RuntimeError(
                f"{label} is about to step between micro-steps: the last backward ran without gradient "
                "synchronisation, so that under DDP each rank would step on gradients of its own. Let the last "
                "backward before a step run outside `block_backward_sync` / `no_sync`."
            )
        if self.updating and self.plan.offload is not None:
            raise _torn(f"{label} cannot step")
        if progress.depth > 0 and not progress.in_backward:
            self._close_forward()
        if self.plan.offload is not None:
            with self.means.spans.of(Phase.OFFLOAD, label):
                self.means.tiers.settle()  # copies of what is about to be written
        self.weights.begin_step()
        self.take_over_shown(on_disk=False)  # the optimizer reads those from what is shown
        writes, place = self.means.writes, self._place_of_step(label)
        progress.steps += 1
        follows, progress.follows = progress.follows, ""
        if follows != f"{place} {[*values]}" or writes.digest:
            rows = self.agree(place, [writes.digest, *values])
            writes.compare([row[0] for row in rows], self.means.control)
            if differ is not None and len(rows) > 1:
                differ(self.means.control)
        self._schedule.vacate()
        self.updating, self.access.stepping = True, running
        self.means.spans.begin(Phase.STEP, label)

    def after_optimizer_step(self, units: Mapping[int, Sequence[nn.Parameter]]) -> None:
        """Bring updated masters to the compute copies.

        ``units``: those with parameters of the optimizer, and these, the same on every rank. Collective: every rank.
        """
        self.access.end_step()
        self.means.spans.stop(Phase.STEP)
        # What got its gradients last computes first in a forward, which is where its new weights are waited for.
        reduced = [] if self._reducer is None else self._reducer.units
        order = [index for index in dict.fromkeys((*reversed(reduced), *units)) if index in units]
        self.weights.refresh(order)
        for index in order:
            self.units[index].parameters_changed(units[index])
        self.weights.after_step(self.computes or self.plan.offload is not None)
        self.updating = False
        self._schedule.masters_changed(units)
        for optimizer in self.optimizers:
            optimizer.masters_changed(units)
        if self.progress.depth > 0 and not self.progress.in_backward:
            self._open_forward()

    def agree_stepped(self, failure: BaseException | None) -> None:
        """Tell the other ranks how the update went. Collective: every rank; raises on all if it failed on one."""
        what, control = "take its part of an optimizer step", self.means.control
        control.together(what, raising(failure), OffloadError, HALF_UPDATED)

    def take_over_shown(self, on_disk: bool = True) -> None:
        """Bring home what the user wrote to parameters that show their values all the time. Local.

        ``on_disk``: also to masters on disk, which raises ``OffloadError`` if a disk failed.
        """
        self.access.note_written()
        for unit in self.units if self.plan.offload is not None else ():
            for flat in unit.flats:
                if flat.shown is not None and (on_disk or flat.rest.master is not Tier.DISK):
                    flat.take_over_shown()

    def masters_changed(self, units: Sequence[int], parameters: Container[nn.Parameter] | None = None) -> None:
        """Publish masters that were written from outside (a loaded checkpoint). Not inside a step. Collective.

        ``parameters``: those of the units that were written; by default all of them.
        """
        updating, self.updating = self.updating, False
        self.weights.begin_step()
        self.means.tiers.settle()
        written = {index: self.units[index].parameters for index in units}
        if parameters is not None:
            written = {index: [p for p in every if p in parameters] for index, every in written.items()}
        self.after_optimizer_step(written)
        self.updating = updating
        self._schedule.masters_changed(())

    # ------------------------------------------------------------ user code

    def put_together(self, what: str, history: int, numbers: Tensor, added: bool) -> Tensor:
        """Norms and sums that user code asks of tensors of which each rank has a slice: see ``sharded.Together``."""
        if self.progress.in_backward:
            raise ParameterAccessError(
                f"{what} was called during a backward, which the ranks run at their own pace, so its result could not "
                "be collected. Call it after the backward, for example in `on_after_backward`."
            )
        if threading.get_ident() != self.progress.thread:
            raise ParameterAccessError(
                f"{what} was called in a thread of its own, where it would come between other messages of the ranks. "
                "Call it in the thread that trains, and give the other one the number."
            )
        # Few numbers on the host go with the agreement itself.
        count, control = len(numbers), self.means.control
        at_once = self.totals is control and count < self.means.agreement.width
        rows = self.agree(what, [history, *(numbers.cpu().view(torch.int64).tolist() if at_once else ())])
        other = next((rank for rank, row in enumerate(rows) if row[0] != rows[0][0]), None)
        if other is not None:
            raise DivergenceError(
                f"Rank {other} called {what} with other values or arguments than rank 0. Each rank holds one slice, so "
                "all ranks must do the same to their slices: look for a mask, a factor or a noise that depends on the "
                "rank, or use `with lightning_zero.full_gradients(module):`."
            )
        if at_once:
            own = [row[1 : 1 + count] for row in (rows if len(rows) > 1 else rows * control.world_size)]
            return control.put_together(own) if added else torch.tensor(own, device="cpu").view(torch.float64)
        if not added:
            each = numbers.new_zeros(len(control.counted), count)
            each[control.counted.index(control.rank)] = numbers
            numbers = each.view(-1)
        found = self.totals.total(numbers.to(self.totals.device))
        return found if added else found.view(-1, count)

    def abandon(self) -> None:
        """Forget the running step after an error: no collective, no gradients, nothing pinned or bound."""
        progress = self.progress
        self.means.spans.abandon()
        progress.calls.clear()
        if self._schedule.order.has_ended:
            self.means.control.before = None
        self._schedule.abandon()
        self.means.tiers.abandon()
        if self._reducer is not None:
            self.means.collectives.abandon(self._reducer.abandon())
        self.weights.abandon()
        for unit in self.units:
            unit.forget_written()
        self.means.writes.forget()
        progress.depth, progress.in_backward, progress.segment, progress.follows = 0, False, 0, ""
        self.weights.unbind()

    def detach(self) -> None:
        """Take the hooks off the module. Its parameters stay as they are."""
        self.weights.settle()
        self._hooks.remove()
        self.access.release()
        for part in self.module.modules():
            _ENGINES.pop(part, None)

    # ----------------------------------------------------------------- private

    def _place_of_step(self, label: str) -> str:
        progress = self.progress
        passed = f"{progress.trained} forwards and {progress.backwards} backwards"
        return f"step {progress.steps + 1} of {label}, after {passed}"

    def _announce(self, step: Announced | None) -> str:
        """The step that follows at once. What would be an error there comes before the ranks agree on it. Local."""
        if step is None:
            return ""
        self.access.note_written()
        told = step()
        if told is None or self.progress.depth or not self.reduce_gradients or self.updating or self.thawed():
            return ""
        self._schedule.check_holders()
        self.weights.settle()  # nobody reads what is about to be written
        return f"{self._place_of_step(told[0])} {[*told[1]]}"

    def _recover(self) -> None:
        """Drop a backward that raised: its end callback never came, and gradients would never be reduced again."""
        if self.progress.in_backward and not self.progress.explicit and current_graph_task() == -1:
            self.abandon()

    def _refuse_thawed(self) -> None:
        if thawed := self.thawed():
            raise ParameterAccessError(
                f"Parameter '{thawed[0]}' was frozen when this step began and is trainable now, so there is no buffer "
                "for its gradient. Set `requires_grad` between steps (`on_train_batch_start`): the next training step "
                "then shards the module again. Or keep it trainable, and set `.grad = None` to skip its update."
            )

    def _open_forward(self) -> None:
        progress = self.progress
        progress.forwards += 1
        progress.trained += progress.scope == "training_step"
        place = f"forward {progress.forwards} ({progress.scope})"
        self._schedule.open(f"forward {progress.segment} of {progress.scope}", place, amid=progress.segment > 0)
        progress.segment += 1

    def _close_forward(self, then: str = "") -> bool:
        """Whether all ranks go on with ``then`` at once."""
        lost, self.progress.lost = self.progress.lost, ""
        if lost:
            raise ParameterAccessError(lost)
        order = self._schedule.order
        return (order.is_open or order.has_ended) and self._schedule.close(then=then)[1]

    def _finish(self, unit: ShardedUnit) -> None:
        span = self._schedule.guard.active.pop(unit)
        if span is not None:
            self.means.spans.end(span)
        self._schedule.reshard(unit)
        if self._reducer is not None and self.progress.reduces and unit.outstanding == 0:
            self._reducer.finish_unit(unit.plan.index)

    def _bring_for_backward(self, unit: ShardedUnit) -> bool:
        self.begin_backward()
        return self._schedule.bring(unit)

    def _hold(self, weight: nn.Parameter, part: Tensor) -> Tensor:
        """Put the first part of a weight's gradient where that is to be, if no hook of the user's gets to see it."""
        binding, hooks = binding_of(weight), len(weight._backward_hooks or ()) + len(weight._post_accumulate_grad_hooks)
        if self._reducer is None or binding is None or binding.bucket is None or hooks != 1:  # that one is the engine's
            return part
        if not self.progress.in_backward:
            self.begin_backward()
        bucket, position = binding.bucket, binding.slice.position
        return self._reducer.hold(bucket, position, part)
