"""The elements that this rank holds of a tensor which is split over the ranks, and what can be done with them alone."""

from __future__ import annotations

import numbers
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_zero.errors import ParameterAccessError
from lightning_zero.shards.functions import Elementwise
from lightning_zero.shards.reductions import Together
from lightning_zero.shards.slice import fingerprint, flat_range

__all__ = [
    "Meaning",
    "Part",
    "Selection",
    "SlicedValues",
    "Trace",
    "gradient_of",
    "history_of",
    "select",
    "state_of",
    "values_of",
]


@dataclass(frozen=True)
class Meaning:
    """What sliced values are, in words for messages."""

    what: str
    again: str  # how it is read anew
    advice: str  # what works where a slice is not enough


def gradient_of(name: str) -> Meaning:
    """The averaged gradient of a parameter."""
    return Meaning(
        f"averaged gradient of '{name}'",
        "Read `.grad` anew, or keep a copy of it: clone it while it is there.",
        "To read it whole: `lightning_zero.full_gradient(module, name)`. To see and edit gradients whole, as under "
        "DDP: `with lightning_zero.full_gradients(module):`, on every rank. Norms, sums and finite checks "
        "(`grad.norm()`, `clip_grad_norm_`, `grad.isfinite().all()`) and elementwise edits (`grad.mul_(mask)`, "
        "`grad[rows] = 0`) work as they are.",
    )


def values_of(name: str) -> Meaning:
    """A parameter's values."""
    return Meaning(
        f"parameter '{name}'",
        "Read `.data` anew, between steps.",
        "Write `with lightning_zero.full_parameters(module):` around it, on every rank; for a momentum teacher, "
        "`lightning_zero.ema_update(teacher, student, momentum)` in place of the loop. Norms, sums, finite checks and, "
        "between steps, elementwise edits of `.data` work as they are. Another strategy cannot run what is sharded: "
        "give it a `copy.deepcopy(module)` that was made there.",
    )


def state_of(name: str, key: str) -> Meaning:
    """A state of the optimizer for a parameter."""
    return Meaning(
        f"optimizer state '{key}' of '{name}'",
        "Read it from `optimizer.state` anew, or keep a clone of it.",
        "To read it whole: `lightning_zero.full_optimizer_state(module, name, key)`, on every rank. To save it: "
        "`trainer.save_checkpoint`. Elementwise edits work as they are, for example `state.zero_()`, and so does "
        "`optimizer.load_state_dict`.",
    )


@dataclass(eq=False)
class Trace:
    """What happened to values that share memory."""

    name: str  # the parameter's that they belong to
    meaning: Meaning  # what they are, or were made from
    alive: Callable[[], bool] | None  # whether the memory still holds them; ``None``: always
    edited: Callable[[int], None] | None  # told of each edit
    history: int  # a number for how they came about, the same on every rank that did the same
    own: bool = True  # whether the memory is nobody else's
    together: Together | None = None  # who puts the ranks' parts of a norm or a sum together
    read_only: bool = False
    early: Callable[[], bool] | None = None  # whether it is an average already where DDP has a rank's own sum

    def note(self, history: int) -> None:
        """An edit was made, and this is the history now."""
        self.history = history
        if self.edited is not None:
            self.edited(history)

    def check_alive(self, called: str) -> None:
        """Raise ``ParameterAccessError`` if the memory is used for something else by now."""
        if self.alive is not None and not self.alive():
            raise ParameterAccessError(
                f"{called} uses the {self.meaning.what} that was cleared or replaced since it was read, and its memory "
                f"is used again. {self.meaning.again}"
            )

    def check_writable(self, called: str) -> None:
        """Raise ``ParameterAccessError`` if the values can be read only."""
        if self.read_only:
            raise ParameterAccessError(
                f"The values of the {self.meaning.what} are not in memory here, and {called} would write to them. "
                f"{self.meaning.advice}"
            )

    def check_not_early(self, called: str) -> None:
        """Raise ``ParameterAccessError`` if under DDP each rank has values of its own now."""
        if self.early is not None and self.early():
            raise ParameterAccessError(
                f"{called} of the {self.meaning.what} was called between micro-steps. It is averaged over the ranks "
                "already, where under DDP each rank still has a sum of its own, so that the result would be another. "
                "Call it after the last micro-step, for example in `on_before_optimizer_step`, or use stage 1."
            )

    def refuse(self, what: str) -> NoReturn:
        """Raise ``ParameterAccessError``, and say what works instead."""
        raise ParameterAccessError(
            f"The {self.meaning.what} is sliced over the ranks, and {what} needs more than this rank's slice. "
            f"{self.meaning.advice}"
        )


