"""One rank's slice of a parameter, and the boxes as which ``torch.distributed.checkpoint`` stores slices.

[Note: Boxes]

A shard is a contiguous range of a flattened parameter, but DCP stores boxes (an offset and a size per dimension). A
range is at most ``2 n - 1`` boxes of an n-dimensional parameter: the rest of a row, whole rows, the beginning of a
row, and the same again inside each partial row. Elements 5 to 16 of shape (5, 4):

    .  .  .  .
    .  a  a  a      box a: offset (1, 1), size (1, 3)
    b  b  b  b      box b: offset (2, 0), size (2, 4)
    b  b  b  b
    c  .  .  .      box c: offset (4, 0), size (1, 1)

The concatenation of the boxes, each flattened, is the range again: a box is a piece of the slice's own memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero._torch import make_wrapper_subclass
from lightning_zero.offload.host import OffloadedTensor

__all__ = ["Box", "FlatShard", "boxes", "elements_before", "is_range", "linear", "memory_identity", "tile"]


class Box(NamedTuple):
    """A rectangular part of a tensor: its first element and its extent, per dimension, in elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def boxes(shape: Sequence[int], start: int, end: int) -> list[Box]:
    """Cover elements ``start`` to ``end`` (exclusive) of the flattened ``shape``. See [Note: Boxes].

    Returns:
        Non-empty boxes in the order of the range; at most ``max(1, 2 * len(shape) - 1)`` of them, none for an empty
        range.
    """
    if start >= end:
        return []
    if not shape:
        return [Box((), ())]
    row_shape = tuple(shape[1:])
    row_numel = math.prod(row_shape)
    first, head = divmod(start, row_numel)
    last, tail = divmod(end, row_numel)
    if first == last:
        return _in_row(first, boxes(row_shape, head, tail))
    found = []
    if head:
        found += _in_row(first, boxes(row_shape, head, row_numel))
        first += 1
    if last > first:
        found.append(Box((first, *(0 for _ in row_shape)), (last - first, *row_shape)))
    return found + _in_row(last, boxes(row_shape, 0, tail))


def _in_row(row: int, inner: list[Box]) -> list[Box]:
    return [Box((row, *box.offsets), (1, *box.sizes)) for box in inner]


def linear(shape: Sequence[int], offsets: Sequence[int]) -> int:
    """The place of an element in the flattened tensor."""
    return sum(offset * math.prod(shape[dim + 1 :]) for dim, offset in enumerate(offsets))


def elements_before(shape: Sequence[int], box: Box, end: int) -> int:
    """How many elements of a box come before element ``end`` of the flattened tensor."""
    if end >= math.prod(shape):
        return math.prod(box.sizes)
    count = 0
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        row, end = divmod(end, math.prod(shape[dim + 1 :]))
        inner = math.prod(box.sizes[dim + 1 :])
        if row < offset:
            return count
        if row >= offset + size:
            return count + size * inner
        count += (row - offset) * inner
    return count


def is_range(shape: Sequence[int], box: Box) -> bool:
    """Whether a box is a range of the flattened tensor."""
    partial = next((dim for dim, size in enumerate(box.sizes) if size != 1), len(shape))
    return tuple(box.sizes[partial + 1 :]) == tuple(shape[partial + 1 :])


def tile(shape: Sequence[int], parts: Sequence[Box]) -> bool:
    """Whether boxes cover every element once: as ranges, or as the cells of a grid, which is all that DCP makes."""
    if sum(math.prod(box.sizes) for box in parts) != math.prod(shape):
        return False
    if all(is_range(shape, box) for box in parts):
        end = 0
        for begin, numel in sorted((linear(shape, box.offsets), math.prod(box.sizes)) for box in parts):
            if begin != end:
                return False
            end += numel
        return True
    cuts = [[*sorted({box.offsets[dim] for box in parts}), size] for dim, size in enumerate(shape)]
    if math.prod(len(cut) - 1 for cut in cuts) != len(parts):
        return False
    cells = set(itertools.product(*(itertools.pairwise(cut) for cut in cuts)))
    return cells == {
        tuple((offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True)) for box in parts
    }


class FlatShard(Tensor):
    """A parameter of full shape of which this process holds one contiguous range of the flattened elements.

    It occupies no memory of its own. User code which looks at names, shapes and dtypes of a checkpoint works; a shard
    can be renamed, dropped, cloned and cast; computing with it raises, because the result could only be wrong.

    Args:
        local: 1-D and contiguous: this rank's elements, possibly none, kept by reference. They may rest in a file.
        shape: the full shape.
        start: the place of ``local[0]`` in the flattened parameter. Meaningless, but in bounds, if ``local`` is empty.

    Raises:
        ValueError: if ``local`` is not such a range.
    """

    local: Tensor  # 1-D: the elements this rank holds, in the memory given to the constructor
    start: int  # the place of ``local[0]`` in the flattened parameter

    @staticmethod
    def __new__(cls, local: Tensor, shape: Sequence[int], start: int) -> FlatShard:
        numel = math.prod(shape)
        if local.dim() != 1 or not local.is_contiguous():
            raise ValueError(f"A flat shard needs a contiguous 1-D tensor, got shape {tuple(local.shape)}.")
        if start < 0 or start + local.numel() > numel:
            raise ValueError(
                f"Elements {start} to {start + local.numel()} are not a range of a tensor of shape {tuple(shape)} "
                f"with {numel} elements."
            )
        shard: FlatShard = make_wrapper_subclass(
            cls, torch.Size(shape), dtype=local.dtype, device=local.device, requires_grad=False
        )
        shard.local, shard.start = local.detach(), int(start)
        return shard

    @property
    def boxes(self) -> list[Box]:
        """The slice as boxes of the full shape, in the order of ``local``."""
        return boxes(self.shape, self.start, self.start + self.local.numel())

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Detach, clone and cast work on the slice; everything else would need elements of other ranks."""
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return FlatShard(args[0].local, args[0].shape, args[0].start)
        if func in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            options = {name: value for name, value in (kwargs or {}).items() if name != "memory_format"}
            return FlatShard(func(args[0].local, **options), args[0].shape, args[0].start)
        raise RuntimeError(  # not TypeError, of which Python's operators make a message of their own
            f"{func} needs whole parameters, but a checkpoint holds only this rank's part of each. Compute with "
            "`lightning_zero.full_parameters` around the module, or with the saved checkpoint."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatShard:
        """A copy with memory of its own."""
        copied = FlatShard(self.local.clone(), self.shape, self.start)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse: a pickle would hold one rank's elements under the name of the whole."""
        raise TypeError(
            "A FlatShard cannot be pickled: it holds one rank's part of a parameter only. In a checkpoint it may be in "
            "dictionaries and lists, not in other objects such as dataclasses; elsewhere, take whole parameters with "
            "`lightning_zero.full_parameters` around the module."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        end = self.start + self.local.numel()
        return f"FlatShard({tuple(self.shape)}, {self.dtype}, elements {self.start} to {end} here)"


def memory_identity(tensor: Tensor) -> Hashable:
    """Equal for tensors that show the same elements in the same shape, while they exist."""
    if isinstance(tensor, OffloadedTensor):
        return tensor.identity
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape)
