"""A tensor of a checkpoint that is still on disk."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_zero._torch import make_wrapper_subclass, tree_leaves, tree_map_only, untracked
from lightning_zero.checkpoint.format.record import TensorItem
from lightning_zero.checkpoint.storage.files import PIECE_NBYTES
from lightning_zero.storage.file_tensor import FileTensor
from lightning_zero.storage.host import host_memory

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
    (``torch.cat``, ``.float()``) works. None of these keep the elements.

    What makes a difference between elements and a copy of them (a view, as of slicing, a write in place, an address)
    loads the tensor first, once: its memory then belongs to the handle and to those detached from it, and is what all
    reading gets from now on. Only its shape cannot be changed in place.

    Args:
        source: where it is read from.
        key: its name there, for messages.
        item: its dtype and shape, and what the source needs to find it.
    """

    _source: Source
    _key: str
    _item: TensorItem
    _memory: list[Tensor]  # of one once it is loaded; shared with detached handles

    @staticmethod
    def __new__(cls, source: Source, key: str, item: TensorItem) -> StoredTensor:
        """See the class."""
        stored: StoredTensor = make_wrapper_subclass(
            cls, torch.Size(item.shape), dtype=item.dtype, device=torch.device("cpu"), requires_grad=False
        )
        stored._source, stored._item, stored._key = source, item, key
        stored._memory = []
        return stored

    @property
    def key(self) -> str:
        """The name under which it is stored."""
        return self._key

    @property
    def memory(self) -> Tensor | None:
        """What it was loaded into, if it was."""
        return self._memory[0] if self._memory else None

    def load(self) -> Tensor:
        """The whole tensor, in memory that belongs to this handle from now on: writing to it is writing to the handle.

        Raises:
            CheckpointError: if the file is damaged.
        """
        if not self._memory:
            self._memory.append(self.read())
        return self._memory[0]

    def read_into(self, destination: Tensor, start: int) -> None:
        """Read a range of the flattened elements.

        Args:
            destination: 1-D, on any device or in a file, of any dtype: the elements are cast to it. Written.
            start: the flattened element that ``destination[0]`` gets.

        Raises:
            ValueError: if the range is not inside the tensor.
            CheckpointError: if the file was cut off or removed. Checksums are not looked at here.
            OffloadError: if the destination is in a file, and cannot be written.
        """
        if destination.dim() != 1 or start < 0 or start + destination.numel() > self.numel():
            raise ValueError(
                f"Elements {start} to {start + destination.numel()} of '{self._key}' with shape {tuple(self.shape)} "
                f"cannot be read into a tensor of shape {tuple(destination.shape)}."
            )
        if self.memory is not None:
            with untracked():
                destination.copy_(self.memory.reshape(-1)[start : start + destination.numel()])
        elif isinstance(destination, FileTensor):
            self._read_to_file(destination, start)
        else:
            self._source.read_elements(self._key, self._item, destination, start)

    def _read_to_file(self, destination: FileTensor, start: int) -> None:
        """A piece at a time: sources write to memory of any stride, which a file has not."""
        step = max(1, PIECE_NBYTES // destination.dtype.itemsize)
        with untracked():
            buffer = host_memory(min(step, destination.numel()) * destination.dtype.itemsize, locked=False)
        for begin in range(0, destination.numel(), step):
            piece = buffer.view(destination.dtype)[: min(step, destination.numel() - begin)]
            self._source.read_elements(self._key, self._item, piece, start + begin)
            destination.write(piece, begin)

    def read(self) -> Tensor:
        """The whole tensor, in host memory of its own.

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
        kwargs = kwargs or {}
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            alias = StoredTensor(args[0]._source, args[0]._key, args[0]._item)
            alias._memory = args[0]._memory
            return alias
        handles = _aliased(func, args, kwargs)
        if handles and torch.Tag.inplace_view in func.tags:
            raise TypeError(f"{func}: the shape of {handles[0]} cannot be changed in place; use `.clone()` first.")
        owners = {id(handle.load()): handle for handle in handles}
        args, kwargs = tree_map_only(StoredTensor, _elements, (args, kwargs))
        found = func(*args, **kwargs)
        for handle in handles:
            if handle.load().shape != handle.shape:
                raise TypeError(f"{func} gave {handle} the shape {tuple(handle.load().shape)}; use a tensor that fits.")
        return tree_map_only(Tensor, lambda tensor: owners.get(id(tensor), tensor), found)

    @property
    def data(self) -> Tensor:
        """A detached handle."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if (value.shape, value.dtype) != (self.shape, self.dtype):
            raise TypeError(f"{tuple(value.shape)} {value.dtype} cannot be the data of {self}.")
        self._memory = [value.load() if isinstance(value, StoredTensor) else value.detach()]

    def data_ptr(self) -> int:
        """The address of its memory."""
        return self.load().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Its memory."""
        return self.load().untyped_storage()

    def numpy(self, *, force: bool = False) -> Any:
        """Its memory as an array."""
        return self.load().numpy(force=force)

    def __dlpack__(self, **options: Any) -> Any:
        """Its memory. Asked for a tensor's own, torch would hand out an address that leads nowhere."""
        return self.load().__dlpack__(**options)

    def share_memory_(self) -> StoredTensor:
        """Move its memory to where other processes can reach it."""
        self.load().share_memory_()
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy as the ordinary tensor."""
        return _elements(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredTensor:
        """A handle of its own; what is only on disk stays there."""
        copied = StoredTensor(self._source, self._key, self._item)
        copied._memory = [memory.clone() for memory in self._memory]
        if isinstance(self, torch.nn.Parameter):  # which is an attribute, for a class of tensors
            copied._is_param = True
        memo[id(self)] = copied.requires_grad_(self.requires_grad)
        return copied

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """What is stored, without reading it."""
        return f"StoredTensor('{self._key}', {tuple(self.shape)}, {self.dtype})"


def _aliased(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[StoredTensor]:
    """The handles among an operator's arguments that it writes to, or gives a view of."""
    values = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    found = [values.get(argument.name) for argument in func._schema.arguments if argument.alias_info is not None]
    return [value for value in tree_leaves(found) if isinstance(value, StoredTensor)]


def _elements(stored: StoredTensor) -> Tensor:
    """To compute with; what has to be read is not kept."""
    return stored.read() if stored.memory is None else stored.memory
