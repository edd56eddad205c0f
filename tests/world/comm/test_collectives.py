"""All wires of CPU ranks next to plain arithmetic: every rank's buffer is known to every rank here."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zero._torch import storage_key, users_of
from lightning_zero.comm import (
    Collectives,
    GlooCollectives,
    Groups,
    LocalCollectives,
    NativeCollectives,
    Streams,
    choose_collectives,
)
from lightning_zero.comm.collectives import Pending
from lightning_zero.comm.control import passed_on
from lightning_zero.comm.groups import RANKS_PER_HOST
from lightning_zero.comm.native import Passage
from lightning_zero.errors import CommunicationError, DivergenceError
from lightning_zero.extensions.hops import HierarchicalCollectives
from lightning_zero.extensions.shared_memory.collectives import SharedMemoryCollectives
from tests.helpers.probe import pairwise_sum
from tests.helpers.world import run_world

pytestmark = pytest.mark.usefixtures("one_host")

CPU = torch.device("cpu")
FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
OTHERS = (torch.int64, torch.int32, torch.uint8)
SIZE = 192  # elements per rank


FLAT = ("gloo", "shared memory", "shared memory, allocated")
RANKS_OF_A_HOST = 2
# The wires that are tried one after the other in one world, and how many ranks it has.
WORLDS = pytest.mark.parametrize(("names", "world_size"), [(FLAT, 3), (("two hops",), 4)], ids=["flat", "two hops"])


def order_of(name: str, world_size: int) -> list[int]:
    """Who has the first shard, the second one, and so on: what a host has sums up to lies side by side."""
    if name != "two hops":
        return list(range(world_size))
    return [host + place for place in range(RANKS_OF_A_HOST) for host in range(0, world_size, RANKS_OF_A_HOST)]


def wire(name: str = "gloo") -> Any:
    groups = Groups.create("gloo")
    if name == "two hops":
        os.environ[RANKS_PER_HOST] = str(RANKS_OF_A_HOST)
        comm = choose_collectives(groups, Streams(CPU), CPU)
        assert isinstance(comm, HierarchicalCollectives)
        return comm
    if name == "gloo":
        return GlooCollectives(groups, Streams(CPU))
    comm = choose_collectives(groups, Streams(CPU), CPU)
    assert isinstance(comm, SharedMemoryCollectives)
    return comm


def placed(comm: Collectives, name: str, tensor: Tensor) -> Tensor:
    """The same elements where the other ranks can read them."""
    if "allocated" not in name:
        return tensor
    place = comm.allocate(tensor.numel(), tensor.dtype, CPU)
    return place.copy_(tensor)


def buffer_of(rank: int, world_size: int, dtype: torch.dtype, salt: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * salt + rank)
    return (torch.randn(world_size * SIZE, generator=generator) * 50).abs().to(dtype)


def average(world_size: int, dtype: torch.dtype, salt: int = 0) -> Tensor:
    """Summed by pairs in ``dtype`` itself; fp16 is divided before the sum, so that it cannot overflow."""
    rows = [buffer_of(rank, world_size, dtype, salt) for rank in range(world_size)]
    if dtype == torch.float16:
        rows = [row / world_size for row in rows]
    total = pairwise_sum(rows)
    return total if dtype == torch.float16 else total / world_size


@WORLDS
def test_against_the_reference_bit_for_bit(names: tuple[str, ...], world_size: int) -> None:
    def run(rank: int) -> None:
        for name in names:
            comm, order = wire(name), order_of(name, world_size)
            for dtype in (*FLOATING, *OTHERS):
                at = f"{name}, {dtype}"
                full = placed(comm, name, torch.zeros(world_size * SIZE, dtype=dtype))
                comm.own_range(full).copy_(comm.own_range(buffer_of(rank, world_size, dtype)))
                comm.all_gather(full, "gather").wait()
                rows = [buffer_of(rank, world_size, dtype).chunk(world_size)[place] for place, rank in enumerate(order)]
                assert torch.equal(full, torch.cat(rows)), at
                for place, source in enumerate(order):
                    value = placed(comm, name, buffer_of(rank, world_size, dtype))
                    comm.broadcast(value, place).wait()
                    assert torch.equal(value, buffer_of(source, world_size, dtype)), at
                if dtype in OTHERS:
                    continue
                expected = comm.own_range(average(world_size, dtype))
                bucket = placed(comm, name, buffer_of(rank, world_size, dtype))
                shard = torch.full((SIZE,), 7.0, dtype=dtype)
                comm.reduce_scatter(bucket, shard, "apart").wait()
                assert torch.equal(shard, expected), at
                bucket = placed(comm, name, buffer_of(rank, world_size, dtype))
                comm.reduce_scatter(bucket, comm.own_range(bucket), "in place").wait()
                assert torch.equal(comm.own_range(bucket), expected), at

    run_world(world_size, run)


@WORLDS
def test_uneven_pieces(names: tuple[str, ...], world_size: int) -> None:
    def run(rank: int) -> None:
        whole = [[0, 2, 1, 5], [3, 0, 0, 1], [1, 1, 4, 0], [0, 2, 0, 3]]  # from row to column
        splits = [row[:world_size] for row in whole[:world_size]]
        for name in names:
            comm = wire(name)
            place = comm.rank
            mine = placed(comm, name, torch.arange(sum(splits[place])) + 10 * place)
            received = torch.full((sum(row[place] for row in splits),), -1)
            comm.all_to_all(received, mine, [row[place] for row in splits], splits[place]).wait()
            rows = [(torch.arange(sum(row)) + 10 * source).split(row)[place] for source, row in enumerate(splits)]
            assert torch.equal(received, torch.cat(rows)), name

    run_world(world_size, run)


@WORLDS
def test_many_at_once_never_share_a_buffer(names: tuple[str, ...], world_size: int) -> None:
    """Also of two dtypes and sizes, waited for in another order than begun, with gathers in between."""

    def run(rank: int) -> None:
        for name in names:
            comm = wire(name)
            flying: list[tuple[Any, Tensor, Tensor]] = []
            for salt in range(6):
                dtype = (torch.float32, torch.float64)[salt % 2]
                bucket = placed(comm, name, buffer_of(rank, world_size, dtype, salt))
                shard = torch.zeros(SIZE, dtype=dtype)
                pending = comm.reduce_scatter(bucket, shard, f"bucket {salt}")
                flying.append((pending, shard, comm.own_range(average(world_size, dtype, salt))))
                full = placed(comm, name, torch.zeros(world_size * SIZE))
                comm.own_range(full).fill_(comm.rank + salt)
                gathered = comm.all_gather(full, f"unit {salt}")
                flying.append((gathered, full, torch.arange(world_size).repeat_interleave(SIZE).float() + salt))
            for pending, result, expected in reversed(flying):
                pending.wait()
                pending.wait()  # a second time does nothing
                assert pending.done, name
                assert torch.equal(result, expected), name

    run_world(world_size, run)


@WORLDS
def test_a_gather_from_a_source(names: tuple[str, ...], world_size: int) -> None:
    """Of the same dtype and of another one; twice, with new values in between."""

    def run(rank: int) -> None:
        for name in names:
            comm = wire(name)
            source = placed(comm, name, torch.full((SIZE,), 1.0 + comm.rank))
            for change in range(3):
                for dtype in (torch.float32, torch.bfloat16):
                    full = torch.full((world_size * SIZE,), 7, dtype=dtype)
                    comm.all_gather(full, "unit", source=source, version=1 + change).wait()
                    expected = torch.arange(1 + change, 1 + change + world_size).repeat_interleave(SIZE).to(dtype)
                    assert torch.equal(full, expected), name
                comm.groups.control.barrier()  # nobody writes before all have read
                source.add_(1)

    run_world(world_size, run)


def test_columns_of_a_tensor_mesh_are_apart() -> None:
    """Ranks 0, 2, 4 have one part of each weight, and 1, 3, 5 the other: each goes its own way, over every wire."""
    splits = [[0, 2, 1], [3, 0, 0], [1, 1, 4]]  # from row to column

    def run(rank: int) -> list[list[Tensor]]:
        groups, column, found = Groups.create("gloo", tensor=2), rank % 2, list[list[Tensor]]()
        shared = choose_collectives(groups, Streams(CPU), CPU)
        assert isinstance(shared, SharedMemoryCollectives)
        for comm in (GlooCollectives(groups, Streams(CPU)), shared):
            place, results, sources = comm.rank, list[Tensor](), list[Tensor]()
            assert (place, comm.world_size) == (rank // 2, 3)
            for turn in range(2 + 3 * column):
                mine = buffer_of(rank, 3, torch.float32, salt=turn)
                sources.append(comm.allocate(SIZE, torch.float32, CPU).copy_(mine[:SIZE]))
                full, bucket, shard = mine.clone(), comm.allocate(3 * SIZE, torch.float32, CPU), torch.zeros(SIZE)
                whole, received = torch.zeros(3 * SIZE), torch.zeros(sum(row[place] for row in splits))
                pieces = [row[place] for row in splits], splits[place]
                transfers = [
                    comm.reduce_scatter(bucket.copy_(mine), shard, "bucket"),
                    comm.all_gather(full, "unit"),
                    comm.all_gather(whole, "weights", source=sources[-1], version=1 + turn),
                    comm.all_to_all(received, mine[: sum(splits[place])], *pieces),
                    comm.broadcast(value := mine.clone(), turn % 3),
                ]
                for transfer in transfers:
                    transfer.wait()
                results += [shard, full, whole, received, value]
            groups.control.barrier()  # nobody lets go of a source before all have read
            found.append(results)
        assert all(map(torch.equal, *found))
        return found[1]

    for rank, (shard, full, whole, received, value, *_) in enumerate(run_world(6, run)):
        place, rows = rank // 2, [buffer_of(other, 3, torch.float32) for other in range(rank % 2, 6, 2)]
        assert torch.equal(shard, (pairwise_sum(rows) / 3).chunk(3)[place])
        assert torch.equal(full, torch.cat([row.chunk(3)[other] for other, row in enumerate(rows)]))
        assert torch.equal(whole, torch.cat([row[:SIZE] for row in rows]))
        sent = [row[: sum(split)].split(split)[place] for row, split in zip(rows, splits, strict=True)]
        assert torch.equal(received, torch.cat(sent))
        assert torch.equal(value, rows[0])


def test_a_gather_and_a_reduction_in_one_group_find_their_own() -> None:
    """Also where ranks begin them in different orders: averages between shard groups do, and both are messages."""

    def run(rank: int) -> None:
        comm = GlooCollectives(Groups.create("gloo", apart=False), Streams(CPU))
        assert comm.groups.one_order
        full, bucket, shard = torch.zeros(2 * SIZE), buffer_of(rank, 2, torch.float32), torch.zeros(SIZE)
        comm.own_range(full).fill_(1.0 + rank)
        transfers = [
            lambda: comm.all_gather(full, "weights"),
            lambda: comm.reduce_scatter(bucket, shard, "gradients"),
        ]
        for pending in [transfer() for transfer in (transfers if rank else reversed(transfers))]:
            pending.wait()
        assert torch.equal(full, torch.tensor([1.0, 2.0]).repeat_interleave(SIZE))
        assert torch.equal(shard, comm.own_range(average(2, torch.float32)))

    run_world(2, run, timeout=30)


def test_a_reduction_is_known_to_have_ended_before_anybody_waits() -> None:
    def run(rank: int) -> None:
        comm = wire()
        for salt in range(2):
            pending = comm.reduce_scatter(buffer_of(rank, 2, torch.float32, salt), torch.zeros(SIZE), "gradients")
            if not rank:
                assert pending.ready_within(20.0)
            else:
                comm.groups.control.barrier()
            pending.wait()
            if not rank:
                comm.groups.control.barrier()

    run_world(2, run, timeout=60)


def test_without_patience_a_late_reduction_gets_memory_of_its_own() -> None:
    """Rank 1 joins the first only after the second was begun: waiting for it would be waiting for good."""

    def run(rank: int) -> None:
        comm = wire()
        results = []
        comm.groups.control.barrier()
        for salt in range(2):
            if rank == 1 and salt == 0:
                comm.groups.control.barrier()  # rank 0 has begun both
            shard = torch.zeros(SIZE)
            results.append((comm.reduce_scatter(buffer_of(rank, 2, torch.float32, salt), shard, "late", 0.0), shard))
        if rank == 0:
            comm.groups.control.barrier()
        for salt, (pending, shard) in enumerate(results):
            pending.wait()
            assert torch.equal(shard, comm.own_range(average(2, torch.float32, salt)))

    run_world(2, run, timeout=30)


def test_observers_see_kind_size_and_purpose() -> None:
    def run(rank: int) -> None:
        for name in FLAT[:2]:
            comm, seen = wire(name), []
            comm.observers.append(lambda call, seen=seen: seen.append((call.kind, call.what, call.numel, call.nbytes)))
            comm.all_gather(torch.zeros(4), "a").wait()
            comm.reduce_scatter(torch.zeros(6, dtype=torch.float64), torch.zeros(3, dtype=torch.float64), "b").wait()
            comm.broadcast(torch.zeros(5, dtype=torch.uint8), 1, "c").wait()
            assert seen == [("all_gather", "a", 4, 16), ("reduce_scatter", "b", 6, 48), ("broadcast", "c", 5, 5)], name

    run_world(2, run)


@pytest.mark.parametrize("name", FLAT[:2])
def test_a_dead_peer_is_an_error_that_says_what_was_under_way(name: str) -> None:
    class Gone(Exception):
        pass

    def run(rank: int) -> None:
        comm = wire(name)
        comm.groups.control.barrier()
        if rank == 1:
            raise Gone
        with pytest.raises(CommunicationError, match="Rank 0: parameters of unit 'x' did not complete"):
            comm.all_gather(torch.zeros(2 * SIZE), "parameters of unit 'x'").wait()
        with pytest.raises(CommunicationError):
            comm.groups.control.barrier()

    failures = run_world(2, run, expect_failure=True, timeout=30)
    assert {rank: failure.type for rank, failure in failures.items()} == {1: "Gone"}


def test_a_transfer_that_failed_fails_again() -> None:
    """Not: waits for messages that have come, of which gloo tells once."""

    def run(rank: int) -> int:
        comm = wire()
        barrier = comm.groups.control.barrier
        barrier()
        if rank == 1:
            barrier()
            return 0
        transfer = comm.all_gather(torch.zeros(3 * SIZE), "parameters of unit 'block'")
        barrier()
        for _ in range(2):  # what came from the other rank, and what did not come from this one
            with pytest.raises(CommunicationError, match="parameters of unit 'block' did not complete"):
                transfer.wait()
        return 2

    assert run_world(3, run, timeout=20) == [2, 0, 2]


@pytest.mark.thorough  # the wait is 8 seconds
@pytest.mark.parametrize("kind", ["reduction", "gather"])
def test_a_rank_that_is_killed_in_the_middle_of_a_message_ends_the_wait_for_it(kind: str) -> None:
    """Of a message that was cut off gloo tells nobody."""

    def run(rank: int) -> bool:
        comm = wire()
        full, shard = torch.zeros(2**24), torch.empty(2**23)  # 32 MiB to each: more than the system has room for

        def begin() -> Pending:
            if kind == "gather":
                return comm.all_gather(full, "parameters of unit 'x'")
            return comm.reduce_scatter(full, shard, "gradients of bucket 1")

        other = comm.groups.control.gather_objects(os.getpid())[1 - rank]
        if rank == 0:
            transfer = begin()
            comm.groups.control.barrier()
            match = r"(?s)(gradients of bucket 1|parameters of unit 'x').*rank 1 .* its process is gone"
            with pytest.raises(DivergenceError, match=match):
                transfer.wait()
            comm.abandon([transfer])
            comm.groups.destroy()
            return True
        comm.groups.control.barrier()
        os.kill(other, signal.SIGSTOP)
        transfer = begin()
        time.sleep(0.3)  # in which as much is sent as there is room for
        os.kill(other, signal.SIGCONT)
        os.kill(os.getpid(), signal.SIGKILL)
        return transfer.ready_within(0.0)

    failures = run_world(2, run, expect_failure=True, timeout=40, grace=30)
    assert {rank: failure.type for rank, failure in failures.items()} == {1: "SIGKILL"}


@pytest.mark.parametrize("name", ["gloo", "two hops"])
def test_threads_hold_no_memory_of_what_they_have_taken_through(name: str) -> None:
    """Who else has a weight's memory is counted after each gather."""

    def run(rank: int) -> list[int]:
        comm, found = wire(name), list[int]()
        full, end = torch.zeros((4 if name == "two hops" else 2) * SIZE), Passage.end
        bucket = full.clone()
        keys = [storage_key(full), storage_key(bucket)]
        alone = [users_of(key) for key in keys]

        def ended(passage: Passage, failure: BaseException | None = None) -> None:
            if name != "two hops" or name in passage.kind:  # and not within one of the hops
                for _ in range(1000):  # gloo's own threads let go a moment later; this one keeps what it has meanwhile
                    held = [users_of(key) - before for key, before in zip(keys, alone, strict=True)]
                    if held == [0, 0]:
                        break
                    time.sleep(0.001)
                found.extend(held)
            end(passage, failure)

        Passage.end = ended  # type: ignore[method-assign]
        try:
            comm.all_gather(full, "parameters of unit 'x'").wait()
            comm.reduce_scatter(bucket, torch.empty(SIZE), "gradients of bucket 1").wait()
        finally:
            Passage.end = end  # type: ignore[method-assign]
        return found

    for found in run_world((4 if name == "two hops" else 2), run):
        assert found == [0] * 4


