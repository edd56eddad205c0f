"""The engine's side of what user code does to parameters and gradients: ``shards/binding.py`` sees it and asks here."""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol
from weakref import proxy, ref

import torch
from torch import Tensor, nn

from lightning_zero._torch import untracked
from lightning_zero.comm import ControlGroup
from lightning_zero.engine.agreement import ExternalWrites
from lightning_zero.engine.build import copy_slice
from lightning_zero.engine.gradients.shown import GradientPlace, UserGradients
from lightning_zero.engine.reducer import GradientBucket
from lightning_zero.engine.units.sharded import ShardedUnit
from lightning_zero.engine.units.unit import PublishedWeights, ReplicatedUnit, Unit
from lightning_zero.errors import ParameterAccessError
from lightning_zero.offload.transfers import MemoryTiers
from lightning_zero.plan import FlatLayout, Plan
from lightning_zero.shards.binding import Binding, get_data, is_absent, set_data, set_gradient
from lightning_zero.shards.functions import refusal
from lightning_zero.shards.reductions import Combine
from lightning_zero.shards.slice import ParameterShard
from lightning_zero.shards.sliced_tensor import SlicedTensor
from lightning_zero.shards.sliced_values import values_of
from lightning_zero.shards.workers import WORKER, for_worker

__all__ = ["ParameterAccess"]


class RunsUnits(Protocol):
    """What the access to parameters asks of its engine: see ``Passes``."""

    units: list[Unit]
    shards: dict[str, ParameterShard]
    plan: Plan
    tiers: MemoryTiers
    control: ControlGroup
    device: torch.device
    weights: PublishedWeights
    in_backward: bool
    updating: bool

    @property
    def computes(self) -> bool: ...
    @property
    def gathered(self) -> bool: ...
    def agree(self, place: str, values: Sequence[int] = ()) -> list[list[int]]: ...
    def put_together(self, what: str, history: int, numbers: Tensor, combine: Combine) -> Tensor: ...
    def stay(self, unit: ShardedUnit, parameter: str) -> None: ...
    def masters_were_written(self, what: str = "", units: Sequence[int] = ()) -> None: ...


