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

__all__ = ["ShardedTensor", "Source", "Together", "words"]

_PIECE_NUMEL = 2**20  # elements that are cast to float64 at a time

Together = Callable[[str, int, Tensor, bool], Tensor]
"""Puts the numbers of all ranks together, and gives every rank the same answer: an engine does. Collective: every rank.

It gets the call, for messages, the same on every rank; a number for how the values came about, which must be the same
on every rank; 1-D float64 numbers, equally many on every rank, which it may overwrite; and whether to add them up.
Otherwise it returns a row of them for each rank."""


class Source:
    """What a sharded tensor is, for messages, and when its elements may be used. Subclasses say more.

    Args:
        what: its name in a sentence.
        advice: what works where a slice is not enough.
        together: puts the ranks' numbers together; ``None``: everything but copies raises.
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
        cls, own: Tensor, shape: torch.Size, source: Source, device: torch.device | None = None, history: int = 0
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

    def _refused(self, *args: Any, **kwargs: Any) -> NoReturn:
        self.source.refuse("code that reads its memory, or saves it, needs all of it")

    data_ptr = numpy = tolist = storage = untyped_storage = __array__ = __dlpack__ = __reduce_ex__ = _refused


foreach_types.append(ShardedTensor)  # so that `clip_grad_norm_` asks for all norms at once


def words(text: str) -> frozenset[str]:
    """The words of a text, for lists of names."""
    return frozenset(text.split())


# Names of functions as torch's dispatcher knows them, without underscores.
_LIKE = words("zeros_like ones_like empty_like full_like rand_like randn_like new_zeros new_ones new_empty new_full")
_SCALES = words("mul div neg zero")  # commute with averages
_IN_PLACE = _SCALES | words("clamp clamp_min clamp_max clamp_minimum clamp_maximum nan_to_num")
_OUT_OF_PLACE = words("""
    clone to_copy abs neg pow sqrt mul div eq ne gt ge lt le isfinite isnan isinf logical_not bitwise_not
""")


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function of torch gives if there are sharded tensors among its arguments."""
    name: str = func.overloadpacket.__name__.replace("linalg_vector_norm", "norm")
    plain, in_place, listed = name.removeprefix("_foreach").strip("_"), name.endswith("_"), name.startswith("_foreach_")
    if name in _LIKE:
        return func(*tree_map_only(ShardedTensor, _shape_only, args), **kwargs)
    subjects = [value for value in (args[0] if listed else args[:1]) if isinstance(value, ShardedTensor)]
    if not subjects:
        other = next(value for value in tree_leaves((args, kwargs)) if isinstance(value, ShardedTensor))
        other.source.refuse(f"{name}() of another tensor needs all of it")
    subject = subjects[0]
    if plain in ("detach", "alias"):
        return ShardedTensor(subject.own, subject.shape, subject.source, subject.device, subject.history)
    for one in subjects:
        if one.source.together is None and plain not in ("clone", "to_copy"):
            one.source.refuse(f"{name}() needs all of it")
    if plain == "norm" or (plain in _KINDS and not listed):
        return _reduced(args[0] if listed else [subject], name, func, args[1:], kwargs, listed)
    if plain not in (_IN_PLACE if in_place else () if listed else _OUT_OF_PLACE):
        subject.source.refuse(f"{name}() needs more than that")
    number = _checked(subjects, name, plain, in_place, [*args[1:], *kwargs.values()])
    own = [_elements(value, subject) for value in args]
    if plain == "to_copy":
        elements = own[0].to(kwargs.get("dtype"), copy=True)
        return _derived(subject, elements, number, torch.device(kwargs.get("device") or subject.device))
    result = func(*own, **kwargs)
    return (None if listed else subject) if in_place else _derived(subject, result, number)


def _checked(subjects: Sequence[ShardedTensor], name: str, plain: str, in_place: bool, others: Sequence[Any]) -> int:
    """Raise unless an elementwise function gives slices what it gives the whole; note edits in place.

    Returns a number for the call.
    """
    subject, called = subjects[0], f"{name}()"
    place = subject.source.place
    alike = [] if in_place else [v for v in others if isinstance(v, ShardedTensor) and v.source.place is place]
    for value in others:
        if not _is_number(value) and not any(value is one for one in alike) and plain not in ("clone", "to_copy"):
            subject.source.refuse(f"{called} works with numbers only")
    linear = in_place and plain in _SCALES and not any(isinstance(value, str) for value in others)
    number = fingerprint(plain, [_told(value) for value in others])
    for value in (*subjects, *alike):
        value.source.check(called, linear)
        if in_place:
            value.source.edited(called, number)
    return fingerprint(subject.history, number)


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        plain = not isinstance(value, ShardedTensor) and value.layout is torch.strided
        return plain and value.dim() == 0 and not value.is_complex()
    return value is None or isinstance(value, numbers.Real | str)


def _told(value: Any) -> Any:
    if isinstance(value, ShardedTensor):
        return value.history
    return value.item() if isinstance(value, Tensor) else value


def _elements(value: Any, beside: ShardedTensor) -> Any:
    """An argument for this rank's elements: what is offloaded is edited where it is."""
    if isinstance(value, list | tuple):
        return [_elements(one, beside) if isinstance(one, ShardedTensor) else one for one in value]
    if not isinstance(value, ShardedTensor):
        return value.to(beside.own.device) if isinstance(value, Tensor) and not value.dim() else value
    own = in_memory(value.own)
    if value.dim():
        return own
    return own.view(()) if own.numel() else own.new_zeros(())  # dtypes depend on whether there are dimensions


