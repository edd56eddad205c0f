"""The small tensor that stands for one of which every rank holds a slice: a gradient, an optimizer state, a parameter.

It answers what a tensor is asked about itself, and does what most people write by hand: norms, sums and finite checks
(one collective each), scaling and clamping in place by numbers. Everything else raises ``ParameterAccessError`` and
names what works: a context that shows the whole tensor, or this rank's slices (``lightning_zero.local_slices``).

[Note: rounding]
Sums are made in float64 and rounded once, so the last bits may differ from those that torch gives for the whole tensor,
and a float32 norm whose squares overflow is still finite here. Scaling and clamping give every element the bits that it
has on the whole tensor, because each of these results is the correctly rounded one.

[Note: ranks that do different things]
Every call makes a number of its name and its arguments. Edits are noted with it, reductions send it along, so that a
factor that depends on the rank is an error on every rank.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from lightning_zero._torch import (
    foreach_types,
    make_wrapper_subclass,
    no_functions,
    no_torch_function,
    tree_leaves,
    tree_map_only,
    untracked,
)
from lightning_zero.errors import ParameterAccessError
from lightning_zero.offload.host import in_memory
from lightning_zero.shards.slice import Slice, fingerprint

__all__ = ["Combine", "ShardedTensor", "Source", "Together", "words"]

_PIECE_NUMEL = 2**20  # elements that are cast to float64 at a time
_INF = math.inf


class Combine(Enum):
    """How the ranks' numbers are put together."""

    SUM = "sum"
    LARGEST = "largest"  # of numbers that are not negative; NaN if one is
    EACH = "each"  # all of them, a row for each rank


Together = Callable[[str, int, Tensor, Combine], Tensor]
"""Puts the numbers of all ranks together, and gives every rank the same answer: an engine does. Collective: every rank.

It gets the call, for messages, the same on every rank; a number for how the values came about, which must be the same
on every rank; 1-D float64 numbers, equally many on every rank, which it may overwrite; and how to combine them."""


class Source:
    """What a sharded tensor is, for messages, and when its elements may be used. Subclasses say more.

    Args:
        what: its name in a sentence.
        advice: what works where a slice is not enough.
        together: puts the ranks' numbers together; ``None``: norms and sums raise as well.
        place: the part of a parameter whose elements it has one for each of.
    """

    def __init__(self, what: str, advice: str, together: Together | None = None, place: Slice | None = None) -> None:
        self.what = what
        self.advice = advice
        self.together = together
        self.place = place

    def check(self, called: str, linear: bool) -> None:
        """Raise ``ParameterAccessError`` if the elements must not be used now.

        ``linear``: whether the call commutes with averages over the ranks.
        """

    def edited(self, called: str, number: int) -> None:
        """Note an edit in place, by a number that is the same on every rank that did the same; or refuse it."""
        self.refuse(f"{called} would write to what can only be read here")

    def refuse(self, problem: str) -> NoReturn:
        """Raise ``ParameterAccessError``, and say what works instead."""
        raise ParameterAccessError(f"The {self.what} is sharded, each rank holds a slice: {problem}. {self.advice}")


def _refused(self: ShardedTensor, *args: Any, **kwargs: Any) -> NoReturn:
    self.source.refuse("code that reads its memory, or saves it, needs all of it")


class ShardedTensor(Tensor):
    """A tensor of the whole shape, of which this rank holds ``own``: 1-D, on any device or in a file.

    Args:
        own: read, and written by edits in place.
        shape: of the whole tensor.
        source: whose it is.
        device: where the whole tensor would be; by default where ``own`` is.
        history: a number for how the values came about; 0: as they are in the source.
    """

    own: Tensor
    source: Source
    history: int

    __torch_function__ = no_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        own: Tensor,
        shape: torch.Size,
        source: Source,
        device: torch.device | None = None,
        history: int = 0,
    ) -> ShardedTensor:
        sharded: ShardedTensor = make_wrapper_subclass(cls, shape, dtype=own.dtype, device=device or own.device)
        sharded.own, sharded.source, sharded.history = own, source, history
        return sharded

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with untracked(), no_functions():
            return _call(func, tuple(args), kwargs or {})

    @property
    def data(self) -> Tensor:
        """The same object: ``grad.data.mul_(0.5)`` is an old spelling of ``grad.mul_(0.5)``."""
        return self

    @data.setter
    def data(self, value: Tensor) -> None:
        if not (isinstance(value, ShardedTensor) and value.own is self.own and value.history == self.history):
            self.source.refuse("its .data cannot be assigned")  # but to what a conversion gave that changes nothing

    def requires_grad_(self, requires_grad: bool = True) -> ShardedTensor:
        """It has no graph."""
        return self.source.refuse("requires_grad_() needs all of it") if requires_grad else self

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = copied = self.clone()
        return copied

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedTensor({self.source.what}, shape {list(self.shape)}, {self.dtype}, {self.device})"

    data_ptr = numpy = tolist = storage = untyped_storage = __array__ = __dlpack__ = __reduce_ex__ = _refused


