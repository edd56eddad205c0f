"""Opening and verifying a checkpoint of any kind, which is found out by looking.

What has checksums: in a directory of our own, the record, every file, and every chunk of a tensor, which says whose
values are damaged; in archives of ``torch.save``, alone or in a stock directory, every entry, unless torch was told
not to compute any; nothing in safetensors.
"""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple

from lightning_zero.checkpoint.agreement import Control, collect
from lightning_zero.checkpoint.directories import (
    Directory,
    ForeignDirectory,
    load_together,
    read_directory,
    read_foreign_directory,
)
from lightning_zero.checkpoint.format.dcp import StoredBytes
from lightning_zero.checkpoint.format.items import Opened
from lightning_zero.checkpoint.format.record import META_FILE, METADATA_FILE, RECORD_FILE, TensorItem
from lightning_zero.checkpoint.format.safetensors import (
    INDEX_FILE,
    SINGLE_FILE,
    read_safetensors,
    read_safetensors_directory,
)
from lightning_zero.checkpoint.format.stored import StoredTensor
from lightning_zero.checkpoint.format.torch_file import read_torch_file
from lightning_zero.checkpoint.storage.files import (
    PIECE_NBYTES,
    Files,
    HttpFiles,
    Window,
    is_folder,
    open_folder,
    open_parent,
    read_bytes,
)
from lightning_zero.checkpoint.storage.http import is_http
from lightning_zero.errors import CheckpointError

__all__ = [
    "Found",
    "Kind",
    "find_checkpoint",
    "is_checkpoint_directory_at",
    "open_checkpoint",
    "read_checkpoint",
    "require_lightning",
    "verify_checkpoint",
    "verify_together",
]


def open_checkpoint(
    path: str | os.PathLike[str], control: Control, *, verify: bool = False, weights_only: bool | None = None
) -> dict[str, Any]:
    """Read what a checkpoint says of itself; tensors stay on disk until they are asked for.

    Args:
        path: a directory of ours, of ``torch.distributed.checkpoint`` or of Hugging Face, a safetensors file, or a
            file of ``torch.save``; local or the URL of any file system that fsspec knows.
        control: the ranks.
        verify: check every checksum there is before anything is used, each rank a part of the files.
        weights_only: whether pickles of other programs are refused if they could run code, as for ``torch.load``;
            by default they are. Our own directories hold none that is needed.

    Returns:
        Lightning's checkpoint dictionary. Tensors are StoredTensors, or mapped from a torch file. What is only
        weights is under ``state_dict``.

    Raises:
        CheckpointError: on every rank, naming the file, if it is no whole checkpoint, if it could run code, or if the
            ranks see different ones.

    Collective: every rank.
    """
    found: list[Found] = []

    def load() -> Opened:
        found.append(find_checkpoint(path))
        return read_checkpoint(path, found[0], weights_only)

    checkpoint = load_together(path, control, load)
    if verify:
        verify_together(path, found[0], control)
    return checkpoint


