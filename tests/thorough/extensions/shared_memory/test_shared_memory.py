"""Ranks that read one another's memory: when they may, what they leave behind, and what happens when one is gone."""

from __future__ import annotations

import errno
import gc
import itertools
import json
import logging
import mmap
import os
import re
import signal
import socket
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zero.comm import GlooCollectives, Groups, Streams, choose_collectives, native
from lightning_zero.comm.native import SWITCH
from lightning_zero.errors import CommunicationError, DivergenceError
from lightning_zero.extensions.shared_memory.collectives import SharedMemoryCollectives
from lightning_zero.extensions.shared_memory.heap import Heap, PeerHeap
from tests.helpers.world import run_world

pytestmark = pytest.mark.usefixtures("one_host")

CPU = torch.device("cpu")
SIZE = 192
SOON = 3.0  # seconds in which a rank has to notice that another one is gone


def connected() -> SharedMemoryCollectives:
    comm = choose_collectives(Groups.create("gloo"), Streams(CPU), CPU)
    assert isinstance(comm, SharedMemoryCollectives)
    return comm


def filled(comm: SharedMemoryCollectives, value: float, numel: int = SIZE) -> Tensor:
    return comm.allocate(numel, torch.float32, CPU).fill_(value)


def test_pages_go_back_to_the_system_with_the_last_tensor() -> None:
    heap = Heap(2, b"label")
    blocks = os.fstat(heap.file).st_blocks
    tensor = heap.allocate(2**20, torch.uint8).fill_(1)
    assert os.fstat(heap.file).st_blocks == blocks + 2**20 // 512
    del tensor
    assert os.fstat(heap.file).st_blocks == blocks
    heap.close()


# ---------------------------------------------------------------------------------------------------------------------
# Memory


HUGE = 2 << 20


def huge_pages(heap: Heap) -> int:
    """Bytes of its file that this process has mapped as such."""
    text = Path("/proc/self/smaps").read_text()
    mapped = re.findall(r"memfd:lightning_zero(?:(?!VmFlags).)*?ShmemPmdMapped: +(\d+) kB", text, re.DOTALL)
    return 1024 * max(map(int, mapped))


