"""Saving a checkpoint directory: who writes what, the record of what was written, and publishing it."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import warnings
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
from lightning_zero.checkpoint.commit import Staging, local_path
from lightning_zero.checkpoint.flat_shard import FlatShard
from lightning_zero.checkpoint.items import Leaf, describe, digest, disagreement, split
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
from lightning_zero.checkpoint.writer import LeafPlanner, ShardWriter, Written, is_plain, linear
from lightning_zero.comm.groups import naming_failures
from lightning_zero.errors import CheckpointError

__all__ = ["save_checkpoint_directory"]

_ALIGNMENT = 64  # bytes, of the tensors in meta.bin


class _Outline(NamedTuple):
    """What the record says of a leaf but where it lies: a tensor (``dtype``), a JSON value, or a blob (neither)."""

    path: tuple[Any, ...]
    type: str
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    value: Any = None
    has_value: bool = False


def save_checkpoint_directory(
    checkpoint: Mapping[str, Any], path: str | os.PathLike[str], control: Control, *, plan_summary: Mapping[str, Any]
) -> None:
    """Write a checkpoint directory and publish it in one step. See [Note: The directory] and [Note: Publishing].

    Args:
        checkpoint: Lightning's checkpoint dictionary. What is under ``state_dict`` and ``optimizer_states``, and
            under any key that holds a FlatShard, is written sharded; of the rest, rank 0's is written. Not changed.
            Its tensors are read until this returns.
        path: the directory to make or to replace, on a file system that all ranks share; rank 0's counts.
        control: the ranks.
        plan_summary: how the run is partitioned: information for people, not used in loading.

    Raises:
        CheckpointError: on every rank, naming the ranks that failed and why. What was at ``path`` is unchanged then.

    Collective: every rank.
    """
    with _no_garbage_collection():
        _Save(control, f"save the checkpoint '{os.fspath(path)}'").run(checkpoint, path, plan_summary)


class _Save:
    """One save: its steps, each of which succeeds on all ranks or raises on all."""

    def __init__(self, control: Control, what: str) -> None:
        self._control = control
        self._what = what
        self._staging: Staging | None = None  # on rank 0

    def run(self, checkpoint: Mapping[str, Any], path: str | os.PathLike[str], plan_summary: Mapping[str, Any]) -> None:
        try:
            leaves, rest, directory = self._prepare(checkpoint, path)
            mine, named = self._divide(leaves, directory)
            written = self._write_shards(mine, named, directory)
            parts = collect(
                self._control, self._what, lambda: (written, {key: _outline(leaf) for key, leaf in named.items()})
            )

            def commit() -> None:
                if self._staging is not None:
                    _write_record(self._staging.path, parts, rest, plan_summary)
                    self._staging.publish()

            collect(self._control, self._what, commit)
        finally:
            if self._staging is not None:
                self._staging.discard()

    def _prepare(
        self, checkpoint: Mapping[str, Any], path: str | os.PathLike[str]
    ) -> tuple[dict[str, Leaf], dict[str, Any], Path]:
        """Take the checkpoint apart; rank 0 makes the directory."""
        leaves: dict[str, Leaf] = {}
        rest: dict[str, Any] = {}

        def prepare() -> str:
            found, others = split(checkpoint)
            for leaf in found.values():
                _check(leaf)
            leaves.update(found)
            rest.update(others)
            if self._control.rank != 0:
                return ""
            self._staging = Staging(local_path(path))
            return str(self._staging.path)

        directory = collect(self._control, self._what, prepare)[0]
        return leaves, rest, Path(directory)

    def _divide(self, leaves: dict[str, Leaf], directory: Path) -> tuple[dict[str, Leaf], dict[str, Leaf]]:
        """Decide who writes what.

        A shard is written by every rank that holds some of it; everything else, and what has no elements, by the
        lowest rank that has it. That is rank 0, unless an optimizer has no state for a parameter of which rank 0 owns
        nothing.

        Returns:
            What this rank writes, and what this rank is the lowest to have.
        """

        def look() -> str:
            if not directory.is_dir():
                raise FileNotFoundError(
                    f"'{directory.parent}' is not the folder that rank 0 sees: use a shared file system"
                )
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

    def _write_shards(self, mine: dict[str, Leaf], named: dict[str, Leaf], directory: Path) -> list[Written]:
        writer = ShardWriter(directory)
        group = self._control.process_group
        named = {key: leaf for key, leaf in named.items() if not leaf.is_container}
        try:
            with naming_failures(f"the attempt to {self._what}", self._control.rank), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                save(
                    {},
                    storage_writer=writer,
                    planner=LeafPlanner(mine, named),
                    process_group=group,
                    no_dist=group is None,
                )
        except CheckpointException as error:
            reasons = {rank: f"{type(failure[0]).__name__}: {failure[0]}" for rank, failure in error.failures.items()}
            raise CheckpointError(failure_text(self._what, reasons)) from None
        return writer.written


def _check(leaf: Leaf) -> None:
    value = leaf.value
    if not isinstance(value, Tensor) or isinstance(value, FlatShard):
        return
    if value.is_meta:
        raise ValueError(f"'{leaf.key}' is on the meta device: it has no values to save")
    if hasattr(value, "__create_write_items__"):
        raise ValueError(f"'{leaf.key}' is a {type_name(value)}, sharded by something else than this strategy")


def _outline(leaf: Leaf) -> _Outline:
    value, kind = leaf.value, type_name(leaf.value)
    if isinstance(value, FlatShard) or is_plain(value):
        return _Outline(leaf.path, kind, dtype=value.dtype, shape=tuple(value.shape))
    if isinstance(value, Tensor):
        return _Outline(leaf.path, kind)
    try:
        return _Outline(leaf.path, kind, value=Encoder(strict=True).encode(value), has_value=True)
    except Inexpressible:
        return _Outline(leaf.path, kind)


def _write_record(
    directory: Path,
    parts: Sequence[tuple[list[Written], dict[str, _Outline]]],
    rest: dict[str, Any],
    plan_summary: Mapping[str, Any],
) -> None:
    """Write ``meta.pt``, ``meta.bin`` and, last, ``zero.json``; durably."""
    written: dict[str, list[Written]] = {}
    files: dict[str, FileEntry] = {}
    for entries, _ in parts:
        for entry in entries:
            written.setdefault(entry.key, []).append(entry)
            end = max(entry.offset + entry.nbytes, files[entry.file].nbytes if entry.file in files else 0)
            files[entry.file] = FileEntry(end, None)
    items = {key: _item(key, outline, written) for _, outlines in parts for key, outline in outlines.items()}
    with _new_file(directory / META_FILE) as file:
        torch.save(rest, file)
    encoded = _encode_rest(directory, rest, files)
    for name in (METADATA_FILE, META_FILE):
        files[name] = _file_entry(directory / name)
    for name, listed in files.items():
        found = (directory / name).stat().st_size
        if found != listed.nbytes:
            raise OSError(f"'{name}' has {found} bytes after {listed.nbytes} were written")
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


def _item(key: str, outline: _Outline, written: Mapping[str, list[Written]]) -> Item:
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


def _encode_rest(directory: Path, rest: dict[str, Any], files: dict[str, FileEntry]) -> Any:
    """The rest as typed JSON; tensors too large for it go to ``meta.bin``."""
    with ExitStack() as stack:
        opened: list[BinaryIO] = []

        def store(tensor: Tensor) -> dict[str, Any]:
            if not opened:
                opened.append(stack.enter_context(_new_file(directory / META_TENSORS_FILE)))
            file = opened[0]
            file.write(b"\0" * (-file.tell() % _ALIGNMENT))
            offset, memory = file.tell(), raw_memory(tensor)
            file.write(memory)
            files[META_TENSORS_FILE] = FileEntry(file.tell(), None)
            return {
                "dtype": dtype_name(tensor.dtype),
                "shape": list(tensor.shape),
                "offset": offset,
                "crc32": zlib.crc32(memory),
            }

        return Encoder(store).encode(rest)


def _file_entry(path: Path) -> FileEntry:
    crc32 = nbytes = 0
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            crc32, nbytes = zlib.crc32(piece, crc32), nbytes + len(piece)
    return FileEntry(nbytes, crc32)


@contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """A file that did not exist, durable when the context ends."""
    with open(path, "xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Planning makes hundreds of thousands of small objects that live: collecting meanwhile was 60 % of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _own_version() -> str:
    try:
        return importlib.metadata.version("lightning-zero")
    except importlib.metadata.PackageNotFoundError:  # run from a source folder
        return "unknown"