def test_what_goes_in_two_hops_is_counted_apart_from_what_goes_directly() -> None:
    """By these counts the ranks judge who can go on."""

    def run(rank: int) -> list[int]:
        comm = wire("two hops")
        bucket, shard = torch.ones(4 * SIZE), torch.empty(SIZE)
        for _ in range(3):
            comm.reduce_scatter(bucket, shard, "gradients of bucket 1").wait()
            comm.all_to_all(torch.empty(4), torch.ones(4), [1] * 4, [1] * 4).wait()
        return [passed_on[f"the reductions{way} {comm.groups.number}"] for way in ("", " in two hops")]

    assert run_world(4, run) == [[3, 3]] * 4


def test_an_average_between_groups_has_the_same_bits_in_one_call_and_in_two() -> None:
    """Of two groups, whose sums have one order only; and float16, whose sum here is infinite, is divided before."""

    def run(rank: int) -> None:
        groups, streams = Groups.create("gloo", span=2), Streams(CPU)
        assert groups.across is not None
        kinds = NativeCollectives, GlooCollectives
        one, two = (kind(groups, streams, kind(groups.across, streams)) for kind in kinds)
        for dtype in FLOATING:
            mine, other = ((buffer_of(place, 1, dtype)[:-1] * 500) for place in (rank, (rank + 2) % 4))
            for reduced in (False, True):
                shards = mine.clone(), mine.clone()
                for wire, shard in zip((one, two), shards, strict=True):
                    before = Pending("a reduction") if reduced else None
                    wire.average_across(shard, "gradients", before)[1].wait()
                divided = dtype == torch.float16
                expected = mine / 2 + other / 2 if divided else (mine + other) / 2
                assert torch.equal(shards[0], expected), (dtype, reduced)
                assert torch.equal(shards[0], shards[1]), (dtype, reduced)
                assert (mine + other).isinf().any() == divided

    run_world(4, run)