foreach_types.append(ShardedTensor)  # so that `clip_grad_norm_` asks for all norms at once


def words(text: str) -> frozenset[str]:
    """The words of a text, for lists of names."""
    return frozenset(text.split())


# Names of functions as torch's dispatcher knows them.
_LIKE = words("zeros_like ones_like empty_like full_like rand_like randn_like new_zeros new_ones new_empty new_full")
_SCALES = words("mul div neg zero")  # commute with averages
_IN_PLACE = _SCALES | words("clamp clamp_min clamp_max clamp_minimum clamp_maximum nan_to_num")
_OUT_OF_PLACE = _IN_PLACE | words("""
    abs sqrt sgn sign isfinite isnan isinf logical_not bitwise_not pow eq ne gt ge lt le rsub add sub
    minimum maximum
""")


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function of torch gives if there are sharded tensors among its arguments."""
    name: str = func.overloadpacket.__name__.replace("linalg_vector_norm", "norm")
    sharded = [value for value in tree_leaves((args, kwargs)) if isinstance(value, ShardedTensor)]
    if name in _LIKE:
        return func(*tree_map_only(ShardedTensor, _shape_only, args), **kwargs)
    if name.startswith("_foreach_"):
        return _for_each(name.removeprefix("_foreach_"), func, args, kwargs)
    subject = args[0]
    if not isinstance(subject, ShardedTensor):
        sharded[0].source.refuse(f"{name}() of another tensor needs all of it")
    if name in ("detach", "alias"):
        return ShardedTensor(subject.own, subject.shape, subject.source, subject.device, subject.history)
    if name in _KINDS or name in _NORMS:
        return _reduced([subject], name, func, args[1:], kwargs)[0]
    if name in ("clone", "_to_copy"):
        subject.source.check(f"{name}()", False)
        dtype, device = kwargs.get("dtype") or subject.dtype, kwargs.get("device") or subject.device
        elements, number = _elements(subject).to(dtype, copy=True), fingerprint(subject.history, name, dtype)
        return _derived(subject, elements, number, torch.device(device))
    number = _checked(subject, name, args[1:], kwargs)
    result = func(*(_beside(value, subject) for value in args), **kwargs)
    return subject if name.endswith("_") else _derived(subject, result, number)


def _checked(
    subject: ShardedTensor, name: str, args: Sequence[Any], kwargs: dict[str, Any], told: int | None = None
) -> int:
    """Raise unless an elementwise function gives a slice what it gives the whole; note an edit in place.

    Returns a number for the call. ``told``: one for its arguments, where that is known.
    """
    source, plain, in_place, called = subject.source, name.strip("_"), name.endswith("_"), f"{name}()"
    if plain not in (_IN_PLACE if in_place else _OUT_OF_PLACE):
        source.refuse(f"{called} needs more than that")
    others = [*args, *kwargs.values()]
    alike = [] if in_place or source.place is None else [value for value in others if isinstance(value, ShardedTensor)]
    for value in others:
        if not _is_number(value) and not (value in alike and value.source.place is source.place):
            source.refuse(f"{called} works with numbers only")
        if in_place and (isinstance(value, complex) or (isinstance(value, Tensor) and value.is_complex())):
            source.refuse(f"{called} with a complex number has other last bits on a slice")
    for value in (subject, *alike):
        value.source.check(called, in_place and plain in _SCALES and not kwargs.get("rounding_mode"))
    number = fingerprint(plain, [_told(value) for value in others]) if told is None else told
    if in_place:
        source.edited(called, number)
    return fingerprint(subject.history, plain, number)


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and not isinstance(value, ShardedTensor) and value.layout is torch.strided
    return value is None or isinstance(value, numbers.Number | str)


def _told(value: Any) -> Any:
    if isinstance(value, ShardedTensor):
        return value.history
    return value.item() if isinstance(value, Tensor) else value


def _beside(value: Any, subject: ShardedTensor) -> Any:
    """An argument for this rank's elements: what is offloaded is edited where it is."""
    if isinstance(value, ShardedTensor):
        return _elements(value)
    return value.to(subject.own.device) if isinstance(value, Tensor) else value


