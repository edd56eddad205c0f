"""Reading a checkpoint directory: the record, then byte ranges straight into their destination."""

from __future__ import annotations

import contextlib
import ctypes
import io
import math
import os
import stat
import threading
import warnings
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_zero._torch import untracked
from lightning_zero.checkpoint.agreement import Control, collect
from lightning_zero.checkpoint.commit import local_path
from lightning_zero.checkpoint.items import put_together
from lightning_zero.checkpoint.schema import (
    META_FILE,
    META_TENSORS_FILE,
    RECORD_FILE,
    BlobItem,
    Chunk,
    Item,
    Record,
    TensorItem,
    ValueItem,
)
from lightning_zero.checkpoint.typed_json import DTYPES, Decoder
from lightning_zero.errors import CheckpointError

__all__ = ["StoredTensor", "is_sharded_checkpoint", "load_checkpoint_directory"]

_PIECE_NBYTES = 1 << 24  # read, checked and cast at a time
_OPEN_FILES = 16


class StoredTensor(Tensor):
    """A tensor of a checkpoint that is still on disk.

    It has the shape and dtype that were saved, and no memory. ``read_into`` and ``read`` get its elements; so does any
    computation with it, which gives ordinary tensors, so that code which rearranges a checkpoint before it is loaded
    (``torch.cat``, slicing, ``.float()``) works. Writing to it raises.
    """

    _directory: _Directory
    _key: str
    _item: TensorItem

    @staticmethod
    def __new__(cls, directory: _Directory, key: str, item: TensorItem) -> StoredTensor:
        """See the class."""
        stored: StoredTensor = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(item.shape), dtype=item.dtype, device=torch.device("cpu"), requires_grad=False
        )
        stored._directory, stored._item, stored._key = directory, item, key
        return stored

    def read_into(self, destination: Tensor, start: int) -> None:
        """Read a range of the flattened elements.

        Args:
            destination: 1-D, on any device, of any dtype: the elements are cast to it. Written.
            start: the flattened element that ``destination[0]`` gets.

        Raises:
            ValueError: if the range is not inside the tensor.
            CheckpointError: if the file is damaged. A checksum covers a chunk, so it is checked for chunks read whole.
        """
        if destination.dim() != 1 or start < 0 or start + destination.numel() > self.numel():
            raise ValueError(
                f"Elements {start} to {start + destination.numel()} of '{self._key}' with shape {tuple(self.shape)} "
                f"cannot be read into a tensor of shape {tuple(destination.shape)}."
            )
        self._directory.read_elements(self._key, self._item, destination, start)

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
            return StoredTensor(args[0]._directory, args[0]._key, args[0]._item)
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


