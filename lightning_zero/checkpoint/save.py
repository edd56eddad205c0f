"""Saving a checkpoint directory: who writes what, the record of what was written, and publishing it.

Tensors are written a piece at a time. Checksums are CRC-32s, as of zip. That of a whole file is put together of those
of its parts where they are known.
"""

from __future__ import annotations

import gc
import hashlib
import io
import math
import os
import struct
import sys
import threading
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, cast

import torch
from torch import Tensor

from lightning_zero._torch import untracked
from lightning_zero.checkpoint.format.dcp import part_boxes, write_metadata
from lightning_zero.checkpoint.format.record import (
    META_FILE,
    META_TENSORS_FILE,
    METADATA_FILE,
    RECORD_FILE,
    BlobItem,
    Box,
    Chunk,
    FileEntry,
    FlatShard,
    Item,
    Leaf,
    Record,
    Split,
    StoredBox,
    StoredBytes,
    TensorItem,
    ValueItem,
    changed,
    describe,
    memory_identity,
    split,
)
from lightning_zero.checkpoint.format.stored import StoredTensor, read_slices
from lightning_zero.checkpoint.format.torch_file import Hole, Place, TorchFile
from lightning_zero.checkpoint.format.typed_json import (
    Encoder,
    Inexpressible,
    dtype_name,
    is_plain,
    raw_memory,
    type_name,
)
from lightning_zero.checkpoint.load import load_safely
from lightning_zero.checkpoint.storage.files import MAX_INDEX_NBYTES, WRITTEN_NBYTES, is_remote, local_path
from lightning_zero.checkpoint.storage.publish import RemoteStaging, Staging
from lightning_zero.comm import ControlGroup
from lightning_zero.errors import CheckpointError

__all__ = [
    "LARGE_NBYTES",
    "SUMMARY_KEY",
    "ChecksummedFile",
    "Part",
    "combine",
    "items_of",
    "new_file",
    "no_garbage_collection",
    "save_checkpoint_directory",
    "stored_identity",
    "write_together",
]

SUMMARY_KEY = "lightning_zero"
"""Top-level key of what only this package wants to know of a checkpoint."""


