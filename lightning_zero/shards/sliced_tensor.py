"""What stands for a gradient, or for a state of an optimizer, of which every rank holds a slice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_zero._torch import (
    foreach_types,
    make_wrapper_subclass,
    no_functions,
    tree_leaves,
    tree_map_only,
    untracked,
)
from lightning_zero.shards.binding import is_absent
from lightning_zero.shards.functions import (
    LIKE,
    NEW,
    QUESTIONS,
    SHAPES,
    Elementwise,
    elementwise,
    not_linear_from,
    words,
)
from lightning_zero.shards.reductions import Reduction, Slice, Together, reduce_together
from lightning_zero.shards.slice import fingerprint
from lightning_zero.shards.sliced_values import Meaning, Part, SlicedValues, Trace, gradient_of, history_of

__all__ = ["SlicedTensor"]


class SlicedTensor(Tensor):
    """A tensor of a parameter's shape of which this rank holds a slice: an averaged gradient, a state.

    It answers what a tensor is asked about itself. Elementwise functions that give the same bits for a part as for the
    whole work: in place they change the slice, out of place they give another sliced tensor. Operands are numbers,
    tensors that can be expanded to the whole shape, and tensors that were made from this one. So does an index, for
    writing. Norms, sums and finite checks give ordinary tensors, by one collective, if there is who puts them
    ``together``. Whatever else needs elements of other ranks raises ``ParameterAccessError``, on every rank.

    Args:
        own: 1-D, contiguous: this rank's elements. Read and written.
        start: the first of them in the flattened tensor.
        shape: of the whole tensor.
        name: the parameter's.
        alive: whether ``own`` still holds it; ``None``: always.
        edited: told of each edit by a number that is the same on every rank if that did the same.
        device: what it is asked for; by default ``own``'s.
        meaning: what it is, for messages; by default the parameter's averaged gradient.
        cut: the same on every rank; equal for tensors of one shape that are cut at the same places.
        together: who puts the ranks' parts of norms and sums together.
        read_only: whether writing to it raises.
        early: whether it is an average already where DDP has a sum of each rank's own; ``None``: never.
    """

    _slice: SlicedValues

    @staticmethod
    def __new__(
        cls,
        own: Tensor,
        start: int,
        shape: Sequence[int],
        name: str,
        alive: Callable[[], bool] | None = None,
        edited: Callable[[int], None] | None = None,
        device: torch.device | None = None,
        meaning: Meaning | None = None,
        cut: tuple[int, ...] | None = None,
        together: Together | None = None,
        read_only: bool = False,
        early: Callable[[], bool] | None = None,
    ) -> SlicedTensor:
        size, meaning = torch.Size(shape), meaning or gradient_of(name)
        if own.dim() != 1 or not own.is_contiguous() or start < 0 or start + own.numel() > size.numel():
            raise ValueError(
                f"A slice of the {meaning.what} must be 1-D, contiguous and inside shape {list(size)}; got shape "
                f"{list(own.shape)} from element {start} on."
            )
        trace = Trace(name, meaning, alive, edited, fingerprint(name), False, together, read_only, early)
        key = (name,) if cut is None else (*cut, *size)
        return _wrapped(SlicedValues(Part(size, start, own.numel()), key, own, None, trace, device or own.device))

    @property
    def own(self) -> Tensor:
        """This rank's elements, 1-D: the memory itself, or a copy where they do not lie in a row."""
        return self._slice.own

    @property
    def start(self) -> int:
        """The first of them in the flattened tensor."""
        return self._slice.part.start

    @property
    def parameter_name(self) -> str:
        """Whose it is, or was made from."""
        return self._slice.trace.name

    @property
    def history(self) -> int:
        """A number for how these values came about, the same on every rank that did the same."""
        return self._slice.trace.history

    def elements(self, cut: tuple[int, ...]) -> Tensor:
        """``own``, for something of the same shape that is cut so."""
        self._slice.trace.check_alive("an assignment")
        if self._slice.key != (*cut, *self.shape):
            self.refuse("assigning it to something that is cut at other places")
        return self._slice.own

    def is_cut_as(self, other: SlicedTensor) -> bool:
        """Whether ranks hold the same elements of both."""
        return self._slice.key == other._slice.key

    def be(self, other: SlicedTensor) -> None:
        """Share the memory of another, and what happens to it."""
        self._slice = other._slice

    def as_parameter(self) -> SlicedTensor:
        """Let a module take it for one of its parameters. Returns it."""
        self._is_param = True  # what ``isinstance(..., nn.Parameter)`` asks
        return self

    def let_go(self) -> None:
        """Keep the values that are there now, in memory of its own."""
        values = self._slice
        if not values.trace.own:
            trace = replace(values.trace, alive=None, edited=None, own=True)
            self._slice = replace(values, memory=values.memory.clone(), trace=trace)

    def live_on(self) -> None:
        """Take the memory for its own from now on, whatever ``alive`` says."""
        self._slice.trace.alive = None

    @property
    def lent(self) -> str | None:
        """What lies in the memory, if it is not this tensor's own."""
        trace = self._slice.trace
        return None if trace.own else trace.meaning.what

    def refuse(self, what: str) -> NoReturn:
        """Raise ``ParameterAccessError``: ``what`` needs more than a slice."""
        self._slice.trace.refuse(what)

    @property
    def data(self) -> Tensor:
        """The same object. Setting it writes to it."""
        return self

    @data.setter
    def data(self, value: Tensor) -> None:
        if value is self:  # of a conversion that changes nothing
            return
        if not isinstance(value, Tensor) or value.shape != self.shape or value.dtype != self.dtype:
            self._slice.trace.refuse("another shape or dtype for its .data")
        self.copy_(value)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with untracked(), no_functions():
            return _call(func, tuple(args), dict(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuse what comes from code that does not ask."""
        _first((args, kwargs))._slice.trace.refuse(f"{func}")

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with no_functions():
            what = f"{self._slice.trace.meaning.what}, shape {list(self.shape)}, {self.dtype}, {self.device}"
        return f"SlicedTensor({what}, sliced over ranks)"


foreach_types.append(SlicedTensor)  # so that `clip_grad_norm_` asks for all norms at once

_ATTRIBUTES = words(
    "shape dtype device layout ndim itemsize nbytes requires_grad grad_fn grad is_leaf is_cpu is_cuda is_sparse "
    "is_sparse_csr is_quantized is_meta is_mps is_nested is_xpu is_mtia is_mkldnn is_xla retains_grad output_nr"
)
_QUESTIONS = QUESTIONS | words("stride is_contiguous __dir__ __format__")
_UNCHANGED = words("detach detach_ contiguous resolve_conj resolve_neg")
_COPIES = words("clone __deepcopy__")
_CONVERSIONS = words("to type float double half bfloat16 bool cfloat cdouble chalf cpu cuda")
_AS_ANOTHER = SHAPES | words("to is_same_size")


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a torch function gives if there are sliced gradients among its arguments."""
    name = getattr(func, "__name__", str(func))
    subject = args[0] if args and isinstance(args[0], SlicedTensor) else None
    if subject is not None:
        if name in ("__get__", "__set__", "__delete__"):
            return _attribute(subject, func, name, args)
        if name in _QUESTIONS:
            return func(*args, **kwargs)
        if name in _UNCHANGED or (name == "requires_grad_" and False in (*args[1:], *kwargs.values())):
            return subject
    if name in LIKE or name in NEW or (subject is None and name in _AS_ANOTHER):
        if name in LIKE:
            kwargs.setdefault("memory_format", torch.contiguous_format)
        return func(*tree_map_only(SlicedTensor, _without_values, args), **kwargs)
    if name.startswith("_foreach_"):
        return _for_each(name, func, args, kwargs)
    for sliced in _sliced((args, kwargs)):
        sliced._slice.trace.check_alive(f"{name}()")
    if any(isinstance(value, Tensor) and is_absent(value) for value in tree_leaves((args, kwargs))):
        _first((args, kwargs))._slice.trace.refuse(f"{name}() of a parameter whose values are not in memory")
    if subject is not None and name in _COPIES:
        return _wrapped(subject._slice.derived(subject.own.clone(), fingerprint("clone", subject.history)))
    if subject is not None and name in _CONVERSIONS:
        return _converted(subject, func, args[1:], kwargs)
    if subject is not None and name == "__getitem__" and not any(True for _ in _sliced(args[1])):
        return _wrapped(subject._slice.get(args[1]))
    if subject is not None and name == "__setitem__":
        return subject._slice.set(*tree_map_only(SlicedTensor, attrgetter("_slice"), args[1:]))
    if subject is not None and (reduction := Reduction.of(name, args[1:], kwargs)) is not None:
        return _reduced(reduction, [subject], name, func, args[1:], kwargs)[0]
    return _computed(name, func, args, kwargs)


def _computed(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an elementwise function gives."""
    first = _first((args, kwargs))
    known, history, operands = _prepared(first, name, getattr(func, "__module__", None), args, kwargs)
    result = func(*operands[: len(args)], **dict(zip(kwargs, operands[len(args) :], strict=True)))
    if known.in_place:
        first._slice.edited(operands[0], history)
        return first
    # Anything else is the answer of a comparison with something else.
    return _wrapped(first._slice.computed(result, history)) if isinstance(result, Tensor) else result


def _reduced(
    reduction: Reduction, subjects: Sequence[SlicedTensor], name: str, func: Any, args: Any, kwargs: dict[str, Any]
) -> list[Tensor]:
    """What a norm, a sum or a finite check gives, of each tensor. One collective for all that one engine looks after.

    ``func`` gives it of one tensor, with these arguments behind that.
    """
    models, engines = list[Tensor](), dict[Together, list[int]]()
    for index, subject in enumerate(subjects):
        values, trace = subject._slice, subject._slice.trace
        trace.check_alive(f"{name}()")
        trace.check_not_early(f"{name}()")
        if trace.together is None or (reduction.needs_reals and subject.is_complex()):
            trace.refuse(f"{name}()")
        if reduction.dtype is not None and torch.promote_types(subject.dtype, reduction.dtype) is not reduction.dtype:
            trace.refuse(f"{name}(dtype={reduction.dtype})")
        row = reduction.row_of(subject.shape)
        if row is None or (values.part.picks is not None and row != subject.numel()):
            trace.refuse(f"{name}() over dimensions other than the last ones")
        models.append(func(torch.empty(subject.shape, dtype=subject.dtype, device="meta"), *args, **kwargs))
        if subject.numel():
            engines.setdefault(trace.together, []).append(index)
        else:
            models[-1] = func(torch.empty(subject.shape, dtype=subject.dtype, device=subject.device), *args, **kwargs)
    for together, members in engines.items():
        these = [subjects[index]._slice for index in members]
        slices = [Slice(values.own, values.part.start, values.part.shape, values.device) for values in these]
        more = f" and of {len(these) - 1} more" if len(these) > 1 else ""
        what = f"{name}() of the {these[0].trace.meaning.what}{more}"
        history = fingerprint(history_of(name, args, kwargs), [values.trace.history for values in these])
        found = reduce_together(reduction, slices, [models[index] for index in members], together, what, history)
        for index, result in zip(members, found, strict=True):
            models[index] = result
    return models


def _norm_of_one(tensor: Tensor, ord: float = 2, dtype: torch.dtype | None = None) -> Tensor:
    """What ``_foreach_norm`` gives of each tensor, with the same arguments."""
    norm: Tensor = torch.linalg.vector_norm(tensor, ord, dtype=dtype)
    return norm


def _for_each(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor] | None:
    """A function of lists of tensors, some of them sliced."""
    if (reduction := Reduction.of(name, args[1:], kwargs)) is not None:
        sliced = [value for value in args[0] if isinstance(value, SlicedTensor)]
        others = [value for value in args[0] if not isinstance(value, SlicedTensor)]
        of_slices = iter(_reduced(reduction, sliced, name, _norm_of_one, args[1:], kwargs))
        of_others = iter(func(others, *args[1:], **kwargs) if others else ())
        return [next(of_slices if isinstance(value, SlicedTensor) else of_others) for value in args[0]]
    told = {place: fingerprint(value) for place, value in enumerate(args) if isinstance(value, Tensor)}
    lists = [position for position, value in enumerate(args) if isinstance(value, list | tuple)]
    given = [list(value) if isinstance(value, list | tuple) else value for value in args]
    found: list[tuple[int, SlicedTensor, int]] = []
    for index in range(len(args[0])):
        each = tuple(value[index] if position in lists else value for position, value in enumerate(args))
        first = next(_sliced(each), None)
        if first is None:
            continue
        first._slice.trace.check_alive(f"{name}()")
        _, history, operands = _prepared(first, name, None, each, kwargs, told)
        found.append((index, first, history))
        for position in lists:
            given[position][index] = operands[position]
    results = func(*given, **kwargs)
    if name.endswith("_"):
        for index, first, history in found:
            first._slice.edited(given[0][index], history)
        return None if results is None else list(args[0])
    results = list(results)
    for index, first, history in found:
        results[index] = _wrapped(first._slice.computed(results[index], history))
    return results


def _prepared(
    first: SlicedTensor,
    name: str,
    module: str | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    told: Mapping[int, int] | None = None,
) -> tuple[Elementwise, int, list[Any]]:
    """A function that can do with a slice, what is told of a call, and what it gets: positional, then named arguments.

    ``args`` are those of one tensor. ``told``: numbers that stand for arguments which many tensors share, by place.
    """
    refuse = first._slice.trace.refuse
    known = elementwise(name.removeprefix("_foreach_"), module)
    if known is None or "out" in kwargs:
        refuse(f"{name}(out=...)" if "out" in kwargs else f"{name}()")
    if not any(first is value for value in (*args, *kwargs.values())) or (known.in_place and first is not args[0]):
        refuse(f"{name}() of a tensor that is not")
    if first.shape and not known.exact(args, kwargs):
        refuse(f"{name}() with these arguments (it gives other last bits for a slice than for the whole)")
    if known.in_place:
        first._slice.trace.check_writable(f"{name}()")
    for sliced in _sliced(tuple(args[not_linear_from(name) :]) + tuple(kwargs.values())):
        sliced._slice.trace.check_not_early(f"{name}()")
    args, kwargs = tree_map_only(SlicedTensor, attrgetter("_slice"), (args, kwargs))
    for_history = [told[place] if told and place in told else value for place, value in enumerate(args)]
    return known, history_of(known.name, for_history, kwargs), first._slice.operands(known, (*args, *kwargs.values()))


def _attribute(subject: SlicedTensor, func: Any, name: str, args: tuple[Any, ...]) -> Any:
    attribute = func.__self__.__name__
    if name == "__get__" and attribute in _ATTRIBUTES:
        return func(*args)
    if not (name == "__set__" and attribute == "requires_grad" and args[1] is False):
        subject._slice.trace.refuse(f"its .{attribute}")


def _converted(subject: SlicedTensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Another dtype or device; the same object where that changes nothing."""
    kwargs.pop("memory_format", None)
    args, kwargs = tree_map_only(SlicedTensor, _without_values, (args, kwargs))
    asked = func(torch.empty((), dtype=subject.dtype, device=subject.device), *args, **kwargs)
    if not isinstance(asked, Tensor):  # `type()` asks for a name
        return asked
    if (asked.dtype, asked.device) == (subject.dtype, subject.device) and not kwargs.get("copy"):
        return subject
    if not (asked.is_floating_point() or asked.is_complex() or asked.dtype is torch.bool):
        subject._slice.trace.refuse(f"a conversion to {asked.dtype}")
    own = subject.own
    device = asked.device if own.device == subject.device else own.device
    history = fingerprint("to", subject.history, asked.dtype)
    return _wrapped(subject._slice.derived(own.to(device, asked.dtype, copy=True), history, asked.device))


def _wrapped(values: SlicedValues) -> SlicedTensor:
    sliced: SlicedTensor = make_wrapper_subclass(
        SlicedTensor, values.part.shape, dtype=values.memory.dtype, device=values.device, requires_grad=False
    )
    sliced._slice = values
    return sliced


def _without_values(sliced: SlicedTensor) -> Tensor:
    """An ordinary tensor of the same shape, dtype and device, for functions that ask for no more."""
    return torch.empty((), dtype=sliced.dtype, device=sliced.device).expand(sliced.shape)


def _first(values: Any) -> SlicedTensor:
    return next(_sliced(values))


def _sliced(values: Any) -> Iterator[SlicedTensor]:
    if isinstance(values, SlicedTensor):
        yield values
    elif isinstance(values, Mapping):
        yield from _sliced(tuple(values.values()))
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _sliced(value)
