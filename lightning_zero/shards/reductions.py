"""Norms, sums and finite checks of tensors that are sliced over the ranks.

Each rank reduces its own elements to a few float64 numbers. One collective puts the numbers of all ranks together, and
every rank gets the same ordinary tensor. Padding is no part of a slice, so it never counts. ``Reduction`` reads a call
of torch and knows these steps; ``reduce_together`` runs them. Nothing here knows parameters or gradients.

[Note: rounding]
Sums are made in float64 and rounded once, so the last bits may differ from those that torch gives for the whole tensor,
and a float32 norm whose squares overflow is still finite here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = ["REDUCTIONS", "Combine", "Reduction", "Slice", "Together", "reduce_together"]

_PIECE_NUMEL = 2**20  # elements that are cast to float64 at a time
_INF = math.inf


class Combine(Enum):
    """How the ranks' numbers are put together."""

    SUM = "sum"
    LARGEST = "largest"  # of numbers that are not negative; NaN if one is
    EACH = "each"  # all of them, a row for each rank that holds a slice


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


class _Kind(NamedTuple):
    """One way to reduce the rows of a matrix: to numbers of a rank, and all ranks' numbers to results."""

    combine: Combine
    empty: float  # what each number is where there is no element
    numbers: Callable[[Tensor], Tensor]  # of the rows of a matrix, a row of ``width`` numbers for each
    merge: Callable[[Tensor, Tensor], Tensor]  # of two such rows of numbers
    result: Callable[[Tensor, int], Tensor]  # of all rows' numbers, and how many elements a row has
    width: int = 1


def _wide(piece: Tensor) -> Tensor:
    return piece.to(torch.float64)


def _column(numbers: Tensor) -> Tensor:
    return numbers.to(torch.float64).unsqueeze(1)


def _first(numbers: Tensor, count: int) -> Tensor:
    return numbers[..., 0]


def _p_norm(order: float) -> _Kind:
    def powers(piece: Tensor) -> Tensor:
        wide = torch.promote_types(piece.dtype, torch.float64)
        return _column(torch.linalg.vector_norm(piece, order, 1, dtype=wide).pow(order or 1.0))

    if order == _INF:
        return _Kind(Combine.LARGEST, 0.0, lambda x: _column(_wide(x.abs()).amax(1)), torch.maximum, _first)
    if order == -_INF:
        return _extreme(lambda x: _wide(x.abs()).amin(1), torch.amin, _INF, torch.minimum)
    return _Kind(Combine.SUM, 0.0, powers, torch.add, lambda n, count: n[:, 0].pow(1.0 / (order or 1.0)))


def _extreme(of: Callable[[Tensor], Tensor], over: Any, empty: float, merge: Any) -> _Kind:
    return _Kind(Combine.EACH, empty, lambda x: _column(of(x)), merge, lambda n, count: over(n[..., 0], 0))


def _moments(piece: Tensor) -> Tensor:
    """Count, mean, and sum of the squared distances from it."""
    piece = _wide(piece)
    mean = piece.mean(1, keepdim=True)
    count = torch.full_like(mean, piece.shape[1])
    return torch.cat([count, mean, (piece - mean).square().sum(1, keepdim=True)], 1)


def _merged_moments(left: Tensor, right: Tensor) -> Tensor:
    """Source: Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances"."""
    (n, mean, squares), (m, other, more) = left.unbind(-1), right.unbind(-1)
    count, apart = n + m, other - mean
    share = m / count.clamp(min=1)
    return torch.stack([count, mean + apart * share, squares + more + apart.square() * n * share], -1)


def _variance(root: bool, correction: float) -> _Kind:
    def result(numbers: Tensor, count: int) -> Tensor:
        merged = numbers[0]
        for row in numbers[1:]:
            merged = _merged_moments(merged, row)
        variance = merged[:, 2] / max(count - correction, 0)
        return variance.sqrt() if root else variance

    return _Kind(Combine.EACH, 0.0, _moments, _merged_moments, result, width=3)


_SUM = _Kind(Combine.SUM, 0.0, lambda x: _column(_wide(x).sum(1)), torch.add, _first)
_KINDS = {
    "sum": _SUM,
    "mean": _SUM._replace(result=lambda n, count: n[:, 0] / count),
    "count_nonzero": _SUM._replace(numbers=lambda x: _column((x != 0).sum(1))),
    "any": _Kind(Combine.LARGEST, 0.0, lambda x: _column((x != 0).any(1)), torch.maximum, _first),
    "all": _Kind(Combine.LARGEST, 0.0, lambda x: _column((x == 0).any(1)), torch.maximum, lambda n, c: 1 - n[:, 0]),
    "max": _extreme(lambda x: _wide(x).amax(1), torch.amax, -_INF, torch.maximum),
    "min": _extreme(lambda x: _wide(x).amin(1), torch.amin, _INF, torch.minimum),
}
# Names of functions, and what they take by position.
_TAKES: dict[str, tuple[str, ...]] = {
    "norm": ("p", "dim", "keepdim", "dtype"),
    "linalg_norm": ("p", "dim", "keepdim"),
    "linalg_vector_norm": ("p", "dim", "keepdim"),
    "_foreach_norm": ("p", "dtype"),
    **dict.fromkeys(("sum", "mean", "all", "any", "amax", "amin", "count_nonzero"), ("dim", "keepdim")),
    **dict.fromkeys(("max", "min"), ()),
    **dict.fromkeys(("std", "var"), ("correction",)),
}
_ALIKE = {"ord": "p", "axis": "dim", "keepdims": "keepdim", "unbiased": "correction"}
REDUCTIONS = frozenset(_TAKES)
"""The names of the functions that ``Reduction`` knows, as torch gives them."""


