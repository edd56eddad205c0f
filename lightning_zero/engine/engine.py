"""The engine: forward and backward of a module, and optimizer steps on its masters, whose results it publishes.

A step: ``before_optimizer_step`` -> ``after_optimizer_step``; where masters are on the host, in between for each unit
``unit_stepped``, and ``agree_stepped``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn

from lightning_zero.comm import ControlGroup, raising
from lightning_zero.comm.control import parent_rank
from lightning_zero.config import Tier
from lightning_zero.engine.build import build_reducer
from lightning_zero.engine.events import Phase
from lightning_zero.engine.hooks import EngineHooks, warn_of_formats
from lightning_zero.engine.passes import Passes, torn
from lightning_zero.engine.reducer import tied_layers
from lightning_zero.engine.unit import ReplicatedUnit, Unit
from lightning_zero.errors import OffloadError
from lightning_zero.shards.binding import binding_of

__all__ = ["ZeroEngine", "engine_of"]

_RESUME = "No rank goes on with half-updated weights. Resume from the last checkpoint, which is intact."

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
        engine.freeze_shown(True)


def _after_fork() -> None:
    if parent_rank() is None:  # what is forked becomes a rank itself
        return
    for engine in _engines():
        engine.leave_to_worker()
    _ENGINES.clear()


os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


class ZeroEngine(Passes):
    """Runs one module as its plan says, and brings what optimizers do to its masters to all ranks.

    Built as ``Passes`` is.
    """

    def __init__(self, module: nn.Module, *args: Any, **options: Any) -> None:
        warn_of_formats(module)
        super().__init__(module, *args, **options)
        self.listeners: list[Callable[[], None]] = []  # told when masters were written from outside
        self._steps = 0
        self._stepped: Unit | None = None  # whose masters are on their way back from the host
        self._returned: set[int] = set()  # units of the running step whose masters are back, or on their way
        self._hooks = EngineHooks(self)
        self._hooks.keep_apart(module)
        if self._sharded or self._replicated:
            root = self._schedule.root
            scoped = [*self._replicated, *([root] if root is not None else [])]
            self._hooks.watch_forwards(self.module, self._sharded, scoped)
            self._hooks.watch_encoders(self.module)
        mixed = any(flat.layout.dtype != flat.layout.compute_dtype for unit in self.units for flat in unit.flats)
        if mixed and self.device.type == "cpu":
            self._hooks.narrow_norms(self.module)
        self._schedule.stayed = partial(self._hooks.watch_parts, self.module, self._sharded)
        for part in self.module.modules():
            _ENGINES[part] = ref(self)

    def prepare_training(self) -> None:
        """Allocate what gradients need and start to collect them. Once; evaluation needs neither."""
        if self._reducer is None:
            self._reducer = build_reducer(
                self.plan, self.units, self.pool, self.collectives, self.control, self.tiers, self.spans
            )
            self._hooks.watch_gradients(self._reducer.buckets)
            self.access.watch_gradients(self._reducer.buckets)
            named = {spec.name for spec in self.plan.parameters if spec.aliases and spec.trainable}
            tied = {p for p, name in self.names.items() if name in named}
            self._tied = list(tied_layers(self.module, tied, self._hold))

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
        if self.accumulates:
            raise RuntimeError(
                f"{label} is about to step on gradients that were never reduced over the ranks: the last backward ran "
                "without gradient synchronisation. Let the last backward before a step run outside "
                "`block_backward_sync` / `no_sync`."
            )
        if self.between_micro_steps:
            raise RuntimeError(
                f"{label} is about to step between micro-steps: the last backward ran without gradient "
                "synchronisation. Under DDP each rank would step on gradients of its own, and here they are averaged "
                "already. Let the last backward before a step run outside `block_backward_sync` / `no_sync`."
            )
        if self.updating and self.plan.offload is not None:
            raise torn(f"{label} cannot step")
        if self._depth > 0 and not self.in_backward:
            self._close_forward()
        if self.plan.offload is not None:
            with self.spans.of(Phase.OFFLOAD, label):
                self.tiers.settle()  # copies of what is about to be written
        self.weights.settle()  # other ranks may still be reading what is about to be written
        self._returned.clear()
        self.take_over_shown(on_disk=False)  # those are stepped on from what is shown
        self._steps += 1
        place = f"step {self._steps} of {label}, after {self._trained} forwards and {self._backwards} backwards"
        rows = self.agreement.round(place, [self.access.writes.digest, *values])
        self.access.writes.compare([row[0] for row in rows], self.control)
        if differ is not None and any(row != rows[0] for row in rows):
            differ(self.control)
        self._schedule.vacate()
        self.updating, self.access.stepping = True, running
        self._running["step"] = self.spans.begin(Phase.STEP, label)

    def after_optimizer_step(self, units: Mapping[int, Sequence[nn.Parameter]]) -> None:
        """Bring updated masters to the compute copies.

        ``units``: those with parameters of the optimizer, and these, the same on every rank. Collective: every rank.
        """
        self.access.end_step()
        self._end_span("step")
        failure: OffloadError | None = None
        # What got its gradients last computes first in a forward, which is where its new weights are waited for.
        places = {} if self._reducer is None else {index: at for at, index in enumerate(self._reducer.units)}
        for index in sorted(units, key=lambda index: places.get(index, -1), reverse=True):
            unit, parameters = self.units[index], units[index]
            if index not in self._returned:
                try:
                    for flat in unit.flats:
                        flat.refresh()
                except OffloadError as error:  # the gather below must come all the same
                    failure = failure or error
                if isinstance(unit, ReplicatedUnit):
                    self.weights.publish(unit)
            unit.parameters_changed(parameters)
        if self.tiers.can_fail and not self._returned.issuperset(units):
            self.control.together("bring weights back that were changed", raising(failure), OffloadError, _RESUME)
        self._returned.clear()
        self.weights.after_step(self.computes or self.plan.offload is not None)
        self.updating = False
        self._schedule.masters_changed(list(units))
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
        self.control.together("take its part of an optimizer step", raising(failure), OffloadError, _RESUME)

    def take_over_shown(self, on_disk: bool = True) -> None:
        """Bring home what the user wrote to parameters that show their values all the time. Local.

        ``on_disk``: also to masters on disk, which raises ``OffloadError`` if a disk failed.
        """
        self.access.note_written()
        for unit in self.units if self.plan.offload is not None else ():
            for flat in unit.flats:
                if on_disk or flat.rest.master is not Tier.DISK:
                    flat.take_over_shown()

    def masters_changed(self, units: Sequence[int], parameters: Container[nn.Parameter] | None = None) -> None:
        """Publish masters that were written from outside (a loaded checkpoint). Not inside a step. Collective.

        ``parameters``: those of the units that were written; by default all of them.
        """
        torn, self.updating = self.updating, False
        firsts = [self.units[index].flats[0].layout.parameters[0] for index in units if self.units[index].parameters]
        self.weights.settle()
        self.tiers.settle()
        self._returned.clear()
        written = {index: self.units[index].parameters for index in units}
        if parameters is not None:
            written = {index: [p for p in every if p in parameters] for index, every in written.items()}
        self.after_optimizer_step(written)
        self.updating = torn
        self.masters_were_written(", ".join(f"unit of '{spec.name}'" for spec in firsts))

    def masters_were_written(self, what: str = "", units: Sequence[int] = ()) -> None:
        super().masters_were_written(what, units)
        for listener in self.listeners:
            listener()

    def abandon(self) -> None:
        self._stepped = None
        self._returned.clear()
        super().abandon()

    def leave_to_worker(self) -> None:
        """Let go of the module in a process that was forked from this rank, which has none of its threads and must not
        use its connections."""
        self._hooks.remove()
        self.access.leave_to_worker()

    def detach(self) -> None:
        """Take the hooks off the module. Its parameters stay as they are."""
        self.weights.settle()
        self._hooks.remove()
        self.access.release()
        for part in self.module.modules():
            _ENGINES.pop(part, None)

    def _hold(self, weight: nn.Parameter, part: Tensor) -> Tensor:
        """Put the first part of a weight's gradient where that is to be, if no hook of the user's gets to see it."""
        binding, hooks = binding_of(weight), len(weight._backward_hooks or ()) + len(weight._post_accumulate_grad_hooks)
        if self._reducer is None or binding is None or binding.place is None or hooks != 1:  # that one is the engine's
            return part
        if not self.in_backward:
            self.begin_backward()
        bucket, position = binding.place[:2]
        return self._reducer.hold(bucket, position, part)

    def _publish_stepped(self) -> None:
        unit, self._stepped = self._stepped, None
        if unit is not None:
            unit.settle_weights()
            if isinstance(unit, ReplicatedUnit):
                self.weights.publish(unit)
