"""Comparing the files of a checkpoint with their checksums: all of them, or a sample.

What has checksums: in a directory of our own, the record, every file, and every chunk of a tensor, which says whose
values are damaged; in archives of ``torch.save``, alone or in a stock directory, every entry, unless torch was told
not to compute any. The index of a stock directory has none, and neither have safetensors, nor what torch wrote before
1.6: they are whole or not, and nothing says which.

[Note: The sample]

A full check takes several times the processor time of a load (docs/checkpoints.md). What a run resumes from is
checked in part, without being asked: of each data file, tensors that together have a twentieth of its bytes, or the
smallest one, drawn at random with the record's checksum as the seed, so that every rank and every repetition draws the
same; and whole files up to 1 MiB, and those with nothing else to compare. That finds a file that is not the one
that was saved, and long stretches of zeros or noise. A single changed bit it finds once in twenty times.
"""

from __future__ import annotations

import os
import random
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from io import BufferedReader
from typing import NamedTuple

from lightning_zero.checkpoint.format.dcp import archives
from lightning_zero.checkpoint.format.record import META_FILE, METADATA_FILE, StoredBytes, TensorItem
from lightning_zero.checkpoint.format.torch_file import ZIP, archive_entries
from lightning_zero.checkpoint.load import Directory, Found, Kind, find_checkpoint, foreign_items, read_checkpoint
from lightning_zero.checkpoint.save import LARGE_NBYTES, combine
from lightning_zero.checkpoint.storage.files import PIECE_NBYTES, Files, open_range, read_bytes
from lightning_zero.comm import ControlGroup
from lightning_zero.errors import CheckpointError, shortened, some

__all__ = ["Verification", "own_checks", "run_checks", "verify_checkpoint", "verify_together"]

Progress = Callable[[int], object]

_NAMED = 8  # how many damages a message spells out
_SAMPLED = 20  # one byte of so many
_WHOLE_NBYTES = 1 << 20
_PIECE_NBYTES = 1 << 20


class Verification(list[str]):
    """What is damaged, each with the name of the file and, if it is known, of the tensor.

    ``unverified`` names the files that are not known to be whole either, because they have no checksums.
    """

    def __init__(self, damages: Sequence[str], unverified: Sequence[str]) -> None:
        super().__init__(damages)
        self.unverified = list(dict.fromkeys(unverified))

    @property
    def is_whole(self) -> bool:
        """Whether every byte that counts is known to be as it was saved."""
        return not self and not self.unverified

    def doubt(self) -> str:
        """A sentence about what is not known, if anything is."""
        if not self.unverified:
            return ""
        return (
            f"It cannot be verified: changed bytes would not be noticed, without checksums for {some(self.unverified)}"
        )


class _NoChecksum(str):
    """The name of a file that has none, among damages."""


class Check(NamedTuple):
    """A part of a checkpoint with checksums of its own: its size, and what reads it and gives what is damaged."""

    nbytes: int
    damages: Callable[[Progress], Iterator[str]]


def verify_checkpoint(path: str | os.PathLike[str], *, progress: Progress = lambda nbytes: None) -> Verification:
    """Read a whole checkpoint and compare it with its sizes and checksums, as far as it has any.

    Args:
        path: as for ``open_checkpoint``.
        progress: called with the number of bytes, for every piece that was read.

    Returns:
        A list of what is damaged. An empty list means an intact checkpoint only if ``is_whole`` is true; ``unverified``
        names the files without checksums.
    """
    try:
        found = find_checkpoint(path)
        result = run_checks(_checks(path, found), progress)
        if not result:
            read_checkpoint(path, found, None)
    except CheckpointError as error:
        return Verification([str(error)], [])
    except Exception as error:  # what was forged can raise anything
        return Verification([shortened(f"'{os.fspath(path)}' is damaged: {type(error).__name__}: {error}")], [])
    return Verification([shortened(damage) for damage in result], result.unverified)


