"""Memory that ranks share: who may read and write what, after errors, in new groups and in forked processes too."""

from __future__ import annotations

import gc
import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_zero.comm import Groups, Streams, choose_collectives
from lightning_zero.errors import CommunicationError
from lightning_zero.extensions.shared_memory.collectives import SharedMemoryCollectives
from lightning_zero.extensions.shared_memory.heap import Heap
from lightning_zero.extensions.shared_memory.links import Links
from tests.helpers.world import run_world

pytestmark = pytest.mark.usefixtures("one_host")

CPU = torch.device("cpu")
SIZE = 100


def connected(timeout: timedelta | None = None) -> SharedMemoryCollectives:
    comm = choose_collectives(Groups.create("gloo", timeout), Streams(CPU), CPU)
    assert isinstance(comm, SharedMemoryCollectives)
    return comm


def test_nobody_reads_before_the_owner_has_come_as_far() -> None:
    """Nobody says that it has written; and rank 1, which an error stopped earlier, has begun less than rank 0."""

    def run(rank: int) -> None:
        comm = connected()
        shard, other = comm.allocate(SIZE, torch.float32, CPU), comm.allocate(SIZE, torch.float32, CPU)
        full = torch.zeros(2 * SIZE)
        for turn in range(1, 4):
            if rank == 1:
                time.sleep(0.05)
            shard.fill_(turn)
            comm.all_gather(full, "root", source=shard, version=2 * turn).wait()
            assert full.eq(turn).all()
            comm.groups.control.barrier()
            if rank == 0 or turn != 2:
                comm.all_gather(full, "layer", source=other, version=2 * turn + 1).wait()

    run_world(2, run, timeout=20)


def test_what_is_asked_for_is_what_was_there_when_the_gather_began() -> None:
    def run(rank: int) -> None:
        comm = connected()
        shard = comm.allocate(SIZE, torch.float32, CPU).fill_(rank)
        full = torch.zeros(2 * SIZE)
        pending = comm.all_gather(full, "root", source=shard)
        shard.fill_(-1)
        if rank == 1:
            time.sleep(0.2)
        pending.wait()
        assert full.view(2, SIZE).eq(torch.tensor([[0.0], [1.0]])).all()
        comm.groups.control.barrier()

    run_world(2, run, timeout=20)


def interrupted(message: object) -> None:
    raise KeyboardInterrupt("enough")


def test_an_interrupt_where_messages_are_taken_in_lets_nobody_wait_for_good() -> None:
    def run(rank: int) -> None:
        comm = connected()
        if rank == 1:
            comm.transport._take_in = interrupted  # type: ignore[method-assign]
        error, message = (KeyboardInterrupt, "enough") if rank == 1 else (CommunicationError, "rank 1 has given up")
        with pytest.raises(error, match=message):
            comm.all_gather(comm.allocate(2 * SIZE, torch.float32, CPU), "unit").wait()
        if rank == 1:
            time.sleep(0.5)  # nobody is to be told by the end of this process

    run_world(2, run, timeout=20)


def test_a_timeout_of_years_can_be_waited_for() -> None:
    def run(rank: int) -> None:
        comm = connected(timedelta(days=3650))
        if rank == 1:
            time.sleep(0.2)
        comm.groups.control.barrier()

    run_world(2, run, timeout=20)


def test_groups_end_with_their_default_group_at_the_latest_when_new_ones_are_made(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        found = []
        links: list[Links] = []
        for turn in range(3):
            dist.init_process_group("gloo", init_method=f"file://{tmp_path}/{turn}", rank=rank, world_size=2)
            comm = connected()
            comm.groups.control.barrier()
            links.append(comm.transport._links)
            found.append(len(os.listdir("/proc/self/fd")))
            dist.destroy_process_group()
            del comm
        assert found[2] <= found[1], found  # twenty and more each time
        assert links[1].gone

    run_world(2, run, timeout=30, init_group=False)


def test_a_forked_process_changes_nothing() -> None:
    heap = Heap(2, b"label")
    tensor = heap.allocate(SIZE, torch.float32).fill_(3)
    child = os.fork()
    if child == 0:
        tensor.fill_(5)  # stays its own
        grandchild = os.fork()
        if grandchild == 0:
            os._exit(0 if tensor.eq(5).all() else 1)
        _, status = os.waitpid(grandchild, 0)
        del tensor
        gc.collect()
        os._exit(status and 1)
    assert os.waitpid(child, 0)[1] == 0
    assert tensor.eq(3).all()
    heap.close()
