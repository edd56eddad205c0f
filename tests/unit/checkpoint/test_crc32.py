"""The checksum of a file while it is written is that of the file, whoever computed which part."""

from __future__ import annotations

import io
import random
import zlib
from pathlib import Path

import pytest
import torch

from lightning_zero.checkpoint.format.torch_file import Hole, TorchFile
from lightning_zero.checkpoint.save import ChecksummedFile, combine


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
    """Bytes, tensors of any size and layout, and whole torch files."""
    choose = random.Random(seed)
    expected = bytearray()
    with open(tmp_path / "f", "xb") as raw:
        file = ChecksummedFile(raw)
        for _ in range(12):
            data = choose.randbytes(choose.choice([0, 1, 30, 5000, 262_143, 262_144, 400_000]))
            kind = choose.randrange(3)
            tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
            if kind == 0:
                file.write(data)
            elif kind == 1:
                assert file.write_elements(tensor) == zlib.crc32(data)
            else:
                hole = choose.random() < 0.5
                layout = TorchFile({"w": Hole("w", tensor.dtype, tensor.shape) if hole else tensor})
                begin = file.nbytes
                assert file.write_archive(layout, *[tensor] * hole) == [zlib.crc32(data)]
                assert file.nbytes == begin + layout.nbytes
                raw.flush()
                data = (tmp_path / "f").read_bytes()[begin:]
                assert torch.equal(torch.load(io.BytesIO(data))["w"], tensor)
            expected += data
        assert file.checksum == zlib.crc32(expected)
        assert file.nbytes == len(expected)
    assert (tmp_path / "f").read_bytes() == expected


@pytest.mark.parametrize("numel", [1000, 1_000_000])
def test_the_elements_of_a_slice_that_is_not_contiguous(tmp_path: Path, numel: int) -> None:
    tensor = torch.arange(2 * numel).view(numel, 2).t()
    with open(tmp_path / "f", "xb") as raw:
        file = ChecksummedFile(raw)
        assert file.write_elements(tensor) == file.checksum == zlib.crc32(tensor.contiguous().numpy().tobytes())