def _derived(parent: ShardedTensor, elements: Tensor, number: int, device: torch.device | None = None) -> ShardedTensor:
    """Values of their own, made of a sharded tensor's."""
    own, source = elements.reshape(-1)[: parent.own.numel()], parent.source
    made = Source(f"tensor made of the {source.what}", source.advice, source.together, source.place)
    return ShardedTensor(own, parent.shape, made, device or parent.device, number or 1)


def _shape_only(sharded: ShardedTensor) -> Tensor:
    """An ordinary tensor of the same shape, dtype and device, for functions that ask for no more."""
    return torch.empty((), dtype=sharded.dtype, device=sharded.device).expand(sharded.shape)


class _Kind(NamedTuple):
    """One way to reduce a tensor: a float64 number of this rank's elements, then one of all ranks' numbers."""

    piece: Callable[[Tensor], Tensor]
    over: Callable[..., Tensor] = torch.sum  # of several numbers
    empty: float = 0.0  # the number where there is no element
    result: Callable[[Tensor, int], Tensor] = lambda number, count: number  # ``count``: elements of the whole tensor


def _p_norm(order: float) -> _Kind:
    if order == math.inf:
        return _Kind(lambda x: x.abs().amax(), torch.amax)
    if order == -math.inf:
        return _MIN._replace(piece=lambda x: x.abs().amin())

    def powers(piece: Tensor) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(piece, order, dtype=torch.promote_types(piece.dtype, torch.float64))
        return norm.pow(order or 1.0)

    return _Kind(powers, result=lambda number, count: number.pow(1.0 / (order or 1.0)))


_SUM = _Kind(lambda x: x.sum(dtype=torch.float64))
_MAX = _Kind(lambda x: x.amax(), torch.amax, -math.inf)
_MIN = _Kind(lambda x: x.amin(), torch.amin, math.inf)
_KINDS = {
    "sum": _SUM,
    "mean": _SUM._replace(result=lambda number, count: number / count),
    "count_nonzero": _Kind(lambda x: (x != 0).sum()),
    "any": _Kind(lambda x: (x != 0).sum(), result=lambda number, count: number > 0),
    "all": _Kind(lambda x: (x == 0).sum(), result=lambda number, count: number == 0),
    **{"max": _MAX, "amax": _MAX, "min": _MIN, "amin": _MIN},
}


def _kind_of(subject: ShardedTensor, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> _Kind:
    """What a reduction does with these arguments behind its tensor."""
    norm, counts = name.endswith("norm"), name in ("any", "all", "count_nonzero")
    takes = ("p", "dtype") if name == "_foreach_norm" else ("p", "dim") if norm else ("dim",)
    given = dict(zip(takes, args, strict=False)) | {"p" if key == "ord" else key: kwargs[key] for key in kwargs}
    dtype, order, dim = given.get("dtype"), given.get("p"), given.get("dim")
    order = 2.0 if order is None else order
    wider = dtype is None or (norm and torch.promote_types(subject.dtype, dtype) is dtype)
    whole = dim is None or (isinstance(dim, list | tuple) and not dim and not counts)
    if not whole or not wider or isinstance(order, str | Tensor) or (subject.is_complex() and not (norm or counts)):
        subject.source.refuse(f"{name}() of some dimensions, of a matrix or in another dtype needs all of it")
    return _p_norm(float(order)) if norm else _KINDS[name]


def _reduced(values: Sequence[Tensor], name: str, func: Any, args: Any, kwargs: dict[str, Any], listed: bool) -> Any:
    """What a norm, a sum or a finite check gives of each tensor. One collective for all that one engine looks after."""
    results = list[Tensor]()
    engines = dict[Any, list[tuple[int, ShardedTensor, _Kind]]]()
    for index, value in enumerate(values):
        model: Any = value
        if isinstance(value, ShardedTensor):
            kind = _kind_of(value, name, args, kwargs)
            value.source.check(f"{name}()", False)
            model = torch.empty(value.shape, dtype=value.dtype, device="meta" if value.numel() else value.device)
            if value.numel():
                engines.setdefault(value.source.together, []).append((index, value, kind))
        results += func([model], *args, **kwargs) if listed else [func(model, *args, **kwargs)]
    for together, members in engines.items():
        kind, first = members[0][2], members[0][1]
        more = f" and of {len(members) - 1} more" if members[1:] else ""
        told = [_told(value) for value in (*args, *kwargs.values())]
        history = fingerprint(name, told, [value.history for _, value, _ in members])
        mine = torch.stack([_number(kind, _counted(value)).to(first.own.device) for _, value, _ in members])
        found = together(f"{name}() of the {first.source.what}{more}", history, mine, kind.over is torch.sum)
        for (index, value, _), number in zip(members, found if found.dim() == 1 else kind.over(found, 0), strict=True):
            place = value.source.place
            result = kind.result(number, value.numel() if place is None else math.prod(place.spec.whole_shape))
            results[index] = result.to(value.device, results[index].dtype).view(results[index].shape)
    return results if listed else results[0]


def _counted(value: ShardedTensor) -> Tensor:
    """This rank's elements, but of what another rank counts."""
    place = value.source.place
    return value.own if place is None or place.spec.counted else value.own.narrow(0, 0, 0)


def _number(kind: _Kind, own: Tensor) -> Tensor:
    """This rank's number, float64, of a tensor of which it has these elements."""
    starts = range(0, own.numel(), _PIECE_NUMEL)
    pieces = (in_memory(own.narrow(0, start, min(_PIECE_NUMEL, own.numel() - start))) for start in starts)
    found = [kind.piece(piece).to(torch.float64) for piece in pieces]
    return (
        kind.over(torch.stack(found)) if found else torch.full((), kind.empty, dtype=torch.float64, device=own.device)
    )
