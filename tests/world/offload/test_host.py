"""Host memory is aligned, zero, valid as long as anything shows it, and counted."""

from __future__ import annotations

import gc
import mmap
import sys
import weakref

import pytest
import torch

from lightning_zero.offload import host as memory
from lightning_zero.offload.host import HostMemory, bytes_of, host_memory, padded_nbytes
from tests.helpers.device_runs import needs_gpu, run_on
from tests.helpers.world import run_world

CPU = torch.device("cpu")


@pytest.mark.parametrize("numel", [0, 1, 1023, 1025])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_memory_is_zero_and_aligned(numel: int, dtype: torch.dtype) -> None:
    taken = HostMemory(CPU, None).allocate(numel, dtype)
    assert taken.shape == (numel,)
    assert taken.dtype == dtype
    assert not taken.any()
    assert numel == 0 or taken.data_ptr() % mmap.PAGESIZE == 0
    taken.fill_(1)
    assert int(taken.sum()) == numel or dtype == torch.bfloat16


def test_a_view_keeps_the_memory_and_nothing_else_does() -> None:
    taken, owned = memory._allocate(1 << 16, True)
    owner, view = weakref.ref(owned), taken[10:20]
    del taken, owned
    gc.collect()
    assert owner() is not None
    view.fill_(7)
    assert view.tolist() == [7] * 10
    del view
    gc.collect()
    assert owner() is None


def test_what_unlocks_runs_while_the_memory_is_still_mapped() -> None:
    """``cudaHostUnregister`` of an address that is no longer mapped is an error, or another mapping's."""
    taken, owner = memory._allocate(1 << 16, True)
    taken.fill_(5)
    address, seen = taken.data_ptr(), []

    def look() -> None:
        with open("/proc/self/maps") as maps:
            ranges = [line.split()[0].split("-") for line in maps]
        seen.append(any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges))

    weakref.finalize(owner, look)
    del taken, owner
    gc.collect()
    assert seen == [True]


def test_memory_is_counted_in_pages_until_it_is_released() -> None:
    host = HostMemory(CPU, None)
    first, second = host.allocate(1000, torch.float32), host.allocate(1025, torch.float32)
    assert host.nbytes == 4096 + 8192
    assert host.locked_nbytes == 0  # there is nothing to lock it for
    first.fill_(1), second.fill_(2)
    host.release()
    assert host.nbytes == 0
    assert (int(first.sum()), int(second.sum())) == (1000, 2050)


@pytest.mark.parametrize("nbytes", [4096, 8 << 20])
def test_a_forked_process_has_a_copy(nbytes: int) -> None:
    shared = host_memory(nbytes, locked=False)

    def child(rank: int) -> int:
        shared.fill_(7)
        return int(shared[-1])

    assert run_world(2, child, init_group=False) == [7, 7]
    assert not shared.any()


def test_more_than_there_is_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="bytes of host memory"):
        host_memory(1 << 60, locked=False)


def test_whole_pages() -> None:
    assert [padded_nbytes(nbytes) for nbytes in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]


def test_bytes_are_the_same_memory() -> None:
    tensor = torch.zeros(2, 3)
    bytes_of(tensor)[0:4].copy_(torch.tensor([1.5]).view(torch.uint8))
    assert tensor[0, 0] == 1.5


@needs_gpu
def test_memory_is_locked_within_the_budget_and_unlocked_again() -> None:
    (found,) = run_on("cuda", "locked")
    locked = {"locked": [True, False, False, True], "nbytes": 3 * 4096}
    assert found == {**locked, "released": False, "copied": True, "kept": True}


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a forked process gets a copy")
def test_a_forked_process_that_frees_the_memory_of_its_parent_unmaps_nothing_else() -> None:
    """It has the parent's objects, and mappings of its own where the parent's would have left room."""
    held = [host_memory(1 << 20, False, inherited=False).fill_(7)]

    def run(rank: int) -> list[int]:
        own = [mmap.mmap(-1, 1 << 20) for _ in range(64)]
        seen = int(held[0].sum())
        held.clear()
        gc.collect()
        return [seen, *(mapping[0] for mapping in own)]

    assert run_world(1, run, init_group=False) == [[0] * 65]
    assert int(held[0].sum()) == 7 << 20
