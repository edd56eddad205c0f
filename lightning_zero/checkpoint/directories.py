"""Reading checkpoint directories: our own by their record, and stock ones of ``torch.distributed.checkpoint``.

What is in the latter is put into Lightning's checkpoint dictionary, under the names of [Note: The directory]:

    ModelParallelStrategy    state_dict.<name>, optimizer_0.state.<name>.<key>, optimizer_0.param_groups.0.<k>, meta.pt
    FSDPStrategy             the same with model.<name>
    dcp.save(state_dict)     <name>
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_zero.checkpoint.agreement import Control, collect
from lightning_zero.checkpoint.format.dcp import StoredBytes, StoredShape, parse_metadata
from lightning_zero.checkpoint.format.elements import BoxItem, BoxSource, ChunkSource, memory_of
from lightning_zero.checkpoint.format.items import Opened, put_together
from lightning_zero.checkpoint.format.record import (
    META_FILE,
    META_TENSORS_FILE,
    METADATA_FILE,
    RECORD_FILE,
    BlobItem,
    Chunk,
    Index,
    Item,
    Record,
    TensorItem,
    ValueItem,
)
from lightning_zero.checkpoint.format.stored import StoredTensor
from lightning_zero.checkpoint.format.torch_file import ADVICE, load_torch
from lightning_zero.checkpoint.format.typed_json import DTYPES, Decoder
from lightning_zero.checkpoint.storage.files import Files, open_folder, read_bytes
from lightning_zero.errors import CheckpointError

__all__ = [
    "Directory",
    "ForeignDirectory",
    "is_sharded_checkpoint",
    "load_checkpoint_directory",
    "load_safely",
    "load_together",
    "read_directory",
    "read_foreign_directory",
]


class Directory:
    """An open checkpoint directory.

    Args:
        files: of the directory.

    Attributes:
        source: reads its tensors.
        record: the content of its ``zero.json``.
        digest: of the bytes of ``zero.json``, for the ranks to compare.

    Raises:
        CheckpointError: if its record is missing or damaged.
    """

    def __init__(self, files: Files) -> None:
        self.files = files
        self.source = ChunkSource(files)
        if not files.has(RECORD_FILE):
            raise CheckpointError(
                f"'{files.name}' has no readable {RECORD_FILE}: it is no checkpoint of this strategy."
            )
        data = read_bytes(files, RECORD_FILE)
        self.digest = zlib.crc32(data)
        try:
            self.record = Record.from_bytes(data)
        except ValueError as error:
            raise self.unusable(error) from error

    def check_size(self, name: str) -> None:
        """Compare the size of a file with the recorded one.

        Raises:
            CheckpointError: if it is another, or the file is missing.
        """
        nbytes, expected = self.files.size(name), self.record.files[name].nbytes
        if nbytes != expected:
            raise CheckpointError(
                f"'{self.files.name}/{name}' has {nbytes} bytes where {expected} were saved: it was cut off or changed."
            )

    def listed(self, name: str) -> str:
        """The name under which the record lists ``meta.pt`` or ``meta.bin``: in object stores it is new every time."""
        stem, _, ending = name.partition(".")
        for found in self.record.files:
            if found == name or (found.startswith(f"{stem}-") and found.endswith(f".{ending}")):
                return found
        return name

    def unusable(self, error: ValueError) -> CheckpointError:
        """What to raise if the record is not what it should be."""
        return CheckpointError(f"'{self.files.name}/{RECORD_FILE}' cannot be used: {error}.")

    def read_bytes(self, file: str, offset: int, nbytes: int) -> bytes:
        """A range of a file."""
        return read_bytes(self.files, file, offset, nbytes)


def is_sharded_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a directory that ``load_checkpoint_directory`` reads. Local: looks at names only."""
    try:
        return open_folder(path).has(RECORD_FILE)
    except CheckpointError:
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
    return load_together(path, control, lambda: read_directory(open_folder(path)))


