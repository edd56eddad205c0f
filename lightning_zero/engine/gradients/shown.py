"""What ``.grad`` of the user's parameters is: autograd's own gradient, one of earlier micro-steps, or slices.

[Note: three gradients]
* While a backward runs, and until the engine takes it over at the end of its accumulation, a gradient is autograd's:
  this rank's own, whole. Tensor hooks and post-accumulate hooks see that one, added to what was accumulated before.
* After micro-steps that do not reduce, where full gradients stay (``zero1``): the sum so far, whole and of this rank.
* After a backward that reduces: the average, of which this rank has a slice. A ``SlicedTensor`` stands there, which
  can be edited element by element, and says what to do where the whole is needed.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol
from weakref import ref

import torch
from torch import Tensor, nn

from lightning_zero._torch import no_subclasses, untracked
from lightning_zero.engine.agreement import ExternalWrites
from lightning_zero.engine.reducer import GradientBucket
from lightning_zero.errors import ParameterAccessError
from lightning_zero.shards.binding import Binding, get_gradient, set_gradient
from lightning_zero.shards.reductions import Combine
from lightning_zero.shards.slice import flat_range
from lightning_zero.shards.sliced_tensor import SlicedTensor

__all__ = ["GradientPlace", "UserGradients"]


class RunsBackward(Protocol):
    """What runs backwards."""

    in_backward: bool
    between_micro_steps: bool

    def put_together(self, what: str, history: int, numbers: Tensor, combine: Combine) -> Tensor: ...


class GradientPlace(NamedTuple):
    """Where a parameter's gradient is collected."""

    bucket: GradientBucket
    position: int
    shard: nn.Parameter | None  # what the optimizer steps on
    cleared: int  # a number for its being cleared: the sum tells which ones were, whatever the order

    @classmethod
    def of(cls, bucket: GradientBucket, position: int) -> GradientPlace:
        """That of a bucket's parameter."""
        shard = bucket.flat.shards[position].parameter
        return cls(bucket, position, shard, (bucket.index * 1000003 + position + 1) ** 3)

    @property
    def whole(self) -> Tensor | None:
        """The sum of this rank's gradients over micro-steps, where that stays whole."""
        bucket, position = self[:2]
        if bucket.resident is None or bucket.views is None or not bucket.still_local(position):
            return None
        return bucket.views[position]