def test_one_rank_needs_no_wire() -> None:
    comm, data = LocalCollectives(), torch.arange(6.0)
    shard, output = torch.zeros(6), torch.zeros(6)
    comm.all_gather(data, "").wait()
    comm.reduce_scatter(data, shard, "").wait()
    comm.all_to_all(output, data, [6], [6]).wait()
    comm.broadcast(data, 0).wait()
    for result in (data, shard, output):
        assert torch.equal(result, torch.arange(6.0))


def test_numbers_put_together() -> None:
    """Sums, and largest numbers with NaN of either sign above infinity: the same bits on every rank."""
    rows = torch.tensor(
        [
            [0.0, 2.0**-1074, 1.0, 1e300],
            [1.0, 0.0, float("inf"), 3.0],
            [float("nan"), 1.0, -float("nan"), 2.0],
        ],
        dtype=torch.float64,
    )
    ways = (*FLAT[:2], "hosts")

    def run(rank: int) -> list[list[Tensor]]:
        found = []
        for name in ways:
            comm = Groups.create("gloo").control if name == "hosts" else wire(name)
            assert comm.device == CPU
            found.append([comm.total(rows[rank].clone()), comm.total(rows[rank].clone(), largest=True)])
        return found

    expected = [rows.sum(0), rows.amax(0)]
    first, *others = run_world(3, run)
    for ranks in (first, *others):
        for name, mine, of_first in zip(ways, ranks, first, strict=True):
            for numbers, right, bits in zip(mine, expected, of_first, strict=True):
                assert numbers.dtype is torch.float64, name
                assert torch.equal(numbers.view(torch.int64), bits.view(torch.int64)), name
                assert torch.equal(numbers.isnan(), right.isnan()), name
                assert torch.equal(numbers.nan_to_num(0.0), right.nan_to_num(0.0)), name


def test_one_rank_keeps_its_numbers() -> None:
    mine = torch.tensor([1.0, float("nan")], dtype=torch.float64)
    assert LocalCollectives().total(mine) is mine
    assert LocalCollectives(Streams(torch.device("meta"))).device.type == "meta"