class ParameterAccess:
    """All of an engine's parameters as user code sees them."""

    def __init__(self, engine: RunsUnits) -> None:
        self._engine: RunsUnits = proxy(engine)
        self.writes = ExternalWrites()
        self.stepping: Callable[[], bool] | None = None
        """Tells whether an optimizer step is what called; ``None`` while there is none."""
        self.check_trainer: Callable[[nn.Module], object] = lambda module: None
        """Raises if somebody else trains the module now."""
        self.gradients = UserGradients(self.writes, self._engine)
        self._edited: dict[Unit, str] = {}  # absent, and written to in slices: of which parameter, at last
        self._assigned: dict[Binding, None] = {}  # in the order of their first assignment
        self._taken: list[tuple[int, int, str]] = []  # memory of these, sorted: first address, the one behind it, name
        self._units = {parameter: unit for unit in engine.units for parameter in unit.parameters}
        self.bindings: dict[nn.Parameter, Binding] = {}
        self._cuts: dict[nn.Parameter, tuple[FlatLayout, int]] = {}
        for flat in (flat for unit in engine.units for flat in unit.flats):
            every = zip(flat.parameters, flat.placeholders, flat.shards, strict=True)
            for position, (parameter, placeholder, shard) in enumerate(every):
                self.bindings[parameter] = Binding(parameter, shard.spec.name, placeholder, self)
                self._cuts[parameter] = flat.layout, position
        self._plain = [u for u in engine.units if isinstance(u, ReplicatedUnit) and u.always_bound]

    def watch_gradients(self, buckets: Iterable[GradientBucket]) -> None:
        """Show what is collected and averaged in these from now on."""
        for bucket in buckets:
            for position, parameter in enumerate(bucket.flat.parameters):
                binding = self.bindings[parameter]
                binding.place, binding.let_go = GradientPlace.of(bucket, position), self.gradients.let_go

    def release(self) -> None:
        """Make the parameters ordinary ones again."""
        for binding in self.bindings.values():
            binding.release()

    def hand_over(self) -> None:
        """Let aliases of whole parameters show what these show now: they have other memory since ``release``."""
        for parameter, binding in self.bindings.items():
            for alias in [found for weak in binding.handed.known if (found := weak()) is not None]:
                if not isinstance(alias, SlicedTensor) and alias.shape == parameter.shape:
                    set_data(alias, get_data(parameter))

    # ------------------------------------------------------------ what a binding asks

    def bring(self, binding: Binding, together: bool) -> bool:
        """Let a parameter show its values, if this rank can do so alone, or with the others in the same phase."""
        unit = self._units[binding.parameter]
        if isinstance(unit, ReplicatedUnit):
            self._engine.weights.bring([unit])
        elif together and isinstance(unit, ShardedUnit) and is_absent(binding.parameter) and not self._engine.updating:
            self._engine.stay(unit, binding.name)
        return not is_absent(binding.parameter)

    def assigned(self, binding: Binding, value: Tensor | None) -> bool:
        """Note that a parameter is about to be ``value``. Returns whether the values have to be copied instead."""
        unit, parameter = self._units[binding.parameter], binding.parameter
        self._check_not_stepping(binding)
        if value is not None:
            self._check_kind(binding, value)
            self._check_apart(binding, value)
        if unit in self._plain:
            self._keep_for_later(binding, value)
            return False
        if self.bring(binding, together=True):  # its unit computes, in memory that has to stay
            unit.note_assigned(parameter)
            return True
        if self._engine.computes:
            raise ParameterAccessError(
                f"'{binding.name}' was written to during a forward or backward, outside of the module that owns it, "
                "where its values are not in memory. Write to it in a hook between steps, in the forward of its "
                "module, or inside `with lightning_zero.full_parameters(module):`, on every rank."
            )
        self._keep_for_later(binding, value)
        return False

    def handed_out(self, binding: Binding) -> None:
        """Note that an alias of a parameter's memory left, through which it may be written to unseen."""
        unit = self._units[binding.parameter]
        if not (binding.external or unit.held):
            unit.note_handed_out(binding.parameter)

    def read_gradient(self, binding: Binding, local: Tensor | None) -> Tensor | None:
        """What ``.grad`` is. ``local``: what autograd holds there."""
        self._check_not_stepping(binding)
        return self.gradients.read(binding, local)

    def assigned_slice(self, binding: Binding, value: Tensor) -> bool:
        """``parameter.data = ...``, if this rank has a slice of the value, which the parameter's own is made."""
        if not isinstance(value, SlicedTensor):
            return False
        target = self.sliced(binding) if is_absent(binding.parameter) and not binding.held else None
        if target is None:
            value.refuse(f"assigning it to '{binding.name}', which is not in slices now,")
        if value.lent is None:
            binding.handed.part()
            target.copy_(value)
            value.be(target)  # the tensor that was assigned is the parameter's memory
            binding.handed.note(value)
        elif value.lent != target.lent:  # it is not what ``parameter.data *= x`` assigns, and is there already
            raise ParameterAccessError(
                f"'{binding.name}' was assigned memory of the {value.lent}, so that one would follow the other. Copy "
                "the values (`.clone()`), or tie parameters before `trainer.fit`."
            )
        return True

    def sliced(self, binding: Binding) -> SlicedTensor | None:
        """This rank's slice of an absent parameter, to be edited between steps; ``None`` where that cannot be."""
        unit, engine, parameter = self._units[binding.parameter], self._engine, binding.parameter
        self._check_not_stepping(binding)
        shard = engine.shards[binding.name]
        if not isinstance(unit, ShardedUnit) or shard.data.dtype != parameter.dtype:
            return None
        sharded = unit

        def editable() -> bool:
            """Whether nobody gathers the values, or has saved any, or shows them."""
            if engine.computes and (engine.in_backward or engine.gathered or sharded.resident):
                return False
            return not (binding.held or sharded.outstanding or engine.updating)

        if not editable():
            return None
        if engine.plan.offload is not None:
            engine.tiers.settle()  # what is about to be written may still be read

        def edited(digest: int) -> None:
            self.writes.note(f"'{binding.name}'", digest)
            sharded.void(parameter)
            self._edited[sharded] = f"'{binding.name}'"
            if engine.computes:
                self._bring_edits_home()

        return self._slice_of(binding, editable, edited)

    def read_slice(self, binding: Binding) -> SlicedTensor | None:
        """This rank's slice of an absent parameter, of its master, to be read; ``None`` in a step or a backward."""
        self._check_not_stepping(binding)
        engine = self._engine
        if (sliced := self.sliced(binding)) is not None or engine.in_backward or engine.updating:
            return sliced
        if engine.plan.offload is not None:
            engine.tiers.settle()

        def alive() -> bool:
            return not engine.updating

        return self._slice_of(binding, alive, read_only=True)

    def master(self, parameter: nn.Parameter) -> SlicedTensor:
        """This rank's slice of a parameter's master, to be read between steps, or written by who says so
        (``masters_changed``) on every rank."""
        if self._engine.plan.offload is not None:
            self._engine.tiers.settle()
        return self._slice_of(self.bindings[parameter])

    def _slice_of(
        self,
        binding: Binding,
        alive: Callable[[], bool] | None = None,
        edited: Callable[[int], None] | None = None,
        read_only: bool = False,
    ) -> SlicedTensor:
        shard, parameter = self._engine.shards[binding.name], binding.parameter
        layout, position = self._cuts[parameter]
        cut = layout.cut_of(position)
        start = shard.start if shard.data.numel() else 0
        name, device = binding.name, self._engine.device
        together, meaning = self._engine.put_together, values_of(name)
        return SlicedTensor(
            shard.data, start, parameter.shape, name, alive, edited, device, meaning, cut, together, read_only
        )

    def write_gradient(self, binding: Binding, value: Tensor | None) -> None:
        """``.grad = value``."""
        self.gradients.write(binding, value)

    def shows_for_good(self, binding: Binding) -> bool:
        """Whether what a parameter shows is its own until it is changed, and not only while a module runs."""
        unit = self._units[binding.parameter]
        return binding.external or unit.held or unit in self._plain

    def for_worker(self, binding: Binding) -> tuple[Any, ...]:
        """What a parameter without values is pickled as for a process that is being spawned."""
        return for_worker(binding)

    def refusal(self, names: Sequence[str], use: str) -> ParameterAccessError:
        """What is raised where ``use`` needs the values of absent parameters."""
        return refusal(names, use)

    # ---------------------------------------------------------- what the engine asks

    @property
    def plain_memory(self) -> list[Tensor]:
        """What parameters that show their values all the time lie in."""
        return [memory for unit in self._plain for memory in unit.memory]

    def leave_to_worker(self) -> None:
        """In a process that this rank has forked: no parameter is the engine's any more. Those that show values for a
        while only are absent."""
        for binding in self.bindings.values():
            if not self.shows_for_good(binding):
                binding.hide()
            if self.gradients.is_there(binding):
                WORKER.behind.add(binding)
                set_gradient(binding.parameter, None)
            binding.owner, binding.let_go = ref(WORKER), WORKER.clear_gradient

    def note_written(self) -> None:
        """Look for writes to parameters that show their values all the time. Local."""
        for unit in self._plain:
            if unit.written and not unit.held:
                unit.bring_home()
                unit.note_written(self.writes)

    def end_step(self) -> None:
        """Note that an optimizer step is over, and raise if it has written to what parameters show. Local.

        It was taken on shards, which are about to take the place of what is shown.
        """
        stepped, self.stepping = self.stepping is not None, None
        for unit in self._plain if stepped else ():
            if unit.written and not unit.held:
                writes = ExternalWrites()
                if unit.note_written(writes):
                    raise _in_step(writes.first)

    def _check_not_stepping(self, binding: Binding) -> None:
        if self.stepping is not None and self.stepping():
            raise _in_step(f"'{binding.name}'")

    def take_over(self, plain: bool = True) -> None:
        """Take values over that were assigned since the last time. Local: the ranks compare at their next agreement.

        Every rank has assigned the whole value, so what other ranks would have to send is here already. ``plain``: also
        to parameters that show their values all the time. Not between a forward and its backward, which still needs the
        old ones. Raises ``OffloadError`` if a disk failed.
        """
        engine = self._engine
        self._bring_edits_home()
        if not self._assigned:
            return
        mine = [b for b in self._assigned if b.external and (plain or self._units[b.parameter] not in self._plain)]
        for binding in mine:
            del self._assigned[binding]
        if not self._assigned:
            self._taken.clear()
        for binding in mine:
            value = get_data(binding.parameter)
            self._check_kind(binding, value)
            self.writes.note(f"'{binding.name}'", value)
        replaced = ""
        for binding in mine:
            binding.external = False
            unit = self._units[binding.parameter]
            if isinstance(unit, ReplicatedUnit):
                if unit.always_bound:
                    unit.bring_home()
                    continue
                engine.weights.settle([unit])
            binding.handed.part()
            value, shard = get_data(binding.parameter), engine.shards[binding.name]
            copy_slice(value, shard.start, shard.data)
            binding.hide()
            replaced = f"'{binding.name}'"
            unit.overwrite(binding.parameter, value)
        if mine:
            engine.masters_were_written(replaced)

    def compare(self, place: str) -> None:
        """Meet the other ranks, outside of a phase, and see that all have written the same since they last did.

        Collective. Raises ``DivergenceError`` on every rank if not, or if the others are at another place.
        """
        self.take_over()
        self.note_written()
        rows = self._engine.agree(place, [self.writes.digest])
        if len(self._plain) < len(self._engine.units):  # else each rank shows what it wrote itself
            self.writes.compare([row[0] for row in rows], self._engine.control)

    def _bring_edits_home(self) -> None:
        if self._edited:
            edited, self._edited = self._edited, {}
            for unit in edited:
                for flat in unit.flats:
                    flat.refresh()
            self._engine.masters_were_written([*edited.values()][-1], [unit.index for unit in edited])

    def _check_kind(self, binding: Binding, value: Tensor) -> None:
        parameter = binding.placeholder
        wrong = next(
            (
                f"{what} {getattr(value, what)}, the parameter has {getattr(parameter, what)}"
                for what in ("shape", "dtype", "device")
                if getattr(value, what) != getattr(parameter, what)
            ),
            None,
        )
        if wrong is not None:
            raise ParameterAccessError(
                f"'{binding.name}' cannot be changed to a tensor of {wrong}: memory for parameters, gradients and the "
                "optimizer is laid out at set-up. Convert the module before `trainer.fit` (or in `configure_model`), "
                "or choose `Trainer(precision=...)`."
            )

    def _check_apart(self, binding: Binding, value: Tensor) -> None:
        """Raise if memory is assigned that another parameter lies in: the engine's, or what was assigned before."""
        start, end = _range(value)
        others = [
            (self.bindings[parameter].name, *_range(view))
            for unit in self._engine.units
            if any(first < end and start < stop for first, stop in map(_range, unit.memory))
            for parameter, view in unit.held_views()
            if parameter is not binding.parameter
        ]
        place = bisect(self._taken, (start, end))
        others += [(name, first, stop) for first, stop, name in self._taken[max(0, place - 1) : place + 1]]
        for name, first, stop in others:
            if first < end and start < stop:
                raise ParameterAccessError(
                    f"'{binding.name}' was assigned memory of '{name}', so that one would follow the other. Copy the "
                    "values (`.clone()`), or tie the parameters before `trainer.fit`."
                )

    def _keep_for_later(self, binding: Binding, value: Tensor | None) -> None:
        self._assigned[binding] = None
        if value is not None and value.numel():
            insort(self._taken, (*_range(value), binding.name))


def _in_step(what: str) -> ParameterAccessError:
    return ParameterAccessError(
        f"{what} was read or written by `optimizer.step()` through a parameter that the optimizer keeps outside of its "
        "groups. While a step runs, this rank's shards of parameters and gradients are what counts, and they are in "
        "`self.param_groups`. Go through these in `step()`, or do it after the step, in a hook."
    )


def _range(value: Tensor) -> tuple[int, int]:
    """First address of a tensor, and the one behind it."""
    if not value.numel():
        return 0, 0
    with untracked():
        steps = ((length - 1) * stride for length, stride in zip(value.shape, value.stride(), strict=True))
        return value.data_ptr(), value.data_ptr() + (1 + sum(steps)) * value.element_size()