class _Directory:
    """An open checkpoint directory whose files have the recorded sizes.

    It holds the directory itself and not its name, so that a checkpoint which is replaced meanwhile gives an error and
    never a mixture of two.

    Raises:
        CheckpointError: if it is no whole checkpoint, naming the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = local_path(path)
        try:
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise CheckpointError(f"'{self.path}' is not a checkpoint directory: {error.strerror}.") from error
        self._files: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()
        weakref.finalize(self, _close, self._descriptor, self._files)
        try:
            with open(RECORD_FILE, "rb", opener=self._open) as file:
                self.record_bytes = file.read()
        except OSError as error:
            raise CheckpointError(
                f"'{self.path}' has no readable {RECORD_FILE} ({error.strerror}): it is no checkpoint of this strategy."
            ) from error
        try:
            self.record = Record.from_bytes(self.record_bytes)
        except ValueError as error:
            raise CheckpointError(f"'{self.path / RECORD_FILE}' cannot be used: {error}.") from error
        self._verify_sizes()

    def read_elements(self, key: str, item: TensorItem, destination: Tensor, start: int) -> None:
        """Fill a 1-D tensor with the flattened elements from ``start``, cast to its dtype."""
        end = start + destination.numel()
        with untracked():
            for chunk in item.chunks:
                first, last = max(start, chunk.start), min(end, chunk.start + chunk.numel)
                if first < last:
                    self._read_range(key, chunk, item.dtype, first, destination[first - start : last - start])

    def read_bytes(self, file: str, offset: int, nbytes: int) -> bytes:
        """A range of a file."""
        buffer = bytearray(nbytes)
        self._read(file, offset, memoryview(buffer))
        return bytes(buffer)

    def _read_range(self, key: str, chunk: Chunk, dtype: torch.dtype, first: int, destination: Tensor) -> None:
        """Read elements of one chunk, in pieces. A whole chunk is checked against its checksum."""
        direct = destination.device.type == "cpu" and destination.dtype == dtype and destination.is_contiguous()
        direct = direct and type(destination) is Tensor
        whole = chunk.crc32 is not None and destination.numel() == chunk.numel
        crc32 = 0
        step = max(1, _PIECE_NBYTES // dtype.itemsize)
        buffer = None if direct else torch.empty(min(step, destination.numel()), dtype=dtype)
        for begin in range(0, destination.numel(), step):
            part = destination[begin : begin + step]
            target = part if buffer is None else buffer[: part.numel()]
            memory = _memory(target)
            self._read(chunk.file, chunk.offset + (first - chunk.start + begin) * dtype.itemsize, memory)
            if whole:
                crc32 = zlib.crc32(memory, crc32)
            if buffer is not None:
                part.copy_(target)
        if whole and crc32 != chunk.crc32:
            raise CheckpointError(
                f"'{self.path / chunk.file}' is damaged: the {chunk.numel * dtype.itemsize} bytes of '{key}' at byte "
                f"{chunk.offset} do not match their checksum. Resume from another checkpoint."
            )

    def _read(self, file: str, offset: int, memory: memoryview) -> None:
        with self._lock:
            descriptor = self._file(file)
            done = 0
            while done < len(memory):
                count = os.preadv(descriptor, [memory[done:]], offset + done)
                if count == 0:
                    raise CheckpointError(f"'{self.path / file}' ends at byte {offset + done}: it was cut off.")
                done += count

    def _file(self, name: str) -> int:
        """A descriptor, of which a few are kept open."""
        if name not in self._files:
            if len(self._files) >= _OPEN_FILES:
                os.close(self._files.popitem(last=False)[1])
            try:
                self._files[name] = self._open(name, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise CheckpointError(
                    f"'{self.path / name}' cannot be read: {error.strerror}. The checkpoint was removed or replaced."
                ) from error
        return self._files[name]

    def _open(self, name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, dir_fd=self._descriptor)

    def _verify_sizes(self) -> None:
        for name, entry in self.record.files.items():
            try:
                found = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
            except OSError as error:
                raise CheckpointError(f"'{self.path}' is not whole: '{name}' is missing ({error.strerror}).") from error
            if not stat.S_ISREG(found.st_mode):
                raise CheckpointError(f"'{self.path / name}' is not a regular file.")
            if found.st_size != entry.nbytes:
                raise CheckpointError(
                    f"'{self.path / name}' has {found.st_size} bytes where {entry.nbytes} were "
                    "saved: it was cut off or changed."
                )


def is_sharded_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a directory that ``load_checkpoint_directory`` reads. Local: looks at names only."""
    try:
        return (local_path(path) / RECORD_FILE).is_file()
    except ValueError:
        return False


def load_checkpoint_directory(path: str | os.PathLike[str], control: Control) -> dict[str, Any]:
    """Read the record of a checkpoint directory; tensors stay on disk until they are asked for.

    Returns:
        Lightning's checkpoint dictionary, as it was saved, with a StoredTensor for every tensor that was saved
        sharded or under ``state_dict`` or ``optimizer_states``. What could not be written in a form that is safe to
        load is left out with a warning on rank 0, unless ``torch.load(weights_only=True)`` accepts it.

    Raises:
        CheckpointError: on every rank, naming the file, if the directory is no whole checkpoint or the ranks see
            different ones.

    Collective: every rank.
    """
    what = f"load the checkpoint '{os.fspath(path)}'"
    opened: list[tuple[dict[str, Any], list[str]]] = []

    def load() -> int:
        directory = _Directory(path)
        try:
            opened.append(_checkpoint(directory))
        except ValueError as error:
            raise CheckpointError(f"'{directory.path / RECORD_FILE}' cannot be used: {error}.") from error
        return zlib.crc32(directory.record_bytes)

    if len(set(collect(control, what, load))) > 1:
        raise CheckpointError(f"Could not {what}: the ranks see different directories there. Use a shared file system.")
    checkpoint, missing = opened[0]
    if missing and control.rank == 0:
        warnings.warn(
            f"Left out of the checkpoint '{os.fspath(path)}', because loading it could run code: {', '.join(missing)}. "
            f"If it is needed and you trust the file, allow its class with `torch.serialization.add_safe_globals`.",
            stacklevel=2,
        )
    return checkpoint