def test_what_is_large_has_huge_pages_again_after_it_was_given_back() -> None:
    heap = Heap(2, b"label")
    edge = heap.allocate(100, torch.uint8).fill_(7)
    blocks, tensor = os.fstat(heap.file).st_blocks, heap.allocate(5 * HUGE // 2, torch.uint8)
    assert heap.offset(tensor) % HUGE == 0 == tensor.data_ptr() % HUGE
    assert not tensor.any()
    if not heap._collapses:
        pytest.skip("needs Linux 6.1, and memory that is not in pieces")
    peer = PeerHeap(heap.file, heap.nbytes, b"label")
    view = peer.view(heap.offset(tensor), tensor.numel(), torch.uint8)
    for value in (1, 2):
        tensor.fill_(value)
        assert huge_pages(heap) == 2 * HUGE, "and not what does not fill one: others' memory may be there"
        assert bool((view == value).all())
        del tensor
        assert os.fstat(heap.file).st_blocks == blocks
        assert not view[:: HUGE // 4].any(), "nothing is there"
        tensor = heap.allocate(5 * HUGE // 2, torch.uint8)
        assert heap.offset(tensor) % HUGE == 0
    assert bool((edge == 7).all())
    heap.close()


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOMEM, errno.EAGAIN])
def test_a_system_without_huge_pages_is_not_asked_again(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """EINVAL: an older one; ENOMEM: none are left. With EAGAIN some page was in use at this moment."""
    heap, asked, advised = Heap(2, b"label"), 0, 0

    def madvise(advice: int, *place: int) -> None:
        nonlocal asked, advised
        advised += advice == mmap.MADV_HUGEPAGE
        if advice == 25:
            asked += 1
            raise OSError(code, "no")

    monkeypatch.setattr(heap._memory, "madvise", madvise)
    for value in (1, 2):
        tensor = heap.allocate(2 * HUGE, torch.uint8)
        assert not tensor.any()
        assert int(tensor.fill_(value)[-1]) == value
    assert asked == (2 if code == errno.EAGAIN else 1)
    assert advised == 2, "as before Linux 6.1, where such pages may come by themselves"
    heap.close()


def test_what_a_forked_process_allocates_takes_no_pages_of_its_rank() -> None:
    heap = Heap(2, b"label")
    blocks = os.fstat(heap.file).st_blocks
    if os.fork() == 0:
        heap.allocate(2 * HUGE, torch.uint8)
        os._exit(0)
    os.wait()
    assert os.fstat(heap.file).st_blocks == blocks
    heap.close()


class Forker:
    """Whose memory it is."""


def test_a_forked_process_sees_what_was_frozen() -> None:
    """And keeps what it writes to itself. One copy serves many processes, while nothing changes."""
    heap = Heap(2, b"label")
    tensor, other = (heap.allocate(numel, torch.float32).fill_(1) for numel in (3 * 4096, 1000))

    def forked() -> list[float]:
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.read(go, 1)
            seen = [*tensor[::4096].tolist(), float(other[0])]
            tensor.add_(10)
            os.write(writer, json.dumps([*seen, float(tensor.sum())]).encode())
            os._exit(0)
        tensor.fill_(2)
        other.fill_(2)
        os.write(going, b"!")
        os.wait()
        return json.loads(os.read(reader, 1000))

    (go, going), owner, another = os.pipe(), Forker(), Forker()
    heap.freeze(owner, [tensor, torch.ones(3)])
    first = heap._frozen[owner]
    assert forked() == [1, 1, 1, 2, 11 * 3 * 4096]
    heap.freeze(owner, [tensor, other])
    second = heap._frozen[owner]
    assert first.keys() < second.keys()
    assert first.items().isdisjoint(second.items()), "it has changed"
    assert forked() == [2, 2, 2, 2, 12 * 3 * 4096]
    assert float(tensor.sum()) == 2 * 3 * 4096
    heap.freeze(another, [])
    heap.freeze(owner, [tensor, other])
    assert heap._frozen[owner] == second
    heap.freeze(owner, [])
    copies = [weakref.ref(copy) for copy in (*first.values(), *second.values())]
    del first, second
    assert not any(copy() for copy in copies)
    heap.close()


def test_memory_of_many_sizes_never_overlaps() -> None:
    heap, random = Heap(2, b"label"), Random(0)
    held: dict[int, Tensor] = {}
    for value in range(1, 200):
        if held and random.random() < 0.45:
            del held[random.choice([*held])]
        tensor = heap.allocate(random.choice([1, 5000, HUGE - 4096, HUGE, HUGE + 1, 2 * HUGE + 8192]), torch.uint8)
        assert not tensor.any(), "what was given back shows zeros"
        held[value] = tensor.fill_(value)
        if len(held) > 12:
            del held[next(iter(held))]
        del tensor
        for there, kept in held.items():
            assert int(kept.min()) == int(kept.max()) == there
    size = heap.used_nbytes
    assert size == sum(-(-kept.numel() // 4096) * 4096 for kept in held.values())
    assert heap._end < 64 * HUGE, "it fills gaps"
    heap.close()


# ---------------------------------------------------------------------------------------------------------------------
# Order


def test_memory_is_in_use_until_all_others_have_read_it() -> None:
    def run(rank: int) -> None:
        comm = connected()
        for salt in range(20):
            bucket = filled(comm, rank + salt, 3 * SIZE)
            pending = comm.reduce_scatter(bucket, comm.own_range(bucket), "bucket")
            pending.wait()
            bucket.fill_(float("nan"))  # as if the slot's next unit wrote there
            full = filled(comm, rank + salt, 3 * SIZE)
            gathered = comm.all_gather(full, "unit")
            gathered.receive()
            assert torch.equal(full, torch.arange(salt, salt + 3).repeat_interleave(SIZE).float())
            gathered.wait()
            full.fill_(float("nan"))
        shard = torch.zeros(SIZE)
        pending = comm.reduce_scatter(torch.full((3 * SIZE,), float(rank)), shard, "memory of another kind")
        pending.wait()
        assert shard.eq(1).all()

    run_world(3, run)


def test_what_is_read_without_asking_is_never_old() -> None:
    """One rank is always late to change its shard; nobody may see it before."""

    def run(rank: int) -> None:
        comm = connected()
        shard = filled(comm, 0)
        for step in range(1, 6):
            comm.groups.control.barrier()
            if rank == step % 3:
                time.sleep(0.02)
            shard.fill_(step)
            full = torch.zeros(3 * SIZE)
            comm.all_gather(full, "unit", source=shard, version=step).wait()
            assert full.eq(step).all()
        comm.groups.control.barrier()  # memory may go when nobody can read it any more

    run_world(3, run)


def test_ranks_that_wait_for_different_things_serve_each_other() -> None:
    """Rank 0 waits until its bucket was read by rank 1, which waits in an agreement for rank 0."""

    def run(rank: int) -> None:
        comm = connected()
        bucket = filled(comm, rank, 2 * SIZE)
        pending = comm.reduce_scatter(bucket, comm.own_range(bucket), "bucket")
        if rank == 0:
            pending.wait()
        comm.groups.control.barrier()
        pending.wait()
        assert comm.own_range(bucket).eq(0.5).all()

    run_world(2, run, timeout=20)


def test_more_messages_than_a_pipe_holds() -> None:
    def run(rank: int) -> None:
        comm = connected()
        if rank == 0:
            time.sleep(0.5)
        shard = filled(comm, rank, 2)
        flying = [comm.reduce_scatter(shard, shard[:1], f"bucket {index}") for index in range(10_000)]
        for pending in flying:
            pending.wait()

    run_world(2, run)


def test_a_rank_that_leaves_early_has_still_given_what_it_owed() -> None:
    """Rank 0 has its own result and ends; what it staged, and what it let go of, is there for the slower rank."""

    def run(rank: int) -> None:
        comm = connected()
        comm.groups.control.barrier()
        if rank == 0:
            comm.broadcast(torch.full((SIZE,), 7.0), 0).wait()
            comm.groups.destroy()
            return
        while not comm.transport._links.gone:
            comm.transport._links._read(0.1)
        value = torch.zeros(SIZE)
        comm.broadcast(value, 0).wait()
        assert value.eq(7).all()

    run_world(2, run)


def test_what_was_read_is_counted() -> None:
    def run(rank: int) -> tuple[int, ...]:
        comm = connected()
        found = [comm.transport.moved]
        for action in (
            lambda: comm.all_gather(filled(comm, 1, 4 * SIZE), "unit"),
            lambda: comm.reduce_scatter(filled(comm, 1, 4 * SIZE), torch.zeros(SIZE), "bucket"),
            lambda: comm.broadcast(torch.zeros(SIZE), 0),
        ):
            action().wait()
            found.append(comm.transport.moved)
        return tuple(b - a for a, b in itertools.pairwise(found))

    # (N - 1) / N of the whole; a broadcast is read once by each of the others.
    for rank, moved in enumerate(run_world(4, run)):
        assert moved == (3 * SIZE * 4, 3 * SIZE * 4, SIZE * 4 if rank else 0)


# ---------------------------------------------------------------------------------------------------------------------
# Errors


def reduce(comm: SharedMemoryCollectives) -> None:
    comm.reduce_scatter(filled(comm, 1, comm.world_size * SIZE), torch.zeros(SIZE), "bucket").wait()


DEEDS: dict[str, Callable[[SharedMemoryCollectives], Any]] = {
    "gather": lambda comm: comm.all_gather(filled(comm, 1, comm.world_size * SIZE), "unit").wait(),
    "reduction": reduce,
    "agreement": lambda comm: comm.groups.control.barrier(),
}


@pytest.mark.timing
@pytest.mark.parametrize(("deed", "forks"), [("gather", False), ("reduction", True), ("agreement", False)])
def test_a_killed_rank_is_an_error_on_the_others_at_once(deed: str, forks: bool) -> None:
    """Also if a process that it forked lives on with copies of all that it had open."""

    def run(rank: int) -> None:
        comm = connected()
        DEEDS[deed](comm)
        if rank == 2:
            if forks and os.fork() == 0:
                time.sleep(SOON + 1)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(CommunicationError, match=r"rank [012] (is gone|has given up)"):
            DEEDS[deed](comm)
        assert time.monotonic() - began < SOON

    failures = run_world(3, run, expect_failure=True, timeout=30)
    assert {rank: failure.type for rank, failure in failures.items()} == {2: "SIGKILL"}


def test_a_rank_killed_in_the_middle_of_a_collective() -> None:
    """Rank 1 has offered its part and dies; rank 0 gets that, but never hears that its own was taken."""

    def run(rank: int) -> None:
        comm = connected()
        while rank == 0 and not comm.transport._links.gone:
            comm.transport.progress()
        pending = comm.all_gather(filled(comm, rank, 2 * SIZE), "unit")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(CommunicationError, match="Rank 0: unit did not complete: rank 1 is gone"):
            pending.wait()

    failures = run_world(2, run, expect_failure=True, timeout=30)
    assert {rank: failure.type for rank, failure in failures.items()} == {1: "SIGKILL"}


def test_ranks_in_different_places_are_an_error_and_no_garbage() -> None:
    def run(rank: int) -> str:
        comm = connected()
        with pytest.raises(CommunicationError) as caught:
            DEEDS["gather" if rank == 0 else "agreement"](comm)
        return str(caught.value)

    first, second = run_world(2, run, timeout=20)
    assert "rank 1 takes no part in it: it waits for this rank somewhere else" in first
    assert "rank 0 has given up" in second


def test_agreements_on_different_things_are_an_error() -> None:
    def run(rank: int) -> None:
        control = connected().groups.control
        with pytest.raises(DivergenceError, match=r"different places of the training program:\n  rank 0: .* norm"):
            control.barrier() if rank else control.total(torch.ones(1, dtype=torch.float64))

    run_world(2, run, timeout=20)


@pytest.mark.parametrize("what", [("bucket", "another"), ("bucket", "bucket")])
def test_collectives_that_do_not_fit_are_an_error(what: tuple[str, str]) -> None:
    def run(rank: int) -> str:
        comm = connected()
        size = SIZE if what[0] != what[1] or rank == 0 else 2 * SIZE
        with pytest.raises(CommunicationError, match="at another place in the program") as caught:
            comm.reduce_scatter(filled(comm, 1, 2 * size), torch.zeros(size), what[rank]).wait()
        return str(caught.value)

    run_world(2, run, timeout=20)


# ---------------------------------------------------------------------------------------------------------------------
# The choice


def test_engines_come_and_go_through_one_transport() -> None:
    def run(rank: int) -> None:
        def once() -> int:
            comm = connected()
            shard = filled(comm, rank)
            comm.all_gather(torch.zeros(2 * SIZE), "unit", source=shard, version=1).wait()
            comm.all_gather(filled(comm, rank, 2 * SIZE), "unit").wait()
            comm.groups.control.barrier()
            del comm, shard
            gc.collect()
            time.sleep(0.05)  # a thread of the transport may just be about to close a peer's file
            return len(open_files())

        before = open_files()
        assert once() == once() == once() > len(before)
        (transport,) = Groups.create("gloo").resource("shared_memory", None).transports
        assert transport.heap.used_nbytes == 0
        Groups.create("gloo").destroy()
        del transport
        gc.collect()
        assert open_files() == before

    run_world(2, run)


def open_files() -> set[str]:
    """Pipes and anonymous files."""
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    names = [os.readlink(link) for link in links if os.path.lexists(link)]
    return {name for name in names if name.startswith(("pipe:", "/memfd:"))}


def chosen_with_log(rank: int, tensor: int = 1) -> tuple[str, list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("lightning_zero")
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    groups = Groups.create("gloo", tensor=tensor)
    kinds = {type(choose_collectives(groups, Streams(CPU), CPU)) for _ in range(3)}
    assert len(kinds) == 1
    comm = choose_collectives(groups, Streams(CPU), CPU)
    bucket, shard = torch.full((2 * SIZE,), float(rank)), torch.zeros(SIZE)
    comm.reduce_scatter(bucket, shard, "bucket").wait()
    assert shard.eq((rank % tensor) + tensor / 2).all()
    return type(comm).__name__, lines


def refuse(*args: Any) -> int:
    raise OSError(38, "Function not implemented")


def break_on(rank: int, here: int, patch: Callable[[], None], tensor: int) -> tuple[str, list[str]]:
    if rank == here:
        patch()
    return chosen_with_log(rank, tensor)


BREAKS: dict[str, tuple[Callable[[], None], str]] = {
    "switched off": (lambda: os.environ.update({SWITCH: "0"}), f"{SWITCH}=0 on rank 1"),
    "no anonymous files": (lambda: setattr(os, "memfd_create", refuse), "rank 1: OSError: .* not implemented"),
    "another host": (
        lambda: setattr(socket, "gethostname", lambda: "elsewhere"),
        "they are on 2 hosts",
    ),
    "files of others cannot be opened": (lambda: setattr(os, "open", refuse), "rank 1: OSError: .* not implemented"),
}


@pytest.mark.parametrize("tensor", [1, 2], ids=["", "tensor-parallel"])
@pytest.mark.parametrize("what", BREAKS)
def test_gloo_where_one_rank_can_not(what: str, tensor: int) -> None:
    patch, reason = BREAKS[what]
    (kind, lines), *others = run_world(2 * tensor, lambda rank: break_on(rank, 1, patch, tensor), timeout=30)
    assert kind == GlooCollectives.__name__
    assert others == [(kind, [])] * (2 * tensor - 1)
    (line,) = lines
    assert re.search(f"^Ranks exchange weights and gradients over gloo: {reason}", line), line
    assert ("with tensor parallelism" in line) == (what == "another host" and tensor > 1)


@pytest.mark.parametrize(
    ("device", "span", "what"), [*(("meta", None, what) for what in (None, *BREAKS)), ("cpu", 2, None)]
)
def test_agreements_of_one_host_take_the_shortcut_whatever_computes(
    device: str, span: int | None, what: str | None
) -> None:
    """Where tensors go another way: on an accelerator, and within shard groups. On all ranks, or on none."""
    size = 2 * (span or 1)

    def run(rank: int) -> tuple[bool, list[list[int]]]:
        if what is not None and rank == 1:
            BREAKS[what][0]()
        groups = Groups.create("gloo", span=span)
        choose_collectives(groups, Streams(torch.device(device)), torch.device(device))
        return groups.control.shortcut is not None, groups.control.exchange([rank, 7])

    assert run_world(size, run, timeout=30) == [(what is None, [[rank, 7] for rank in range(size)])] * size


def test_a_rank_without_the_extension_is_an_error_on_all() -> None:
    def run(rank: int) -> None:
        groups = Groups.create("gloo")
        if rank == 1:
            native.installed = lambda name: name != "shared_memory"
        with pytest.raises(DivergenceError, match="extension shared_memory: False"):
            choose_collectives(groups, Streams(CPU), CPU)

    run_world(2, run)


def test_shared_memory_is_taken_without_a_word() -> None:
    for kind, lines in (*run_world(2, chosen_with_log), *run_world(4, chosen_with_log, 2)):
        assert kind == SharedMemoryCollectives.__name__
        assert lines == []
