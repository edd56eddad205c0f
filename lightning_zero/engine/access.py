"""The engine's side of what user code does to parameters and gradients: ``shards/binding.py`` sees it and asks here.

[Note: three gradients]
* While a backward runs, and until the engine takes it over at the end of its accumulation, a gradient is autograd's:
  this rank's own, whole. Tensor hooks and post-accumulate hooks see that one.
* After micro-steps that do not reduce, where full gradients stay (``zero1``): the sum so far, whole and of this rank.
* After a backward that reduces: the average, of which this rank has a slice. A ``ShardedTensor`` stands there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import proxy

from torch import Tensor, nn

from lightning_zero._torch import no_subclasses, untracked
from lightning_zero.engine.agreement import ExternalWrites
from lightning_zero.engine.reducer import GradientBucket
from lightning_zero.engine.unit import ReplicatedUnit, ShardedUnit
from lightning_zero.errors import ParameterAccessError
from lightning_zero.shards.binding import Binding, absent_in_rank, get_data, get_gradient, is_absent, set_gradient
from lightning_zero.shards.sharded import ShardedTensor, Source
from lightning_zero.shards.slice import Slice

__all__ = ["ParameterAccess"]

_SLICES = "To go through this rank's slices: `lightning_zero.local_slices(module)`."
_OF_GRADIENTS = (
    "Norms, sums and finite checks (`grad.norm()`, `clip_grad_norm_`, `grad.isfinite().all()`), scaling and clamping "
    "in place by numbers (`grad.mul_(0.5)`, `clip_grad_value_`), `zero_()` and None work as they are. To see and edit "
    "gradients whole, as under DDP: `with lightning_zero.full_gradients(module):`, on every rank; to read one: "
    f"`lightning_zero.full_gradient(module, name)`. {_SLICES}"
)
_OF_VALUES = (
    "Write `with lightning_zero.full_parameters(module):` around what needs its values, on every rank; for a momentum "
    f"teacher, `lightning_zero.ema_update(teacher, student, momentum)`. {_SLICES} Another strategy cannot run what is "
    "sharded: give it a `copy.deepcopy(module)` that was made inside."
)


def _sum_of_own(bucket: GradientBucket, position: int) -> Tensor | None:
    """The sum of this rank's gradients over micro-steps, where that stays whole, and is all there is."""
    if bucket.resident is None or bucket.room is None or not bucket.still_local(position):
        return None
    return None if position in bucket.round.kept else bucket.room.views[position]


class _Gradient(Source):
    """The averaged gradient that a parameter has now, until it is cleared or another one comes."""

    def __init__(self, binding: Binding, engine: Any, writes: ExternalWrites) -> None:
        what = f"averaged gradient of '{binding.name}'"
        super().__init__(what, _OF_GRADIENTS, engine.put_together, binding.slice)
        self._binding, self._engine, self._writes = binding, engine, writes
        self._number = binding.bucket.shard.numbers[binding.slice.position]

    def check(self, called: str, linear: bool) -> None:
        one, bucket = self._binding.slice, self._binding.bucket
        if one.gradient is None or bucket.shard.numbers[one.position] != self._number:
            raise ParameterAccessError(
                f"{called} uses the {self.what} that was cleared or replaced since it was read, and its memory is used "
                "again. Read `.grad` again, or keep a copy of it: clone it while it is there."
            )
        if one.position in bucket.round.kept and bucket.still_local(one.position):
            raise ParameterAccessError(
                f"{called} was called on the gradient of '{self._binding.name}', which was averaged but not cleared, "
                "and to which this rank has added since: the two parts are separate. Clear gradients after each step, "
                "or read them in `on_before_optimizer_step`."
            )
        if self._engine.progress.between_micro_steps and not linear:
            raise ParameterAccessError(
                f"{called} of the {self.what} was called between micro-steps. It is averaged over the ranks already, "
                "where under DDP each rank still has a sum of its own, so that the result would be another. Call it "
                "after the last micro-step, for example in `on_before_optimizer_step`, or use stage 1."
            )

    def edited(self, called: str, number: int) -> None:
        self._writes.note(f"the gradient of '{self._binding.name}'", number)


