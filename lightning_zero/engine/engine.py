"""The verbs of a training step.

Forward: ``enter`` (a Lightning step method, or any call of the model) -> for each unit ``before_unit_forward``,
``after_unit_forward`` -> ``leave``. Backward: ``begin_backward`` -> for each unit ``before_unit_backward``, for each
gradient ``gradient_arrived`` -> ``end_backward``. Step: ``before_optimizer_step`` -> ``after_optimizer_step``.

[Note: when a unit's backward is over]
Autograd runs the nodes of one thread strictly from the last created to the first. So when the first node of unit j
runs, all units that ran after j in the forward are finished, whatever gradients they got. A unit is let go then, never
when its own gradients have arrived: a frozen or detached reader may still need its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from lightning_zero._torch import current_graph_task, next_sequence_number, queue_backward_callback, take_gradient
from lightning_zero.comm import Collectives, ControlGroup
from lightning_zero.config import Tier
from lightning_zero.engine.access import ParameterAccess, ParameterWatch
from lightning_zero.engine.agreement import Agreement
from lightning_zero.engine.bucket import GradientBucket
from lightning_zero.engine.build import UnitBuilder, build_reducer, check_materialisable, place_buffers
from lightning_zero.engine.events import Phase, Span, Spans
from lightning_zero.engine.hooks import EngineHooks, ForwardCall, hook_outputs, refuse_double_backward
from lightning_zero.engine.reducer import GradientReducer, report_width
from lightning_zero.engine.replicated import PublishedWeights, ReplicatedUnit
from lightning_zero.engine.schedule import UnitSchedule
from lightning_zero.engine.sharded import ShardedUnit
from lightning_zero.engine.unit import Unit
from lightning_zero.errors import OffloadError
from lightning_zero.init import InitRecord
from lightning_zero.plan import FETCH_UNITS, Plan
from lightning_zero.shards.flat import ParameterShard
from lightning_zero.shards.placeholder import Placeholders
from lightning_zero.storage.tiers import MemoryTiers

__all__ = ["ZeroEngine", "engine_of"]

_Differ = Callable[[ControlGroup], None]
_RESUME = "No rank goes on with half-updated weights. Resume from the last checkpoint, which is intact."
_TORN = (
    "{doing}: an optimizer step on offloaded weights failed half-way, so they are partly old and partly new. Resume "
    "from the last checkpoint (`trainer.fit(..., ckpt_path=...)`), which is intact, or build the module anew."
)


# Which engine looks after a module: user code that wants to look inside has only its module in hand, and nothing is
# ever attached to the user's objects. The one global of the package; both sides are weak.
_ENGINES: WeakKeyDictionary[nn.Module, ref[ZeroEngine]] = WeakKeyDictionary()


def engine_of(module: nn.Module) -> ZeroEngine | None:
    """The engine that looks after ``module`` (the root or any module below it), if there is one."""
    engine = _ENGINES.get(module)
    return None if engine is None else engine()


class ZeroEngine:
    """Runs one module as its plan says.

    Args:
        module: the user's module. Its parameter objects stay; what they point to is the engine's from now on.
        plan: who owns what.
        collectives: the wire.
        control: agreements between hosts.
        tiers: where shards rest, by tier; and where the module computes.
        record: how a module on the meta device was initialised.

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
        record: InitRecord | None = None,
    ) -> None:
        collectives.settle()  # what an engine before this one was doing when an error stopped it
        control.agree_equal("model or plan", plan.summary_lines(), plan.fingerprint())
        check_materialisable(module, record, control)
        self.module = module
        self.plan = plan
        self.collectives = collectives
        self.control = control
        self.tiers = tiers
        self.device = tiers.device
        self.streams = tiers.streams
        self.spans = Spans()
        self.placeholders = placeholders = Placeholders()
        self.units: list[Unit] = UnitBuilder(module, plan, collectives, control, tiers, placeholders, record).build()
        place_buffers(module, tiers.device, record)
        flats = [flat for unit in self.units for flat in unit.flats]
        pairs = [pair for flat in flats for pair in zip(flat.parameters, flat.shards, strict=True)]
        self.names: dict[nn.Parameter, str] = {parameter: shard.spec.name for parameter, shard in pairs}
        self.shards: dict[str, ParameterShard] = {shard.spec.name: shard for flat in flats for shard in flat.shards}
        self.reduce_gradients = True
        self._always_reduces = plan.placement.shards_gradients
        self._reduces = True  # whether the running backward does
        self.updating = False  # between the beginning and the end of an optimizer step: masters may be half updated
        self.listeners: list[Callable[[], None]] = []  # told when masters were written from outside
        self._reducer: GradientReducer | None = None
        self._watch = ParameterWatch(module, self.names, flats)
        self._watch.find_holders(self.units)
        self._replicated = [u for u in self.units if isinstance(u, ReplicatedUnit) and not u.always_bound]
        width = 5 + report_width(sum(flat.layout.trainable for flat in flats))
        self._agreement = Agreement(control, width, self.spans)
        self.access = ParameterAccess(self)
        self._schedule = self._make_schedule()
        self._sharded = self._schedule.sharded
        self.weights = PublishedWeights(self._replicated, collectives, self.spans, self.access.writes, module)
        self._stepped: Unit | None = None  # whose masters are on their way back from the host
        self._returned: set[int] = set()  # units of the running step whose masters are back, or on their way
        self._running: dict[str, Span | None] = {}  # stretches of time that begin and end in different calls
        self._depth, self._scope, self._segment = 0, "", 0
        self.forwards, self._backwards, self._steps = 0, 0, 0
        self.in_backward = False  # a backward runs
        self._explicit = False
        self._active: list[ShardedUnit] = []
        self._calls: list[ForwardCall] = []
        self._hooks = EngineHooks(self)
        if self._sharded or self._replicated:
            root = self._schedule.root
            scoped = [*self._replicated, *([root] if root is not None else [])]
            self._hooks.watch_forwards(module, self._sharded, scoped)
        for part in module.modules():
            _ENGINES[part] = ref(self)

    def prepare_training(self) -> None:
        """Allocate what gradients need and start to collect them. Once; evaluation needs neither."""
        if self._reducer is None:
            self._reducer = build_reducer(self.plan, self.units, self.collectives, self.control, self.tiers)
            self._reducer.spans = self.spans
            self._hooks.watch_gradients(self._reducer.buckets)
            self.access.gradients.watch(self._reducer.buckets, self.access.bindings)

    # ----------------------------------------------------------------- forward

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Everything a Lightning step method does: root parameters are in place, units are gathered as they are called.

        Collective: every rank, with the same names of methods in the same order. Calls of one name share an order.
        """
        if self._depth == 0:
            if self.updating and self.plan.offload is not None:
                raise RuntimeError(_TORN.format(doing=f"{name} cannot run"))
            self._watch.check_trainable()
            for unit in self._sharded:
                unit.outstanding = 0
        self.enter(name)
        try:
            yield
            self.leave(failed=False)
        except BaseException:
            self.abandon()
            raise

    def enter(self, name: str, called: bool = False) -> None:
        """Begin a scope in which units may be needed; scopes nest. ``called``: by the call of a module."""
        self._recover()
        if self._depth == 0 and not self.in_backward:
            self.access.take_over()
        self._depth += 1
        if self._depth > 1 or self.in_backward:
            return
        self.spans.listen()
        self.collectives.settle()
        self._scope, self._segment = name, 0
        self.weights.bind(name)
        self._open_forward()
        if called:
            self._schedule.guard_root()
        if not self._sharded:
            self._running["forward"] = self.spans.begin(Phase.FORWARD, name)

    def leave(self, failed: bool) -> None:
        """End a scope. ``failed``: by an exception; nothing is agreed then, because the others may not get here."""
        if self._depth == 0:
            return
        self._depth -= 1
        if self._depth == 0:
            self._schedule.unguard_root()
        if failed:
            # An inner scope's exception may still be caught by the user's code; the outermost one ends the step.
            if self._depth == 0 and not self.in_backward:
                self.abandon()
            return
        if self._depth == 0 and not self.in_backward:
            self._end_span("forward")
            self._close_forward()
            self.weights.unbind()

    @contextmanager
    def paused(self) -> Iterator[bool]:
        """Interrupt a running forward, if there is one, so that other collectives can be issued on every rank alike.

        Collective: every rank.
        """
        running = self._depth > 0 and not self.in_backward
        if running:
            self._close_forward()
            depth, self._depth = self._depth, 0
        yield running
        if running:
            self._depth = depth
            self._segment += 1
            self._open_forward()

    def agree(self, place: str, values: Sequence[int] = ()) -> list[list[int]]:
        """Meet the other ranks outside of a phase and exchange a few numbers: see ``Agreement.round``."""
        return self._agreement.round(place, values)

    def before_unit_forward(self, unit: ShardedUnit, *called: Any) -> None:
        """Make a unit's full parameters available for its forward. ``called``: what its module is called with."""
        implicit = self._depth == 0 and not self.in_backward
        if implicit:
            self.enter(f"forward of '{unit.name}'")
        for owner, key, parameter in unit.holders:
            if owner["_parameters"].get(key) is not parameter:
                self._watch.refuse_replaced(unit, key, parameter)
        self._schedule.unshard(unit)
        guarded = torch.is_grad_enabled()
        call = ForwardCall(unit, unit.version, next_sequence_number(), guarded, implicit, self.in_backward)
        if self.spans.heard:
            call.span = self.spans.begin(Phase.FORWARD, unit.name, unit.nbytes)
        self._calls.append(call)
        if guarded:
            self._schedule.guard.push()

    def after_unit_forward(self, unit: ShardedUnit, output: Any, failed: bool) -> None:
        """Let a unit go after its forward, and arrange that its backward finds it again."""
        if not self._calls or self._calls[-1].unit is not unit:
            return  # abandoned in between
        call = self._calls.pop()
        if call.span is not None:
            self.spans.end(call.span)
        if call.guarded:
            self._schedule.guard.pop()
            if not failed and hook_outputs(output, call, self.before_unit_backward) and not call.recomputed:
                call.counted = True
                unit.outstanding += 1
        self._schedule.reshard(unit)
        if call.implicit:
            self.leave(failed)

    # ---------------------------------------------------------------- backward

    @contextmanager
    def backward(self) -> Iterator[None]:
        """One whole backward, whose end is known even if activation checkpointing runs others inside. Collective."""
        self._recover()
        self.begin_backward()
        self._explicit = True
        try:
            yield
        except BaseException as error:
            self.abandon()
            self.access.explain(error)
            raise
        finally:
            self._explicit = False
        self.end_backward()

    def begin_backward(self) -> None:
        """Note that a backward runs. Called by whatever is seen of it first."""
        if self.in_backward:
            return
        self.access.check_trainer(self.module)
        if self._depth > 0:
            self._close_forward()
        else:
            self.access.take_over(plain=False)
            self._segment = 0
        self.spans.listen()
        self.weights.bind()
        self.in_backward = True
        self._reduces = self.reduce_gradients or self._always_reduces
        self._backwards += 1
        if self._reduces or self._sharded:
            # Before anything is sent: a rank that runs no backward here would pair its next transfer with this one's.
            self._agreement.round(f"begin of backward {self._backwards} (of {self._scope})")
            self.collectives.settle()  # what a backward before this one was doing when an error stopped it
        if not self._explicit and current_graph_task() != -1:
            queue_backward_callback(self._end_implicit_backward)
        name = f"backward {self._segment} of {self._scope}"
        if not self._sharded:
            self._running["backward"] = self.spans.begin(Phase.BACKWARD, self._scope)
        self._schedule.open(name, f"backward {self._backwards} (of {self._scope})")
        if self._reducer is not None:
            self._reducer.open(name, self._schedule.uniform)

    def before_unit_backward(self, call: ForwardCall) -> None:
        """Make a unit available for its backward, and let those go whose backward is over."""
        if torch.is_grad_enabled():
            refuse_double_backward()
        unit = call.unit
        if call.version != unit.version:
            raise RuntimeError(
                f"The weights of unit '{unit.name}' were changed (by an optimizer step) between this forward and its "
                "backward, so the gradients would be wrong. Run forward again after the step, or step later."
            )
        if not self.in_backward:
            self.begin_backward()
        if call.counted:
            call.counted = False
            unit.outstanding = max(0, unit.outstanding - 1)
        for other in [u for u in self._active if u.index not in unit.kin]:
            self._finish(other)
        if unit not in self._active:
            self._schedule.unshard(unit)
            self._active.append(unit)
            unit.in_backward = True
            if self.spans.heard:
                unit.span = self.spans.begin(Phase.BACKWARD, unit.name, unit.nbytes)

    def gradient_arrived(self, bucket: GradientBucket, position: int, parameter: Tensor) -> None:
        """Take one finished gradient over from autograd."""
        gradient = take_gradient(parameter)
        if gradient is None or self._reducer is None:
            return
        if torch.is_grad_enabled():
            refuse_double_backward()
        if not self.in_backward:
            self.begin_backward()
        self._reducer.arrive(bucket, position, gradient, self._reduces)

    def bucket_filled(self, bucket: GradientBucket) -> None:
        """Reduce a bucket whose last gradient has arrived, if no forward of its unit waits for its backward."""
        if self._reduces and self._reducer is not None and bucket.unit.outstanding == 0:
            self._reducer.finish(bucket.unit.index)

    def end_backward(self) -> None:
        """Reduce what is left, agree that the backward is over, and show gradients to optimizers. Collective."""
        if not self.in_backward:
            return
        for unit in list(self._active):
            self._finish(unit)
        self._end_span("backward")
        report = self._reducer.report() if self._reducer is not None and self._reduces else []
        rows: list[list[int]] = [report]
        if self._sharded:
            rows = self._schedule.close(report)
        elif self._reduces and self._reducer is not None:
            place = f"backward {self._backwards} (of {self._scope})"
            rows = [row[5:] for row in self._agreement.round(place, [0, 0, 0, 0, 0, *report])]
        if self._reducer is not None:
            if self._reduces:
                self._reducer.close(rows)
            else:
                self._reducer.keep_local()
        self.in_backward = False
        self._segment += 1
        if self._depth > 0:
            self._open_forward()
        else:
            self.weights.unbind()

    def _end_implicit_backward(self) -> None:
        if self.in_backward and not self._explicit:
            self.end_backward()

    # -------------------------------------------------------------------- step

    def before_optimizer_step(
        self, label: str, values: Sequence[int] = (), differ: _Differ | None = None, running: Callable[[], bool] = bool
    ) -> None:
        """Agree with the other ranks that all are about to take the same optimizer step.

        Args:
            label: which optimizer, in words that mean the same on every rank.
            values: 64-bit numbers that have to be equal on all ranks; ``differ`` raises if something is not.
            running: tells whether the step is what called.

        Collective: every rank.
        """
        self._recover()
        if self._reducer is not None and self._reducer.holds_local:
            raise RuntimeError(
                f"{label} is about to step on gradients that were never reduced over the ranks: the last backward ran "
                "without gradient synchronisation. Let the last backward before a step run outside "
                "`block_backward_sync` / `no_sync`."
            )
        if self.updating and self.plan.offload is not None:
            raise RuntimeError(_TORN.format(doing=f"{label} cannot step"))
        if self._depth > 0 and not self.in_backward:
            self._close_forward()
        if self.plan.offload is not None:
            with self.spans.of(Phase.OFFLOAD, label):
                self.tiers.settle()  # copies of what is about to be written
        self.weights.settle()  # other ranks may still be reading what is about to be written
        self._returned.clear()
        self.take_over_shown(on_disk=False)  # those are stepped on from what is shown
        self._steps += 1
        place = f"step {self._steps} of {label}, after {self.forwards} forwards and {self._backwards} backwards"
        rows = self._agreement.round(place, [self.access.writes.digest, *values])
        self.access.writes.compare([row[0] for row in rows], self.control)
        if differ is not None and any(row != rows[0] for row in rows):
            differ(self.control)
        self.updating, self.access.stepping = True, running
        self._running["step"] = self.spans.begin(Phase.STEP, label)

    def after_optimizer_step(self, units: Sequence[int]) -> None:
        """Bring updated masters to the compute copies.

        Args:
            units: the units with parameters of the optimizer, the same on every rank.

        Collective: every rank.
        """
        self.access.end_step()
        self._end_span("step")
        failure: OffloadError | None = None
        for index in units:
            unit = self.units[index]
            if index not in self._returned:
                try:
                    for flat in unit.flats:
                        flat.refresh()
                except OffloadError as error:  # the gather below must come all the same
                    failure = failure or error
                self._publish(unit)
            unit.parameters_changed()
        if self.plan.offload is not None and not self._returned.issuperset(units):
            self.control.raise_together(failure, "bring weights back that were changed", _RESUME)
        self._returned.clear()
        self.weights.after_step(self._depth > 0 or self.in_backward or self.plan.offload is not None)
        self.updating = False
        self._schedule.masters_changed(units)
        self.placeholders.check_intact()
        if self._depth > 0 and not self.in_backward:
            self._segment += 1
            self._open_forward()

    def unit_stepped(self, index: int) -> None:
        """Bring one unit's updated masters from the host to the compute copies, while the next one is stepped on.

        Collective: every rank, for every unit of the optimizer, in ascending order; also if stepping has failed here.
        """
        self._publish_stepped()
        self._stepped = self.units[index]
        self._stepped.send_back(self.tiers.transfers)
        self._returned.add(index)

    def agree_stepped(self, failure: BaseException | None) -> None:
        """Tell the other ranks how the update went. Collective: every rank; raises on all if it failed on one."""
        self._publish_stepped()
        self.control.raise_together(failure, "take its part of an optimizer step", _RESUME)

    def take_over_shown(self, on_disk: bool = True) -> None:
        """Bring home what the user wrote to parameters that show their values all the time. Local.

        ``on_disk``: also to masters on disk, which raises ``OffloadError`` if a disk failed.
        """
        self.access.take_over()
        self.access.note_written()
        for unit in self.units if self.plan.offload is not None else ():
            for flat in unit.flats:
                if on_disk or flat.rest.master is not Tier.DISK:
                    flat.take_over_shown()

    def masters_changed(self, units: Sequence[int]) -> None:
        """Publish masters that were written from outside (a loaded checkpoint). Not inside a step. Collective."""
        torn, self.updating = self.updating, False
        self.access.note_units_replaced(units)
        self.weights.settle()
        if self.plan.offload is not None:
            self.tiers.settle()
            self._returned.clear()
        self.after_optimizer_step(units)
        self.updating = torn
        self.masters_were_written()

    def masters_were_written(self, units: Sequence[int] = ()) -> None:
        """Tell optimizers that masters were not written by a step, and forget what was gathered of units. Local."""
        self._schedule.void(units)
        for listener in self.listeners:
            listener()

    @property
    def gathered(self) -> bool:
        """Whether units beside the root were gathered in the running phase."""
        return self._schedule.gathered

    @property
    def computes(self) -> bool:
        """Whether a forward or a backward runs, in which units are gathered."""
        return self._depth > 0 or self.in_backward

    # ----------------------------------------------------------------- failure

    def abandon(self) -> None:
        """Forget the running step after an error: no collective, no gradients, nothing pinned or bound."""
        self.spans.abandon()
        self._calls.clear()
        self._active.clear()
        self._schedule.abandon()
        self.tiers.abandon()
        if self._reducer is not None:
            self.collectives.abandon(self._reducer.abandon())
        self.weights.abandon()
        self._stepped = None
        self._returned.clear()
        for unit in self.units:
            unit.forget_sent()
            unit.note_written()
        self.access.writes.forget()
        self._depth, self.in_backward, self._segment = 0, False, 0
        self.weights.unbind()

    def detach(self) -> None:
        """Take the hooks off the module. Its parameters stay as they are."""
        self.weights.settle()
        self._hooks.remove()
        self.access.release()
        for part in self.module.modules():
            _ENGINES.pop(part, None)

    # ----------------------------------------------------------------- private

    def _make_schedule(self) -> UnitSchedule:
        self.tiers.fetcher.reserve(FETCH_UNITS, self.plan.fetch_nbytes)
        return UnitSchedule(
            self.plan,
            self.units,
            self.collectives,
            self.streams,
            self._agreement,
            self._memory_for_backward,
            self.tiers.fetcher if self.plan.offload is not None else None,
            self.spans,
            self.access.writes,
            self.masters_were_written,
        )

    def _recover(self) -> None:
        """Drop a backward that raised: its end callback never came, and gradients would never be reduced again."""
        if self.in_backward and not self._explicit and current_graph_task() == -1:
            self.abandon()

    def _end_span(self, name: str) -> None:
        if self._running:
            self.spans.end(self._running.pop(name, None))

    def _open_forward(self) -> None:
        self.forwards += 1
        name, place = f"forward {self._segment} of {self._scope}", f"forward {self.forwards} ({self._scope})"
        self._schedule.open(name, place, amid=self._segment > 0)

    def _close_forward(self) -> None:
        if self._schedule.is_open:
            self._schedule.close()

    def _finish(self, unit: ShardedUnit) -> None:
        self._active.remove(unit)
        unit.in_backward = False
        if unit.span is not None:
            self.spans.end(unit.span)
        self._schedule.reshard(unit)
        if self._reducer is not None and self._reduces and unit.outstanding == 0:
            self._reducer.finish(unit.index)

    def _memory_for_backward(self, unit: ShardedUnit) -> tuple[Tensor, bool]:
        refuse_double_backward()
        self.begin_backward()
        return self._schedule.memory_of(unit)

    def _publish_stepped(self) -> None:
        unit, self._stepped = self._stepped, None
        if unit is not None:
            unit.settle_weights()
            self._publish(unit)

    def _publish(self, unit: Unit) -> None:
        if isinstance(unit, ReplicatedUnit):
            self.weights.publish(unit)
