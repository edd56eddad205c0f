"""What a disk changes is an error, whatever of it is read; and nothing that was only written is."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_zero.errors import OffloadError
from lightning_zero.extensions.nvme import FileTensor, NvmeStore, Request, fill_from
from lightning_zero.extensions.nvme.files import PageChecksums
from lightning_zero.extensions.nvme.store import WINDOW_ALIGNMENT
from lightning_zero.offload.host import PAGE_NBYTES, host_memory
from tests.helpers.stores import CPU, NAMES, Call, Disk, fail, flip, store

STEP = WINDOW_ALIGNMENT
NUMEL = 3 * STEP + 777


def values(numel: int = NUMEL) -> Tensor:
    return torch.arange(1.0, numel + 1)


def through_windows(opened: NvmeStore, resting: FileTensor) -> Tensor:
    """Read as a step does."""
    found = torch.zeros(resting.numel())

    def work(request: Request, buffers: list[Tensor]) -> None:
        found[request.tag : request.tag + request.numel] = buffers[0]

    numel = resting.numel()
    parts = [(start, resting.part(start, min(STEP, numel - start))) for start in range(0, numel, STEP)]
    opened.pipeline().run([Request(part.numel(), [(part, True, False)], start) for start, part in parts], work)
    return found


# ---------------------------------------------------------------------------------------------------------------------
# What is found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", ["whole", "direct", "part", "windows", "written beside"])
def test_a_flipped_bit_is_an_error_that_says_where(tmp_path: Path, name: str, how: str) -> None:
    with store(tmp_path, Disk(direct=NAMES[name])) as opened:
        opened.allocate(5, torch.float32, "something before")
        resting = opened.allocate(NUMEL, torch.float32, "exp_avg of unit 1")
        resting.write(values())
        assert torch.equal(resting.read(), values())
        flip(resting, 2 * STEP + 5, bit=3)
        read = {
            "whole": lambda: fill_from(torch.zeros(NUMEL + 8)[8:], resting),  # never at the start of a page
            "direct": lambda: fill_from(pages(14).view(torch.float32)[:NUMEL], resting),  # whole pages, then the rest
            "part": resting.part(2 * STEP + 5, 1).read,
            "windows": lambda: through_windows(opened, resting),
            "written beside": lambda: resting.write(torch.zeros(3), 2 * STEP + 8),  # keeps the rest of the page
        }[how]
        with pytest.raises(OffloadError) as caught:
            read()
        page = 4096 + 2 * STEP * 4
        start, end = {"whole": (0, NUMEL), "direct": (0, NUMEL // 1024 * 1024), "windows": (2 * STEP, 3 * STEP)}.get(
            how, (2 * STEP, 2 * STEP + 1024)
        )
        assert str(caught.value) == (
            f"Rank 3: exp_avg of unit 1 (the window of elements {start} to {end}, at byte {4096 + start * 4}) "
            f"in '{tmp_path}' differs from what was written: 1 of {-(-(end - start) // 1024)} pages "
            f"have another checksum, first the one at byte {page}. The disk, its cable or the memory is "
            "faulty. The last checkpoint is intact: resume from it, on another disk."
        )
        assert torch.equal(resting.part(0, 2 * STEP).read(), values()[: 2 * STEP]), "the rest can be read"
        resting.write(values(1024), 2 * STEP)  # the whole page anew
        assert torch.equal(resting.part(2 * STEP, 1024).read(), values(1024))


def test_whoever_asks_reads_what_is_there(tmp_path: Path) -> None:
    settings = {"rank": 0, "buffer_nbytes": 1 << 20, "io_threads": 1, "device": CPU}
    opened = NvmeStore(str(tmp_path), checksums=False, **settings)
    resting = opened.allocate(NUMEL, torch.float32, "x")
    resting.write(values())
    flip(resting, 7)
    assert not torch.equal(resting.read(), values())
    opened.close()


def pages(count: int = 1, seed: int = 0) -> Tensor:
    memory = host_memory(count * PAGE_NBYTES, locked=False)
    return memory.copy_(torch.randint(0, 256, (len(memory),), generator=torch.Generator().manual_seed(seed)))


def known(memory: Tensor) -> PageChecksums:
    made = PageChecksums(memory.numel())
    with made.writing(memory, 0):
        pass
    return made


def test_every_single_bit_counts() -> None:
    memory = pages()
    checksums = known(memory)
    for byte in range(PAGE_NBYTES):
        for bit in (0, 3, 7) if byte % 16 else range(8):
            memory[byte] ^= 1 << bit
            assert checksums.damaged(memory, 0) == [0], (byte, bit)
            memory[byte] ^= 1 << bit
    assert checksums.damaged(memory, 0) == []


def test_damage_of_other_kinds() -> None:
    memory = pages(3)
    checksums, numbers = known(memory), memory.view(torch.int32)
    kinds = {
        "two signs": lambda: numbers[5:8:2].bitwise_xor_(-(2**31)),
        "two bits of one place": lambda: numbers[5:7].bitwise_xor_(1 << 20),
        "a sector that was lost": lambda: memory[512:1024].zero_(),
        "a sector of something else": lambda: memory[512:1024].copy_(memory[4096:4608].clone()),
        "neighbours exchanged": lambda: numbers[8:10].copy_(numbers[8:10].flip(0)),
        "pages exchanged": lambda: memory[:8192].copy_(memory[:8192].roll(4096)),
        "zeros": lambda: memory[:4096].zero_(),
        "ones": lambda: memory[:4096].fill_(255),
    }
    before = memory.clone()
    for kind, change in kinds.items():
        change()
        assert checksums.damaged(memory, 0) == ([0, 4096] if kind == "pages exchanged" else [0]), kind
        memory.copy_(before)
    assert checksums.damaged(memory, 0) == []
    assert checksums.damaged(memory[4096:], 4096) == []
    assert checksums.damaged(memory[4096:], 0) == [0, 4096], "each page is known by its place"


# ---------------------------------------------------------------------------------------------------------------------
# What is not: windows cut anew, parts of pages, writes that fail


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_any_order_of_parts_and_windows_is_what_memory_would_hold(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    """And one bit that changes after all of it is found by every way to read it."""
    choose, numel = random.Random(1), 5 * STEP + 77
    with store(tmp_path, Disk(direct=NAMES[name]), threads=3) as opened:
        resting, expected = opened.allocate(numel, dtype, "x"), torch.zeros(numel, dtype=dtype)
        opened.allocate(1, dtype, "something behind")
        for turn in range(60):

            def work(request: Request, buffers: list[Tensor], turn: int = turn) -> None:
                buffers[0].fill_(turn)

            if turn % 3 == 0:
                size = STEP * choose.randint(1, 3)
                cuts = [resting.part(s, min(size, numel - s)) for s in range(0, numel, size) if choose.random() < 0.7]
                opened.pipeline().run([Request(p.numel(), [(p, choose.random() < 0.5, True)]) for p in cuts], work)
            else:
                start = choose.randrange(numel)
                length = choose.choice([1, 3, 1024, choose.randint(1, numel)])
                cuts = [resting.part(start, min(length, numel - start))]
                cuts[0].write(torch.full((cuts[0].numel(),), turn, dtype=dtype))
            for part in cuts:
                expected[part.start : part.start + part.numel()] = turn
            start = choose.randrange(numel)
            assert torch.equal(resting.part(start, numel - start).read(), expected[start:])
        for element in (0, numel // 2, numel - 1):
            flip(resting, element)
            for read in (resting.read, resting.part(element, 1).read):
                with pytest.raises(OffloadError, match="another checksum"):
                    read()
            flip(resting, element)
        assert torch.equal(resting.read(), expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_write_that_fails_leaves_something_that_can_be_written_anew(tmp_path: Path, name: str) -> None:
    """In the middle: nobody knows what is there then, and weights that are loaded anew also come in parts of pages."""
    disk = Disk(direct=NAMES[name])
    with store(tmp_path, disk) as opened:
        resting = opened.allocate(NUMEL, torch.float32, "x")
        resting.write(values())
        writes: list[Call] = []

        def before(call: Call) -> int | None:
            if call.kind == "write":
                writes.append(call)
                if len(writes) > 1:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                return 4096
            return None

        disk.before = before
        with pytest.raises(OffloadError, match="Input/output"):
            resting.write(values() * 2)
        disk.before = None
        for start in range(0, NUMEL, 1000):
            resting.write(values()[start : start + 1000] * 3, start)
        assert torch.equal(resting.read(), values() * 3)
        disk.before = fail("write", errno.EIO)
        with pytest.raises(OffloadError, match="Input/output"):
            resting.fill(0)
        disk.before = None
        flip(resting, NUMEL - 1)
        resting.part(0, STEP).read()
        resting.write(values())
        flip(resting, NUMEL - 1)
        with pytest.raises(OffloadError, match="another checksum"):
            resting.read()


def test_a_shard_that_grows_the_file_while_others_are_written(tmp_path: Path) -> None:
    with store(tmp_path, threads=2) as opened:
        resting, more = opened.allocate(16 * STEP, torch.float32, "x"), []

        def work(request: Request, buffers: list[Tensor]) -> None:
            buffers[0].fill_(3)
            more.append(opened.allocate(100, torch.float32, f"state {request.tag}"))
            more[-1].fill(request.tag)

        for _ in range(3):
            parts = [resting.part(start, STEP) for start in range(0, 16 * STEP, STEP)]
            opened.pipeline().run([Request(STEP, [(part, True, True)], i) for i, part in enumerate(parts)], work)
        assert (resting.read() == 3).all()
        assert [int(part.read()[99]) for part in more] == [*range(16)] * 3