class ParameterAccess:
    """All of an engine's parameters, and their gradients, as user code sees them.

    ``engine`` is the ``ZeroEngine``.
    """

    def __init__(self, engine: Any) -> None:
        self._engine: Any = proxy(engine)
        self.writes: ExternalWrites = engine.means.writes
        self.stepping: Callable[[], bool] | None = None
        """Tells whether an optimizer step is what called; ``None`` while there is none."""
        self.check_trainer: Callable[[nn.Module], object] = lambda module: None
        """Raises if somebody else trains the module now."""
        self.whole: dict[nn.Parameter, Tensor | None] = {}
        """Averaged gradients in the user's hands (``full_gradients``), by parameter."""
        self.torn = ""
        """What has left values that not all ranks have: nothing may go on from there."""
        self._units = {parameter: unit for unit in engine.units for parameter in unit.parameters}
        self.bindings: dict[nn.Parameter, Binding] = {}
        self._plain = [u for u in engine.units if isinstance(u, ReplicatedUnit) and u.always_bound]
        for unit in engine.units:
            absent = unit not in self._plain
            for flat in unit.flats:
                for parameter, placeholder, shard in zip(flat.parameters, flat.placeholders, flat.shards, strict=True):
                    self.bindings[parameter] = Binding(parameter, shard.name, placeholder, self, shard, absent)

    def watch_gradients(self, buckets: Iterable[GradientBucket]) -> None:
        """Show what is collected and averaged in these from now on."""
        for bucket in buckets:
            for parameter in bucket.flat.parameters:
                self.bindings[parameter].bucket = bucket

    def release(self) -> None:
        """Make the parameters ordinary ones again."""
        for binding in self.bindings.values():
            binding.release()

    def bring(self, binding: Binding, together: bool) -> bool:
        """Let a parameter show its values, if this rank can do so alone, or with the others in the same phase."""
        unit = self._units[binding.parameter]
        if isinstance(unit, ReplicatedUnit):
            self._engine.weights.bring([unit])
        elif together and isinstance(unit, ShardedUnit) and is_absent(binding.parameter) and not self._engine.updating:
            self._engine.stay(unit, binding.name)
        return not is_absent(binding.parameter)

    def stand_in(self, binding: Binding) -> Tensor:
        """What ``.data`` and ``detach()`` of an absent parameter are: shape, dtype and device; any use raises."""
        self._check_not_stepping(binding)
        source = Source(f"parameter '{binding.name}'", _OF_VALUES, place=binding.slice)
        return ShardedTensor(binding.slice.data, binding.placeholder.shape, source, self._engine.device)

    def data_of(self, binding: Binding) -> Tensor:
        """What ``.data`` of a parameter is that shows its values.

        It shares the parameter's version where what is written has to be seen: at once where that is refused, and
        between phases where ranks compare it. Before a backward torch would take it for a change that spoils that.
        """
        parameter = binding.parameter
        if self._units[parameter] not in self._plain:
            return Tensor.detach(parameter)
        progress = self._engine.progress
        unseen = self._engine.computes or progress.trained > progress.backwards
        return binding.alias(get_data(parameter) if unseen else Tensor.detach(parameter))

    def assign(self, binding: Binding, value: Tensor) -> None:
        """``parameter.data = value``: what always shows its values is that tensor, until the next step."""
        unit = self._units[binding.parameter]
        self._check_not_stepping(binding)
        like = binding.placeholder
        kinds = [(tensor.shape, tensor.dtype, tensor.device) for tensor in (like, value)]
        if kinds[0] != kinds[1]:
            raise ParameterAccessError(
                f"'{binding.name}' cannot be changed to a tensor of shape {list(value.shape)}, {value.dtype}, on "
                f"{value.device}: the parameter has shape {list(like.shape)}, {like.dtype}, on {like.device}, and "
                "memory for parameters, gradients and the optimizer is laid out at set-up. Convert the module before "
                "`trainer.fit` (or in `configure_model`), or choose `Trainer(precision=...)`."
            )
        if not isinstance(unit, ReplicatedUnit) or unit not in self._plain:
            raise absent_in_rank(f"'{binding.name}'", "an assignment to its .data")
        address = value.data_ptr() if value.numel() else 0
        for other, view in (pair for unit in self._plain for pair in unit.views() if address):
            ranges = [(tensor.data_ptr(), tensor.nbytes) for tensor in (view, get_data(other))]
            if other is not binding.parameter and any(start <= address < start + size for start, size in ranges):
                raise ParameterAccessError(
                    f"'{binding.name}' was assigned memory of '{self.bindings[other].name}', so that one would follow "
                    "the other. Copy the values (`.clone()`), or tie the parameters before `trainer.fit`."
                )
        unit.count(binding.parameter, -1)
        binding.show(value)

    def shows_for_good(self, binding: Binding) -> bool:
        """Whether what a parameter shows is its own until it is changed, and not only while a module runs."""
        unit = self._units[binding.parameter]
        return unit.held or unit in self._plain

    def read_gradient(self, binding: Binding, local: Tensor | None) -> Tensor | None:
        """What ``.grad`` is. ``local``: what autograd holds there."""
        if self.stepping is not None:
            self._check_not_stepping(binding)
        parameter = binding.parameter
        if self.whole and parameter in self.whole:
            return self.whole[parameter]
        one, bucket = binding.slice, binding.bucket
        if bucket is None or one is None:
            return local
        if local is not None:
            # In the user's hooks it may be a part of what DDP would show.
            if self._engine.progress.in_backward and (bucket.has_gradient(one.position) or one.gradient is not None):
                raise ParameterAccessError(
                    f"A hook on '{binding.name}' read .grad in the middle of an accumulation, or for a parameter "
                    "whose gradient is never cleared (one in no optimizer, say). Earlier gradients are kept apart, so "
                    "there is no sum with this one yet. Use a hook on the tensor (`parameter.register_hook`), which "
                    "gets this gradient, or edit the sum in `on_before_optimizer_step`."
                )
            return local
        whole, gradient = _sum_of_own(bucket, one.position), one.gradient
        if whole is not None or gradient is None:
            return whole
        source = _Gradient(binding, self._engine, self.writes)
        return ShardedTensor(gradient, binding.placeholder.shape, source, binding.placeholder.device)

    def write_gradient(self, binding: Binding, value: Tensor | None) -> None:
        """``.grad = value``: ``None``, or what stands there already, as after ``p.grad *= x``. Not a tensor of the
        user's, unless the gradient is whole here."""
        if self.stepping is not None:
            self._check_not_stepping(binding)
        parameter = binding.parameter
        if self.whole and parameter in self.whole:
            self.whole[parameter] = value
            return
        one, bucket = binding.slice, binding.bucket
        if bucket is None or one is None or one.parameter is None or self._engine.progress.in_backward:
            set_gradient(parameter, value)
            return
        if value is None:
            with no_subclasses():
                set_gradient(parameter, None)  # of a backward that this engine has not seen
            if one.parameter.grad is not None:
                if one.position not in bucket.round.local:  # the sum tells which ones were, whatever the order
                    self.writes.cleared += (bucket.index * 1000003 + one.position + 1) ** 3
                one.parameter.grad = None
            return
        whole = _sum_of_own(bucket, one.position)
        if value is whole or (isinstance(value, ShardedTensor) and value.own is one.gradient and whole is None):
            return
        what = f"the gradient of '{binding.name}'"
        if value.shape != parameter.shape or value.dtype != parameter.dtype:
            raise ParameterAccessError(
                f"A tensor of shape {list(value.shape)} and {value.dtype} was assigned to {what}, which has shape "
                f"{list(parameter.shape)} and {parameter.dtype}."
            )
        if whole is None:
            raise ParameterAccessError(f"A tensor was assigned to {what}: each rank holds a slice. {_OF_GRADIENTS}")
        with untracked():
            whole.copy_(value)

    def keep_gradient(self, binding: Binding, whole: Tensor | None) -> None:
        """Let a trainable parameter's average be ``whole``, full shape, of which this rank keeps its slice."""
        one: Slice = binding.slice
        if whole is None:
            one.parameter.grad = None  # type: ignore[union-attr]
            return
        with untracked():
            binding.bucket.replace(one.position, one.of(whole))

    @property
    def plain_memory(self) -> list[Tensor]:
        """What parameters that show their values all the time lie in."""
        return [memory for unit in self._plain for memory in unit.buffers]

    def leave_to_worker(self) -> None:
        """In a process that this rank has forked: no parameter is the engine's any more. Those that show values for a
        while only are absent."""
        for binding in self.bindings.values():
            if not self.shows_for_good(binding):
                binding.hide()
            one, bucket = binding.slice, binding.bucket
            if bucket is not None:
                own = one.gradient is not None or _sum_of_own(bucket, one.position) is not None
                binding.behind = own or get_gradient(binding.parameter) is not None
                set_gradient(binding.parameter, None)
            binding.owner = lambda: None

    def note_written(self) -> None:
        """Look for writes to parameters that show their values all the time. Local: ranks compare them later."""
        if self.torn:
            raise ParameterAccessError(f"{self.torn} was left before its end, so the ranks may have different values.")
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
                names = unit.written_names()
                unit.forget_written()
                raise _in_step(f"'{names[0]}'")

    def compare(self, place: str) -> None:
        """Meet the other ranks, outside of a phase, and see that all have written the same since they last did.

        Collective. Raises ``DivergenceError`` on every rank if not, or if the others are at another place.
        """
        self.note_written()
        rows = self._engine.agree(place, [self.writes.digest])
        if len(self._plain) < len(self._engine.units):  # else each rank shows what it wrote itself
            self.writes.compare([row[0] for row in rows], self._engine.control)

    def _check_not_stepping(self, binding: Binding) -> None:
        if self.stepping is not None and self.stepping():
            raise _in_step(f"'{binding.name}'")


def _in_step(what: str) -> ParameterAccessError:
    return ParameterAccessError(
        f"{what} was read or written by `optimizer.step()` through a parameter that the optimizer keeps outside of its "
        "groups. While a step runs, this rank's shards of parameters and gradients are what counts, and they are in "
        "`self.param_groups`. Go through these in `step()`, or do it after the step, in a hook."
    )
