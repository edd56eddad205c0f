"""A tensor whose elements rest in a file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_zero._torch import make_wrapper_subclass, storage_key, tree_leaves, tree_map_only, untracked
from lightning_zero.storage.files import Region
from lightning_zero.storage.host import PIECE_NBYTES, host_memory

__all__ = ["FileTensor", "aliased", "fill_from", "pieces"]


class FileTensor(Tensor):
    """A tensor whose elements, in this shape, rest in a region of a file from ``start`` on.

    It has a shape and a dtype, and no memory. Views of it that are a range of its elements (slices of the first
    dimension, other shapes) are handles on the same elements. ``copy_``, ``fill_`` and ``zero_`` write to the file in
    pieces, and so does ``copy_`` from it into an ordinary tensor read in pieces; other operations that write in place
    read the whole handle, compute, and write it back. Whatever else computes with it reads it first and gives ordinary
    tensors. What would need an address, or a view that is no range, is refused.

    Nothing is kept in memory, so two threads must not write to the same elements at a time.
    """

    region: Region  # which may hold other elements as well
    start: int

    @staticmethod
    def __new__(cls, region: Region, start: int, shape: torch.Size) -> FileTensor:
        resting: FileTensor = make_wrapper_subclass(
            cls, shape, dtype=region.dtype, device=torch.device("cpu"), requires_grad=False
        )
        if start < 0 or start + resting.numel() > region.numel:
            raise ValueError(
                f"Elements {start} to {start + resting.numel()} are not inside {region.what}, which has {region.numel}."
            )
        resting.region, resting.start = region, start
        return resting

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for handles that show the same elements in the same shape, whether or not one of them still exists."""
        where = (str(self.region.file.path), self.region.offset, self.start)
        return (*where, tuple(self.shape), self.dtype)

    def part(self, start: int, numel: int) -> FileTensor:
        """A range of the flattened elements, 1-D. A ``ValueError`` if it is not inside."""
        if start < 0 or numel < 0 or start + numel > self.numel():
            raise ValueError(f"Elements {start} to {start + numel} are not inside {self}.")
        return FileTensor(self.region, self.start + start, torch.Size((numel,)))

    def read(self) -> Tensor:
        """All elements, in host memory of their own. An ``OffloadError`` if they cannot be read."""
        with untracked():
            whole = _memory(self.numel(), self.dtype)
        self.read_into(whole)
        return whole.view(self.shape)

    def read_into(self, destination: Tensor, start: int = 0) -> None:
        """Read a range of the flattened elements, in pieces, from ``start`` on into a 1-D tensor, cast to its dtype.

        A ``ValueError`` if they are not inside, an ``OffloadError`` if they cannot be read.
        """
        fill_from(destination, self._part_for(destination, start))

    def write(self, values: Tensor, start: int = 0) -> None:
        """Write a range of the flattened elements, in pieces; see ``read_into``."""
        fill_from(self._part_for(values, start), values)

    def fill(self, value: Any) -> None:
        """Give every element the same value, in pieces."""
        for start, piece in pieces(self.numel(), self.dtype):
            self.write(piece.fill_(value), start)

    def _part_for(self, tensor: Tensor, start: int) -> FileTensor:
        if tensor.dim() != 1:
            raise ValueError(f"{self} is read and written with 1-D tensors, got one of shape {tuple(tensor.shape)}.")
        return self.part(start, tensor.numel())

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        aten = torch.ops.aten
        if func is aten.copy_.default:
            return _copy(args[0], args[1])
        if func in (aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default):
            args[0].fill(0 if len(args) == 1 else args[1].item() if isinstance(args[1], Tensor) else args[1])
            return args[0]
        shown, written = aliased(cls, func, args, kwargs)
        if shown:
            return _view(func, shown[0], args, kwargs)
        if written and torch.Tag.inplace_view in func.tags:
            raise TypeError(
                f"{func}: {written[0]} cannot show something else. Use `read()`, and `write()` to change it."
            )
        return _compute(func, written, args, kwargs)

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        _refuse(self, "cannot show other data", "Write to it with `write()` or `copy_()`.")

    def data_ptr(self) -> int:
        _refuse(self, "has no address", "Use `read()`.")

    def untyped_storage(self) -> torch.UntypedStorage:
        _refuse(self, "has no storage", "Use `read()`, or `identity` to compare.")

    def __dlpack__(self, **options: Any) -> Any:
        """Refused: torch's own would crash the interpreter, for a tensor without memory."""
        _refuse(self, "shares no memory with another library", "Use `read()`.")

    def numpy(self, *, force: bool = False) -> Any:
        if not force:  # what is changed in the array has to reach the tensor
            _refuse(self, "shares no memory with an array", "Use `read().numpy()`.")
        return self.read().numpy()

    def __array__(self, dtype: Any = None) -> Any:
        return self.read().__array__(dtype) if dtype is not None else self.read().__array__()

    def tolist(self) -> Any:
        return self.read().tolist()

    def share_memory_(self) -> NoReturn:
        _refuse(self, "cannot be moved to shared memory", "Use `read().share_memory_()`.")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as an ordinary tensor."""
        return self.read().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """An ordinary tensor: a copy does not see later writes, and nobody counted on more room in the file."""
        copied: Tensor = self.read()
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, requires_grad=self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"FileTensor({self.region.what}, elements {self.start} to {self.start + self.numel()}, {self.dtype})"


def fill_from(destination: Tensor, source: Tensor) -> None:
    """``destination.copy_(source)`` of 1-D tensors, wherever they rest, in pieces where one of them rests in a file."""
    if destination.dim() != 1 or destination.shape != source.shape:
        raise ValueError(f"Shape {tuple(destination.shape)} cannot be filled from shape {tuple(source.shape)}.")
    if not isinstance(source, FileTensor):
        if isinstance(destination, FileTensor):
            destination.region.move(source.detach(), destination.start, write=True)
        else:
            with untracked():
                destination.copy_(source)
    elif not isinstance(destination, FileTensor):
        source.region.move(destination.detach(), source.start, write=False)
    elif destination.identity != source.identity:
        for start, piece in pieces(source.numel(), source.dtype):
            source.read_into(piece, start)
            destination.write(piece, start)


def pieces(numel: int, dtype: torch.dtype, nbytes: int = PIECE_NBYTES) -> Iterator[tuple[int, Tensor]]:
    """Where pieces of ``numel`` elements start, and host memory for each, the same for all: at most ``nbytes``."""
    with untracked():
        piece = _memory(min(numel, nbytes // dtype.itemsize), dtype)
    for start in range(0, numel, max(1, piece.numel())):
        yield start, piece[: numel - start]


def _memory(numel: int, dtype: torch.dtype) -> Tensor:
    """Memory that is read into directly, if there is enough to read for that to be worth a mapping of its own."""
    if numel * dtype.itemsize < PIECE_NBYTES:
        return torch.empty(numel, dtype=dtype)
    return host_memory(numel * dtype.itemsize, locked=False).view(dtype)


def _copy(target: Tensor, source: Tensor) -> Tensor:
    """``target.copy_(source)``: at least one of them rests."""
    if source.shape != target.shape:
        source = _elements(source).expand(target.shape)
    if isinstance(target, FileTensor) or (isinstance(source, FileTensor) and target.is_contiguous()):
        target_elements, source_elements = (
            tensor.part(0, tensor.numel()) if isinstance(tensor, FileTensor) else tensor.reshape(-1)
            for tensor in (target, source)
        )
        fill_from(target_elements, source_elements)
    else:
        with untracked():
            target.copy_(_elements(source))
    return target


def aliased(kind: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """The tensors of a class among an operator's arguments that it gives a view of, and those that it writes to."""
    arguments = func._schema.arguments
    values = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    shown: list[Any] = []
    written: list[Any] = []
    for argument in arguments:
        if argument.alias_info is not None:
            handles = [leaf for leaf in tree_leaves(values.get(argument.name)) if isinstance(leaf, kind)]
            (written if argument.alias_info.is_write else shown).extend(handles)
    return shown, written


