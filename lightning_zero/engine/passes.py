"""The verbs of forward and backward.

Forward: ``enter`` (a Lightning step method, or any call of the model) -> for each unit ``before_unit_forward``,
``after_unit_forward`` -> ``leave``. Backward: ``begin_backward`` -> for each unit ``before_unit_backward``, for each
gradient ``gradient_arrived`` -> ``end_backward``.

[Note: when a unit's backward is over]
Autograd runs the nodes of one thread strictly from the last created to the first. So when the first node of unit j
runs, all units that ran after j in the forward are finished, whatever gradients they got. A unit is let go then, never
when its own gradients have arrived: a frozen or detached reader may still need its weights.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero._torch import (
    current_graph_task,
    next_sequence_number,
    no_subclasses,
    queue_backward_callback,
    take_gradient,
)
from lightning_zero.comm import Collectives, ControlGroup, Totals
from lightning_zero.engine.access import ParameterAccess
from lightning_zero.engine.agreement import Agreement
from lightning_zero.engine.build import UnitBuilder
from lightning_zero.engine.events import Phase, Span, Spans
from lightning_zero.engine.guard import check_weights, explain_failure, refuse_graph_of_gradients
from lightning_zero.engine.hooks import ForwardCall, hook_outputs, tied
from lightning_zero.engine.pool import BufferPool
from lightning_zero.engine.reducer import GradientBucket, GradientReducer, TiedLayer, report_width
from lightning_zero.engine.schedule import UnitSchedule
from lightning_zero.engine.sharded import ShardedUnit
from lightning_zero.engine.unit import PublishedWeights, ReplicatedUnit, Unit
from lightning_zero.errors import DivergenceError, ParameterAccessError
from lightning_zero.meta import MetaValues
from lightning_zero.offload.transfers import MemoryTiers
from lightning_zero.plan import FETCH_UNITS, Plan
from lightning_zero.shards.sharded import Combine
from lightning_zero.shards.slice import Placeholders, Slice

__all__ = ["Passes", "torn"]

_NOTHING = nullcontext()


def torn(doing: str) -> RuntimeError:
    """What is raised where weights are needed, or stepped on, after a step on them has failed."""
    return RuntimeError(
        f"{doing}: an optimizer step on offloaded weights failed half-way, so they are partly old, partly new. Resume "
        "from the last checkpoint (`trainer.fit(..., ckpt_path=...)`), which is intact, or build the module anew."
    )


class Passes:
    """Runs forward and backward of one module as its plan says.

    Args:
        module: the user's module. Its parameter objects stay; what they point to is the engine's from now on.
        plan: who owns what.
        collectives: the wire.
        control: agreements between hosts.
        tiers: where shards rest, by tier; and where the module computes.
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
        collectives.settle()  # what an engine before this one was doing when an error stopped it
        control.alike("model or plan", plan.summary_lines())
        values = initial or MetaValues.by_unit(module, plan)
        self.module, self.plan = module, plan
        self.collectives, self.control = collectives, control
        self.tiers, self.device = tiers, tiers.device
        self.spans = Spans()
        self.placeholders = Placeholders()
        self.pool = BufferPool(collectives, tiers.device, plan)
        builder = UnitBuilder(module, plan, self.pool, collectives, control, tiers, self.placeholders, values)
        self.units: list[Unit] = builder.build()
        values.place_buffers(tiers.device)
        if initial is None:
            values.check(control)
        flats = [flat for unit in self.units for flat in unit.flats]
        pairs = [pair for flat in flats for pair in zip(flat.parameters, flat.shards, strict=True)]
        self.names: dict[nn.Parameter, str] = {parameter: shard.spec.name for parameter, shard in pairs}
        self.shards: dict[str, Slice] = {shard.spec.name: shard for _, shard in pairs}
        self._frozen = [parameter for parameter, shard in pairs if shard.parameter is None]
        self.reduce_gradients = True
        self._reduces = True  # whether the running backward does
        self.updating = False  # between the beginning and the end of an optimizer step: masters may be half updated
        self._reducer: GradientReducer | None = None
        width = 6 + report_width(sum(flat.layout.trainable for flat in flats))
        self.agreement = agreement = Agreement(control, width, self.spans)
        self.access = ParameterAccess(self)
        tiers.fetcher.reserve(FETCH_UNITS, plan.fetch_nbytes)
        self._schedule = UnitSchedule(
            plan,
            self.pool,
            self.units,
            collectives,
            tiers.streams,
            agreement,
            self._bring_for_backward,
            tiers.fetcher if plan.offload is not None else None,
            self.spans,
            self.access.writes,
        )
        self._sharded = self._schedule.sharded
        self._replicated = [u for u in self.units if isinstance(u, ReplicatedUnit) and not u.always_bound]
        self.weights = PublishedWeights(self._replicated, collectives, self.spans, self.access.writes, module)
        self._running: dict[str, Span | None] = {}  # stretches of time that begin and end in different calls
        self._depth, self._scope, self._segment = 0, "", 0
        self._thread = threading.get_ident()  # that runs scopes
        self._shown_frozen = False  # there is a copy of what parameters show, for processes that are forked
        self.forwards, self._backwards, self._trained = 0, 0, 0  # the last: forwards of training steps
        self.in_backward = False  # a backward runs
        self.between_micro_steps = False  # the last backward was not the last one before a step
        self._explicit = False
        self._replaced = (0, "")  # what got other values last, and after how many forwards
        self._stayed = (0, "")  # what had to stay whole for the first time last, likewise
        self._active: list[ShardedUnit] = []
        self._calls: list[ForwardCall] = []
        self._tied: list[TiedLayer] = []  # while training

    def agree(self, place: str, values: Sequence[int] = ()) -> list[list[int]]:
        """Meet the other ranks outside of a phase and exchange a few numbers: see ``Agreement.round``."""
        return self.agreement.round(place, values)

    def freeze_shown(self, frozen: bool) -> None:
        """Have processes that are forked see what parameters show now, whatever it becomes; or no more of them."""
        self._shown_frozen = frozen
        self.collectives.freeze(self.access.plain_memory if frozen else ())

    # ----------------------------------------------------------------- forward

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Everything a Lightning step method does. Calls of one name share an order of units.

        Collective: every rank, with the same names of methods in the same order.
        """
        if self._depth == 0:
            if self.updating and self.plan.offload is not None:
                raise torn(f"{name} cannot run")
            if torch.is_grad_enabled():
                self._refuse_thawed()
            for unit in self._sharded:
                unit.outstanding = 0
            if self._shown_frozen:
                self.freeze_shown(False)
        self.enter(name)
        try:
            with tied(self._tied) if self._tied and self._depth == 1 and torch.is_grad_enabled() else _NOTHING:
                yield
            self.leave(failed=False)
        except BaseException:
            self.abandon()
            raise

    def enter(self, name: str, called: bool = False) -> None:
        """Begin a scope in which units may be needed; scopes nest. ``called``: by the call of a module."""
        self._recover()
        self._depth += 1
        if self._depth > 1 or self.in_backward:
            return
        self.spans.listen()
        self.collectives.settle()
        self._thread = threading.get_ident()
        self._scope, self._segment = name, 0
        self.weights.bind(name)
        self._open_forward()
        if called:
            self._schedule.guard_root()
        if not self._sharded:
            self._running["forward"] = self.spans.begin(Phase.FORWARD, name)

    def leave(self, failed: bool) -> None:
        """End a scope. ``failed``: by an exception; nothing is agreed then, because the others may not get here."""
        if self._depth != 1:  # an inner scope's exception may still be caught by the user's code
            self._depth = max(0, self._depth - 1)
            return
        self._depth = 0
        self._schedule.unguard_root()
        if self.in_backward:
            return
        if failed:
            self.abandon()
            return
        self._end_span("forward")
        self._close_forward()
        self.weights.unbind()

    @contextmanager
    def paused(self) -> Iterator[bool]:
        """Interrupt a running forward, if there is one, for other collectives. Collective: every rank."""
        running = self._depth > 0 and not self.in_backward
        if running:
            self._close_forward()
            depth, self._depth = self._depth, 0
        yield running
        if running:
            self._depth = depth
            self._segment += 1
            self._open_forward()

    def before_unit_forward(self, unit: ShardedUnit, *called: Any) -> None:
        """Make a unit's full parameters available for its forward. ``called``: what its module is called with."""
        implicit = self._depth == 0 and not self.in_backward
        if implicit:
            self.enter(f"forward of '{unit.name}'")
        unit.check_holders()
        self._schedule.unshard(unit)
        guarded = torch.is_grad_enabled()
        call = ForwardCall(self, unit, unit.version, next_sequence_number(), guarded, implicit, self.in_backward)
        if self.spans.heard:
            call.span = self.spans.begin(Phase.FORWARD, unit.name, unit.nbytes)
        self._calls.append(call)
        if guarded:
            self._schedule.guard.push()

    def after_unit_forward(self, unit: ShardedUnit, *called: Any, failed: bool | None = None) -> None:
        """Let a unit go after its forward, and arrange that its backward finds it again.

        ``called``: the module, what it was called with, and its output; ``None`` after an error, but not only then.
        """
        output = called[-1] if called else None
        if failed is None:
            failed = output is None and sys.exc_info()[1] is not None
        if not self._calls or self._calls[-1].unit is not unit:
            return  # abandoned in between
        call = self._calls.pop()
        if call.span is not None:
            self.spans.end(call.span)
        if call.guarded:
            self._schedule.guard.pop()
            if not failed and hook_outputs(output, call) and not call.recomputed:
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
            known = [what if forwards == self.forwards else "" for forwards, what in (self._replaced, self._stayed)]
            explain_failure(error, *known)
            raise
        finally:
            self._explicit = False
        self.end_backward()
        self._refuse_thawed()

    def stay(self, unit: ShardedUnit, parameter: str) -> None:
        """Make a unit whole though no module of it runs: see ``UnitSchedule.stay``."""
        self._schedule.stay(unit, parameter)
        self._stayed = self.forwards, parameter

    def begin_backward(self) -> None:
        """Note that a backward runs. Called by whatever is seen of it first."""
        if self.in_backward:
            return
        self.access.check_trainer(self.module)
        if self._depth > 0:
            self._close_forward()
        else:
            self._segment = 0
        self.spans.listen()
        self.weights.bind()
        self.in_backward = True
        self.between_micro_steps = not self.reduce_gradients
        self._reduces = self.reduce_gradients or self.plan.placement.shards_gradients
        self._backwards += 1
        place = f"backward {self._backwards} (of {self._scope})"
        if self._reduces or self._sharded:
            # Before anything is sent: a rank that runs no backward here would pair its next transfer with this one's.
            self.agreement.round(f"begin of {place}")
            self.collectives.settle()  # what a backward before this one was doing when an error stopped it
        if not self._explicit and current_graph_task() != -1:
            queue_backward_callback(lambda: None if self._explicit else self.end_backward())
        name = f"backward {self._segment} of {self._scope}"
        if not self._sharded:
            self._running["backward"] = self.spans.begin(Phase.BACKWARD, self._scope)
        self._schedule.open(name, place)
        if self._reducer is not None:
            self._reducer.open(name, self._schedule.uniform, self.reduce_gradients)

    def before_unit_backward(self, call: ForwardCall) -> None:
        """Make a unit available for its backward, and let those go whose backward is over."""
        unit = call.unit
        if unit.version != call.version:
            check_weights(unit, call.version)
        if not self.in_backward:
            self.begin_backward()
        if call.counted:
            call.counted = False
            unit.outstanding = max(0, unit.outstanding - 1)
        for other in self._active[:]:
            if other.index not in unit.kin:
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
            refuse_graph_of_gradients()
        if not self.in_backward:
            self.begin_backward()
        self._reducer.arrive(bucket, position, gradient, self._reduces)

    def bucket_filled(self, bucket: GradientBucket) -> None:
        """Reduce a bucket whose last gradient has arrived, if no forward of its unit waits for its backward."""
        if self._reduces and self._reducer is not None and bucket.unit.outstanding == 0:
            self._reducer.finish([bucket])

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
            if self.reduce_gradients and not self._depth:  # a step follows, and before it the last shard takes memory
                self._schedule.vacate()
        elif self._reduces and self._reducer is not None:
            rows = self.agreement.round(f"backward {self._backwards} (of {self._scope})", report)
            rows = [row[: len(report)] for row in rows]
        if self._reducer is not None:
            self._reducer.close(rows) if self._reduces else self._reducer.keep_local()
        self.in_backward = False
        self._segment += 1
        if self._depth > 0:
            self._refuse_thawed()
            self._open_forward()
        else:
            self.weights.unbind()

    # ------------------------------------------------------------------- state

    def thawed(self) -> list[str]:
        """What is trainable and was not when the module was laid out. Local."""
        with no_subclasses():  # absent parameters would be asked one by one
            return [self.names[parameter] for parameter in self._frozen if parameter.requires_grad]

    @property
    def accumulates(self) -> bool:
        """Whether this rank has sums of gradients for itself, to be averaged with those of a later micro-step."""
        return self._reducer is not None and self._reducer.holds_local

    @property
    def gathered(self) -> bool:
        """Whether units beside the root were gathered in the running phase."""
        return self._schedule.gathered

    @property
    def computes(self) -> bool:
        """Whether a forward or a backward runs, in which units are gathered."""
        return self._depth > 0 or self.in_backward

    @property
    def awaits_backward(self) -> bool:
        """Whether the backward of a training step is still to come."""
        return self._trained > self._backwards

    @property
    def totals(self) -> Totals:
        """Who puts numbers about gradients together, where these rest."""
        on_host = self.device.type == "cpu" or (self.plan.offload is not None and self.plan.offload.optimizer)
        return self.control if on_host else self.collectives

    def put_together(self, what: str, history: int, numbers: Tensor, combine: Combine) -> Tensor:
        """As ``Together`` has it: the norms and sums that user code asks of tensors of which each rank has a slice."""
        if self.in_backward:
            raise ParameterAccessError(
                f"{what} was called during a backward, which the ranks run at their own pace, so its result could not "
                "be collected. Call it after the backward, for example in `on_after_backward`."
            )
        if threading.get_ident() != self._thread:
            raise ParameterAccessError(
                f"{what} was called in a thread of its own, where it would come between other messages of the ranks. "
                "Call it in the thread that trains, and give the other one the number."
            )
        if combine is Combine.EACH:
            each = numbers.new_zeros(self.collectives.world_size, len(numbers))
            each[self.collectives.rank] = numbers
            numbers = each.view(-1)
        largest, count = combine is Combine.LARGEST, len(numbers)
        # Few numbers on the host go with the agreement itself.
        at_once = self.totals is self.control and count < self.agreement.width
        rows = self.agree(what, [history, *(numbers.cpu().view(torch.int64).tolist() if at_once else ())])
        other = next((rank for rank, row in enumerate(rows) if row[0] != rows[0][0]), None)
        if other is not None:
            raise DivergenceError(
                f"Rank {other} called {what} with other values or arguments than rank 0. Each rank holds a slice of "
                "the whole, so all must have done the same to it: look for a mask, a factor or a noise that depends on "
                "the rank, or use `with lightning_zero.full_gradients(module):`."
            )
        if at_once:
            found = self.control.put_together([row[1 : 1 + count] for row in rows], largest)
        else:
            found = self.totals.total(numbers.to(self.totals.device), largest)
        return found.view(self.collectives.world_size, -1) if combine is Combine.EACH else found

    def masters_were_written(self, what: str = "", units: Sequence[int] = ()) -> None:
        """Note that masters got other values past the optimizer. Local.

        ``what``: whose, for a backward that needs the old ones. ``units``: what was gathered of them is void.
        """
        if what:
            self._replaced = self.forwards, what
        self._schedule.void(units)

    def abandon(self) -> None:
        """Forget the running step after an error: no collective, no gradients, nothing pinned or bound."""
        self.spans.abandon()
        self._calls, self._active = [], []
        self._schedule.abandon()
        self.tiers.abandon()
        if self._reducer is not None:
            self.collectives.abandon(self._reducer.abandon())
        self.weights.abandon()
        for unit in self.units:
            unit.forget_step()
        self.access.writes.forget()
        self._depth, self.in_backward, self._segment = 0, False, 0
        self.weights.unbind()

    # ----------------------------------------------------------------- private

    def _recover(self) -> None:
        """Drop a backward that raised: its end callback never came, and gradients would never be reduced again."""
        if self.in_backward and not self._explicit and current_graph_task() == -1:
            self.abandon()

    def _refuse_thawed(self) -> None:
        if thawed := self.thawed():
            raise ParameterAccessError(
                f"Parameter '{thawed[0]}' was frozen when this step began and is trainable now, so that its gradient "
                "has nowhere to go. Set `requires_grad` between steps (`on_train_batch_start`): the next training step "
                "lays the module out anew then. Or leave it True, and set `.grad = None` where it is not to be stepped."
            )

    def _end_span(self, name: str) -> None:
        if self._running:
            self.spans.end(self._running.pop(name, None))

    def _open_forward(self) -> None:
        self.forwards += 1
        self._trained += self._scope == "training_step"
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
            self._reducer.finish_unit(unit.index)

    def _bring_for_backward(self, unit: ShardedUnit) -> bool:
        self.begin_backward()
        return self._schedule.bring(unit)
