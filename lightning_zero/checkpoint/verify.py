"""Comparing everything that is stored with the checksums that were stored with it.

What has one: in a directory of our own, the record, every file, and every chunk of a tensor, which says whose values
are damaged; in archives of ``torch.save``, alone or in a stock directory, every entry, unless torch was told not to
compute any; nothing in safetensors.
"""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from lightning_zero.checkpoint.agreement import Control, collect
from lightning_zero.checkpoint.chunks import PIECE_NBYTES
from lightning_zero.checkpoint.files import Files
from lightning_zero.checkpoint.foreign import ForeignDirectory
from lightning_zero.checkpoint.kinds import Found, Kind, find_checkpoint, read_checkpoint
from lightning_zero.checkpoint.metadata import StoredBytes
from lightning_zero.checkpoint.reader import Directory
from lightning_zero.checkpoint.schema import META_FILE, TensorItem
from lightning_zero.errors import CheckpointError

__all__ = ["verify_checkpoint", "verify_together"]

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
        damages = [damage for check in checks for damage in check.run(progress or _ignore)]
        if not damages:
            read_checkpoint(path, found, None)
    except CheckpointError as error:
        return [str(error)]
    except Exception as error:  # what was forged can raise anything
        return [f"'{os.fspath(path)}' is damaged: {type(error).__name__}: {error}"]
    return damages


def verify_together(path: str | os.PathLike[str], found: Found, control: Control) -> None:
    """Verify a checkpoint, each rank a part of its files.

    Args:
        path: of the checkpoint, for messages.
        found: what is there, the same on every rank.
        control: the ranks.

    Raises:
        CheckpointError: on every rank, naming what is damaged.

    Collective: every rank.
    """

    def verify() -> None:
        checks = _checks(found)
        damages = [damage for check in _share(checks, control) for damage in check.run(_ignore)]
        if damages:
            more = [f"and {len(damages) - _NAMED} more"] if len(damages) > _NAMED else []
            raise CheckpointError("\n    ".join(["it is damaged.", *damages[:_NAMED], *more]))

    collect(control, f"verify the checkpoint '{os.fspath(path)}'", verify)


class _Check(Protocol):
    @property
    def nbytes(self) -> int:
        """Bytes to read."""

    def run(self, progress: Progress) -> list[str]:
        """Read what is to be checked. Returns the damages."""


def _checks(found: Found) -> list[_Check]:
    """What there is to check, in an order that is the same on every rank.

    Raises:
        CheckpointError: if that is damaged which says what there is.
    """
    kind, files, name = found
    if kind is Kind.OWN:
        return _own_checks(Directory(files))
    if kind is Kind.FOREIGN:
        return _foreign_checks(ForeignDirectory(files))
    if kind is Kind.TORCH:
        return [_ArchiveCheck(files, StoredBytes(name, 0, files.size(name)), f"'{files.name}/{name}'")]
    return []


def _share(checks: list[_Check], control: Control) -> list[_Check]:
    """This rank's part: the largest first, each to the rank that has least to read."""
    shares: list[list[_Check]] = [[] for _ in range(control.world_size)]
    loads = [0] * control.world_size
    for check in sorted(checks, key=lambda check: -check.nbytes):
        rank = loads.index(min(loads))
        shares[rank].append(check)
        loads[rank] += check.nbytes + 1
    return shares[control.rank]


def _ignore(nbytes: int) -> None:
    """Show no progress."""


# ---------------------------------------------------------------------------------------------------------------------
# Our own directories


@dataclass
class _FileCheck:
    """A file against the checksums of the record.

    Attributes:
        ranges: byte, size and checksum of what has one by itself, and the names of the tensors.
    """

    directory: Directory
    name: str
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


def _own_checks(directory: Directory) -> list[_Check]:
    checks = {name: _FileCheck(directory, name) for name in directory.record.files}
    for key, item in directory.record.items.items():
        if isinstance(item, TensorItem):
            for chunk in item.chunks:
                if chunk.crc32 is not None:
                    place = (chunk.offset, chunk.numel * item.dtype.itemsize, chunk.crc32)
                    checks[chunk.file].ranges.setdefault(place, []).append(key)
    return [*checks.values()]


# ---------------------------------------------------------------------------------------------------------------------
# Archives of torch.save


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
            with zipfile.ZipFile(io.BufferedReader(_Window(self.files, self.place, progress), 1 << 20)) as archive:
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


class _Window(io.RawIOBase):
    """A range of a file as a file."""

    def __init__(self, files: Files, place: StoredBytes, progress: Progress) -> None:
        self._files = files
        self._place = place
        self._progress = progress
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._place.nbytes}[whence]
        self._position = max(0, origin + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        memory = memoryview(buffer)
        memory = memory[: max(0, min(len(memory), self._place.nbytes - self._position))]
        self._files.read_into(self._place.file, self._place.offset + self._position, memory)
        self._position += len(memory)
        self._progress(len(memory))
        return len(memory)


def _foreign_checks(directory: ForeignDirectory) -> list[_Check]:
    names: dict[StoredBytes, list[str]] = {}
    items: Mapping[str, Any] = directory.index.items
    for name, item in items.items():
        for place in [item] if isinstance(item, StoredBytes) else [stored.archive for stored in item.boxes]:
            names.setdefault(place, []).append(name)
    checks: list[_Check] = [
        _ArchiveCheck(directory.files, place, "the data of " + " and ".join(f"'{name}'" for name in found))
        for place, found in names.items()
    ]
    if directory.files.has(META_FILE):
        place = StoredBytes(META_FILE, 0, directory.files.size(META_FILE))
        checks.append(_ArchiveCheck(directory.files, place, "what is not sharded"))
    return checks