def _view(func: Any, handle: FileTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``func`` shows of ``handle``, as handles: torch says which elements those are."""
    meta = torch.empty(handle.shape, dtype=handle.dtype, device="meta")
    args, kwargs = tree_map_only(FileTensor, lambda _: meta, (args, kwargs))
    shown = func(*args, **kwargs)

    def resting(view: Tensor) -> FileTensor:
        if storage_key(view) != storage_key(meta) or view.dtype != handle.dtype:
            raise TypeError(f"{func}: {handle} cannot be shown like this. Use `read()` first.")
        if not view.is_contiguous():
            raise TypeError(
                f"{func}: {handle} can only be shown in ranges of its elements. Use `read()`, and `write()` to "
                "change it."
            )
        return FileTensor(handle.region, handle.start + int(view.storage_offset()), view.shape)

    return tree_map_only(Tensor, resting, shown)


def _compute(func: Any, written: list[FileTensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on the elements, and write those back that it changed."""
    # By identity of the elements: `x.add_(x.detach())` reads and writes the same ones.
    loaded: dict[tuple[Any, ...], Tensor] = {}

    def elements(handle: FileTensor) -> Tensor:
        if handle.identity not in loaded:
            loaded[handle.identity] = handle.read()
        return loaded[handle.identity]

    args, kwargs = tree_map_only(FileTensor, elements, (args, kwargs))
    found = func(*args, **kwargs)
    owners = {id(elements(handle)): handle for handle in written}
    for handle in written:
        if elements(handle).shape != handle.shape:
            raise TypeError(f"{func}: {handle} cannot get the shape {tuple(elements(handle).shape)}.")
    for handle in owners.values():
        handle.write(elements(handle).reshape(-1))
    return tree_map_only(Tensor, lambda tensor: owners.get(id(tensor), tensor), found)


def _elements(tensor: Tensor) -> Tensor:
    return tensor.read() if isinstance(tensor, FileTensor) else tensor


def _refuse(handle: FileTensor, why: str, instead: str) -> NoReturn:
    raise TypeError(f"{handle} rests in a file and {why}. {instead}")
