"""Opening and verifying a checkpoint of any kind, which is found out by looking.

What has checksums: in a directory of our own, the record, every file, and every chunk of a tensor, which says whose
values are damaged; in archives of ``torch.save``, alone or in a stock directory, every entry, unless torch was told
not to compute any; nothing in safetensors.
"""

from __future__ import annotations

import io
import os
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple

from lightning_zero.checkpoint.directories import (
    Directory,
    ForeignDirectory,
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
    is_http,
    open_folder,
    open_parent,
    read_bytes,
)
from lightning_zero.comm import ControlGroup
from lightning_zero.comm.control import collect
from lightning_zero.errors import CheckpointError

__all__ = [
    "Found",
    "Kind",
    "find_checkpoint",
    "is_checkpoint_directory_at",
    "open_checkpoint",
    "verify_checkpoint",
]


def open_checkpoint(
    path: str | os.PathLike[str], control: ControlGroup, *, verify: bool = False, weights_only: bool | None = None
) -> dict[str, Any]:
    """Read what a checkpoint says of itself; tensors stay on disk until they are asked for.

    Args:
        path: a directory of ours, of Lightning's sharded strategies or of ``dcp.save``; a torch file; a safetensors
            file or directory; a local path or a URL.
        control: the ranks.
        verify: read everything that has a checksum and compare it, the files shared out among the ranks.
        weights_only: for torch files and the ``meta.pt`` of other programs, as for ``torch.load``. ``False`` lets them
            run code, which by default they must not. Our own directories hold none that is needed.

    Returns:
        Lightning's checkpoint dictionary. Tensors are StoredTensors, or mapped from a torch file. What is only
        weights is under ``state_dict``. What could run code is left out with a warning on rank 0, or refused.

    Raises:
        CheckpointError: on every rank, naming the file, if it is no whole checkpoint, if it could run code, or if the
            ranks see different ones.

    Collective: every rank.
    """
    what = f"load the checkpoint '{os.fspath(path)}'"
    read: list[tuple[Found, Opened]] = []

    def look() -> Any:
        found = find_checkpoint(path)
        read.append((found, read_checkpoint(path, found, weights_only)))
        return read[0][1].digest

    digests = collect(control, what, look)
    found, (checkpoint, _, missing) = read[0]
    if any(digest != digests[0] for digest in digests):
        raise CheckpointError(f"Could not {what}: the ranks see different directories there. Use a shared file system.")
    if missing and control.rank == 0:
        warnings.warn(
            f"Left out of the checkpoint '{os.fspath(path)}', because loading it could run code: {', '.join(missing)}. "
            f"If it is needed and you trust the file, allow its class with `torch.serialization.add_safe_globals`.",
            stacklevel=2,
        )
    if verify:
        collect(control, f"verify the checkpoint '{os.fspath(path)}'", lambda: _verify_share(found, control))
    return checkpoint


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
    """What is at a path: a checkpoint of a kind, the folder that it is or lies in, and there its name; empty for a
    folder.
    """

    kind: Kind
    files: Files
    name: str = ""


def find_checkpoint(path: str | os.PathLike[str]) -> Found:
    """Look what is at a path; ``CheckpointError`` if it is nothing that can be a checkpoint."""
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


Progress = Callable[[int], Any]

_NAMED = 8  # how many damages a message spells out


def verify_checkpoint(path: str | os.PathLike[str], *, progress: Progress = lambda nbytes: None) -> list[str]:
    """Read a whole checkpoint and compare it with its sizes and checksums.

    Args:
        path: as for ``open_checkpoint``.
        progress: called with the number of bytes, for every piece that was read.

    Returns:
        What is damaged, each with the name of the file and, if it is known, of the tensor; nothing if it is whole.
    """
    try:
        found = find_checkpoint(path)
        damages = [damage for check in _checks(found) for damage in check.run(progress)]
        if not damages:
            read_checkpoint(path, found, None)
    except CheckpointError as error:
        return [str(error)]
    except Exception as error:  # what was forged can raise anything
        return [f"'{os.fspath(path)}' is damaged: {type(error).__name__}: {error}"]
    return damages


def _verify_share(found: Found, control: ControlGroup) -> None:
    """Verify this rank's part of a checkpoint: the largest checks first, each for the rank that has least to read."""
    loads, damages = [0] * control.world_size, []
    for check in sorted(_checks(found), key=lambda check: -check.nbytes):
        rank = loads.index(min(loads))
        loads[rank] += check.nbytes + 1
        if rank == control.rank:
            damages += check.run(lambda nbytes: None)
    if damages:
        more = [f"and {len(damages) - _NAMED} more"] if len(damages) > _NAMED else []
        raise CheckpointError("\n    ".join(["it is damaged.", *damages[:_NAMED], *more]))


class _Check(NamedTuple):
    """A part of a checkpoint with checksums of its own: its size, and what reads it and gives what is damaged."""

    nbytes: int
    damages: Callable[[Progress], Iterator[str]]

    def run(self, progress: Progress) -> list[str]:
        try:
            return list(self.damages(progress))
        except CheckpointError as error:
            return [str(error)]


