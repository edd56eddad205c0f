"""Saving a checkpoint directory: who writes what, the record of what was written, and publishing it."""

from __future__ import annotations

import gc
import importlib.metadata
import io
import os
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_zero.checkpoint.agreement import Control, collect, failure_text
from lightning_zero.checkpoint.destination import Destination, RemoteDestination
from lightning_zero.checkpoint.directories import load_safely
from lightning_zero.checkpoint.format.flat_shard import FlatShard
from lightning_zero.checkpoint.format.items import Leaf, changed, check_savable, describe, digest, disagreement, split
from lightning_zero.checkpoint.format.record import (
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
from lightning_zero.checkpoint.format.typed_json import (
    Encoder,
    Inexpressible,
    dtype_name,
    is_plain,
    raw_memory,
    type_name,
)
from lightning_zero.checkpoint.format.writer import (
    ChecksummedFile,
    LeafPlanner,
    ShardWriter,
    Written,
    linear,
    save_archive,
)
from lightning_zero.checkpoint.storage.files import is_remote
from lightning_zero.comm.control import naming_failures
from lightning_zero.errors import CheckpointError

__all__ = [
    "Outline",
    "Part",
    "comes_back",
    "no_garbage_collection",
    "outline",
    "save_checkpoint_directory",
    "write_record",
]


def save_checkpoint_directory(
    checkpoint: Mapping[str, Any], path: str | os.PathLike[str], control: Control, *, plan_summary: Mapping[str, Any]
) -> list[str]:
    """Write a checkpoint directory and publish it in one step. See [Note: The directory] and [Note: Publishing].

    May run in a thread of its own, if nothing else uses ``control`` meanwhile and nobody changes the checkpoint.

    Args:
        checkpoint: Lightning's checkpoint dictionary. What is under ``state_dict`` and ``optimizer_states``, and
            under any key that holds a FlatShard, is written sharded; of the rest, rank 0's is written. Not changed.
            Its tensors are read until this returns.
        path: the directory to make or to replace: on a file system that all ranks share, or a URL of any store that
            fsspec knows; rank 0's counts.
        control: the ranks.
        plan_summary: how the run is partitioned: information for people, not used in loading.

    Returns:
        What will not be there when it is loaded, or will be of another class: path and class of each. The same on every
        rank.

    Raises:
        CheckpointError: on every rank, naming the ranks that failed and why. What was at ``path`` is unchanged then.

    Collective: every rank.
    """
    destination = RemoteDestination(os.fspath(path)) if is_remote(path) else Destination(path)
    with no_garbage_collection():
        return _Save(control, destination, f"save the checkpoint '{os.fspath(path)}'").run(checkpoint, plan_summary)


class _Save:
    """One save: its steps, each of which succeeds on all ranks or raises on all."""

    def __init__(self, control: Control, destination: Destination, what: str) -> None:
        self._control = control
        self._destination = destination
        self._what = what

    def run(self, checkpoint: Mapping[str, Any], plan_summary: Mapping[str, Any]) -> list[str]:
        try:
            leaves, rest, token = self._prepare(checkpoint)
            mine, named = self._divide(leaves, token)
            writer = self._write_shards(mine, named)

            def deliver() -> Part:
                self._destination.deliver(list(writer.files))
                outlines = {key: outline(leaf) for key, leaf in named.items()}
                lost = [
                    f"'{key}' ({found.type})" for key, found in outlines.items() if not comes_back(named[key], found)
                ]
                return Part(writer.written, writer.files, outlines, lost)

            parts = collect(self._control, self._what, deliver)

            def commit() -> list[str]:
                if self._control.rank != 0:
                    return []
                lost = [f"'{'.'.join(map(str, path))}' ({kind})" for path, kind in changed(checkpoint)]
                lost += write_record(self._destination, parts, rest, plan_summary)
                self._destination.commit()
                return lost

            return collect(self._control, self._what, commit)[0]
        finally:
            self._destination.discard()

    def _prepare(self, checkpoint: Mapping[str, Any]) -> tuple[dict[str, Leaf], dict[str, Any], str]:
        """Take the checkpoint apart; rank 0 prepares the destination."""
        leaves: dict[str, Leaf] = {}
        rest: dict[str, Any] = {}

        def prepare() -> str:
            found, others = split(checkpoint)
            for leaf in found.values():
                check_savable(leaf)
            leaves.update(found)
            rest.update(others)
            return self._destination.begin() if self._control.rank == 0 else ""

        token = collect(self._control, self._what, prepare)[0]
        return leaves, rest, token

    def _divide(self, leaves: dict[str, Leaf], token: str) -> tuple[dict[str, Leaf], dict[str, Leaf]]:
        """Decide who writes what.

        A shard is written by every rank that holds some of it; everything else, and what has no elements, by the
        lowest rank that has it. That is rank 0, unless an optimizer has no state for a parameter of which rank 0 owns
        nothing.

        Returns:
            What this rank writes, and what this rank is the lowest to have.
        """

        def look() -> str:
            self._destination.enter(token)
            return digest(leaves)

        known: set[str] = set(leaves) if self._control.rank > 0 else set()
        if len(set(collect(self._control, self._what, look))) > 1:
            descriptions = self._control.gather_objects(describe(leaves))
            conflict = disagreement(descriptions)
            if conflict is not None:
                raise CheckpointError(f"Could not {self._what}: the ranks hold different checkpoints: {conflict}.")
            known = {key for description in descriptions[: self._control.rank] for key in description}
        named = {key: leaf for key, leaf in leaves.items() if key not in known}
        mine = {
            key: leaf
            for key, leaf in leaves.items()
            if not leaf.is_container
            and (key in named or (isinstance(leaf.value, FlatShard) and leaf.value.numel() > 0))
        }
        return mine, named

    def _write_shards(self, mine: dict[str, Leaf], named: dict[str, Leaf]) -> ShardWriter:
        writer = ShardWriter(self._destination.path, self._destination.suffix)
        planner = LeafPlanner(mine, {key: leaf for key, leaf in named.items() if not leaf.is_container})
        group = self._control.process_group
        if group is None:
            collect(self._control, self._what, lambda: _save_alone(writer, planner))
            return writer
        try:
            with naming_failures(f"the attempt to {self._what}", self._control.rank):
                save({}, storage_writer=writer, planner=planner, process_group=group)
        except CheckpointException as error:
            reasons = {rank: f"{type(failure[0]).__name__}: {failure[0]}" for rank, failure in error.failures.items()}
            raise CheckpointError(failure_text(self._what, reasons)) from None
        return writer


def _save_alone(writer: ShardWriter, planner: LeafPlanner) -> None:
    """What DCP's ``save`` does, for one process, without its warning that there is only one."""
    planner.set_up_planner({}, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan(plans)
    writer.finish(metadata, [writer.write_data(planner.finish_plan(plan), planner).value()])


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Copying and planning make very many small objects that live: collecting meanwhile was 60 % of the time.

    Not in the background: it would keep the garbage of the training, and a process forked meanwhile would never
    collect.
    """
    paused = gc.isenabled() and threading.current_thread() is threading.main_thread()
    if paused:
        gc.disable()
    try:
        yield
    finally:
        if paused:
            gc.enable()


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
