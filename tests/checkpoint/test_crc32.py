"""The checksum of a file while it is written is that of the file, whoever computed which part."""

from __future__ import annotations

import errno
import io
import random
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_zero.checkpoint.format.writer import ChecksummedFile, combine, save_archive


@pytest.mark.parametrize("nbytes", [0, 1, 7, 1000, 65_537])
def test_combine_is_the_checksum_of_both(nbytes: int) -> None:
    first, second = random.Random(1).randbytes(123), random.Random(2).randbytes(nbytes)
    assert combine(zlib.crc32(first), zlib.crc32(second), nbytes) == zlib.crc32(first + second)
    assert combine(0, zlib.crc32(second), nbytes) == zlib.crc32(second)


def test_combine_past_four_gibibytes() -> None:
    zeros, crc32 = bytes(1 << 20), 0
    half = zlib.crc32(zeros)
    for power in range(20, 33):  # of all zeros, doubled until they are 8 GiB
        half = combine(half, half, 1 << power)
    whole = 0
    for _ in range(1024):
        crc32 = combine(crc32, zlib.crc32(zeros), len(zeros))
    for _ in range(8):
        whole = combine(whole, crc32, 1 << 30)
    assert whole == half


@pytest.mark.parametrize("seed", range(20))
def test_any_sequence_of_writes(tmp_path: Path, seed: int) -> None:
    """Large ones settled, not settled, or settled with another range; small ones between them."""
    choose = random.Random(seed)
    expected = bytearray()
    with open(tmp_path / "f", "x+b") as raw:
        file = ChecksummedFile(raw)
        for _ in range(12):
            data = choose.randbytes(choose.choice([0, 1, 30, 5000, 262_143, 262_144, 400_000]))
            begin = file.tell()
            assert begin == len(expected)
            assert file.write(memoryview(data)) == len(data)
            expected += data
            if choose.random() < 0.5:
                file.write(b"after")
                expected += b"after"
            if choose.random() < 0.6:
                file.settle(begin, begin + len(data), zlib.crc32(data))
            elif choose.random() < 0.3:
                file.settle(begin, begin + len(data) - 1, 12345)
            unwritten = file.unwritten(begin)
            assert unwritten is None or unwritten == expected[begin:]
        assert file.checksum() == zlib.crc32(expected)
        assert file.tell() == len(expected)
    assert (tmp_path / "f").read_bytes() == expected


class Full(io.BytesIO):
    """A disk with room for 1000 bytes."""

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > 1000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


@pytest.mark.parametrize("numel", [10_000, 1_000_000])
def test_a_failed_write_is_told_as_it_was_and_not_as_torch_does(numel: int) -> None:
    file = ChecksummedFile(Full())
    with pytest.raises(OSError, match="No space left"):  # noqa: PT012  (small ones fail when they are written out)
        save_archive(torch.rand(numel), file)
        file.write_out()