def load_together(path: str | os.PathLike[str], control: Control, load: Callable[[], Opened]) -> dict[str, Any]:
    """Open a checkpoint on every rank or on none, and say what was left out.

    Raises:
        CheckpointError: on every rank, if ``load`` raised on any or the ranks see different checkpoints.

    Collective: every rank.
    """
    what = f"load the checkpoint '{os.fspath(path)}'"
    opened: list[Opened] = []

    def look() -> Any:
        opened.append(load())
        return opened[0].digest

    digests = collect(control, what, look)
    if any(digest != digests[0] for digest in digests):
        raise CheckpointError(f"Could not {what}: the ranks see different directories there. Use a shared file system.")
    checkpoint, _, missing = opened[0]
    if missing and control.rank == 0:
        warnings.warn(
            f"Left out of the checkpoint '{os.fspath(path)}', because loading it could run code: {', '.join(missing)}. "
            f"If it is needed and you trust the file, allow its class with `torch.serialization.add_safe_globals`.",
            stacklevel=3,
        )
    return checkpoint


def read_directory(files: Files) -> Opened:
    """What is in a checkpoint directory of our own.

    Raises:
        CheckpointError: if it is no whole checkpoint, naming the file.
    """
    directory = Directory(files)
    for name in directory.record.files:
        directory.check_size(name)
    try:
        checkpoint, missing = _checkpoint(directory)
    except ValueError as error:
        raise directory.unusable(error) from error
    return Opened(checkpoint, directory.digest, missing)


def _checkpoint(directory: Directory) -> tuple[dict[str, Any], list[str]]:
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


def _value(directory: Directory, key: str, item: Item) -> Any:
    if isinstance(item, TensorItem):
        return StoredTensor(directory.source, key, item)
    if isinstance(item, BlobItem):
        found = load_safely(directory.read_bytes(item.file, item.offset, item.nbytes))
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


def load_safely(archive: bytes) -> tuple[Any] | None:
    """What a ``torch.save`` archive holds, if loading it can run no code."""
    # Any reason not to have it is the same reason to leave it out; but what torch warns of (sparse tensors) is none.
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return (torch.load(io.BytesIO(archive), map_location="cpu", weights_only=True),)
    return None


def _add_from_meta_file(
    directory: Directory, rest: Any, unsupported: Sequence[tuple[tuple[Any, ...], str]]
) -> list[str]:
    """Fill gaps from ``meta.pt``, if it loads without running code. Returns the gaps that stay."""
    loaded = None
    name = directory.listed(META_FILE)
    if name in directory.record.files:
        loaded = load_safely(directory.read_bytes(name, 0, directory.record.files[name].nbytes))
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


def _meta_tensor(directory: Directory, reference: Any) -> Tensor:
    """A tensor of ``meta.bin``."""
    dtype, shape = DTYPES[reference["dtype"]], tuple(reference["shape"])
    name = directory.listed(META_TENSORS_FILE)
    chunk = Chunk(0, math.prod(shape), name, reference["offset"], reference["crc32"])
    item = TensorItem((), dtype, shape, (chunk,) if chunk.numel else ())
    Record(files=directory.record.files, items={name: item}, meta=None)  # proves that it lies in the file
    tensor = StoredTensor(directory.source, name, item).read()
    if chunk.crc32 is not None and zlib.crc32(memory_of(tensor)) != chunk.crc32:
        raise CheckpointError(f"'{directory.files.name}/{name}' is damaged: a tensor does not match its checksum.")
    return tensor


_OPTIMIZER = re.compile(r"optimizer_(\d+)")