def require_lightning(checkpoint: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Make sure that Lightning wrote a checkpoint, so that a run can go on from it: ``CheckpointError``."""
    if "pytorch-lightning_version" not in checkpoint:
        raise CheckpointError(
            f"'{os.fspath(path)}' is no checkpoint of a Trainer and holds weights only: a run cannot go on from it. To "
            "begin one with these weights, use CheckpointPolicy(initial_weights=...) in place of `ckpt_path`."
        )


def is_checkpoint_directory_at(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a directory, local or behind a URL, that ``open_checkpoint`` reads. Looks at names only."""
    try:
        return find_checkpoint(path).kind in (Kind.OWN, Kind.FOREIGN, Kind.HUGGING_FACE)
    except CheckpointError:
        return False


_SAMPLE_NBYTES = 1 << 14
_END_NBYTES = 1 << 20  # of a torch file: the directory of the archive, with a CRC-32 of every tensor


class Kind(Enum):
    """What a checkpoint is, by what it is told from."""

    OWN = auto()  # a directory with our record
    FOREIGN = auto()  # a directory with DCP's index
    HUGGING_FACE = auto()  # a directory with safetensors of the usual names
    SAFETENSORS = auto()  # a file of that ending
    TORCH = auto()  # any other file


class Found(NamedTuple):
    """What is at a path.

    Attributes:
        kind: what it is.
        files: the folder that is the checkpoint, or that it lies in.
        name: of the file in it; empty for a folder.
    """

    kind: Kind
    files: Files
    name: str = ""


def find_checkpoint(path: str | os.PathLike[str]) -> Found:
    """Look what is at a path.

    Raises:
        CheckpointError: if it is nothing that can be a checkpoint.
    """
    if not (_is_folder_of_a_server(path) if is_http(path) else is_folder(path)):
        files, name = open_parent(path)
        if not files.has(name):
            or_hidden = ", or the server does not let us read it" if is_http(path) else ""
            raise CheckpointError(
                f"There is no checkpoint at '{os.fspath(path)}': no such file or directory{or_hidden}."
            )
        ending = name.partition("?")[0].lower() if is_http(path) else name.lower()
        return Found(Kind.SAFETENSORS if ending.endswith(".safetensors") else Kind.TORCH, files, name)
    files = open_folder(path)
    if files.has(RECORD_FILE):
        return Found(Kind.OWN, files)
    if files.has(METADATA_FILE):
        return Found(Kind.FOREIGN, files)
    files = open_folder(path, follow_links=True)
    if files.has(INDEX_FILE) or files.has(SINGLE_FILE):
        return Found(Kind.HUGGING_FACE, files)
    raise CheckpointError(
        f"The directory '{os.fspath(path)}' is no checkpoint: it has neither {RECORD_FILE} nor {METADATA_FILE}, "
        f"{SINGLE_FILE} or {INDEX_FILE}. If it was being written, use the one before."
    )


def read_checkpoint(path: str | os.PathLike[str], found: Found, weights_only: bool | None) -> Opened:
    """What a checkpoint of any kind says of itself; ``open_checkpoint`` on this rank alone."""
    kind, files, name = found
    if kind is Kind.OWN:
        return read_directory(files)
    if kind is Kind.FOREIGN:
        return read_foreign_directory(files, weights_only)
    if kind is Kind.HUGGING_FACE:
        return _with_samples(read_safetensors_directory(files), files)
    if kind is Kind.SAFETENSORS:
        return _with_samples(read_safetensors(files, name), files)
    with files.copied(name) if isinstance(files, HttpFiles) else nullcontext() as copied:
        digest = _samples(files, name, _END_NBYTES)  # first of all asks for the size: a pipe would never end
        return read_torch_file(path, weights_only, copied)._replace(digest=digest)


def _is_folder_of_a_server(url: str | os.PathLike[str]) -> bool:
    """Whether a checkpoint directory lies at an address, by what such directories hold. A signed address has a file."""
    files = open_folder(url)
    return "?" not in os.fspath(url) and any(
        files.has(name) for name in (RECORD_FILE, METADATA_FILE, INDEX_FILE, SINGLE_FILE)
    )


def _with_samples(opened: Opened, files: Files) -> Opened:
    """Headers of safetensors are the same for all weights of a model: the digest is of some elements too."""
    stored = [value for value in opened.checkpoint["state_dict"].values() if isinstance(value, StoredTensor)]
    names = sorted({chunk.file for value in stored for chunk in value._item.chunks})
    return opened._replace(digest=(opened.digest, *(_samples(files, name) for name in names)))


def _samples(files: Files, name: str, end_nbytes: int = _SAMPLE_NBYTES) -> tuple[int, ...]:
    """The size of a file, and checksums of its beginning, middle and end that tell it from another of that size."""
    size = files.size(name)
    parts = [(0, _SAMPLE_NBYTES), (size // 2, _SAMPLE_NBYTES), (max(0, size - end_nbytes), end_nbytes)]
    return size, *(zlib.crc32(read_bytes(files, name, start, min(nbytes, size - start))) for start, nbytes in parts)


Progress = Callable[[int], None]

_NAMED = 8  # how many damages a message spells out


def verify_checkpoint(path: str | os.PathLike[str], *, progress: Progress | None = None) -> list[str]:
    """Read a whole checkpoint and compare it with its sizes and checksums.

    Args:
        path: as for ``open_checkpoint``.
        progress: called with the number of bytes, for every piece that was read.

    Returns:
        What is damaged, each with the name of the file and, if it is known, of the tensor; nothing if it is whole.
    """
    try:
        found = find_checkpoint(path)
        checks = _checks(found)
        damages = [damage for check in checks for damage in check.run(progress or (lambda nbytes: None))]
        if not damages:
            read_checkpoint(path, found, None)
    except CheckpointError as error:
        return [str(error)]
    except Exception as error:  # what was forged can raise anything
        return [f"'{os.fspath(path)}' is damaged: {type(error).__name__}: {error}"]
    return damages


def verify_together(path: str | os.PathLike[str], found: Found, control: Control) -> None:
    """Verify a checkpoint, each rank a part of its files; ``CheckpointError`` on every rank. Collective."""

    def verify() -> None:
        checks = _checks(found)
        damages = [damage for check in _share(checks, control) for damage in check.run(lambda nbytes: None)]
        if damages:
            more = [f"and {len(damages) - _NAMED} more"] if len(damages) > _NAMED else []
            raise CheckpointError("\n    ".join(["it is damaged.", *damages[:_NAMED], *more]))

    collect(control, f"verify the checkpoint '{os.fspath(path)}'", verify)


def _checks(found: Found) -> list[_FileCheck | _ArchiveCheck]:
    """What there is to check, in an order that is the same on every rank."""
    kind, files, name = found
    if kind is Kind.OWN:
        return _own_checks(Directory(files))
    if kind is Kind.FOREIGN:
        return _foreign_checks(ForeignDirectory(files))
    if kind is Kind.TORCH:
        return [_ArchiveCheck(files, StoredBytes(name, 0, files.size(name)), f"'{files.name}/{name}'")]
    return []


def _share(checks: list[_FileCheck | _ArchiveCheck], control: Control) -> list[_FileCheck | _ArchiveCheck]:
    """This rank's part: the largest first, each to the rank that has least to read."""
    shares: list[list[_FileCheck | _ArchiveCheck]] = [[] for _ in range(control.world_size)]
    loads = [0] * control.world_size
    for check in sorted(checks, key=lambda check: -check.nbytes):
        rank = loads.index(min(loads))
        shares[rank].append(check)
        loads[rank] += check.nbytes + 1
    return shares[control.rank]


@dataclass
class _FileCheck:
    """A file against the checksums of the record."""

    directory: Directory
    name: str
    # Byte, size and checksum of what has one by itself, and the names of the tensors.
    ranges: dict[tuple[int, int, int], list[str]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return self.directory.record.files[self.name].nbytes

    def run(self, progress: Progress) -> list[str]:
        files = self.directory.files
        try:
            self.directory.check_size(self.name)
            return list(self._damages(f"'{files.name}/{self.name}'", _Reader(files, self.name, progress)))
        except CheckpointError as error:
            return [str(error)]

    def _damages(self, where: str, reader: _Reader) -> Iterator[str]:
        expected = self.directory.record.files[self.name].crc32
        whole = end = 0
        damaged = False
        for (offset, nbytes, crc32), names in sorted(self.ranges.items()):
            if offset >= end:
                whole, _ = reader.crc32(end, offset - end, whole)
                whole, found = reader.crc32(offset, nbytes, whole)
                end = offset + nbytes
            else:  # shares bytes with another
                _, found = reader.crc32(offset, nbytes, 0)
            if found != crc32:
                damaged = True
                tensors = " and ".join(f"'{name}'" for name in names)
                yield f"{where} is damaged: {nbytes} bytes of {tensors} at byte {offset} do not match their checksum."
        if expected is not None:
            whole, _ = reader.crc32(end, self.nbytes - end, whole)
            if whole != expected and not damaged:
                yield f"{where} is damaged: it does not match its checksum, in bytes that belong to no tensor."


class _Reader:
    """Reads one file for checksums only, from its beginning to its end in large pieces."""

    def __init__(self, files: Files, name: str, progress: Progress) -> None:
        self._files = files
        self._name = name
        self._progress = progress
        self._nbytes = files.size(name)
        self._buffer = bytearray(min(self._nbytes, PIECE_NBYTES))
        self._start = 0  # of what is in the buffer
        self._filled = 0

    def crc32(self, offset: int, nbytes: int, whole: int) -> tuple[int, int]:
        """The checksum of all from before continued over a range, and that of the range alone."""
        alone, end = 0, offset + nbytes
        while offset < end:
            piece = self._piece(offset)[: end - offset]
            whole, alone = zlib.crc32(piece, whole), zlib.crc32(piece, alone)
            offset += len(piece)
        return whole, alone

    def _piece(self, offset: int) -> memoryview:
        """What is in the buffer from an offset; it is filled first if there is nothing."""
        if not self._start <= offset < self._start + self._filled:
            self._start, self._filled = offset, 0
            count = min(len(self._buffer), self._nbytes - offset)
            self._files.read_into(self._name, offset, memoryview(self._buffer)[:count])
            self._filled = count
            self._progress(count)
        return memoryview(self._buffer)[offset - self._start : self._filled]


def _own_checks(directory: Directory) -> list[_FileCheck | _ArchiveCheck]:
    checks = {name: _FileCheck(directory, name) for name in directory.record.files}
    for key, item in directory.record.items.items():
        if isinstance(item, TensorItem):
            for chunk in item.chunks:
                if chunk.crc32 is not None:
                    place = (chunk.offset, chunk.numel * item.dtype.itemsize, chunk.crc32)
                    checks[chunk.file].ranges.setdefault(place, []).append(key)
    return [*checks.values()]


@dataclass
class _ArchiveCheck:
    """An archive against the checksums of its entries; one without any, or of another kind, is taken as it is."""

    files: Files
    place: StoredBytes
    what: str

    @property
    def nbytes(self) -> int:
        return self.place.nbytes

    def run(self, progress: Progress) -> list[str]:
        where = f"'{self.files.name}/{self.place.file}'"
        try:
            window = Window(partial(self._read_into, progress), self.nbytes)
            with zipfile.ZipFile(io.BufferedReader(window, 1 << 20)) as archive:
                for entry in archive.infolist():
                    if entry.CRC:  # torch writes 0 when told to compute none
                        _read_through(archive, entry)
        except CheckpointError as error:
            return [str(error)]
        except Exception as error:  # a damaged archive can raise anything
            if self._is_legacy():
                return []
            return [f"{where} is damaged at byte {self.place.offset} and after, in {self.what}: {error}"]
        return []

    def _read_into(self, progress: Progress, offset: int, memory: memoryview) -> None:
        self.files.read_into(self.place.file, self.place.offset + offset, memory)
        progress(len(memory))

    def _is_legacy(self) -> bool:
        """Whether it begins as a pickle, the format of torch until 1.6, which has no checksums."""
        first = bytearray(min(2, self.nbytes))
        self.files.read_into(self.place.file, self.place.offset, memoryview(first))
        return self.place.offset == 0 and first[:1] == b"\x80"


def _read_through(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> None:
    """Read an entry, which raises at its end if the checksum is another."""
    with archive.open(entry) as content:
        while content.read(1 << 20):
            pass


def _foreign_checks(directory: ForeignDirectory) -> list[_FileCheck | _ArchiveCheck]:
    names: dict[StoredBytes, list[str]] = {}
    items: Mapping[str, Any] = directory.index.items
    for name, item in items.items():
        for place in [item] if isinstance(item, StoredBytes) else [stored.archive for stored in item.boxes]:
            names.setdefault(place, []).append(name)
    checks: list[_FileCheck | _ArchiveCheck] = [
        _ArchiveCheck(directory.files, place, "the data of " + " and ".join(f"'{name}'" for name in found))
        for place, found in names.items()
    ]
    if directory.files.has(META_FILE):
        place = StoredBytes(META_FILE, 0, directory.files.size(META_FILE))
        checks.append(_ArchiveCheck(directory.files, place, "what is not sharded"))
    return checks