def verify_together(path: str | os.PathLike[str], found: Found, control: ControlGroup, *, sampled: bool) -> None:
    """Verify what ``open_checkpoint`` has opened, or a sample of it: each rank a part.

    A warning on rank 0 names what has no checksums, unless ``sampled``. Raises CheckpointError on every rank if
    something is damaged. Collective: every rank.
    """

    def share() -> list[str]:
        loads = [0] * control.world_size
        mine = []
        # The largest first, each for the rank that has least to read.
        for check in sorted(_checks(path, found, sampled=sampled), key=lambda check: -check.nbytes):
            rank = loads.index(min(loads))
            loads[rank] += check.nbytes + 1
            if rank == control.rank:
                mine.append(check)
        result = run_checks(mine, lambda nbytes: None)
        if result:
            more = [f"and {len(result) - _NAMED} more"] if len(result) > _NAMED else []
            raise CheckpointError("\n    ".join(["it is damaged.", *result[:_NAMED], *more]))
        return result.unverified

    shares = control.together(f"verify the checkpoint '{os.fspath(path)}'", share)
    doubt = Verification([], [name for names in shares for name in names]).doubt()
    if doubt and not sampled and control.rank == 0:
        warnings.warn(f"The checkpoint '{os.fspath(path)}' was loaded. {doubt}.", stacklevel=3)


def run_checks(checks: Iterable[Check], progress: Progress) -> Verification:
    """Read parts of a checkpoint; ``progress`` is told the number of bytes of every piece."""
    damages: list[str] = []
    unverified: list[str] = []
    for check in checks:
        try:
            for text in check.damages(progress):
                (unverified if isinstance(text, _NoChecksum) else damages).append(text)
        except CheckpointError as error:
            damages.append(str(error))
    return Verification(damages, unverified)


def _checks(path: str | os.PathLike[str], found: Found, *, sampled: bool = False) -> list[Check]:
    """What there is to check, in an order that is the same on every rank; of a sample, nothing in other formats."""
    kind, files, name = found.kind, found.files, found.name
    if kind is Kind.OWN:
        return own_checks(found.directory, sampled=sampled)
    if sampled:
        return []
    if kind is Kind.FOREIGN:
        return foreign_checks(files)
    if kind in (Kind.TORCH, Kind.DEEPSPEED):
        names = [name] if kind is Kind.TORCH else [name for name, _ in read_checkpoint(path, found, None).digest]
        return [archive_check(files, StoredBytes(name, 0, files.size(name)), f"'{name}'") for name in names]
    return [unverifiable_check(f"{files.name}/{name}" if name else files.name)]


def unverifiable_check(name: str) -> Check:
    """For a file of a format that has no checksums."""
    return Check(0, lambda _: iter([_NoChecksum(f"'{name}'")]))


_Ranges = dict[tuple[int, int, int], list[str]]  # byte, size and checksum -> the names of the tensors that lie there


