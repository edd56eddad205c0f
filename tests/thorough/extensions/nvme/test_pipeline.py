"""Windows are read ahead and written behind, nothing is mixed up, and after an error nothing is under way."""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_zero.errors import OffloadError
from lightning_zero.extensions.nvme import FileTensor, NvmeStore, Request
from lightning_zero.extensions.nvme.pipeline import BufferPool
from lightning_zero.extensions.nvme.store import WINDOW_ALIGNMENT
from lightning_zero.offload.host import host_memory
from tests.helpers.stores import NAMES, Call, Disk, fail, io_threads, store
from tests.helpers.world import run_world

STEP = WINDOW_ALIGNMENT
PATIENCE_SECONDS = 20.0


def windows(numel: int, size: int) -> list[tuple[int, int]]:
    """Start and size of the windows that ``numel`` elements are cut into."""
    return [(start, min(size, numel - start)) for start in range(0, numel, size)]


def requests(numel: int, size: int, *tensors: FileTensor, read: bool = True, write: bool = True) -> list[Request]:
    return [
        Request(length, [(tensor.part(start, length), read, write) for tensor in tensors], (start, length))
        for start, length in windows(numel, size)
    ]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("kib", "threads"), [(64, 1), (256, 1), (256, 3), (4096, 4)])