def _checkpoint(directory: _Directory) -> tuple[dict[str, Any], list[str]]:
    """The dictionary, and the names of what is not in it."""
    missing: list[str] = []
    pairs: list[tuple[tuple[Any, ...], Any]] = []
    for key, item in directory.record.items.items():
        try:
            pairs.append((item.path, _value(directory, key, item)))
        except _LeftOut as error:
            missing.append(f"'{key}' ({error})")
    decoder = Decoder(lambda reference: _meta_tensor(directory, reference))
    rest = decoder.decode(directory.record.meta)
    if not isinstance(rest, dict):
        raise ValueError(f"its meta is a {type(rest).__name__}")
    if decoder.unsupported:
        missing += _add_from_meta_file(directory, rest, decoder.unsupported)
    return {**rest, **put_together(pairs)}, missing


class _LeftOut(Exception):
    """A value that is not loaded; the text is its type."""


def _value(directory: _Directory, key: str, item: Item) -> Any:
    if isinstance(item, TensorItem):
        return StoredTensor(directory, key, item)
    if isinstance(item, BlobItem):
        found = _load_safely(directory.read_bytes(item.file, item.offset, item.nbytes))
        if found is None:
            raise _LeftOut(item.type)
        return found[0]
    return _decode(item)


def _decode(item: ValueItem) -> Any:
    decoder = Decoder()
    value = decoder.decode([item.value])
    if decoder.unsupported:
        raise _LeftOut(decoder.unsupported[0][1])
    return value[0]


def _load_safely(archive: bytes) -> tuple[Any] | None:
    """What a ``torch.save`` archive holds, if loading it can run no code."""
    with contextlib.suppress(Exception):  # any reason not to have it is the same reason to leave it out
        return (torch.load(io.BytesIO(archive), map_location="cpu", weights_only=True),)
    return None


def _add_from_meta_file(
    directory: _Directory, rest: Any, unsupported: Sequence[tuple[tuple[Any, ...], str]]
) -> list[str]:
    """Fill gaps from ``meta.pt``, if it loads without running code. Returns the gaps that stay."""
    entry = directory.record.files[META_FILE]
    loaded = _load_safely(directory.read_bytes(META_FILE, 0, entry.nbytes))
    missing = []
    for path, kind in unsupported:
        try:
            source, target = (loaded or ({},))[0], rest
            for part in path[:-1]:
                source, target = source[part], target[part]
            target[path[-1]] = source[path[-1]]
        except (KeyError, IndexError, TypeError):
            missing.append(f"'{'.'.join(map(str, path))}' ({kind})")
    return missing


def _meta_tensor(directory: _Directory, reference: Any) -> Tensor:
    """A tensor of ``meta.bin``."""
    dtype, shape = DTYPES[reference["dtype"]], tuple(reference["shape"])
    chunk = Chunk(0, math.prod(shape), META_TENSORS_FILE, reference["offset"], reference["crc32"])
    item = TensorItem((), dtype, shape, (chunk,) if chunk.numel else ())
    Record(files=directory.record.files, items={META_TENSORS_FILE: item}, meta=None)  # proves that it lies in the file
    return StoredTensor(directory, META_TENSORS_FILE, item).read()


def _memory(tensor: Tensor) -> memoryview:
    """A contiguous host tensor's bytes, to be written to. The tensor must outlive it."""
    array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")


def _close(descriptor: int, files: dict[str, int]) -> None:
    for opened in (*files.values(), descriptor):
        os.close(opened)