class Reduction(NamedTuple):
    """A call of a function that reduces tensors, to one number or to one for each row (dimension 0, or several)."""

    kind: _Kind
    dims: tuple[int, ...] | None  # that are reduced; ``None``: all
    needs_reals: bool = False  # and not complex numbers
    dtype: torch.dtype | None = None  # to which elements are cast before

    @classmethod
    def of(cls, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Reduction | None:
        """What a function of this name does with these arguments behind its tensor; ``None`` if that is not known."""
        takes = _TAKES.get(name)
        if takes is None or len(args) > len(takes):
            return None
        given = dict(zip(takes, args, strict=False)) | {_ALIKE.get(key, key): value for key, value in kwargs.items()}
        if given.get("out") is None:
            given.pop("out", None)
        if not given.keys() <= {*takes, "dtype"} or any(isinstance(value, Tensor) for value in given.values()):
            return None
        dims = given.get("dim")
        dims = tuple(dims) if isinstance(dims, tuple | list) else None if dims is None else (dims,)
        if any(not isinstance(dim, int) for dim in dims or ()):
            return None  # names of dimensions
        if dims == () and name in ("any", "all"):
            return None  # elements that stay as many
        dtype = given.get("dtype")
        if "p" in takes:
            order = given.get("p", 2.0)
            order = 2.0 if order in (None, "fro") else order
            matrix = name == "linalg_norm" and given.get("p") is not None and dims is None
            if isinstance(order, str) or matrix or (name == "linalg_norm" and dims is not None and len(dims) > 1):
                return None  # norms of matrices
            return cls(_p_norm(float(order)), dims or None, dtype=dtype)
        if name in ("std", "var"):
            correction = given.get("correction", 1)
            if args and not isinstance(correction, bool):
                return None  # a dimension
            return cls(_variance(name == "std", 1 if correction is None else float(correction)), None, True, dtype)
        name = name.removeprefix("a") if name in ("amax", "amin") else name
        return cls(_KINDS[name], dims or None, name not in ("any", "all", "count_nonzero"), dtype)

    def row_of(self, shape: Sequence[int]) -> int | None:
        """How many elements of a tensor of this shape make one result; ``None`` if they are not in a row."""
        if self.dims is None:
            return math.prod(shape)
        reduced = sorted({dim % max(len(shape), 1) for dim in self.dims})
        if reduced != list(range(len(shape) - len(reduced), len(shape))):
            return None
        return math.prod(shape[dim] for dim in reduced)

    def numbers(self, own: Tensor, start: int, row: int, rows: int) -> Tensor:
        """This rank's numbers, 1-D, of a tensor whose elements from ``start`` on are ``own``."""
        kind = self.kind
        if rows == 1 and 0 < own.numel() <= _PIECE_NUMEL:
            return kind.numbers(own.view(1, -1)).view(-1)
        found = torch.full((rows, kind.width), kind.empty, dtype=torch.float64, device=own.device)
        for first, matrix in _rows(own, start, row):
            high = max(1, _PIECE_NUMEL // matrix.shape[1])
            for top in range(0, matrix.shape[0], high):
                for left in range(0, matrix.shape[1], _PIECE_NUMEL):
                    piece = matrix[top : top + high, left : left + _PIECE_NUMEL]
                    target = found[first + top : first + top + len(piece)]
                    target.copy_(kind.merge(target, kind.numbers(piece)))
        return found.view(-1)


def _rows(own: Tensor, start: int, row: int) -> Iterator[tuple[int, Tensor]]:
    """The elements from ``start`` on, as matrices of whole rows or of one part of a row, with their first row."""
    at = 0
    while at < own.numel():
        first, within = divmod(start + at, row)
        left = own.numel() - at
        numel = min(left, row - within) if within or left < row else left - left % row
        yield first, own.narrow(0, at, numel).view(-1, min(numel, row))
        at += numel


class Slice(NamedTuple):
    """What is to be reduced of one tensor."""

    own: Tensor  # 1-D, this rank's elements
    start: int  # the first of them in the flattened tensor
    shape: torch.Size  # of the whole tensor
    device: torch.device  # where the result is to be


def reduce_together(
    reduction: Reduction, slices: Sequence[Slice], like: Sequence[Tensor], together: Together, what: str, history: int
) -> list[Tensor]:
    """Reduce tensors, none of them empty, to results of the shapes and dtypes of ``like``. Collective: every rank."""
    kind, width = reduction.kind, reduction.kind.width
    rows = [reduction.row_of(piece.shape) or 1 for piece in slices]
    counts = [piece.shape.numel() // row for piece, row in zip(slices, rows, strict=True)]
    mine = [
        reduction.numbers(piece.own, piece.start, row, count)
        for piece, row, count in zip(slices, rows, counts, strict=True)
    ]
    numbers = together(what, history, torch.cat([part.to(mine[0].device) for part in mine]), kind.combine)
    results, at = [], 0
    for piece, row, count, model in zip(slices, rows, counts, like, strict=True):
        these = numbers[..., at : at + count * width].unflatten(-1, (count, width))
        results.append(kind.result(these, row).to(piece.device, model.dtype).view(model.shape))
        at += count * width
    return results
