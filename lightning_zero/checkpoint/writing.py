"""Writing tensors into files a piece at a time: to the end of one with its checksum, or to a place in it, cast.

The checksums are CRC-32s, as of zip. That of a whole file is put together of those of its parts where they are known.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, BinaryIO

import torch
from torch import Tensor
from tqdm import tqdm

from lightning_zero._torch import untracked
from lightning_zero.checkpoint.format.record import Chunk
from lightning_zero.checkpoint.format.stored import StoredTensor
from lightning_zero.checkpoint.format.torch_file import TorchFile
from lightning_zero.checkpoint.format.typed_json import raw_memory
from lightning_zero.checkpoint.storage.files import WRITTEN_NBYTES
from lightning_zero.errors import CheckpointError

__all__ = [
    "LARGE_NBYTES",
    "ChecksummedFile",
    "Pieces",
    "combine",
    "new_file",
    "progress_bar",
    "stored_identity",
    "write_bytes",
]

_POLYNOMIAL = 0xEDB88320  # of zlib and zip, bits reversed
_BUFFER_NBYTES = 1 << 20  # of what is written at a time of many small archives
LARGE_NBYTES = 1 << 18  # from here on ``combine`` (0.05 ms) is faster than computing a second time


class ChecksummedFile:
    """Appends to a file that is new and written through this object only, and knows the checksum of it, if wanted."""

    def __init__(self, file: IO[bytes], wanted: bool = True) -> None:
        self._file = file
        self._wanted = wanted
        self._crc32 = 0
        self.nbytes = 0  # written so far

    @property
    def checksum(self) -> int | None:
        """The CRC-32 of all that was written; ``None`` if it was not wanted."""
        return self._crc32 if self._wanted else None

    def write(self, data: bytes | memoryview) -> None:
        """Append one-dimensional bytes."""
        self._append(data)
        if self._wanted:
            self._crc32 = zlib.crc32(data, self._crc32)

    def write_elements(self, tensor: Tensor) -> int | None:
        """Append the elements of a tensor on any device or in a file, a piece at a time. Returns their CRC-32."""
        crc32, nbytes = 0, tensor.numel() * tensor.dtype.itemsize
        for elements, _ in _pieces(tensor):
            memory = raw_memory(elements)
            self._append(memory)
            if self._wanted:
                crc32 = zlib.crc32(memory, crc32)
                if nbytes < LARGE_NBYTES:
                    self._crc32 = zlib.crc32(memory, self._crc32)
        if self._wanted and nbytes >= LARGE_NBYTES:
            self._crc32 = combine(self._crc32, crc32, nbytes)
        return crc32 if self._wanted else None

    def write_archive(self, layout: TorchFile, *in_holes: Tensor) -> list[int | None]:
        """Append a torch file, with tensors for its holes. Returns the CRC-32 of the elements in every place."""
        found: list[int | None] = []
        holes = iter(in_holes)
        tensors = iter([next(holes) if place.tensor is None else place.tensor for place in layout.places])
        # The frame asks for the checksum of a tensor after the loop has written it.
        for _, content in layout.frame(crc32 or 0 for crc32 in found):
            self.write(content)
            if (tensor := next(tensors, None)) is not None:
                found.append(self.write_elements(tensor))
        return found

    def _append(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self.nbytes += len(data)


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


class Pieces:
    """Tensors to be written, each known by a key that tied ones share."""

    def __init__(self) -> None:
        # Of tensors with finite elements that a cast made infinite, NaN or the largest of their dtype.
        self.overflowed: set[Hashable] = set()
        self._tensors: dict[Hashable, tuple[Tensor, torch.dtype]] = {}

    def add(self, tensor: Tensor, dtype: torch.dtype) -> Hashable:
        """Take a tensor in, to be written in a dtype. Returns its key."""
        key = (stored_identity(tensor), dtype)
        self._tensors.setdefault(key, (tensor, dtype))
        return key

    def write(
        self, what: Hashable | Tensor, descriptor: int, offset: int, advance: Callable[[int], Any] = lambda _: None
    ) -> int:
        """Write the elements of a tensor, or of the one added under a key, at an offset of a file.

        ``advance`` is told the bytes of every piece when it is written. Returns the CRC-32 of what was written; 0 if
        torch is set to compute none. ``CheckpointError`` if what is read does not match its checksum.
        """
        tensor, dtype = (what, what.dtype) if isinstance(what, Tensor) else self._tensors[what]
        crc32, wanted = 0, torch.serialization.get_crc32_options()
        for elements, known in _pieces(tensor):
            cast = elements.to(dtype)
            if dtype != tensor.dtype and _overflows(elements, cast):
                self.overflowed.add(what)
            memory = raw_memory(cast)
            write_bytes(descriptor, offset, memory)
            if wanted and known is not None and dtype == tensor.dtype:
                crc32 = combine(crc32, known, len(memory)) if crc32 else known
            elif wanted:
                crc32 = zlib.crc32(memory, crc32)
            offset += len(memory)
            advance(len(memory))
        return crc32


def _overflows(elements: Tensor, cast: Tensor) -> bool:
    """Whether finite elements have no finite value like theirs in another dtype."""
    finite = _wide(elements).isfinite()
    lost = ~_wide(cast).isfinite()
    if cast.is_floating_point() and cast.itemsize == 1 and elements.is_floating_point():  # some become the largest
        lost |= _wide(elements).abs() > torch.finfo(cast.dtype).max
    return bool((finite & lost).any())


def _wide(elements: Tensor) -> Tensor:
    """For questions that torch does not answer for eight bits."""
    return elements.float() if elements.is_floating_point() and elements.itemsize == 1 else elements


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
    # Pieces that do not cross the border of a chunk, because a checksum is that of a chunk.
    whole = Chunk(0, tensor.numel(), "", 0, None)
    for chunk in tensor._item.chunks or ([whole] if tensor.numel() else []):
        crc32, end = 0, chunk.start + chunk.numel
        for begin in range(chunk.start, end, step):
            elements = buffer[: min(step, end - begin)]
            tensor.read_into(elements, begin)
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


def write_bytes(descriptor: int, offset: int, content: bytes | memoryview) -> None:
    """Write all of ``content`` at an offset of a file."""
    memory = memoryview(content)
    done = 0
    while done < len(memory):
        done += os.pwrite(descriptor, memory[done:], offset + done)


def progress_bar(name: str, nbytes: int, shown: bool) -> tqdm[Any]:
    """A progress bar over bytes, on a terminal."""
    return tqdm(total=nbytes, desc=name, unit="B", unit_scale=True, disable=None if shown else True)
