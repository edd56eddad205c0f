"""The CRC-32 of a file while it is written, without computing that of a large tensor twice."""

from __future__ import annotations

import zlib
from typing import IO

__all__ = ["ChecksummedFile", "combine"]

_POLYNOMIAL = 0xEDB88320  # of zlib and zip, bits reversed
_LARGE_NBYTES = 1 << 18  # from here on ``combine`` (0.05 ms) is faster than computing
_BUFFER_NBYTES = 1 << 20


class ChecksummedFile:
    """Appends to a file and knows the checksum of all that was written.

    ``torch.save`` computes the CRC-32 of a tensor for its archive. A large write is therefore left open until
    ``settle`` is told its checksum; if nobody does, it is read back.

    Args:
        file: new, empty, readable, and written through this object only.
        wanted: whether to know the checksum at all.

    Attributes:
        failure: the first error of a write.
    """

    def __init__(self, file: IO[bytes], wanted: bool = True) -> None:
        self._file = file
        self._wanted = wanted
        self._buffer = bytearray()
        self._nbytes = 0  # without the buffer
        self._crc32 = 0  # of what is before the open write
        self._open: tuple[int, int] | None = None  # first and last byte of the open write
        self._after = bytearray()  # what was written after it
        self.failure: OSError | None = None

    def tell(self) -> int:
        """Bytes written."""
        return self._nbytes + len(self._buffer)

    def write(self, data: bytes | memoryview) -> int:
        """Append. Takes one-dimensional bytes. Raises ``OSError`` as a file does, possibly later."""
        if len(data) < _LARGE_NBYTES:
            self._buffer += data
            if len(self._buffer) >= _BUFFER_NBYTES:
                self.write_out()
            return len(data)
        self.write_out()
        if self._wanted:
            self._settle_by_reading()
            self._open = (self._nbytes, self._nbytes + len(data))
        self._write(data)
        return len(data)

    def unwritten(self, begin: int) -> bytes | None:
        """What was written from a place to the end, if all of that is still in memory."""
        return bytes(self._buffer[begin - self._nbytes :]) if begin >= self._nbytes else None

    def flush(self) -> None:
        """Nothing: ``torch.save`` asks for it after every archive, of which there may be very many."""

    def write_out(self) -> None:
        """Hand everything to the operating system."""
        if self._buffer:
            if not self._wanted:
                pass
            elif self._open is None:
                self._crc32 = zlib.crc32(self._buffer, self._crc32)
            else:
                self._after += self._buffer
            self._write(self._buffer)
            self._buffer.clear()

    def settle(self, begin: int, end: int, crc32: int) -> None:
        """Say the checksum of a range. Used if it is the large write that is open, otherwise known already."""
        if self._open == (begin, end):
            self._crc32 = zlib.crc32(self._after, combine(self._crc32, crc32, end - begin))
            self._open = None
            self._after.clear()

    def checksum(self) -> int | None:
        """The CRC-32 of all that was written; ``None`` if it was not wanted."""
        self.write_out()
        if not self._wanted:
            return None
        self._settle_by_reading()
        return self._crc32

    def _write(self, data: bytes | bytearray | memoryview) -> None:
        try:
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            self.failure = self.failure or error
            raise
        self._nbytes += len(data)

    def _settle_by_reading(self) -> None:
        if self._open is None:
            return
        begin, end = self._open
        self._file.seek(begin)
        crc32, left = 0, end - begin
        while left:
            piece = self._file.read(min(left, _LARGE_NBYTES))
            if not piece:
                raise OSError(f"the file ends {left} bytes before what was written to it")
            crc32, left = zlib.crc32(piece, crc32), left - len(piece)
        self._file.seek(0, 2)
        self.settle(begin, end, crc32)


def combine(first: int, second: int, nbytes: int) -> int:
    """The CRC-32 of two texts in sequence.

    Args:
        first: CRC-32 of the first.
        second: CRC-32 of the second.
        nbytes: length of the second.

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


def _squares() -> list[int]:
    """The polynomials x to the power of 1, 2, 4, 8, ..."""
    found = [1 << 30]
    while len(found) < 32:
        found.append(_multiply(found[-1], found[-1]))
    return found


_SQUARES = _squares()
