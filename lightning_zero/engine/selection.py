"""What a rank holds of a tensor that is split over the ranks, and of what an index selects of it."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_zero.engine.ranges import flat_range

__all__ = ["Part", "Selection", "select"]


@dataclass(frozen=True, eq=False)
class Part:
    """Which elements of a tensor this rank holds.

    Args:
        shape: of the whole tensor, the same on every rank.
        start: the first of them in the flattened tensor.
        numel: how many.
        picks: 1-D, the places of all of them, where they are no range.
    """

    shape: torch.Size
    start: int
    numel: int
    picks: Tensor | None = None

    def cut(self, whole: Tensor) -> Tensor:
        """The elements of another tensor at these places.

        Args:
            whole: a shape that can be expanded to this one.

        Returns:
            1-D; a view where possible.

        Raises:
            RuntimeError: if it cannot be expanded.
        """
        whole = whole.expand(self.shape)
        if self.picks is None:
            return flat_range(whole, self.start, self.numel)
        return whole[torch.unravel_index(self.picks.to(whole.device), self.shape)]


@dataclass(frozen=True, eq=False)
class Selection:
    """What an index selects of a part.

    Args:
        part: which elements of the selected tensor this rank holds.
        places: where they are among the elements this rank holds of the whole one: a slice where all that is selected
            lies in a row, or a 1-D mask, or places.
        shows: whether torch would give a view of the tensor, and not a copy of elements of it.
        everything: whether that is the tensor as it is.
    """

    part: Part
    places: slice | Tensor
    shows: bool
    everything: bool = False


def select(index: Any, part: Part, device: torch.device, ordered: bool = True) -> Selection:
    """What ``tensor[index]`` is of the ``part`` of it that this rank holds.

    Args:
        index: as torch takes it.
        part: a range.
        device: for places.
        ordered: whether it matters which element selected is which. If not, ``part`` of the answer is not to be used.

    Raises:
        IndexError: as torch raises it, on every rank alike.
        TypeError: likewise.
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
