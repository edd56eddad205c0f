"""Bytes on the wire, as the kernel counts them for this process's sockets: what must travel, and hardly more."""

from __future__ import annotations

import os
import socket
import stat
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_zero import Compression, estimate_memory
from lightning_zero.comm import Exchange, GlooCollectives, Groups, Streams, choose_collectives
from lightning_zero.comm.groups import RANKS_PER_HOST, connections
from lightning_zero.comm.native import SWITCH
from lightning_zero.extensions.compression.codes import format_nbytes
from tests.helpers.cases import Block, Stack, case, features
from tests.helpers.probe import Probe, fit
from tests.helpers.world import run_world

pytestmark = [
    pytest.mark.usefixtures("one_host"),
    pytest.mark.skipif(sys.platform != "linux", reason="reads tcp_info of Linux"),
]

CPU = torch.device("cpu")
NUMEL = 12 * 2**16  # 3 MiB in float32, a multiple of 2, 3 and 4
_RECEIVED, _SENT, _AGAIN = 128, 200, 208  # in tcp_info: bytes, and how many of those sent were sent again


def traffic(files: Sequence[int] | None = None) -> tuple[int, int]:
    """Bytes sent and received by TCP sockets of this process since they were opened, without headers; ``None``: all."""
    sent = received = 0
    for name in os.listdir("/proc/self/fd") if files is None else map(str, files):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                if found.family == socket.AF_UNIX or found.type != socket.SOCK_STREAM:
                    continue
                info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 216)
        except OSError:  # closed meanwhile, or none of these
            continue
        sent += struct.unpack_from("Q", info, _SENT)[0] - struct.unpack_from("Q", info, _AGAIN)[0]
        received += struct.unpack_from("Q", info, _RECEIVED)[0]
    return sent, received


def during(comm: Any, action: Callable[[], Any], files: Sequence[int] | None = None) -> tuple[int, int]:
    """What an action sends and receives on this rank, once all ranks are through."""
    comm.groups.control.barrier()
    before = traffic(files)
    action()
    comm.groups.control.barrier()
    after = traffic(files)
    return after[0] - before[0], after[1] - before[1]


