"""Ranges of the files of a folder: as a file, as an index, and as what tells one file from another."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Callable
from typing import Any

from lightning_zero.checkpoint.storage.files import Files, Window, read_bytes
from lightning_zero.errors import CheckpointError

__all__ = ["MAX_INDEX_NBYTES", "memory_nbytes", "open_range", "read_index", "samples"]

MAX_INDEX_NBYTES = 1 << 29
"""Of a file that says what is in others. Those of a model with a million tensors have a quarter."""

_SAMPLE_NBYTES = 1 << 14
_SMALL_NBYTES = 1 << 20


def open_range(
    files: Files,
    name: str,
    offset: int,
    nbytes: int,
    *,
    buffer_nbytes: int = _SMALL_NBYTES,
    progress: Callable[[int], Any] = lambda nbytes: None,
) -> io.BufferedReader:
    """A range of a file as a file, read in pieces of a size. ``progress`` is told the bytes of each."""

    def read_into(place: int, memory: memoryview) -> None:
        files.read_into(name, offset + place, memory)
        progress(len(memory))

    return io.BufferedReader(Window(read_into, nbytes), max(1, min(buffer_nbytes, nbytes)))


def read_index(files: Files, name: str) -> bytes:
    """A whole file that says what is in others; ``CheckpointError`` if it is larger than any such file."""
    nbytes = files.size(name)
    if nbytes > MAX_INDEX_NBYTES:
        raise CheckpointError(
            f"'{files.name}/{name}' has {nbytes} bytes, which is too large for an index (at most {MAX_INDEX_NBYTES}): "
            "it is damaged or forged."
        )
    return read_bytes(files, name)


def memory_nbytes() -> int:
    """Of this machine: what is larger cannot be held."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def samples(files: Files, name: str, end_nbytes: int = _SAMPLE_NBYTES) -> tuple[int, ...]:
    """The size of a file, and checksums of its beginning, middle and end that tell it from another of that size."""
    size = files.size(name)
    parts = [(0, _SAMPLE_NBYTES), (size // 2, _SAMPLE_NBYTES), (max(0, size - end_nbytes), end_nbytes)]
    return size, *(zlib.crc32(read_bytes(files, name, start, min(nbytes, size - start))) for start, nbytes in parts)