def own_checks(directory: Directory, *, sampled: bool = False) -> list[Check]:
    """What there is to check in a directory of our own, or of a sample of it. See [Note: The sample]."""
    ranges: dict[str, _Ranges] = {name: {} for name in directory.record.files}
    for key, item in directory.record.items.items():
        if isinstance(item, TensorItem):
            for chunk in item.chunks:
                if chunk.crc32 is not None:
                    place = (chunk.offset, chunk.numel * item.dtype.itemsize, chunk.crc32)
                    ranges[chunk.file].setdefault(place, []).append(key)
    checks = []
    for name, entry in directory.record.files.items():
        chosen, is_whole = ranges[name], not sampled or entry.nbytes <= _WHOLE_NBYTES or not ranges[name]
        if not is_whole:
            chosen = _sample(chosen, entry.nbytes // _SAMPLED, directory.digest)
        nbytes = entry.nbytes if is_whole else sum(length for _, length, _ in chosen)
        checks.append(Check(nbytes, partial(_file_damages, directory, name, chosen, is_whole)))
    return checks


def _sample(ranges: _Ranges, nbytes: int, seed: int) -> _Ranges:
    """Some of the ranges, together of at most so many bytes; at least one."""
    order = sorted(ranges)
    random.Random(seed).shuffle(order)
    chosen: _Ranges = {}
    for place in order:
        if place[1] <= nbytes:
            chosen[place] = ranges[place]
            nbytes -= place[1]
    smallest = min(order, key=lambda place: place[1])
    return chosen or {smallest: ranges[smallest]}


def _file_damages(
    directory: Directory, name: str, ranges: _Ranges, is_whole: bool, progress: Progress
) -> Iterator[str]:
    """Compare a file with the record, from its beginning to its end: each range, and the whole."""
    directory.check_size(name)
    where = f"'{directory.files.name}/{name}'"
    nbytes, expected = directory.record.files[name].nbytes, directory.record.files[name].crc32
    # What lies between the parts of a sample is not read.
    ahead = PIECE_NBYTES if is_whole else 1
    file = open_range(directory.files, name, 0, nbytes, buffer_nbytes=ahead, progress=progress)
    whole = end = 0
    damaged = False
    for (offset, length, crc32), names in sorted(ranges.items()):
        if offset >= end and is_whole:
            whole, _ = _crc32(file, end, offset - end, whole)
            whole, found = _crc32(file, offset, length, whole)
            end = offset + length
        else:  # alone, or shares bytes with another
            _, found = _crc32(file, offset, length, 0)
        if found != crc32:
            damaged = True
            tensors = " and ".join(f"'{name}'" for name in names)
            yield f"{where} is damaged: {length} bytes of {tensors} at byte {offset} do not match their checksum."
    if not is_whole:
        return
    if expected is None:
        yield _NoChecksum(where)
        return
    whole, _ = _crc32(file, end, nbytes - end, whole)
    if whole != expected and not damaged:
        yield f"{where} is damaged: it does not match its checksum, in bytes that belong to no tensor."


def _crc32(file: BufferedReader, offset: int, nbytes: int, whole: int) -> tuple[int, int]:
    """The checksum of all from before continued over a range, and that of the range alone."""
    alone, done = 0, 0
    file.seek(offset)
    while done < nbytes:
        piece = file.read(min(nbytes - done, _PIECE_NBYTES))
        alone = zlib.crc32(piece, alone)
        if nbytes < LARGE_NBYTES:
            whole = zlib.crc32(piece, whole)
        done += len(piece)
    return combine(whole, alone, nbytes) if nbytes >= LARGE_NBYTES else whole, alone


def foreign_checks(files: Files) -> list[Check]:
    """What there is to check in a stock directory."""
    names: dict[StoredBytes, list[str]] = {}
    for name, place in archives(foreign_items(files)[0]):
        names.setdefault(place, []).append(name)
    checks = [
        archive_check(files, place, "the data of " + " and ".join(f"'{name}'" for name in found))
        for place, found in names.items()
    ]
    if files.has(META_FILE):
        checks.append(archive_check(files, StoredBytes(META_FILE, 0, files.size(META_FILE)), "what is not sharded"))
    return [*checks, unverifiable_check(f"{files.name}/{METADATA_FILE}")]


def archive_check(files: Files, place: StoredBytes, what: str) -> Check:
    """For an archive of ``torch.save``."""
    return Check(place.nbytes, partial(_archive_damages, files, place, what))


def _archive_damages(files: Files, place: StoredBytes, what: str, progress: Progress) -> Iterator[str]:
    """Compare an archive with the checksums of its entries."""
    where = f"'{files.name}/{place.file}'"
    start = read_bytes(files, place.file, place.offset, min(len(ZIP), place.nbytes))
    if start.startswith(b"\x80") and not place.offset:  # a pickle first: the format of torch until 1.6
        yield _NoChecksum(where)
        return
    file = open_range(files, *place, progress=progress)
    try:
        entries = archive_entries(file)
        with zipfile.ZipFile(file) as archive:
            for entry in entries.values():
                if entry.CRC:
                    with archive.open(entry) as content:
                        while content.read(_PIECE_NBYTES):  # raises at its end if the checksum is another
                            pass
    except CheckpointError:
        raise
    except Exception as error:  # a damaged archive can raise anything
        yield f"{where} is damaged at byte {place.offset} and after, in {what}: {error}"
        return
    if any(entry.file_size and not entry.CRC for entry in entries.values()):  # torch writes 0 when told to compute none
        yield _NoChecksum(where)