@dataclass(frozen=True, eq=False)
class SlicedValues:
    """Some elements of a tensor."""

    part: Part
    key: tuple[Any, ...]  # the same on every rank; equal for tensors of which ranks hold elements at the same places
    memory: Tensor  # 1-D, where they are
    places: Tensor | None  # which of ``memory`` they are, if not all
    trace: Trace
    device: torch.device  # where the tensor is for its user; ``memory`` may be on the host

    @property
    def own(self) -> Tensor:
        """1-D: the memory itself, or a copy where they do not lie in a row."""
        return self.memory if self.places is None else self.memory[self.places]

    def derived(self, own: Tensor, history: int, device: torch.device | None = None) -> SlicedValues:
        """Values of their own that were made from these, one from each."""
        early = None if self.trace.early is None or not self.trace.early() else lambda: True
        trace = Trace(self.trace.name, self.trace.meaning, None, None, history, True, self.trace.together, early=early)
        return replace(self, memory=own, places=None, trace=trace, device=device or self.device)

    def operands(self, known: Elementwise, args: Sequence[Any]) -> list[Any]:
        """What a function gets of tensors, numbers and ``SlicedValues``: their elements where this rank holds some."""
        return [self._operand(value, f"{known.name}{'_' if known.in_place else ''}()") for value in args]

    def computed(self, result: Tensor, history: int) -> SlicedValues:
        """What an elementwise function gave out of place."""
        return self.derived(result.reshape(-1)[: self.part.numel], history)

    def edited(self, own: Tensor, history: int) -> None:
        """Keep what an elementwise function has written to its first operand."""
        if self.places is not None:
            self.memory[self.places] = own
        self.trace.note(history)

    def _operand(self, value: Any, called: str) -> Any:
        if isinstance(value, SlicedValues):
            if value.key != self.key:
                self.trace.refuse(f"{called} together with '{value.trace.name}', which is cut at other places,")
            return self._shaped(value.own)
        if isinstance(value, Tensor):
            if value.layout is not torch.strided:
                self.trace.refuse(f"{called} with a sparse tensor")
            value = self._beside(value)
            if value.dim() == 0:
                return value
            try:
                return self._shaped(self.part.cut(value))
            except RuntimeError:
                shapes = f"{list(value.shape)}, which does not fit {list(self.part.shape)},"
                self.trace.refuse(f"{called} with a tensor of shape {shapes}")
        if value is None or isinstance(value, str | numbers.Number | torch.dtype):
            return value
        self.trace.refuse(f"{called} with a {type(value).__name__}")

    def _beside(self, value: Tensor) -> Tensor:
        """What is offloaded is edited where it is."""
        return value.to(self.memory.device) if value.device == self.device else value

    def _shaped(self, own: Tensor) -> Tensor:
        """Without dimensions where the tensor has none: dtypes depend on that. Any value where nothing is held."""
        if self.part.shape:
            return own
        return own.view(()) if own.numel() else own.new_zeros(())

    def get(self, index: Any) -> SlicedValues:
        """What an index selects: of the same memory where torch gives a view, a copy where it gives a copy."""
        self._check_indexable()
        found = select(index, self.part, self.memory.device)
        key = self.key if found.everything else (*self.key, fingerprint(index))
        if not found.shows:
            history = fingerprint("get", self.trace.history, index)
            return replace(self.derived(self.memory[found.places], history), part=found.part, key=key)
        if isinstance(found.places, slice):
            return replace(self, part=found.part, key=key, memory=self.memory[found.places])
        return replace(self, part=found.part, key=key, places=found.places)

    def set(self, index: Any, value: Any) -> None:
        """Write to what an index, or a mask made from this tensor, selects.

        ``value``: a number, a tensor that can be expanded to what is selected, or ``get(index)`` after edits.
        """
        self._check_indexable()
        self.trace.check_writable("an index")
        history = fingerprint("set", self.trace.history, _told(index), _told(value))
        if isinstance(value, Tensor):
            value = self._beside(value)
        elif not isinstance(value, SlicedValues | numbers.Number):
            raise TypeError(f"can't assign a {type(value).__name__} to the {self.trace.meaning.what}")
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.reshape(())
        if isinstance(index, SlicedValues):
            if index.key != self.key or index.own.dtype is not torch.bool or not _is_one(value):
                self.trace.refuse("assigning many values by a sliced mask, or by one cut at other places,")
            self.memory[index.own] = value
        else:
            self._set(index, value)
        self.trace.note(history)

    def _set(self, index: Any, value: Any) -> None:
        found = select(index, self.part, self.memory.device, ordered=not _is_one(value))
        if isinstance(value, SlicedValues):
            if value.key != (self.key if found.everything else (*self.key, fingerprint(index))):
                self.trace.refuse("assigning what is cut at other places")
            value = value.own
        elif not _is_one(value):
            while value.dim() > len(found.part.shape) and value.shape[0] == 1:
                value = value[0]
            value = found.part.cut(value)
        self.memory[found.places] = value.to(self.memory.dtype) if isinstance(value, Tensor) else value

    def _check_indexable(self) -> None:
        if self.places is not None or self.part.picks is not None:
            self.trace.refuse("an index of what an index selected (write one index instead)")


