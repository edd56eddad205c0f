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
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from lightning_zero._torch import foreach_types, make_wrapper_subclass, no_functions, tree_map_only, untracked
from lightning_zero.errors import ParameterAccessError
from lightning_zero.offload.host import in_memory
from lightning_zero.shards.slice import Slice, fingerprint

__all__ = ["QUESTIONS", "REDUCTIONS", "Combine", "ShardedTensor", "Source", "Together", "words"]

_PIECE_NUMEL = 2**20  # elements that are cast to float64 at a time
_INF = math.inf


class Combine(Enum):
    """How the ranks' numbers are put together."""

    SUM = "sum"
    LARGEST = "largest"  # of numbers that are not negative; NaN if one is
    EACH = "each"  # all of them, a row for each rank


class Together(Protocol):
    """Puts the numbers of all ranks together: an engine does."""

    def __call__(self, what: str, history: int, numbers: Tensor, combine: Combine) -> Tensor:
        """Give every rank the same answer, on any device.

        Args:
            what: the call, for messages; the same on every rank.
            history: a number for how the values came about, which must be the same on every rank.
            numbers: 1-D float64, equally many on every rank. May be overwritten.
            combine: how.

        Collective: every rank.
        """


class Source:
    """What a sharded tensor is, for messages, and when its elements may be used. Subclasses say more.

    Args:
        what: its name in a sentence.
        advice: what works where a slice is not enough.
        together: puts the ranks' numbers together; ``None``: norms and sums raise as well.
        like: what its elements are an exact copy of may be put in the place of this slice.
    """

    def __init__(self, what: str, advice: str, together: Together | None = None, like: Slice | None = None) -> None:
        self.what = what
        self.advice = advice
        self.together = together
        self.slice = like

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

    @property
    def data(self) -> Tensor:
        """The same object: ``grad.data.mul_(0.5)`` is an old spelling of ``grad.mul_(0.5)``."""
        return self

    @data.setter
    def data(self, value: Tensor) -> None:
        if not _is_same(value, self):  # of a conversion that changes nothing
            self.source.refuse("its .data cannot be assigned")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with untracked(), no_functions():
            return _call(func, tuple(args), kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse what comes from code that does not ask."""
        next(_sharded((args, kwargs))).source.refuse(f"{func} needs more than that")

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with no_functions():
            return f"ShardedTensor({self.source.what}, shape {list(self.shape)}, {self.dtype}, {self.device})"


foreach_types.append(ShardedTensor)  # so that `clip_grad_norm_` asks for all norms at once


def words(text: str) -> frozenset[str]:
    """The words of a text, for lists of names."""
    return frozenset(text.split())


QUESTIONS = words("""
    __len__ size dim ndimension numel nelement element_size storage_offset get_device is_floating_point is_complex
    is_signed is_inference is_conj is_neg has_names _has_compatible_shallow_copy_type
""")
"""Names of functions whose answer does not depend on values, of anything that looks like a tensor."""

_ATTRIBUTES = words("""
    shape dtype device layout ndim itemsize nbytes requires_grad grad_fn grad is_leaf is_cpu is_cuda is_sparse
    is_sparse_csr is_quantized is_meta is_mps is_nested is_xpu is_mtia is_mkldnn is_xla retains_grad output_nr
""")
_QUESTIONS = QUESTIONS | words("stride is_contiguous __dir__ __format__")
_UNCHANGED = words("detach detach_ contiguous resolve_conj resolve_neg")
_LIKE = words("zeros_like ones_like empty_like full_like rand_like randn_like new_zeros new_ones new_empty new_full")
_CASTS = words("to type float double half bfloat16 bool cpu cuda")
_SCALES = words("mul multiply div divide true_divide truediv neg negative zero")  # commute with averages
_IN_PLACE = _SCALES | words("clamp clip clamp_min clamp_max nan_to_num")
_OUT_OF_PLACE = _IN_PLACE | words("""
    abs absolute square sqrt sign isfinite isnan isinf logical_not pow eq ne gt ge lt le greater greater_equal less
    less_equal not_equal rmul rsub add sub clone deepcopy
""")


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a torch function gives if there are sharded tensors among its arguments."""
    name: str = getattr(func, "__name__", str(func))
    if name in _LIKE:
        return func(*tree_map_only(ShardedTensor, _shape_only, args), **kwargs)
    if name.startswith("_foreach_"):
        return _for_each(name.removeprefix("_foreach_"), func, args, kwargs)
    subject = args[0] if args else None
    if not isinstance(subject, ShardedTensor):
        if name in ("view_as", "expand_as", "reshape_as", "type_as", "to", "is_same_size"):
            return func(*tree_map_only(ShardedTensor, _shape_only, args), **kwargs)
        next(_sharded((args, kwargs))).source.refuse(f"{name}() of another tensor needs all of it")
    if name in ("__get__", "__set__", "__delete__"):
        attribute = func.__self__.__name__
        if (name == "__get__" and attribute in _ATTRIBUTES) or (attribute == "requires_grad" and args[1] is False):
            return func(*args)
        subject.source.refuse(f"its .{attribute} needs all of it")
    if name in _QUESTIONS:
        return func(*args, **kwargs)
    if name in _UNCHANGED or (name == "requires_grad_" and False in (*args[1:], *kwargs.values())):
        return subject
    if name in _CASTS:
        return _converted(subject, name, func, args[1:], kwargs)
    if name in REDUCTIONS:
        return _reduced([subject], name, func, args[1:], kwargs)[0]
    return _elementwise(subject, name, func, args[1:], kwargs)


def _converted(subject: ShardedTensor, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Another dtype or device; the same object where that changes nothing."""
    args, kwargs = tree_map_only(ShardedTensor, _shape_only, (args, kwargs))
    asked = func(torch.empty((), dtype=subject.dtype, device=subject.device), *args, **kwargs)
    if not isinstance(asked, Tensor):  # `type()` asks for a name
        return asked
    if (asked.dtype, asked.device) == (subject.dtype, subject.device) and not kwargs.get("copy"):
        return subject
    subject.source.check(f"{name}()", False)
    number = fingerprint(subject.history, name, asked.dtype)
    return _derived(subject, _elements(subject).to(asked.dtype, copy=True), number, asked.device)


def _elementwise(subject: ShardedTensor, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function of a sharded tensor and of numbers gives, in place or not."""
    number = _checked(subject, name, args, kwargs)
    elements = _elements(subject)
    if name in ("clone", "__deepcopy__"):
        return _derived(subject, elements.clone(), number, exact=True)
    given = tuple(elements if _is_same(value, subject) else _beside(value, elements) for value in args)
    result = func(elements, *given, **kwargs)
    if _in_place(name)[0]:
        return subject
    return _derived(subject, result, number) if isinstance(result, Tensor) else result


def _in_place(name: str) -> tuple[bool, str]:
    """Whether a function writes to its first argument, and its name without underscores."""
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
        in_place = name[:1] == "i" and name[1:] in _IN_PLACE
        return in_place, name[1:] if in_place else name
    return name.endswith("_"), name.strip("_")


def _checked(
    subject: ShardedTensor, name: str, args: Sequence[Any], kwargs: dict[str, Any], told: int | None = None
) -> int:
    """Raise unless an elementwise function gives a slice what it gives the whole; note an edit in place.

    Returns a number for the call. ``told``: one for its arguments, where that is known.
    """
    source, (in_place, plain), called = subject.source, _in_place(name), f"{name}()"
    if plain not in (_IN_PLACE if in_place else _OUT_OF_PLACE) or kwargs.get("rounding_mode") or "alpha" in kwargs:
        source.refuse(f"{called} needs more than that")
    others = [value for value in (*args, *kwargs.values()) if in_place or not _is_same(value, subject)]
    others = [] if plain in ("clone", "deepcopy") else others
    if not all(map(_is_number, others)):
        source.refuse(f"{called} works with numbers only")
    if in_place and any(
        isinstance(value, complex) or (torch.is_tensor(value) and value.is_complex()) for value in others
    ):
        source.refuse(f"{called} with a complex number has other last bits on a slice")
    source.check(called, in_place and plain in _SCALES)
    number = fingerprint(plain, [_told(value) for value in others]) if told is None else told
    if in_place:
        source.edited(called, number)
    return fingerprint(subject.history, plain, number)


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and not isinstance(value, ShardedTensor) and value.layout is torch.strided
    return value is None or isinstance(value, numbers.Number)


def _told(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _is_same(value: Any, subject: ShardedTensor) -> bool:
    """Whether both are the same values, as in ``grad * grad``: each reading of ``.grad`` gives another object."""
    return isinstance(value, ShardedTensor) and value.own is subject.own and value.history == subject.history


def _beside(value: Any, elements: Tensor) -> Any:
    """What is offloaded is edited where it is."""
    return value.to(elements.device) if isinstance(value, Tensor) else value


def _elements(sharded: ShardedTensor) -> Tensor:
    """This rank's elements. Without dimensions where the tensor has none: dtypes depend on that."""
    own = in_memory(sharded.own)
    if sharded.dim():
        return own
    return own.view(()) if own.numel() else own.new_zeros(())


def _derived(
    parent: ShardedTensor, elements: Tensor, number: int, device: torch.device | None = None, exact: bool = False
) -> ShardedTensor:
    """Values of their own, made of all of a sharded tensor's; or ``exact`` copies of them."""
    own, source = elements.reshape(-1)[: parent.own.numel()], parent.source
    made = Source(f"tensor made of the {source.what}", source.advice, source.together, source.slice if exact else None)
    return ShardedTensor(own, parent.shape, made, device or parent.device, number or 1)


def _for_each(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of lists of tensors, some of them sharded."""
    subjects = [value for value in args[0] if isinstance(value, ShardedTensor)]
    if not subjects:
        next(_sharded((args, kwargs))).source.refuse(f"_foreach_{name}() with other tensors needs all of it")
    if name == "norm":
        others = [value for value in args[0] if not isinstance(value, ShardedTensor)]
        of_sharded = iter(_reduced(subjects, "_foreach_norm", _norm_of_one, args[1:], kwargs))
        of_others = iter(func(others, *args[1:], **kwargs) if others else ())
        return [next(of_sharded if isinstance(value, ShardedTensor) else of_others) for value in args[0]]
    shared = all(map(_is_number, args[1:]))
    told = fingerprint(name.strip("_"), [*map(_told, args[1:])], [*map(_told, kwargs.values())]) if shared else None
    given, histories = [], []
    for index, value in enumerate(args[0]):
        each = [other[index] if isinstance(other, list | tuple) else other for other in args[1:]]
        sharded = isinstance(value, ShardedTensor)
        histories.append(_checked(value, name, each, kwargs, told) if sharded else 0)
        given.append(_elements(value) if sharded else value)
    results = func(given, *(_beside(value, given[0]) for value in args[1:]), **kwargs)
    if _in_place(name)[0]:
        return None
    return [
        _derived(value, result, number) if isinstance(value, ShardedTensor) else result
        for value, result, number in zip(args[0], results, histories, strict=True)
    ]


def _norm_of_one(tensor: Tensor, ord: float = 2, dtype: torch.dtype | None = None) -> Tensor:
    """What ``_foreach_norm`` gives of each tensor, with the same arguments."""
    norm: Tensor = torch.linalg.vector_norm(tensor, ord, dtype=dtype)
    return norm


def _shape_only(sharded: ShardedTensor) -> Tensor:
    """An ordinary tensor of the same shape, dtype and device, for functions that ask for no more."""
    return torch.empty((), dtype=sharded.dtype, device=sharded.device).expand(sharded.shape)


def _sharded(values: Any) -> Iterator[ShardedTensor]:
    if isinstance(values, ShardedTensor):
        yield values
    elif isinstance(values, tuple | list | dict):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _sharded(value)


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
_NORMS = words("norm linalg_norm linalg_vector_norm _foreach_norm")
_TAKES: dict[str, tuple[str, ...]] = {
    "norm": ("p", "dim", "keepdim", "dtype"),
    "linalg_norm": ("p", "dim", "keepdim"),
    "linalg_vector_norm": ("p", "dim", "keepdim"),
    "_foreach_norm": ("p", "dtype"),
}
REDUCTIONS = _NORMS | frozenset(_KINDS)
"""The names of the functions that reduce a sharded tensor to one number, as torch gives them."""


def _kind_of(subject: ShardedTensor, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> _Kind:
    """What a function does with these arguments behind its tensor."""
    takes = _TAKES.get(name, ("dim", "keepdim"))
    given = dict(zip(takes, args, strict=False))
    given |= {"p" if key == "ord" else "dim" if key == "axis" else key: value for key, value in kwargs.items()}
    dtype, order = given.get("dtype"), given.get("p")
    order = 2.0 if order is None or order == "fro" else order
    wider = dtype is None or (name in _NORMS and torch.promote_types(subject.dtype, dtype) is dtype)
    matrix = name == "linalg_norm" and given.get("p") is not None and subject.dim() > 1
    if given.get("dim") not in (None, ()) or isinstance(order, str | Tensor) or matrix or not wider:
        subject.source.refuse(f"{name}() of some dimensions, of a matrix or in another dtype needs all of it")
    if given.get("out") is not None or (subject.is_complex() and name not in _NORMS | words("any all count_nonzero")):
        subject.source.refuse(f"{name}() with these arguments needs all of it")
    if len(args) > len(takes) or (given.get("dim") == () and name in ("any", "all", "count_nonzero")):
        subject.source.refuse(f"{name}() with these arguments needs all of it")
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