class ForeignDirectory:
    """An open directory whose files are as long as its index says.

    Args:
        files: of the directory.

    Attributes:
        index: the content of ``.metadata``.
        tensors: what is a tensor there.
        source: reads them.
        digest: of the bytes of ``.metadata``.

    Raises:
        CheckpointError: if it is no whole checkpoint, naming the file.
    """

    def __init__(self, files: Files) -> None:
        self.files = files
        self.source = BoxSource(files)
        data = read_bytes(files, METADATA_FILE)
        self.digest = zlib.crc32(data)
        try:
            self.index = parse_metadata(data)
            self.tensors = {
                name: _item(name, item) for name, item in self.index.items.items() if isinstance(item, StoredShape)
            }
        except ValueError as error:
            raise CheckpointError(f"'{files.name}/{METADATA_FILE}' cannot be used: {error}.") from error
        ends: dict[str, int] = {}
        for item in self.index.items.values():
            for place in [item] if isinstance(item, StoredBytes) else [stored.archive for stored in item.boxes]:
                ends[place.file] = max(ends.get(place.file, 0), place.offset + place.nbytes)
        for name, end in ends.items():
            nbytes = files.size(name)
            if nbytes < end:
                raise CheckpointError(
                    f"'{files.name}/{name}' has {nbytes} bytes where at least {end} were saved: it was cut off."
                )

    def value(self, name: str) -> Any:
        """What is stored under a name.

        Raises:
            CheckpointError: if it is no tensor and could run code.
        """
        if name in self.tensors:
            return StoredTensor(self.source, name, self.tensors[name])
        place = self.index.items[name]
        if not isinstance(place, StoredBytes):
            raise TypeError(f"'{name}' is a tensor")
        data = read_bytes(self.files, place.file, place.offset, place.nbytes)
        where = f"'{name}' in '{self.files.name}/{place.file}'"
        return load_torch(io.BytesIO(data), where, True, "allow its class with `torch.serialization.add_safe_globals`")


def read_foreign_directory(files: Files, weights_only: bool | None) -> Opened:
    """What is in a stock directory.

    Args:
        files: of the directory.
        weights_only: for ``meta.pt``, as for ``torch.load``. Nothing else is ever unpickled without restriction.

    Raises:
        CheckpointError: if it is no whole checkpoint or could run code, naming the file.
    """
    directory = ForeignDirectory(files)
    names = [*(name for name in directory.index.paths if name in directory.index.items), *directory.index.items]
    paths = {name: directory.index.paths.get(name, (name,)) for name in names}  # in the order of the dictionary
    layout = _layout(paths)
    pairs = [(layout(path), directory.value(name)) for name, path in paths.items()]
    pairs.sort(key=lambda pair: [part if isinstance(part, Index) else 0 for part in pair[0]])  # lists in their order
    try:
        checkpoint = put_together(pairs)
    except ValueError as error:
        raise CheckpointError(f"'{files.name}/{METADATA_FILE}' cannot be used: {error}.") from error
    for state in checkpoint.get("optimizer_states", ()):
        if isinstance(state, dict):  # of empty containers nothing is stored
            state.setdefault("state", {})
            state.setdefault("param_groups", [])
    rest, digest = _read_meta_file(files, weights_only)
    return Opened({**rest, **checkpoint}, (directory.digest, digest))


def _read_meta_file(files: Files, weights_only: bool | None) -> tuple[Mapping[str, Any], int]:
    """What Lightning puts beside the tensors, and a digest of it."""
    if not files.has(META_FILE):
        return {}, 0
    data = read_bytes(files, META_FILE)
    where = f"'{files.name}/{META_FILE}'"
    loaded = load_torch(io.BytesIO(data), where, weights_only, ADVICE)
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{where} holds a {type(loaded).__name__} instead of a dictionary.")
    return loaded, zlib.crc32(data)


def _item(name: str, stored: StoredShape) -> BoxItem:
    try:
        return BoxItem((), stored.dtype, stored.shape, (), stored.boxes)
    except ValueError as error:
        raise ValueError(f"of '{name}', {error}") from error


def _layout(paths: Mapping[str, tuple[Any, ...]]) -> Any:
    """A function from the path in the saved dictionary to the path in Lightning's."""
    tops = {path[0] for path in paths.values() if len(path) > 1}
    weights = next((top for top in ("state_dict", "model") if top in tops), None)
    numbers = sorted(int(found[1]) for top in tops if type(top) is str and (found := _OPTIMIZER.fullmatch(top)))

    def place(path: tuple[Any, ...]) -> tuple[Any, ...]:
        inner = tuple(Index(part) if type(part) is int else part for part in path[1:])
        if weights is None and not numbers:
            return "state_dict", path[0], *inner
        found = _OPTIMIZER.fullmatch(str(path[0]))
        if found is not None and inner:
            return "optimizer_states", Index(numbers.index(int(found[1]))), *inner
        return "state_dict" if path[0] == weights else path[0], *inner

    return place