def _told(value: Any) -> Any:
    """What stands for an argument in a history."""
    if isinstance(value, SlicedValues):
        return ("sliced", value.trace.history, *value.key)
    return value


def history_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """A number for a call, the same on every rank that calls the same with the same."""
    return fingerprint(name, *map(_told, args), {key: _told(value) for key, value in kwargs.items()})


def _is_one(value: Any) -> bool:
    return isinstance(value, numbers.Number) or (isinstance(value, Tensor) and value.dim() == 0)


@dataclass(frozen=True, eq=False)
class Part:
    """Which elements of a tensor this rank holds: ``numel`` from ``start`` on, flattened, or those at ``picks``."""

    shape: torch.Size  # of the whole tensor, the same on every rank
    start: int
    numel: int
    picks: Tensor | None = None

    def cut(self, whole: Tensor) -> Tensor:
        """The elements, 1-D, of another tensor at these places. Raises ``RuntimeError`` if it cannot be expanded."""
        whole = whole.expand(self.shape)
        if self.picks is None:
            return flat_range(whole, self.start, self.numel)
        return whole[torch.unravel_index(self.picks.to(whole.device), self.shape)]


@dataclass(frozen=True, eq=False)
class Selection:
    """What an index selects of a part."""

    part: Part  # which elements of the selected tensor this rank holds
    places: slice | Tensor  # these among all of its elements: a slice if all ranks' are in a row, a 1-D mask, or places
    shows: bool  # whether torch would give a view of the tensor, and not a copy of elements of it
    everything: bool = False  # whether that is the tensor as it is