def save_checkpoint_directory(
    checkpoint: Mapping[str, Any],
    path: str | os.PathLike[str],
    control: ControlGroup,
    *,
    plan_summary: Mapping[str, Any],
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
    staging = RemoteStaging(os.fspath(path)) if is_remote(path) else Staging(local_path(path))

    def publish(parts: Sequence[Part], names: Sequence[str], rest: dict[str, Any]) -> list[str]:
        lost = [_named(path, kind) for path, kind in changed(checkpoint)]
        lost += _write_record(staging, parts, names, rest, plan_summary)
        staging.publish()
        return lost

    return write_together(checkpoint, staging, control, f"save the checkpoint '{os.fspath(path)}'", publish)


Publish = Callable[["Sequence[Part]", Sequence[str], dict[str, Any]], list[str]]


def write_together(
    checkpoint: Mapping[str, Any], staging: Staging, control: ControlGroup, what: str, publish: Publish
) -> list[str]:
    """Write every rank's file of a checkpoint, then ``publish`` what was written.

    ``publish`` is called on rank 0, with what the ranks wrote, its own names, and the entries that are not sharded.
    Every rank gets its result. Errors are those of ``save_checkpoint_directory``. Collective: every rank.
    """
    with no_garbage_collection():
        try:  # in steps, each of which succeeds on all ranks or raises on all
            divided = _divide(checkpoint, control, what, staging)
            control.together(what, lambda: staging.enter(divided.token))
            parts = control.together(what, lambda: _write_part(staging, control.rank, divided), to_first=True)
            names = list(divided.leaves)
            found = control.together(what, lambda: publish(parts, names, divided.rest) if control.rank == 0 else [])
            return found[0]
        finally:
            staging.discard()


class _Divided(NamedTuple):
    """A checkpoint taken apart: what is written value by value, the other entries, and what ``Staging.enter`` needs.

    This rank owns the names that it is the lowest to have. Of what several ranks have alike, its owner's is written.
    Where all ranks have the same names, in the same order, they are ``alike``.
    """

    leaves: dict[str, Leaf]
    rest: dict[str, Any]
    own: set[str]
    token: tuple[str, str]
    alike: bool


def _divide(checkpoint: Mapping[str, Any], control: ControlGroup, what: str, staging: Staging) -> _Divided:
    """Take a checkpoint apart, decide whose values count, and begin. Collective: every rank.

    Rank 0 has every name, unless an optimizer has no state for a parameter of which rank 0 owns nothing.

    Raises:
        CheckpointError: on every rank, if a value cannot be saved, it cannot begin, or the ranks differ about a value.
    """
    leaves: dict[str, Leaf] = {}
    rest: dict[str, Any] = {}

    def take_apart() -> tuple[str, tuple[str, str]]:
        found, others = split(checkpoint)
        leaves.update(_once(found, control))
        rest.update(others)
        text = repr(list(describe(leaves).items()))
        return hashlib.sha256(text.encode()).hexdigest(), staging.begin() if control.rank == 0 else ("", "")

    told = control.together(what, take_apart)
    known = set(leaves) if control.rank > 0 else set()
    alike = len({found for found, _ in told}) == 1
    if not alike:  # the others tell what they have beside rank 0's
        mine = describe(leaves)
        first: dict[str, Any] = control.gather_objects(mine if control.rank == 0 else None)[0] or {}
        more = control.gather_objects({key: value for key, value in mine.items() if first.get(key) != value})
        known = set(first) if control.rank > 0 else set()
        for rank, (key, value) in ((rank, pair) for rank, found in enumerate(more) for pair in found.items()):
            if (other := first.setdefault(key, value)) != value:
                differs = f"'{key}' is {other} on one and {value} on rank {rank}"
                raise CheckpointError(f"Could not {what}: the ranks hold different checkpoints: {differs}.")
            if rank < control.rank:
                known.add(key)
    return _Divided(leaves, rest, set(leaves) - known, told[0][1], alike)


def _once(leaves: Mapping[str, Leaf], control: ControlGroup) -> Iterator[tuple[str, Leaf]]:
    """The leaves, each shard left to one of the groups of ranks that have the same: in others nobody has any of it.

    Names of one memory go to one group. Under ``SUMMARY_KEY`` there are rows of the ranks, of which no two are one.
    """
    size = len(control.counted)
    groups, mine = control.world_size // size, control.rank // size
    first: dict[Any, str] = {}
    for key, leaf in leaves.items():
        if groups > 1 and isinstance(shard := leaf.value, FlatShard) and shard.local.numel():
            name = first.setdefault(memory_identity(shard.local), key)
            if leaf.path[0] != SUMMARY_KEY and zlib.crc32(name.encode()) % groups != mine:
                leaf = leaf._replace(value=shard.with_elements(shard.local[:0]))
        yield key, leaf


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


class Part(NamedTuple):
    """What one rank wrote, in few objects: reading those of thousands of ranks must not take rank 0 long.

    ``rows`` has a ``_ROW`` for every box of a tensor. Numbers of names count in ``names``, or in those of rank 0 where
    all ranks have the same.
    """

    own: dict[str, tuple[Leaf, StoredBytes | None]]  # by name; the value is what the record says of it, or a hole
    names: list[str] | None
    rows: bytes
    files: dict[str, FileEntry]  # its data file, if there is one
    lost: list[str]  # what loading will not give back


_ROW = struct.Struct("=7q")
"""A box of a tensor in a message: number of the tensor's name, first element, how many (which with the shape say where
it is), where in the file its archive begins, bytes of that, where in the file the elements begin, and their checksum,
or -1."""


def _write_part(staging: Staging, rank: int, divided: _Divided) -> Part:
    """Write one rank's data file as DCP does: an archive per box or value. Durable; no file if there is nothing.

    Every rank that holds some of a shard writes it; everything else, and what has no elements, its owner. Of a tensor
    on another device or in a file, a piece at a time is copied to the host. Of tied parameters there is one copy.
    """
    part = Part({}, None if divided.alike else list(divided.leaves), b"", {}, [])
    path, rows = staging.path / f"__{rank}_0{staging.suffix}.distcp", bytearray()
    with new_file(path) as opened:
        file = ChecksummedFile(opened, torch.serialization.get_crc32_options())
        known: dict[Any, tuple[int, int, int, int]] = {}
        for number, (key, leaf) in enumerate(divided.leaves.items()):
            value, is_shard = leaf.value, isinstance(leaf.value, FlatShard)
            if key not in divided.own and not (is_shard and value.local.numel()):
                continue
            if not is_shard and not is_plain(value):
                part.own[key] = _write_value(file, path.name, leaf, part.lost)
                continue
            ahead: Tensor = value.local if is_shard else value.detach()
            shape, place, cut = tuple(value.shape), value.start if is_shard else 0, value.cut if is_shard else None
            if key in divided.own:
                part.own[key] = leaf._replace(value=Hole(cut, value.dtype, shape)), None
            # One box also without elements, so that DCP knows the tensor.
            end = place + ahead.numel()
            found = part_boxes(shape, cut, place, end) if value.numel() else [Box((0,) * len(shape), shape)]
            for box in found:
                numel = math.prod(box.sizes)
                elements, ahead = (ahead[:numel], ahead[numel:]) if len(found) > 1 else (ahead, ahead)
                same: Any = object()
                if numel and elements.is_contiguous():
                    same = memory_identity(elements), box.sizes, elements.is_conj(), elements.is_neg()
                if same not in known:
                    start, layout = file.nbytes, _layout(Hole(0, elements.dtype, box.sizes))
                    (crc32,) = file.write_archive(layout, elements)
                    crc32 = -1 if crc32 is None else crc32
                    known[same] = start, layout.nbytes, start + layout.places[0].offset, crc32
                rows += _ROW.pack(number, place, numel, *known[same])
                place += numel
    if file.nbytes:
        part.files[path.name] = FileEntry(file.nbytes, file.checksum)
        staging.deliver([path.name])
    else:
        path.unlink()
    return part._replace(rows=bytes(rows))


_layout = lru_cache(maxsize=256)(TorchFile)


def _write_value(file: ChecksummedFile, name: str, leaf: Leaf, lost: list[str]) -> tuple[Leaf, StoredBytes | None]:
    """Write what is no plain tensor. Returns what the record says of it, and where it lies."""
    value, kind = leaf.value, type_name(leaf.value)
    if leaf.is_container:
        return leaf._replace(value=ValueItem(leaf.path, {})), None
    layout = TorchFile(value)
    archive = StoredBytes(name, file.nbytes, layout.nbytes)
    file.write_archive(layout)
    if not isinstance(value, Tensor):
        with suppress(Inexpressible):
            return leaf._replace(value=ValueItem(leaf.path, Encoder(strict=True).encode(value))), archive
    content = io.BytesIO()
    torch.save(value, content)
    if load_safely(content) is None:
        lost.append(_named([leaf.key], kind))
    return leaf._replace(value=BlobItem(leaf.path, kind, *archive)), archive


# -------------------------------------------------------------------------------------------------------------- rank 0

_ALIGNMENT = 64  # bytes, of the tensors in meta.bin


def _named(path: Sequence[Any], kind: str) -> str:
    return f"'{'.'.join(map(str, path))}' ({kind})"


def _write_record(
    staging: Staging,
    parts: Sequence[Part],
    names: Sequence[str],
    rest: dict[str, Any],
    plan_summary: Mapping[str, Any],
) -> list[str]:
    """Write what describes a checkpoint, last of it ``zero.json``; durably. On rank 0, when all data is delivered.

    The parts of the ranks have to make up every tensor, and the files have to be as long as they were written.

    Returns:
        What does not come back when this is loaded in a program like this one, each with its class.
    """
    directory, (meta_file, tensors_file) = staging.path, map(staging.named, (META_FILE, META_TENSORS_FILE))
    items, archives = items_of(parts, names)
    with new_file(directory / meta_file) as opened:
        file = ChecksummedFile(opened)
        file.write_archive(TorchFile(rest))
    described = {meta_file: FileEntry(file.nbytes, file.checksum)}
    large: list[tuple[dict[str, Any], Tensor]] = []

    def store(tensor: Tensor) -> dict[str, Any]:
        large.append(({"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "file": tensors_file}, tensor))
        return large[-1][0]

    encoder = Encoder(store)
    encoded = encoder.encode(rest)
    if large:
        with new_file(directory / tensors_file) as opened:
            file = ChecksummedFile(opened)
            for place, tensor in large:
                file.write(b"\0" * (-file.nbytes % _ALIGNMENT))
                place |= {"offset": file.nbytes, "crc32": file.write_elements(tensor)}
        described[tensors_file] = FileEntry(file.nbytes, file.checksum)
    lost = [text for part in parts for text in part.lost]
    if encoder.unsupported and load_safely(io.BytesIO((directory / meta_file).read_bytes())) is None:
        lost += [_named(path, kind) for path, kind in encoder.unsupported]
    staging.deliver(list(described))
    with new_file(directory / METADATA_FILE) as opened:
        write_metadata(items, archives, file := ChecksummedFile(opened))
    if not staging.suffix:  # where names are new with every save, ``.metadata`` is replaced after the record
        described[METADATA_FILE] = FileEntry(file.nbytes, file.checksum)
    files = {name: entry for part in parts for name, entry in part.files.items()} | described
    sizes = staging.sizes()
    for name, listed in files.items():
        if sizes.get(name) != listed.nbytes:
            raise OSError(f"'{name}' has {sizes.get(name)} bytes after {listed.nbytes} were written")
    record = Record(
        files=files,
        items=items,
        meta=encoded,
        plan=Encoder().encode(dict(plan_summary)),
        world_size=len(parts),
        writer={"lightning_zero": sys.modules["lightning_zero"].__version__, "torch": torch.__version__},
    )
    content = record.to_bytes()
    if len(content) > MAX_INDEX_NBYTES:
        raise ValueError(f"{RECORD_FILE} would have {len(content)} bytes, too many to be read again")
    with new_file(directory / RECORD_FILE) as opened:
        opened.write(content)
    return lost


def items_of(parts: Sequence[Part], names: Sequence[str]) -> tuple[dict[str, Item], dict[str, StoredBytes]]:
    """What the record says of every value, and where archives lie of what is no tensor, but for empty containers.

    ``names`` are those of rank 0, which ``parts`` count in.
    """
    owned = {key: found for part in parts for key, found in part.own.items()}
    chunks: dict[str, list[Chunk]] = {key: [] for key in owned}
    stored: dict[str, list[StoredBox]] = {key: [] for key in owned}
    holes: dict[str, Hole] = {key: leaf.value for key, (leaf, _) in owned.items() if isinstance(leaf.value, Hole)}
    for part in parts:
        file = next(iter(part.files), "")
        for number, start, numel, archive, nbytes, offset, crc32 in _ROW.iter_unpack(part.rows):
            key = (part.names or names)[number]
            shape, split = _cut(holes[key])
            box = Box((0,) * len(shape), shape)
            if numel:
                (box,) = part_boxes(shape, split, start, start + numel)
                chunks[key].append(Chunk(start, numel, file, offset, None if crc32 < 0 else crc32))
            stored[key].append(StoredBox(box, StoredBytes(file, archive, nbytes)))
    items: dict[str, Item] = {}
    for key, (leaf, _) in owned.items():
        items[key] = leaf.value
        if hole := holes.get(key):
            shape, split = _cut(hole)
            try:
                parts_of = tuple(sorted(chunks[key])), tuple(stored[key])
                items[key] = TensorItem(leaf.path, hole.dtype, shape, *parts_of, split)
            except ValueError as error:
                raise ValueError(f"of '{key}', {error}") from error
    return items, {key: archive for key, (_, archive) in owned.items() if archive is not None}


def _cut(hole: Hole) -> tuple[tuple[int, ...], Split | None]:
    """The shape that a hole stands for, and how that is split, which is its key here."""
    return tuple(hole.shape), cast("Split | None", hole.key)


# ---------------------------------------------------------------------------------------------------------------- files

_POLYNOMIAL = 0xEDB88320  # of zlib and zip, bits reversed
_BUFFER_NBYTES = 1 << 20  # of what is written at a time of many small archives
LARGE_NBYTES = 1 << 18  # from here on ``combine`` (0.05 ms) is faster than computing a second time


class ChecksummedFile:
    """Appends to a file, through this object only, and knows the checksum of what it appended, if wanted.

    ``advance`` gets the number of bytes after each piece. ``overflowed`` has the keys of places in archives where a
    cast made finite elements infinite, NaN or the largest of the dtype.
    """

    def __init__(self, file: IO[bytes], wanted: bool = True, advance: Callable[[int], Any] = lambda _: None) -> None:
        self._file = file
        self._wanted = wanted
        self._advance = advance
        self._crc32 = 0
        self.nbytes = 0  # written so far
        self.overflowed: set[Hashable] = set()

    @property
    def checksum(self) -> int | None:
        """The CRC-32 of all that was written; ``None`` if it was not wanted."""
        return self._crc32 if self._wanted else None

    def write(self, data: bytes | memoryview) -> None:
        """Append one-dimensional bytes."""
        self._append(data)
        if self._wanted:
            self._crc32 = zlib.crc32(data, self._crc32)

    def write_elements(self, tensor: Tensor, place: Place | None = None) -> int | None:
        """Append the elements of a tensor on any device or in a file, a piece at a time. Returns their CRC-32.

        For a place in an archive they are cast to its dtype. ``CheckpointError`` if they do not match their checksum.
        """
        dtype, begin, crc32 = tensor.dtype if place is None else place.dtype, self.nbytes, 0
        small = not self._wanted or tensor.numel() * dtype.itemsize < LARGE_NBYTES
        for elements, known in _pieces(tensor):
            cast = elements.to(dtype)
            if place is not None and dtype != tensor.dtype and _overflows(elements, cast):
                self.overflowed.add(place.key)
            memory = raw_memory(cast)
            (self.write if small else self._append)(memory)
            if self._wanted and known is not None and dtype == tensor.dtype:
                crc32 = combine(crc32, known, len(memory)) if crc32 else known
            elif self._wanted:
                crc32 = zlib.crc32(memory, crc32)
        if not small:
            self._crc32 = combine(self._crc32, crc32, self.nbytes - begin)
        return crc32 if self._wanted else None

    def write_archive(self, layout: Any, *in_holes: Tensor) -> list[int | None]:
        """Append a torch file, with tensors for its holes. Returns the CRC-32 of the elements in every place.

        ``layout`` is a ``TorchFile``, or what has ``places`` and ``frame`` as that.
        """
        found: list[int | None] = []
        holes = iter(in_holes)
        # The frame asks for the checksum of a tensor after the loop has written it.
        for (_, content), place in zip_longest(layout.frame(crc32 or 0 for crc32 in found), layout.places):
            self.write(content)
            if place is not None:
                found.append(self.write_elements(next(holes) if place.tensor is None else place.tensor, place))
        return found

    def _append(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self.nbytes += len(data)
        self._advance(len(data))


def combine(first: int, second: int, nbytes: int) -> int:
    """The CRC-32 of two texts in sequence, from that of each and the length of the second.

    Source: ``crc32_combine`` of zlib 1.2.12: multiplication by x to the power ``8 * nbytes`` modulo the polynomial.
    """
    power, position = 1 << 31, 3
    while nbytes:
        if nbytes & 1:
            power = _multiply(_SQUARES[position % 32], power)
        nbytes, position = nbytes >> 1, position + 1
    return _multiply(power, first) ^ second


def _multiply(a: int, b: int) -> int:
    """The product of two polynomials, bits reversed, modulo the polynomial of the checksum."""
    product, bit = 0, 1 << 31
    while bit:
        if a & bit:
            product ^= b
        bit >>= 1
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


_SQUARES = [1 << 30]  # the polynomials x to the power of 1, 2, 4, 8, ...
while len(_SQUARES) < 32:
    _SQUARES.append(_multiply(_SQUARES[-1], _SQUARES[-1]))


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file that did not exist, durable when the context ends."""
    with open(path, "xb", buffering=_BUFFER_NBYTES) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


# --------------------------------------------------------------------------------------------------------------- pieces


def _overflows(elements: Tensor, cast: Tensor) -> bool:
    """Whether finite elements have no finite value like theirs in another dtype."""
    # Torch answers few questions for eight bits.
    before, after = (t.float() if t.is_floating_point() and t.itemsize == 1 else t for t in (elements, cast))
    lost = ~after.isfinite()
    if before.is_floating_point() and after is not cast:  # some become the largest
        lost |= before.abs() > torch.finfo(cast.dtype).max
    return bool((before.isfinite() & lost).any())


def _pieces(tensor: Tensor) -> Iterator[tuple[Tensor, int | None]]:
    """Elements in order, and the CRC-32 of each piece if it is known. The memory of one piece is that of the next."""
    step = max(1, WRITTEN_NBYTES // tensor.dtype.itemsize)
    if isinstance(tensor, StoredTensor) and tensor.memory is not None:
        tensor = tensor.memory
    if not isinstance(tensor, StoredTensor):
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
        yield from ((flat[begin : begin + step], None) for begin in range(0, flat.numel(), step))
        return
    with untracked():
        buffer = torch.empty(min(step, tensor.numel()), dtype=tensor.dtype)
    if tensor._item.split is not None:  # part after part first, for the checksums: not in the order of the elements
        parts = replace(tensor._item, shape=(tensor.numel(),), split=None)
        for _ in _pieces(StoredTensor(tensor._source, tensor.key, parts)):
            pass
    # Pieces that do not cross the border of a chunk, because a checksum is that of a chunk.
    whole = Chunk(0, tensor.numel(), "", 0, None)
    chunks = () if tensor._item.split is not None else tensor._item.chunks
    for chunk in chunks or ([whole] if tensor.numel() else []):
        crc32, end = 0, chunk.start + chunk.numel
        for begin in range(chunk.start, end, step):
            elements = buffer[: min(step, end - begin)]
            read_slices([(tensor, begin, elements)])
            known = zlib.crc32(raw_memory(elements))
            crc32 = combine(crc32, known, elements.nbytes) if crc32 else known
            yield elements, known
        if chunk.crc32 is not None and chunk.crc32 != crc32:
            raise CheckpointError(
                f"'{chunk.file}' is damaged: the elements of '{tensor.key}' at byte {chunk.offset} do not match their "
                "checksum. Use another checkpoint."
            )


def stored_identity(tensor: Tensor) -> Hashable:
    """Equal for tensors whose elements are the same bytes in a file or in memory; unique if there are none."""
    if not tensor.numel():
        return id(tensor), "empty"
    if isinstance(tensor, StoredTensor) and tensor.memory is not None:
        tensor = tensor.memory
    if isinstance(tensor, StoredTensor):
        return id(tensor._source), replace(tensor._item, path=())
    if tensor.layout is not torch.strided or tensor.is_meta:
        return id(tensor), "no memory of its own"
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