def collectives(world_size: int) -> dict[str, Callable[[Any], None]]:
    def gather(comm: Any) -> None:
        comm.all_gather(torch.ones(NUMEL), "unit").wait()

    def reduce(comm: Any) -> None:
        comm.reduce_scatter(torch.ones(NUMEL), torch.empty(NUMEL // world_size), "bucket").wait()

    return {"all_gather": gather, "reduce_scatter": reduce}


def between_hosts(groups: Groups) -> list[int]:
    """The sockets of the hop between hosts."""
    hop = groups.resource("hops", None).between
    names = {group.group_name for group in (hop.gather, hop.reduce) if group is not None}
    assert len(names) == 2
    return [file for name in names for file, _ in connections[name]]


@pytest.mark.parametrize(
    ("hosts", "ranks", "memory"), [(2, 2, "0"), (2, 2, "1"), (3, 2, "1"), (2, 4, "0"), (2, 4, "1")]
)
def test_hosts_send_what_they_have_summed_up(hosts: int, ranks: int, memory: str) -> None:
    """(H - 1) / H of the whole leaves each, however many ranks it has; and a rank sends no more than directly, or
    nothing else where a host's ranks read one another's memory."""
    world_size = hosts * ranks

    def run(rank: int) -> dict[str, tuple[int, int]]:
        comm: Any = choose_collectives(Groups.create("gloo"), Streams(CPU), CPU)
        actions, files = collectives(world_size), between_hosts(comm.groups)
        for action in actions.values():
            action(comm)  # connect
        out = {name: during(comm, lambda action=action: action(comm), files)[0] for name, action in actions.items()}
        return {
            name: (out[name], during(comm, lambda action=action: action(comm))[0]) for name, action in actions.items()
        }

    found = run_world(world_size, run, environment={RANKS_PER_HOST: str(ranks), SWITCH: memory})
    for first in range(0, world_size, ranks):
        for name in ("all_gather", "reduce_scatter"):
            nbytes = 4 * NUMEL * (hosts - 1) // hosts
            leaves = sum(rank[name][0] for rank in found[first : first + ranks])
            assert 0.99 * nbytes < leaves < 1.02 * nbytes, f"{name}: {leaves} of {nbytes}"
    nbytes = 4 * NUMEL * (hosts - 1 if memory == "1" else world_size - 1) // world_size
    for rank in found:
        for name, (_, sent) in rank.items():
            assert 0.99 * nbytes < sent < 1.03 * nbytes, f"{name}: {sent} of {nbytes}"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["int8", "int4", "bfloat16"])
def test_what_is_rounded_leaves_a_host_in_fewer_bytes(kind: Any, ranks: int) -> None:
    weights = "int8" if kind == "int4" else kind

    def run(rank: int) -> tuple[int, int]:
        compression = Compression(weights=weights, gradients=kind)
        comm: Any = choose_collectives(Groups.create("gloo"), Streams(CPU), CPU, Exchange(compression))

        def gather() -> None:
            comm.all_gather(torch.ones(NUMEL), "unit", content=("unit", 0)).wait()

        def reduce() -> None:
            comm.reduce_scatter(torch.ones(NUMEL), torch.empty(NUMEL // comm.world_size), "bucket").wait()

        gather(), reduce()  # connect
        files = None if ranks == 1 else between_hosts(comm.groups)
        gathered, reduced = (during(comm, action, files)[0] for action in (gather, reduce))
        return gathered, reduced

    found = run_world(2 * ranks, run, environment={RANKS_PER_HOST: str(ranks)})
    for position, nbytes in enumerate(format_nbytes(one, NUMEL) // 2 for one in (weights, kind)):
        for first in range(0, 2 * ranks, ranks):
            leaves = sum(rank[position] for rank in found[first : first + ranks])
            assert 0.99 * nbytes < leaves < 1.02 * nbytes, f"{leaves} of {nbytes}"


WIDTH, HIDDEN = 64, 2048


class WireBytes(pl.Callback):
    """What every step sends and receives between hosts."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        trainer.strategy.engine.control.barrier()
        self.steps.append(traffic(between_hosts(trainer.strategy.engine.collectives.groups)))


def wide() -> nn.Module:
    model = Stack(*(Block(WIDTH, HIDDEN) for _ in range(4)))
    model.stem, model.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8)
    return model


def test_a_step_between_hosts_moves_what_the_plan_says() -> None:
    """And the estimate. Agreements take the direct way, as would what rank 0 sends of buffers."""

    def run(rank: int) -> dict[int, tuple[list[int], int, int]]:
        model = case("wide", wide, batch=features(8))
        found = {}
        for stage in (1, 2, 3):
            counter = WireBytes()
            trainer = fit(Probe(model), stage=stage, micro_steps=4, callbacks=[counter], bucket_mib=0.5)
            plan = trainer.strategy.engine.plan
            estimate = estimate_memory(plan, hosts=2).leaving_nbytes(f"zero{stage}")
            sent = [b[0] - a[0] for a, b in zip(counter.steps[2:], counter.steps[3:], strict=False)]
            found[stage] = sent, plan.expected_traffic().total.nbytes // 2, estimate
        return found

    ranks = run_world(4, run, timeout=90, environment={RANKS_PER_HOST: "2"})
    for stage in (1, 2, 3):
        for first in (0, 2):
            must, estimate = ranks[first][stage][1:]
            assert must > 2e6
            assert estimate == pytest.approx(must, abs=4)
            for leaves in map(sum, zip(*(found[stage][0] for found in ranks[first : first + 2]), strict=True)):
                assert 0.99 * must < leaves < 1.02 * must, (stage, leaves, must)


@pytest.mark.parametrize("rounds", [False, True])
def test_a_step_with_secondary_shards_moves_what_the_estimate_says(rounds: bool) -> None:
    """Of four micro-steps: weights once, gradients four times, and less of both where they are rounded."""
    compression = Compression(weights="int8", gradients="int8") if rounds else None

    def run(rank: int) -> tuple[list[int], int]:
        counter, settings = WireBytes(), {"secondary_shards": True, "compression": compression}
        trainer = fit(
            Probe(case("wide", wide, batch=features(8))), stage=3, micro_steps=4, callbacks=[counter], **settings
        )
        estimate = estimate_memory(trainer.strategy.engine.plan, hosts=2, compression=compression)
        return [
            b[0] - a[0] for a, b in zip(counter.steps[2:], counter.steps[3:], strict=False)
        ], estimate.leaving_nbytes("zero3")

    ranks = run_world(4, run, timeout=90, environment={RANKS_PER_HOST: "2"})
    for first in (0, 2):
        must = ranks[first][1]
        for leaves in map(sum, zip(*(sent for sent, _ in ranks[first : first + 2]), strict=True)):
            assert 0.99 * must < leaves < 1.02 * must, (leaves, must)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_collective_over_gloo_moves_each_byte_once(world_size: int) -> None:
    """(N - 1) / N of the whole, out and in: gloo's own reduce-scatter would move twice that."""

    def run(rank: int) -> dict[str, tuple[int, int]]:
        comm = GlooCollectives(Groups.create("gloo"), Streams(CPU))
        actions = collectives(world_size)
        for action in actions.values():
            action(comm)  # connect
        return {name: during(comm, lambda action=action: action(comm)) for name, action in actions.items()}

    nbytes = 4 * NUMEL * (world_size - 1) // world_size
    for found in run_world(world_size, run):
        for name, counted in found.items():
            assert all(0.99 * nbytes < count < 1.02 * nbytes for count in counted), f"{name}: {counted} of {nbytes}"


def test_ranks_that_read_one_another_send_nothing() -> None:
    def run(rank: int) -> dict[str, tuple[tuple[int, int], int]]:
        comm: Any = choose_collectives(Groups.create("gloo"), Streams(CPU), CPU)
        found = {}
        for name, action in collectives(3).items():
            moved = comm.transport.moved
            found[name] = during(comm, lambda action=action: action(comm)), comm.transport.moved - moved
        return found

    for found in run_world(3, run):
        for name, (counted, moved) in found.items():
            # Not (0, 0) to the byte: a connection of the set-up that ends meanwhile takes its own count with it.
            assert max(map(abs, counted)) < 256, f"{name}: {counted}"
            assert moved == 4 * NUMEL * 2 // 3, name
