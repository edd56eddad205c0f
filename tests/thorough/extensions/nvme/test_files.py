"""What a disk may do wrong is an error that says where; what it may do rightly is not."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from lightning_zero.errors import OffloadError
from lightning_zero.extensions.nvme import FileTensor
from tests.helpers.stores import NAMES, Call, Disk, data_of, fail, store
from tests.helpers.world import run_world

NUMEL = 5000  # 20,000 bytes: 4 pages and some


def values() -> torch.Tensor:
    return torch.arange(1.0, NUMEL + 1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("most", [1, 1000, 4095, 4096, 5000])
def test_short_reads_and_writes_are_continued(tmp_path: Path, name: str, most: int) -> None:
    """Past the page cache a call that was cut off inside a page begins at that page again."""
    turn = 0

    def before(call: Call) -> int | None:
        nonlocal turn
        turn += 1
        return most if turn % 2 else None

    disk = Disk(direct=NAMES[name])
    with store(tmp_path, disk) as opened:
        resting = opened.allocate(NUMEL, torch.float32, "x")
        if disk.direct and most % 4096:
            # The real system refuses what is not whole pages, so that the test has to move the part of a page itself.
            disk.before = lambda call: before(call) and max(4096, most - most % 4096)
        else:
            disk.before = before
        resting.write(values())
        assert torch.equal(resting.read(), values())


class Partial(Disk):
    """Says of every second call that only some bytes inside its first or second page were moved."""

    said = 0
    turns = 0

    def preadv(self, descriptor: int, memory: memoryview, offset: int) -> int:
        return self._less(super().preadv(descriptor, memory, offset))

    def pwritev(self, descriptor: int, memory: memoryview, offset: int) -> int:
        return self._less(super().pwritev(descriptor, memory, offset))

    def _less(self, count: int) -> int:
        self.turns += 1
        return min(count, self.said) if self.said and self.turns % 2 else count


@pytest.mark.parametrize("said", [1, 1000, 5000])
def test_a_part_of_a_page_is_asked_for_again(tmp_path: Path, said: int) -> None:
    disk = Partial()
    with store(tmp_path, disk) as opened:
        resting = opened.allocate(NUMEL, torch.float32, "x")
        disk.said, disk.turns = said, 0
        resting.write(values())
        assert torch.equal(resting.read(), values())
        assert disk.turns > 2


def test_a_disk_that_never_gives_a_whole_page_is_an_error(tmp_path: Path) -> None:
    disk = Disk()
    with store(tmp_path, disk) as opened:
        resting = opened.allocate(NUMEL, torch.float32, "x")
        disk.preadv = lambda *args: min(100, Disk.preadv(disk, *args))  # type: ignore[method-assign]
        with pytest.raises(OffloadError, match=r"reading x gave 100 of \d+ bytes.*cut off"):
            resting.read()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["read", "write"])
def test_an_input_output_error_says_what_and_where(tmp_path: Path, name: str, kind: str) -> None:
    disk = Disk(direct=NAMES[name])
    with store(tmp_path, disk) as opened:
        first, second = (opened.allocate(NUMEL, torch.float32, f"exp_avg {i}") for i in range(2))
        first.write(values()), second.write(values())
        disk.before = fail(kind, errno.EIO)
        doing = {"read": "reading", "write": "writing"}[kind]
        message = (
            rf"Rank 3: {doing} exp_avg 1 \(\d+ bytes at byte 20480 of its file in '{tmp_path}'\) failed: .*checkpoint"
        )
        with pytest.raises(OffloadError, match=message):
            second.read() if kind == "read" else second.fill(0)
        disk.before = None
        assert torch.equal(first.read(), values())


def test_a_full_disk_says_what_is_free(tmp_path: Path) -> None:
    disk = Disk(free=7 << 20)
    with store(tmp_path, disk) as opened:
        resting = opened.allocate(NUMEL, torch.float32, "x")
        disk.before = fail("write", errno.ENOSPC)
        with pytest.raises(OffloadError, match=r"No space left.*7.34 MB free"):
            resting.fill(1)
        disk.before, disk.full = None, True
        with pytest.raises(OffloadError, match=r"20.5 kB for y, beside 20.5 kB there already.*7.34 MB free"):
            opened.allocate(NUMEL, torch.float32, "y")
        assert opened.nbytes_on_disk == 20480
        disk.full = False
        opened.allocate(NUMEL, torch.float32, "y").write(values())
        assert not resting.read().any()


def test_without_reservations_zeros_are_written(tmp_path: Path) -> None:
    disk = Disk(reserves=False)
    with store(tmp_path, disk) as opened:
        # What was there before must not show through.
        first, second = (opened.allocate(1 << 19, torch.float32, "x") for _ in range(2))
        assert data_of(opened).stat().st_size == opened.nbytes_on_disk == 2 << 21
        first.fill(1)
        assert not second.read().any()


def test_a_file_that_was_cut_off_is_noticed(tmp_path: Path) -> None:
    with store(tmp_path) as opened:
        resting = opened.allocate(NUMEL, torch.float32, "x")
        os.truncate(data_of(opened), 8192)
        with pytest.raises(OffloadError, match=rf"gave 8192 of \d+ bytes.*file in '{tmp_path}'.*cut off"):
            resting.read()


def test_a_closed_file_is_an_error(tmp_path: Path) -> None:
    with store(tmp_path) as opened:
        resting = opened.allocate(NUMEL, torch.float32, "x")
    for use in (resting.read, lambda: resting.fill(1), lambda: opened.allocate(1, torch.bool, "y")):
        with pytest.raises(OffloadError, match=r"Rank 3: its file in '.*' was closed"):
            use()


def test_a_forked_process_neither_uses_nor_removes_the_files(tmp_path: Path) -> None:
    def child(rank: int, resting: FileTensor) -> list[str]:
        messages = []
        for use in (
            resting.read,
            lambda: resting.fill(1),
            lambda: opened.allocate(1, torch.bool, ""),
        ):
            with pytest.raises(OffloadError) as caught:
                use()
            messages.append(str(caught.value))
        opened.close()
        opened._closing()
        opened.rest()
        return messages

    with store(tmp_path) as opened:
        resting = opened.allocate(NUMEL, torch.float32, "x")
        resting.write(values())
        for message in run_world(1, child, resting, init_group=False)[0]:
            assert f"belongs to process {os.getpid()}" in message
        assert torch.equal(resting.read(), values())


def test_a_system_that_only_pretends_to_leave_the_cache_out_is_not_believed(tmp_path: Path) -> None:
    class Liar(Disk):
        """Takes ``O_DIRECT``, and gives zeros."""

        def preadv(self, descriptor: int, memory: memoryview, offset: int) -> int:
            count = super().preadv(descriptor, memory, offset)
            if len(memory) == 4096 and not lying:
                lying.append(True)
                memory[:] = bytes(4096)
            return count

    lying: list[bool] = []
    with store(tmp_path, Liar()) as opened:
        assert lying
        assert not opened.direct
        resting = opened.allocate(NUMEL, torch.float32, "x")
        assert not resting.read().any()