def test_a_step_is_that_of_ordinary_tensors(tmp_path: Path, name: str, kib: int, threads: int) -> None:
    """Parts of several dtypes, some only read, some only written, through pools that hold one window to all of them."""
    numel = 7 * STEP + 777
    with store(tmp_path, Disk(direct=NAMES[name]), kib=kib, threads=threads) as opened:
        master, moment, half = (
            opened.allocate(numel, dtype, "x") for dtype in (torch.float32, torch.float64, torch.bfloat16)
        )
        gradient = torch.randn(numel, generator=torch.Generator().manual_seed(0))
        expected, expected_moment = torch.zeros(numel), torch.zeros(numel, dtype=torch.float64)

        def work(request: Request, buffers: list[Tensor]) -> None:
            start, length = request.tag
            assert [buffer.numel() for buffer in buffers] == [length] * 3
            buffers[1].mul_(0.5).add_(gradient[start : start + length])
            buffers[0].sub_(buffers[1])
            buffers[2].copy_(buffers[0])

        least = sum((4, 8, 2)) * STEP
        size = opened.window_numel([4, 8, 2]) if least <= opened.pool_nbytes else 1024
        for _ in range(4):
            opened.pipeline().run(
                (
                    Request(
                        length,
                        [
                            (master.part(start, length), True, True),
                            (moment.part(start, length), True, True),
                            (half.part(start, length), False, True),
                        ],
                        (start, length),
                    )
                    for start, length in windows(numel, size if size >= STEP else STEP // 2)
                ),
                work,
            )
            expected_moment.mul_(0.5).add_(gradient)
            expected.sub_(expected_moment)
        assert torch.equal(moment.read(), expected_moment)
        assert torch.equal(master.read(), expected)
        assert torch.equal(half.read(), expected.bfloat16())
        assert not opened.pipeline()._pool._taken


def test_a_pool_that_is_too_small_for_a_window_is_named(tmp_path: Path) -> None:
    with store(tmp_path, kib=64) as opened:
        with pytest.raises(OffloadError, match=r"Rank 3: the buffers have 57344 bytes.*takes 65536.*buffer_mib"):
            opened.window_numel([16])
        resting = opened.allocate(1 << 16, torch.float64, "x")
        with pytest.raises(ValueError, match="524288 bytes cannot be taken from a pool of 57344"):
            opened.pipeline().run([Request(1 << 16, [(resting, True, True)])], lambda request, buffers: None)
    with pytest.raises(ValueError, match="at least 32768"):
        store(tmp_path, kib=16).__enter__()
    assert not os.listdir(tmp_path)


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk()


@pytest.fixture
def opened(tmp_path: Path, disk: Disk) -> Iterator[NvmeStore]:
    with store(tmp_path, disk) as found:
        yield found


def fill(value: float) -> Callable[[Request, list[Tensor]], None]:
    """Work that leaves a value everywhere."""

    def work(request: Request, buffers: list[Tensor]) -> None:
        buffers[0].fill_(value)

    return work


def test_windows_are_read_while_one_is_worked_on(opened: NvmeStore, disk: Disk) -> None:
    """The work on the first window ends only when the second and the third one are being read."""
    tensor = opened.allocate(3 * STEP, torch.float32, "x")
    reading = {tensor.region.offset + 4 * STEP * window: threading.Event() for window in range(3)}

    def before(call: Call) -> None:
        if call.kind == "read":
            reading[call.offset].set()

    disk.before = before

    def work(request: Request, buffers: list[Tensor]) -> None:
        if request.tag[0] == 0:
            assert all(event.wait(PATIENCE_SECONDS) for event in reading.values())

    opened.pipeline().run(requests(3 * STEP, STEP, tensor), work)


def test_windows_are_written_while_later_ones_are_worked_on(opened: NvmeStore, disk: Disk) -> None:
    wrote, worked = threading.Event(), threading.Event()
    tensor = opened.allocate(3 * STEP, torch.float32, "x")

    def before(call: Call) -> None:
        if call.kind == "write" and not wrote.is_set():
            wrote.set()
            assert worked.wait(PATIENCE_SECONDS)  # the first write ends only when the last window is worked on

    disk.before = before

    def work(request: Request, buffers: list[Tensor]) -> None:
        buffers[0].fill_(request.tag[0] + 1)
        if request.tag[0] == 2 * STEP:
            assert wrote.wait(PATIENCE_SECONDS)
            worked.set()

    opened.pipeline().run(requests(3 * STEP, STEP, tensor), work)
    assert tensor.read()[::STEP].tolist() == [1, STEP + 1, 2 * STEP + 1]


def test_parts_that_share_pages_can_be_read_and_not_written(opened: NvmeStore) -> None:
    tensor = opened.allocate(STEP, torch.float32, "exp_avg")
    tensor.write(torch.arange(float(STEP)))
    seen: list[Tensor] = []
    opened.pipeline().run(
        [Request(100, [(tensor.part(start, 100), True, False)]) for start in (0, 50, 1000, STEP - 100)],
        lambda request, buffers: seen.append(buffers[0].clone()),
    )
    assert [int(values[0]) for values in seen] == [0, 50, 1000, STEP - 100]
    assert [int(values[-1]) for values in seen] == [99, 149, 1099, STEP - 1]
    for part in (tensor.part(0, 100), tensor.part(50, STEP - 50)):
        with pytest.raises(ValueError, match=r"exp_avg.*multiples of 4096"):
            opened.pipeline().run([Request(part.numel(), [(part, True, True)])], lambda request, buffers: None)
    assert torch.equal(tensor.read(), torch.arange(float(STEP)))


def test_sizes_that_do_not_match_are_refused(opened: NvmeStore) -> None:
    tensor = opened.allocate(STEP, torch.float32, "x")
    with pytest.raises(ValueError, match="A window of 5 elements cannot take"):
        opened.pipeline().run([Request(5, [(tensor, True, True)])], lambda request, buffers: None)


ERRORS = ["read", "write", "work", "requests"]


@pytest.mark.parametrize("where", ERRORS)
@pytest.mark.parametrize("window", [0, 5, 11])
def test_after_an_error_nothing_is_under_way(opened: NvmeStore, disk: Disk, where: str, window: int) -> None:
    numel = 12 * STEP
    tensor = opened.allocate(numel, torch.float32, "exp_avg")
    place = tensor.region.offset + window * STEP * 4

    def before(call: Call) -> None:
        if (call.kind, call.offset) == (where, place):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    disk.before = before

    def work(request: Request, buffers: list[Tensor]) -> None:
        buffers[0].add_(1)
        if where == "work" and request.tag[0] == window * STEP:
            raise ZeroDivisionError
        worked.append(request.tag[0])

    def generated() -> Iterator[Request]:
        for index, request in enumerate(requests(numel, STEP, tensor)):
            if where == "requests" and index == window:
                raise ZeroDivisionError
            yield request

    worked: list[int] = []
    expected = OffloadError if where in ("read", "write") else ZeroDivisionError
    with pytest.raises(expected, match="exp_avg.*Input/output" if expected is OffloadError else None):
        opened.pipeline().run(generated(), work)
    disk.before = None
    assert not opened.pipeline()._pool._taken
    done = tensor.read()[::STEP]
    for start in worked:
        if not (where == "write" and start == window * STEP):
            assert done[start // STEP] == 1, "a window that was worked on is not written"
    assert int(done.sum()) == len(worked) - (where == "write" and window * STEP in worked)

    def mend(request: Request, buffers: list[Tensor]) -> None:
        buffers[0].fill_(5)

    opened.pipeline().run(requests(numel, STEP, tensor), mend)
    assert (tensor.read() == 5).all()


def test_errors_at_random(tmp_path: Path) -> None:
    """Whatever fails at whatever call: the error is raised, and the next run is right."""
    choose, counting = random.Random(0), threading.Lock()
    disk = Disk()
    with store(tmp_path, disk, kib=256, threads=3) as opened:
        tensors = [opened.allocate(9 * STEP + 5, torch.float32, "x") for _ in range(2)]
        for turn in range(40):
            left = choose.randrange(1, 41)
            code = choose.choice([errno.EIO, errno.ENOSPC, errno.ESTALE])

            def before(call: Call, code: int = code) -> int | None:
                nonlocal left
                with counting:
                    left -= 1
                    if left == 0:
                        raise OSError(code, os.strerror(code))
                return choose.choice([None, 4096])

            def work(request: Request, buffers: list[Tensor], turn: int = turn) -> None:
                buffers[0].fill_(turn), buffers[1].copy_(buffers[0])

            disk.before = before
            try:
                opened.pipeline().run(requests(9 * STEP + 5, STEP, *tensors), work)
                assert left > 0, "an error was lost"
            except OffloadError:
                assert left <= 0
                disk.before = None
                opened.pipeline().run(requests(9 * STEP + 5, STEP, *tensors), work)
            disk.before = None
            assert all((tensor.read() == turn).all() for tensor in tensors)


def test_one_run_at_a_time(opened: NvmeStore) -> None:
    tensor = opened.allocate(STEP, torch.float32, "x")

    def work(request: Request, buffers: list[Tensor]) -> None:
        opened.pipeline().run([], lambda request, buffers: None)

    with pytest.raises(RuntimeError, match="running already"):
        opened.pipeline().run(requests(STEP, STEP, tensor), work)
    opened.pipeline().run(requests(STEP, STEP, tensor), lambda request, buffers: None)


def test_an_interrupt_while_a_disk_is_slow(tmp_path: Path) -> None:
    """Ctrl-C while the main thread waits: what is in the queue is finished, and all goes on after."""

    def rank(rank: int) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        disk, interrupted = Disk(), threading.Event()
        with store(tmp_path, disk) as opened:
            tensor = opened.allocate(8 * STEP, torch.float32, "x")

            def before(call: Call) -> None:
                if call.kind == "read" and not interrupted.is_set():
                    interrupted.set()
                    os.kill(os.getpid(), signal.SIGINT)
                    time.sleep(0.05)  # the main thread waits for the disk meanwhile

            disk.before = before
            with pytest.raises(KeyboardInterrupt):
                opened.pipeline().run(requests(8 * STEP, STEP, tensor), lambda request, buffers: None)
            assert not opened.pipeline()._pool._taken
            opened.pipeline().run(requests(8 * STEP, STEP, tensor), fill(3))
            assert (tensor.read() == 3).all()

    run_world(1, rank, init_group=False)
    assert not os.listdir(tmp_path)


def test_a_second_interrupt_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    """A disk that does not answer must not hold the process; its buffers are never used again."""

    def rank(rank: int) -> None:
        left = [2]

        def interrupt(*_: object) -> None:
            if left[0]:
                left[0] -= 1
                raise KeyboardInterrupt

        signal.signal(signal.SIGINT, interrupt)
        disk, answer = Disk(), threading.Event()
        with store(tmp_path, disk) as opened:
            tensor = opened.allocate(8 * STEP, torch.float32, "x")

            def before(call: Call) -> None:
                while not answer.wait(0.01):
                    os.kill(os.getpid(), signal.SIGINT)

            disk.before = before
            with pytest.raises(KeyboardInterrupt) as caught:
                opened.pipeline().run(requests(8 * STEP, STEP, tensor), lambda request, buffers: None)
            assert isinstance(caught.value.__context__, KeyboardInterrupt)
            answer.set()
            disk.before = None
            with pytest.raises(OffloadError, match="interrupted while it waited"):
                opened.pipeline().run(requests(8 * STEP, STEP, tensor), lambda request, buffers: None)

    run_world(1, rank, init_group=False)
    assert not os.listdir(tmp_path)


def test_interrupts_at_any_moment(tmp_path: Path) -> None:
    """A signal after a random time, again and again: nothing hangs, nothing is left under way, nothing is mixed up."""

    def rank(rank: int) -> int:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        choose, interrupted = random.Random(0), 0
        with store(tmp_path, kib=256) as opened:
            tensor = opened.allocate(40 * STEP, torch.float32, "x")
            for turn in range(60):

                def work(request: Request, buffers: list[Tensor], turn: int = turn) -> None:
                    buffers[0].fill_(turn)

                try:
                    signal.setitimer(signal.ITIMER_REAL, choose.uniform(1e-5, 8e-3))
                    opened.pipeline().run(requests(40 * STEP, STEP, tensor), work)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    interrupted += 1
                assert not opened.pipeline()._pool._taken
                opened.pipeline().run(requests(40 * STEP, STEP, tensor), work)
                assert (tensor.read() == turn).all()
        return interrupted

    (interrupted,) = run_world(1, rank, init_group=False)
    assert interrupted > 10


def test_between_runs_there_is_no_thread_and_no_memory(tmp_path: Path, opened: NvmeStore, disk: Disk) -> None:
    tensor = opened.allocate(8 * STEP, torch.float32, "x")
    opened.pipeline().run(requests(8 * STEP, STEP, tensor), fill(2))
    assert io_threads()
    opened.rest()
    assert not io_threads()
    assert not os.listdir(tmp_path)
    assert opened._pipeline is None
    assert (tensor.read() == 2).all()
    more = opened.allocate(STEP, torch.float32, "y")
    opened.pipeline().run(requests(8 * STEP, STEP, tensor), fill(3))
    assert (tensor.read() == 3).all()
    assert not more.read().any()
    os.truncate(f"/proc/self/fd/{opened._file._descriptor}", 0)
    with pytest.raises(OffloadError, match="cut off"):
        opened.pipeline().run(requests(8 * STEP, STEP, tensor), lambda request, buffers: None)


def test_closing_during_a_transfer_ends_it(tmp_path: Path) -> None:
    disk = Disk()
    with store(tmp_path, disk) as opened:
        tensor = opened.allocate(STEP, torch.float32, "x")
        disk.before = lambda call: opened._file.close() or 4096
        disk.calls.clear()
        with pytest.raises(OffloadError, match="was closed"):
            tensor.read()
        assert len(disk.calls) == 1  # of four


def test_a_full_disk_in_the_middle_of_a_step(opened: NvmeStore, disk: Disk) -> None:
    """Copy-on-write file systems need space for what was reserved."""
    tensor = opened.allocate(8 * STEP, torch.float32, "x")
    disk.before = fail("write", errno.ENOSPC)
    with pytest.raises(
        OffloadError, match=r"Rank 3: writing x .*No space left on device.* free\)\. The last checkpoint"
    ):
        opened.pipeline().run(requests(8 * STEP, STEP, tensor), lambda request, buffers: None)


def test_the_pool_is_a_ring() -> None:
    """Random sizes, first in, first out: pieces never overlap, and there is room whenever there can be."""
    choose, pages = random.Random(0), 16
    pool = BufferPool(host_memory(pages * 4096, locked=False))
    taken: list[Tensor] = []
    places = []
    for _ in range(3000):
        nbytes = choose.randint(1, 7) * 4096
        piece = pool.take(nbytes)
        if piece is None:
            assert taken, "an empty pool has room"
            taken.pop(0)
            pool.give_back()
        else:
            assert piece.numel() == nbytes
            taken.append(piece)
        assert len(pool._taken) == len(taken)
        spans = sorted((piece.data_ptr(), piece.data_ptr() + piece.numel()) for piece in taken)
        assert all(one[1] <= other[0] for one, other in pairwise(spans))
        places.append(len(taken))
    assert max(places) > 4
    for nbytes in (0, -4096, 100, 17 * 4096):
        with pytest.raises(ValueError, match=f"{nbytes} bytes cannot be taken from a pool of 65536"):
            pool.take(nbytes)