class UserGradients:
    """``.grad`` of all trainable parameters of an engine. ``writes`` is told of edits."""

    def __init__(self, writes: ExternalWrites, engine: RunsBackward) -> None:
        self.whole: dict[nn.Parameter, Tensor | None] = {}
        """Averages in the user's hands (``full_gradients``), by parameter."""
        self._writes = writes
        self._engine = engine
        # By the number of the gradient it is of. Weak: it holds the memory of gradients.
        self._shown: dict[nn.Parameter, tuple[int, ref[SlicedTensor]]] = {}

    def read(self, binding: Binding, local: Tensor | None) -> Tensor | None:
        """What ``.grad`` is. ``local``: what autograd holds there."""
        parameter = binding.parameter
        if parameter in self.whole:
            return self.whole[parameter]
        place: GradientPlace | None = binding.place
        if place is None:
            return local
        if local is not None:
            return self._accumulated(binding, place, local)
        whole, shard = place.whole, place.shard
        if whole is not None or shard is None or shard.grad is None:
            return whole
        return self._sliced(binding, place, shard.grad)

    def is_there(self, binding: Binding) -> bool:
        """Whether ``.grad`` shows what is collected here, or would be collected here. Shows nothing."""
        place: GradientPlace | None = binding.place
        if place is None:
            return False
        reduced = place.shard is not None and place.shard.grad is not None
        return reduced or place.whole is not None or get_gradient(binding.parameter) is not None

    def write(self, binding: Binding, value: Tensor | None) -> None:
        """``.grad = value``, of which everything but this rank's slice is dropped, outside of a backward."""
        parameter = binding.parameter
        if parameter in self.whole:
            self.whole[parameter] = value
            return
        place = binding.place
        if place is None or place.shard is None or self._engine.in_backward:
            set_gradient(parameter, value)
            return
        set_gradient(parameter, None)  # of a backward that this engine has not seen
        what, whole = f"the gradient of '{binding.name}'", place.whole
        if value is None:
            if place.shard.grad is not None and whole is None:
                self._writes.note(f"{what} (None)", 0)
            place.shard.grad = None
            return
        current = self._current(place, parameter)
        if value is whole or (place.shard.grad is not None and value is current):
            return  # what ``p.grad += x`` assigns
        if value.shape != parameter.shape or value.dtype != parameter.dtype:
            raise ParameterAccessError(
                f"A tensor of shape {list(value.shape)} and {value.dtype} was assigned to {what}, which has shape "
                f"{list(parameter.shape)} and {parameter.dtype}."
            )
        with untracked():
            if whole is not None:
                whole.copy_(value)
            elif isinstance(value, SlicedTensor):
                own = value.elements(place.bucket.flat.layout.cut_of(place.position)).clone()
                self._writes.note(what, value.history)
                place.bucket.replace(place.position, own)
            else:
                self._writes.note(what, value)
                self.keep(binding, value)

    def let_go(self, binding: Binding) -> None:
        """``.grad = None`` in a ``zero_grad``, for which this is the quick way."""
        place = binding.place
        if place is None or self.whole or self._engine.in_backward:
            self.write(binding, None)
            return
        with no_subclasses():
            set_gradient(binding.parameter, None)
        bucket, position, shard, number = place
        if shard is not None and shard.grad is not None:
            if not bucket.local[position]:
                self._writes.cleared += number
            shard.grad = None

    def keep(self, binding: Binding, whole: Tensor) -> None:
        """Let a trainable parameter's average be ``whole``, full shape, of which this rank keeps its slice."""
        place = binding.place
        shard = place.bucket.flat.shards[place.position]
        with untracked():
            place.bucket.replace(place.position, flat_range(whole.detach(), shard.start, shard.data.numel()))

    def _accumulated(self, binding: Binding, place: GradientPlace, local: Tensor) -> Tensor:
        """A gradient on its way through the user's hooks, with what was accumulated before, as autograd shows it."""
        bucket, position = place[:2]
        if not self._engine.in_backward or position in bucket.merged:
            return local
        before = bucket.arrived[position] or bucket.still_local(position)  # also in this backward, inside of another
        whole = bucket.views[position] if before and bucket.views is not None else None
        reduced = bucket.used[position] or (bucket.launched and not bucket.dirty)
        if whole is not None and whole.dtype == local.dtype and not reduced:
            with untracked():
                whole.add_(local.to_dense() if local.layout is not torch.strided else local)
            bucket.merged.add(position)
            shown = whole.detach()  # counted apart: whoever keeps it keeps the slot's memory
            set_gradient(binding.parameter, shown)
            return shown
        if before or bucket.used[position] or (place.shard is not None and place.shard.grad is not None):
            raise ParameterAccessError(
                f"A hook on '{binding.name}' asked for .grad in the middle of an accumulation, or where nobody clears "
                "gradients (of a parameter in no optimizer, say). What came before is averaged and in slices already, "
                "or of another dtype, so that its sum with this gradient is not there. Use stage 1 in one precision, a "
                "hook on the tensor (`parameter.register_hook`), which gets this gradient, or edit the sum in "
                "`on_before_optimizer_step`."
            )
        return local

    def _sliced(self, binding: Binding, place: GradientPlace, own: Tensor) -> SlicedTensor:
        parameter, (bucket, position, *_) = binding.parameter, place
        number = bucket.numbers[position]
        if (known := self._current(place, parameter)) is not None:
            return known
        shard, name = bucket.flat.shards[position], binding.name

        def alive() -> bool:
            kept = shard.parameter is not None and shard.parameter.grad is not None
            return kept and bucket.numbers[position] == number

        def edited(digest: int) -> None:
            self._writes.note(f"the gradient of '{name}'", digest)

        def early() -> bool:
            return self._engine.between_micro_steps

        cut = bucket.flat.layout.cut_of(position)
        device, together = parameter.device, self._engine.put_together
        sliced = SlicedTensor(
            own, shard.start, parameter.shape, name, alive, edited, device, cut=cut, together=together, early=early
        )
        self._shown[parameter] = (number, ref(sliced))
        return sliced

    def _current(self, place: GradientPlace, parameter: nn.Parameter) -> SlicedTensor | None:
        """What stands for the gradient that there is, if somebody has seen it, and still has it."""
        number, shown = self._shown.get(parameter, (-1, None))
        return None if shown is None or number != place.bucket.numbers[place.position] else shown()
