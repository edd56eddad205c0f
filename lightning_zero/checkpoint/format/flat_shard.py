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

import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero._torch import make_wrapper_subclass
from lightning_zero.offload.host import OffloadedTensor

__all__ = ["Box", "FlatShard", "boxes", "linear", "memory_identity", "overlap"]


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
    shape, found = tuple(shape), []
    while start < end and shape:  # the largest that begins here
        rows = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        offsets = tuple(start // row % size for row, size in zip(rows, shape, strict=True))
        dim, row = next((dim, row) for dim, row in enumerate(rows) if start % row == 0 and start + row <= end)
        count = min((end - start) // row, shape[dim] - offsets[dim])
        found.append(Box(offsets, (*(1 for _ in range(dim)), count, *shape[dim + 1 :])))
        start += count * row
    return found if shape or start >= end else [Box((), ())]


def linear(shape: Sequence[int], offsets: Sequence[int]) -> int:
    """The place of an element in the flattened tensor."""
    return sum(offset * math.prod(shape[dim + 1 :]) for dim, offset in enumerate(offsets))


def overlap(one: Box, other: Box) -> Box | None:
    """The elements that two boxes of a tensor have in common, if there are any."""
    offsets = tuple(map(max, one.offsets, other.offsets))
    sizes = tuple(
        min(a + m, b + n) - offset
        for offset, a, m, b, n in zip(offsets, one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )
    return Box(offsets, sizes) if min(sizes, default=1) > 0 else None


class FlatShard(Tensor):
    """A parameter of full shape of which this process holds one contiguous range of the flattened elements.

    It occupies no memory of its own. User code which looks at names, shapes and dtypes of a checkpoint works; a shard
    can be renamed, dropped, cloned and cast; computing with it raises, because the result could only be wrong.

    Args:
        local: 1-D and contiguous: this rank's elements, possibly none, kept by reference. They may be in a file.
        shape: the full shape.
        start: the place of ``local[0]`` in the flattened parameter. Meaningless, but in bounds, if ``local`` is empty.

    Raises:
        ValueError: if ``local`` is not such a range.
    """

    local: Tensor
    start: int

    @staticmethod
    def __new__(cls, local: Tensor, shape: Sequence[int], start: int) -> FlatShard:
        end = start + local.numel()
        if local.dim() != 1 or not local.is_contiguous() or start < 0 or end > math.prod(shape):
            raise ValueError(
                f"A flat shard needs a contiguous 1-D tensor: of shape {tuple(local.shape)}, elements {start} to {end} "
                f"of a tensor of shape {tuple(shape)}, is none."
            )
        shard: FlatShard = make_wrapper_subclass(cls, torch.Size(shape), dtype=local.dtype, device=local.device)
        shard.local, shard.start = local.detach(), int(start)
        return shard

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Detach, clone and cast work on the slice; everything else would need elements of other ranks."""
        aten, shard = torch.ops.aten, args[0]
        if func in (aten.detach.default, aten.alias.default):
            return FlatShard(shard.local, shard.shape, shard.start)
        if func in (aten.clone.default, aten._to_copy.default):
            options = {name: value for name, value in (kwargs or {}).items() if name != "memory_format"}
            return FlatShard(func(shard.local, **options), shard.shape, shard.start)
        raise RuntimeError(  # not TypeError, of which Python's operators make a message of their own
            f"{func} needs whole parameters, but a checkpoint holds only this rank's part of each. Compute with "
            "`lightning_zero.full_parameters` around the module, or with the saved checkpoint."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatShard:
        memo[id(self)] = copied = FlatShard(self.local.clone(), self.shape, self.start)
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