def _checks(found: Found) -> list[_Check]:
    """What there is to check, in an order that is the same on every rank."""
    kind, files, name = found
    if kind is Kind.OWN:
        return _own_checks(Directory(files))
    if kind is Kind.FOREIGN:
        return _foreign_checks(ForeignDirectory(files))
    if kind is Kind.TORCH:
        return [_archive_check(files, StoredBytes(name, 0, files.size(name)), f"'{files.name}/{name}'")]
    return []


_Ranges = dict[tuple[int, int, int], list[str]]  # byte, size and checksum -> the names of the tensors that lie there


def _own_checks(directory: Directory) -> list[_Check]:
    ranges: dict[str, _Ranges] = {name: {} for name in directory.record.files}
    for key, item in directory.record.items.items():
        if isinstance(item, TensorItem):
            for chunk in item.chunks:
                if chunk.crc32 is not None:
                    place = (chunk.offset, chunk.numel * item.dtype.itemsize, chunk.crc32)
                    ranges[chunk.file].setdefault(place, []).append(key)
    return [
        _Check(entry.nbytes, partial(_file_damages, directory, name, ranges[name]))
        for name, entry in directory.record.files.items()
    ]


def _file_damages(directory: Directory, name: str, ranges: _Ranges, progress: Progress) -> Iterator[str]:
    """Compare a file with the record, from its beginning to its end: each range, and the whole."""
    directory.check_size(name)
    where = f"'{directory.files.name}/{name}'"
    nbytes, expected = directory.record.files[name].nbytes, directory.record.files[name].crc32
    file = _opened(directory.files, StoredBytes(name, 0, nbytes), PIECE_NBYTES, progress)
    whole = end = 0
    damaged = False
    for (offset, length, crc32), names in sorted(ranges.items()):
        if offset >= end:
            whole, _ = _crc32(file, end, offset - end, whole)
            whole, found = _crc32(file, offset, length, whole)
            end = offset + length
        else:  # shares bytes with another
            _, found = _crc32(file, offset, length, 0)
        if found != crc32:
            damaged = True
            tensors = " and ".join(f"'{name}'" for name in names)
            yield f"{where} is damaged: {length} bytes of {tensors} at byte {offset} do not match their checksum."
    if expected is not None:
        whole, _ = _crc32(file, end, nbytes - end, whole)
        if whole != expected and not damaged:
            yield f"{where} is damaged: it does not match its checksum, in bytes that belong to no tensor."


def _opened(files: Files, place: StoredBytes, buffer_nbytes: int, progress: Progress) -> io.BufferedReader:
    """A range of a file, read in pieces of a size."""

    def read_into(offset: int, memory: memoryview) -> None:
        files.read_into(place.file, place.offset + offset, memory)
        progress(len(memory))

    return io.BufferedReader(Window(read_into, place.nbytes), buffer_nbytes)


def _crc32(file: io.BufferedReader, offset: int, nbytes: int, whole: int) -> tuple[int, int]:
    """The checksum of all from before continued over a range, and that of the range alone."""
    alone = 0
    file.seek(offset)
    while nbytes:
        piece = file.read(min(nbytes, 1 << 20))
        whole, alone = zlib.crc32(piece, whole), zlib.crc32(piece, alone)
        nbytes -= len(piece)
    return whole, alone


def _foreign_checks(directory: ForeignDirectory) -> list[_Check]:
    names: dict[StoredBytes, list[str]] = {}
    for name, place in directory.index.places():
        names.setdefault(place, []).append(name)
    files = directory.files
    checks = [
        _archive_check(files, place, "the data of " + " and ".join(f"'{name}'" for name in found))
        for place, found in names.items()
    ]
    if files.has(META_FILE):
        checks.append(_archive_check(files, StoredBytes(META_FILE, 0, files.size(META_FILE)), "what is not sharded"))
    return checks


def _archive_check(files: Files, place: StoredBytes, what: str) -> _Check:
    return _Check(place.nbytes, partial(_archive_damages, files, place, what))


def _archive_damages(files: Files, place: StoredBytes, what: str, progress: Progress) -> Iterator[str]:
    """Compare an archive with the checksums of its entries; one without any, or of another kind, is taken as it is."""
    try:
        with zipfile.ZipFile(_opened(files, place, 1 << 20, progress)) as archive:
            for entry in archive.infolist():
                if entry.CRC:  # torch writes 0 when told to compute none
                    _read_through(archive, entry)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged archive can raise anything
        # The format of torch until 1.6 begins as a pickle, and has no checksums.
        if place.offset or read_bytes(files, place.file, 0, min(1, place.nbytes)) != b"\x80":
            yield f"'{files.name}/{place.file}' is damaged at byte {place.offset} and after, in {what}: {error}"


def _read_through(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> None:
    """Read an entry, which raises at its end if the checksum is another."""
    with archive.open(entry) as content:
        while content.read(1 << 20):
            pass
