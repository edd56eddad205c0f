"""Writing ``zero.json`` and the files that describe a checkpoint."""

from __future__ import annotations

import importlib.metadata
import io
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from lightning_zero.checkpoint.crc32 import ChecksummedFile
from lightning_zero.checkpoint.destination import Destination
from lightning_zero.checkpoint.flat_shard import FlatShard
from lightning_zero.checkpoint.items import Leaf
from lightning_zero.checkpoint.reader import load_safely
from lightning_zero.checkpoint.schema import (
    META_FILE,
    META_TENSORS_FILE,
    METADATA_FILE,
    RECORD_FILE,
    BlobItem,
    Chunk,
    FileEntry,
    Item,
    Record,
    TensorItem,
    ValueItem,
)
from lightning_zero.checkpoint.typed_json import Encoder, Inexpressible, dtype_name, raw_memory, type_name
from lightning_zero.checkpoint.writer import Written, is_plain, linear, save_archive

__all__ = ["Outline", "Part", "comes_back", "outline", "write_record"]

_ALIGNMENT = 64  # bytes, of the tensors in meta.bin


class Outline(NamedTuple):
    """What the record says of a leaf but where it lies: a tensor (``dtype``), a JSON value, or a blob (neither)."""

    path: tuple[Any, ...]
    type: str
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    value: Any = None
    has_value: bool = False


class Part(NamedTuple):
    """What one rank wrote.

    Attributes:
        written: the entries of its data file.
        files: its data file, if it has one.
        outlines: what it is the lowest rank to have, by DCP name.
        lost: what of that does not come back as it is, each with its class.
    """

    written: list[Written]
    files: dict[str, FileEntry]
    outlines: dict[str, Outline]
    lost: list[str]


def outline(leaf: Leaf) -> Outline:
    """What the record says of a leaf, but for its place."""
    value, kind = leaf.value, type_name(leaf.value)
    if isinstance(value, FlatShard) or is_plain(value):
        return Outline(leaf.path, kind, dtype=value.dtype, shape=tuple(value.shape))
    if isinstance(value, Tensor):
        return Outline(leaf.path, kind)
    try:
        return Outline(leaf.path, kind, value=Encoder(strict=True).encode(value), has_value=True)
    except Inexpressible:
        return Outline(leaf.path, kind)


def comes_back(leaf: Leaf, outlined: Outline) -> bool:
    """Whether loading gives the value back in a program that is like this one."""
    if outlined.has_value or outlined.dtype is not None or leaf.is_container:
        return True
    archive = io.BytesIO()
    torch.save(leaf.value, archive)
    return load_safely(archive.getvalue()) is not None


def write_record(
    destination: Destination, parts: Sequence[Part], rest: dict[str, Any], plan_summary: Mapping[str, Any]
) -> list[str]:
    """Write what describes a checkpoint, last of it ``zero.json``; durably. On rank 0.

    Args:
        destination: to which every rank has delivered its data.
        parts: what every rank wrote, in rank order.
        rest: what of the checkpoint is not sharded.
        plan_summary: how the run is partitioned.

    Returns:
        What does not come back when this is loaded in a program like this one, each with its class.

    Raises:
        ValueError: if the parts do not make up every tensor.
        OSError: if a file could not be written, or is not as everybody should see it.
    """
    directory, meta_file = destination.path, _with_suffix(META_FILE, destination.suffix)
    written: dict[str, list[Written]] = {}
    files: dict[str, FileEntry] = {}
    for part in parts:
        files.update(part.files)
        for entry in part.written:
            written.setdefault(entry.key, []).append(entry)
    items = {key: _item(key, found, written) for part in parts for key, found in part.outlines.items()}
    with _new_file(directory / meta_file) as file:
        archive = ChecksummedFile(file)
        save_archive(rest, archive)
        described = {meta_file: FileEntry(archive.tell(), archive.checksum())}
    encoder, encoded = _encode_rest(directory, _with_suffix(META_TENSORS_FILE, destination.suffix), rest, described)
    lost = [text for part in parts for text in part.lost]
    if encoder.unsupported and load_safely((directory / meta_file).read_bytes()) is None:
        lost += [f"'{'.'.join(map(str, path))}' ({kind})" for path, kind in encoder.unsupported]
    destination.deliver(list(described))
    if not destination.suffix:  # where names are new with every save, ``.metadata`` is replaced after the record
        described[METADATA_FILE] = _file_entry(directory / METADATA_FILE)
    files.update(described)
    sizes = destination.sizes()
    for name, listed in files.items():
        if sizes.get(name) != listed.nbytes:
            raise OSError(f"'{name}' has {sizes.get(name)} bytes after {listed.nbytes} were written")
    record = Record(
        files=files,
        items=items,
        meta=encoded,
        plan=Encoder().encode(dict(plan_summary)),
        world_size=len(parts),
        writer={"lightning_zero": _own_version(), "torch": torch.__version__},
    )
    with _new_file(directory / RECORD_FILE) as file:
        file.write(record.to_bytes())
    return lost


def _item(key: str, outline: Outline, written: Mapping[str, list[Written]]) -> Item:
    entries = written.get(key, [])
    if outline.has_value:
        return ValueItem(outline.path, outline.value)
    if outline.dtype is None:
        return BlobItem(outline.path, outline.type, entries[0].file, entries[0].offset, entries[0].nbytes)
    chunks = [
        Chunk(linear(entry.offsets or (), outline.shape), entry.numel, entry.file, entry.elements, entry.crc32)
        for entry in entries
        if entry.elements is not None
    ]
    try:
        return TensorItem(outline.path, outline.dtype, outline.shape, tuple(sorted(chunks)))
    except ValueError as error:
        raise ValueError(f"of '{key}', {error}") from error


def _encode_rest(directory: Path, name: str, rest: dict[str, Any], files: dict[str, FileEntry]) -> tuple[Encoder, Any]:
    """The rest as typed JSON, and who encoded it; tensors too large go to the file ``name``, which is then listed."""
    with ExitStack() as stack:
        opened: list[ChecksummedFile] = []

        def store(tensor: Tensor) -> dict[str, Any]:
            if not opened:
                opened.append(ChecksummedFile(stack.enter_context(_new_file(directory / name))))
            file = opened[0]
            file.write(b"\0" * (-file.tell() % _ALIGNMENT))
            offset, memory = file.tell(), raw_memory(tensor)
            crc32 = zlib.crc32(memory)
            file.write(memory)
            file.settle(offset, file.tell(), crc32)
            return {
                "dtype": dtype_name(tensor.dtype),
                "shape": list(tensor.shape),
                "file": name,
                "offset": offset,
                "crc32": crc32,
            }

        encoder = Encoder(store)
        encoded = encoder.encode(rest)
        for file in opened:
            files[name] = FileEntry(file.tell(), file.checksum())
        return encoder, encoded


def _with_suffix(name: str, suffix: str) -> str:
    stem, extension = os.path.splitext(name)
    return f"{stem}{suffix}{extension}"


def _file_entry(path: Path) -> FileEntry:
    crc32 = nbytes = 0
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            crc32, nbytes = zlib.crc32(piece, crc32), nbytes + len(piece)
    return FileEntry(nbytes, crc32)


@contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """A file that did not exist, durable when the context ends."""
    with open(path, "x+b") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _own_version() -> str:
    try:
        return importlib.metadata.version("lightning-zero")
    except importlib.metadata.PackageNotFoundError:  # run from a source folder
        return "unknown"
