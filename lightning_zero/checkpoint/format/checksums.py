"""The CRC-32 of a file while it is written in parts, of which some checksums are known."""

from __future__ import annotations

import zlib
from typing import IO

from torch import Tensor

from lightning_zero.checkpoint.format.torch_file import TorchFile
from lightning_zero.checkpoint.format.typed_json import raw_memory
from lightning_zero.checkpoint.storage.files import WRITTEN_NBYTES

__all__ = ["LARGE_NBYTES", "ChecksummedFile", "combine"]

_POLYNOMIAL = 0xEDB88320  # of zlib and zip, bits reversed
LARGE_NBYTES = 1 << 18  # from here on ``combine`` (0.05 ms) is faster than computing a second time


class ChecksummedFile:
    """Appends to a file, and knows the checksum of all that was written.

    Args:
        file: new and empty, and written through this object only.
        wanted: whether to compute checksums at all.

    Attributes:
        nbytes: written so far.
    """

    def __init__(self, file: IO[bytes], wanted: bool = True) -> None:
        self._file = file
        self._wanted = wanted
        self._crc32 = 0
        self.nbytes = 0

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
        flat, crc32 = tensor.detach().contiguous().view(-1), 0
        step = max(1, WRITTEN_NBYTES // flat.dtype.itemsize)
        for begin in range(0, flat.numel(), step):
            memory = raw_memory(flat[begin : begin + step])
            self._append(memory)
            if self._wanted:
                crc32 = zlib.crc32(memory, crc32)
                if flat.nbytes < LARGE_NBYTES:
                    self._crc32 = zlib.crc32(memory, self._crc32)
        if self._wanted and flat.nbytes >= LARGE_NBYTES:
            self._crc32 = combine(self._crc32, crc32, flat.nbytes)
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