def select(index: Any, part: Part, device: torch.device, ordered: bool = True) -> Selection:
    """What ``tensor[index]`` is of the ``part``, a range, of it that this rank holds.

    Unless it matters which element selected is which (``ordered``), ``part`` of the answer is not to be used.
    """
    components = tuple(_component(c) for c in (index if isinstance(index, tuple) else (index,)))
    tensors = [c for c in components if isinstance(c, Tensor)]
    if not tensors and not any(isinstance(c, bool) for c in components):
        return _view(components, part, device)
    if len(components) == 1 and isinstance(components[0], Tensor) and part.shape:
        rows = components[0].to(device)
        if not ordered and not rows.is_floating_point() and rows.dtype not in (torch.bool, torch.uint8):
            mask = torch.zeros(part.shape[0], dtype=torch.bool, device=device)
            mask[rows] = True
            rows = mask
        if rows.dtype is torch.bool and rows.dim() and rows.shape == part.shape[: rows.dim()]:
            return _masked(rows, part, ordered)
    return _anywhere(components, part, device)


def _component(index: Any) -> Any:
    """A part of an index: a number, slice, ``None``, ``...``, a truth value, or a tensor of at least one dimension."""
    if index is None or index is Ellipsis or isinstance(index, slice | bool):
        return index
    if hasattr(index, "__index__") and not isinstance(index, Tensor) and not getattr(index, "ndim", 0):
        return index.__index__()
    tensor = torch.as_tensor(index)
    if tensor.dim():
        return tensor
    return bool(tensor) if tensor.dtype is torch.bool else tensor.__index__()


def _view(index: tuple[Any, ...], part: Part, device: torch.device) -> Selection:
    """Steps are positive: what is selected is in the order of the tensor, and a rank's elements are a range of it."""
    shown = torch.empty(part.shape, device="meta")[index]
    sizes, strides, first = shown.shape, shown.stride(), int(shown.storage_offset())

    def place(number: int) -> int:
        found = first
        for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
            found += number % size * stride
            number //= size
        return found

    numel = shown.numel()
    begin = bisect_left(range(numel), part.start, key=place)
    end = bisect_left(range(numel), part.start + part.numel, key=place)
    places: slice | Tensor
    if numel == 0:
        places = slice(0, 0)
    elif place(numel - 1) - place(0) == numel - 1:  # in a row: the same answer on every rank
        places = slice(place(begin) - part.start, place(begin) - part.start + end - begin)
    else:
        rest = torch.arange(begin, end, device=device)
        places = torch.full_like(rest, first - part.start)
        for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
            places.add_(rest % size, alpha=stride)
            rest = rest // size
    selected = Part(sizes, begin, end - begin)
    return Selection(selected, places, True, sizes == part.shape and numel == part.shape.numel())


def _masked(mask: Tensor, part: Part, ordered: bool) -> Selection:
    """All that belongs to the ``True`` of a mask over the first dimensions, in the order of the tensor."""
    row = part.shape[mask.dim() :].numel()
    flat = mask.reshape(-1)
    places = flat_range(flat.view(-1, 1).expand(-1, row), part.start, part.numel)
    if not ordered:
        return Selection(part, places, False)

    def before(place: int) -> int:
        rows, rest = divmod(place, row) if row else (0, 0)
        return int(flat[:rows].sum()) * row + (rest if rest and bool(flat[rows]) else 0)

    shape = torch.Size([int(flat.sum()), *part.shape[mask.dim() :]])
    begin = before(part.start)
    return Selection(Part(shape, begin, before(part.start + part.numel) - begin), places, False)


def _anywhere(index: tuple[Any, ...], part: Part, device: torch.device) -> Selection:
    """The place of every element selected, by what the index makes of each dimension's coordinates."""
    index = tuple(c.to(device) if isinstance(c, Tensor) else c for c in index)
    places = torch.zeros((), dtype=torch.int64, device=device).expand(part.shape)[index]
    stride = part.shape.numel()
    for dimension, size in enumerate(part.shape):
        stride = stride // size if size else 0
        form = [1] * len(part.shape)
        form[dimension] = size
        places = places + torch.arange(size, device=device).view(form).expand(part.shape)[index] * stride
    shape, places = places.shape, places.reshape(-1) - part.start
    picks = ((places >= 0) & (places < part.numel)).nonzero().view(-1)
    return Selection(Part(shape, 0, picks.numel(), picks), places[picks], False)
