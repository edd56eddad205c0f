"""A tensor of a checkpoint that is still on disk."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_zero._torch import untracked
from lightning_zero.checkpoint.schema import TensorItem

__all__ = ["Source", "StoredTensor"]


class Source(Protocol):
    """Where tensors are read from: a directory or a file that is open."""

    def read_elements(self, key: str, item: TensorItem, destination: Tensor, start: int) -> None:
        """Fill a tensor with a range of the flattened elements of another.

        Args:
            key: the name of what is read, for messages.
            item: what is read.
            destination: 1-D, on any device, of any dtype: the elements are cast to it. Written.
            start: the flattened element that ``destination[0]`` gets. The range is inside the tensor.

        Raises:
            CheckpointError: if the file is damaged.
        """


class StoredTensor(Tensor):
    """A tensor of a checkpoint that is still on disk.

    It has the shape and dtype that were saved, and no memory. ``read_into`` and ``read`` get its elements; so does any
    computation with it, which gives ordinary tensors, so that code which rearranges a checkpoint before it is loaded
    (``torch.cat``, slicing, ``.float()``) works. Writing to it raises.

    Args:
        source: where it is read from.
        key: its name there, for messages.
        item: its dtype and shape, and what the source needs to find it.
    """

    _source: Source
    _key: str
    _item: TensorItem

    @staticmethod
    def __new__(cls, source: Source, key: str, item: TensorItem) -> StoredTensor:
        """See the class."""
        stored: StoredTensor = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(item.shape), dtype=item.dtype, device=torch.device("cpu"), requires_grad=False
        )
        stored._source, stored._item, stored._key = source, item, key
        return stored

    @property
    def key(self) -> str:
        """The name under which it is stored."""
        return self._key

    def read_into(self, destination: Tensor, start: int) -> None:
        """Read a range of the flattened elements.

        Args:
            destination: 1-D, on any device, of any dtype: the elements are cast to it. Written.
            start: the flattened element that ``destination[0]`` gets.

        Raises:
            ValueError: if the range is not inside the tensor.
            CheckpointError: if the file was cut off or removed. Checksums are not looked at here.
        """
        if destination.dim() != 1 or start < 0 or start + destination.numel() > self.numel():
            raise ValueError(
                f"Elements {start} to {start + destination.numel()} of '{self._key}' with shape {tuple(self.shape)} "
                f"cannot be read into a tensor of shape {tuple(destination.shape)}."
            )
        self._source.read_elements(self._key, self._item, destination, start)

    def read(self) -> Tensor:
        """The whole tensor, in host memory.

        Raises:
            CheckpointError: if the file is damaged.
        """
        with untracked():
            whole = torch.empty(self.shape, dtype=self.dtype)
            self.read_into(whole.view(-1), 0)
        return whole

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute with what is read from disk; a detached or aliased handle stays a handle."""
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return StoredTensor(args[0]._source, args[0]._key, args[0]._item)
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if isinstance(value, StoredTensor) and argument.alias_info is not None and argument.alias_info.is_write:
                raise TypeError(f"{func}: '{value._key}' is on disk and cannot be written to; use `.clone()` first.")
        args, kwargs = torch.utils._pytree.tree_map_only(StoredTensor, StoredTensor.read, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy as the ordinary tensor."""
        return self.read().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredTensor:
        """A handle cannot change, so that it is its own copy."""
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """What is stored, without reading it."""
        return f"StoredTensor('{self._key}', {tuple(self.shape)}, {self.dtype})"