def _elements(sharded: ShardedTensor) -> Tensor:
    """This rank's elements. Without dimensions where the tensor has none: dtypes depend on that."""
    own = in_memory(sharded.own)
    if sharded.dim():
        return own
    return own.view(()) if own.numel() else own.new_zeros(())


def _derived(parent: ShardedTensor, elements: Tensor, number: int, device: torch.device | None = None) -> ShardedTensor:
    """Values of their own, made of a sharded tensor's."""
    own, source = elements.reshape(-1)[: parent.own.numel()], parent.source
    made = Source(f"tensor made of the {source.what}", source.advice, source.together, source.place)
    return ShardedTensor(own, parent.shape, made, device or parent.device, number or 1)


def _for_each(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of lists of tensors, some of them sharded."""
    subjects = [value for value in args[0] if isinstance(value, ShardedTensor)]
    if not subjects:
        other = next(value for value in tree_leaves((args, kwargs)) if isinstance(value, ShardedTensor))
        other.source.refuse(f"_foreach_{name}() with other tensors needs all of it")
    if name == "norm":
        others = [value for value in args[0] if not isinstance(value, ShardedTensor)]
        of_sharded = iter(_reduced(subjects, "_foreach_norm", _norm_of_one, args[1:], kwargs))
        of_others = iter(func(others, *args[1:], **kwargs) if others else ())
        return [next(of_sharded if isinstance(value, ShardedTensor) else of_others) for value in args[0]]
    shared = all(map(_is_number, args[1:]))
    told = fingerprint(name.strip("_"), [*map(_told, args[1:])], [*map(_told, kwargs.values())]) if shared else None
    numbers_of = []
    for index, value in enumerate(args[0]):
        each = [other[index] if isinstance(other, list | tuple) else other for other in args[1:]]
        numbers_of.append(_checked(value, name, each, kwargs, told) if isinstance(value, ShardedTensor) else 0)
    given = tree_map_only(ShardedTensor, _elements, args)
    given = (given[0], *(_beside(value, subjects[0]) for value in given[1:]))
    results = func(*given, **kwargs)
    if name.endswith("_"):
        return None
    return [
        _derived(value, result, number) if isinstance(value, ShardedTensor) else result
        for value, result, number in zip(args[0], results, numbers_of, strict=True)
    ]


def _norm_of_one(tensor: Tensor, ord: float = 2, dtype: torch.dtype | None = None) -> Tensor:
    """What ``_foreach_norm`` gives of each tensor, with the same arguments."""
    norm: Tensor = torch.linalg.vector_norm(tensor, ord, dtype=dtype)
    return norm


def _shape_only(sharded: ShardedTensor) -> Tensor:
    """An ordinary tensor of the same shape, dtype and device, for functions that ask for no more."""
    return torch.empty((), dtype=sharded.dtype, device=sharded.device).expand(sharded.shape)


class _Kind(NamedTuple):
    """One way to reduce a tensor: a number of each piece, then one of these, then one of all ranks' numbers."""

    combine: Combine
    empty: float  # the number where there is no element
    piece: Callable[[Tensor], Tensor]
    over: Callable[[Tensor], Tensor]  # of several numbers, 1-D
    result: Callable[[Tensor, int], Tensor] = lambda number, count: number  # ``count``: elements of the whole tensor


def _p_norm(order: float) -> _Kind:
    if order == _INF:
        return _Kind(Combine.LARGEST, 0.0, lambda x: x.abs().amax(), torch.amax)
    if order == -_INF:
        return _Kind(Combine.EACH, _INF, lambda x: x.abs().amin(), torch.amin)

    def powers(piece: Tensor) -> Tensor:
        wide = torch.promote_types(piece.dtype, torch.float64)
        norm: Tensor = torch.linalg.vector_norm(piece, order, dtype=wide)
        return norm.pow(order or 1.0)

    return _Kind(Combine.SUM, 0.0, powers, torch.sum, lambda number, count: number.pow(1.0 / (order or 1.0)))


_SUM = _Kind(Combine.SUM, 0.0, lambda x: x.sum(dtype=torch.float64), torch.sum)
_MAX = _Kind(Combine.EACH, -_INF, lambda x: x.amax(), torch.amax)
_MIN = _Kind(Combine.EACH, _INF, lambda x: x.amin(), torch.amin)
_KINDS = {
    "sum": _SUM,
    "mean": _SUM._replace(result=lambda number, count: number / count),
    "count_nonzero": _SUM._replace(piece=lambda x: (x != 0).sum()),
    "any": _Kind(Combine.LARGEST, 0.0, lambda x: (x != 0).any(), torch.amax),
    "all": _Kind(Combine.LARGEST, 0.0, lambda x: (x == 0).any(), torch.amax, lambda number, count: 1 - number),
    **{"max": _MAX, "amax": _MAX, "min": _MIN, "amin": _MIN},
}
_NORMS = words("norm _foreach_norm")


def _kind_of(subject: ShardedTensor, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> _Kind:
    """What a reduction does with these arguments behind its tensor."""
    takes = {"_foreach_norm": ("p", "dtype")}.get(name, ("p", "dim") if name in _NORMS else ("dim",))
    given = dict(zip(takes, args, strict=False)) | {"p" if key == "ord" else key: kwargs[key] for key in kwargs}
    dtype, order = given.get("dtype"), given.get("p", 2.0)
    order = 2.0 if order is None else order
    wider = dtype is None or (name in _NORMS and torch.promote_types(subject.dtype, dtype) is dtype)
    counts = name in ("any", "all", "count_nonzero")
    whole = given.get("dim") is None or (not len(given["dim"]) and not counts) if "dim" in given else True
    complex_too = name in _NORMS or counts
    if not whole or not wider or isinstance(order, str | Tensor) or (subject.is_complex() and not complex_too):
        subject.source.refuse(f"{name}() of some dimensions, of a matrix or in another dtype needs all of it")
    return _p_norm(float(order)) if name in _NORMS else _KINDS[name]


def _reduced(
    subjects: Sequence[ShardedTensor], name: str, func: Any, args: Any, kwargs: dict[str, Any]
) -> list[Tensor]:
    """What a norm, a sum or a finite check gives of each tensor. One collective for all that one engine looks after.

    ``func`` gives it of one tensor, with these arguments behind that.
    """
    results = list[Tensor]()
    engines = dict[Together, list[int]]()
    for index, subject in enumerate(subjects):
        kind = _kind_of(subject, name, args, kwargs)
        subject.source.check(f"{name}()", False)
        together = subject.source.together
        if together is None:
            subject.source.refuse(f"{name}() needs all of it")
        device = "meta" if subject.numel() else subject.device
        results.append(func(torch.empty(subject.shape, dtype=subject.dtype, device=device), *args, **kwargs))
        if subject.numel():
            engines.setdefault(together, []).append(index)
    for together, members in engines.items():
        mine = [_number(kind, subjects[index].own) for index in members]
        more = f" and of {len(members) - 1} more" if members[1:] else ""
        what = f"{name}() of the {subjects[members[0]].source.what}{more}"
        told = [_told(value) for value in (*args, *kwargs.values())]
        history = fingerprint(name, told, [subjects[index].history for index in members])
        found = together(what, history, torch.stack([number.to(mine[0].device) for number in mine]), kind.combine)
        found = kind.over(found, 0) if kind.combine is Combine.EACH else found  # type: ignore[call-arg]
        for index, number in zip(members, found, strict=True):
            subject, model = subjects[index], results[index]
            result = kind.result(number, subject.numel())
            results[index] = result.to(subject.device, model.dtype).view(model.shape)
    return results


def _number(kind: _Kind, own: Tensor) -> Tensor:
    """This rank's number, float64, of a tensor of which it has these elements."""
    found = []
    for start in range(0, own.numel(), _PIECE_NUMEL):
        numel = min(_PIECE_NUMEL, own.numel() - start)
        found.append(kind.piece(in_memory(own.narrow(0, start, numel))).to(torch.float64))
    if not found:
        return torch.full((), kind.empty, dtype=torch.float64, device=own.device)
    return found[0] if len(found) == 1 else kind.over(torch.stack(found))
