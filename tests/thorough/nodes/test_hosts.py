"""Four ranks on two hosts of two, whose collectives take two hops, beside four ranks of one host: the same bits."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_zero import (
    CheckpointPolicy,
    HostOffload,
    LoaderPolicy,
    NvmeOffload,
    ZeroPrecision,
    ZeroStrategy,
    full_gradients,
    full_parameters,
)
from lightning_zero.comm import Groups, Streams, choose_collectives
from lightning_zero.comm.groups import RANKS_PER_HOST, places_by_host
from lightning_zero.comm.native import SWITCH
from lightning_zero.extensions.hops import HierarchicalCollectives
from tests.helpers.training import make_trainer, quiet
from tests.helpers.world import WorldError, run_world
from tests.world.strategy.test_shard_within import Fails, Looks, Net, fit, same, whole

pytestmark = pytest.mark.usefixtures("one_host")

STAGES = (1, 2, 3)
ACCUMULATED = {"accumulate_grad_batches": 2}
CLIPPED = {"gradient_clip_val": 0.05, **ACCUMULATED}
CPU = torch.device("cpu")


def in_both(run: Callable[[int], Any], timeout: float = 120) -> tuple[list[Any], list[Any]]:
    """What ranks of one host find, and what they find on two."""
    found = run_world(4, run, timeout=timeout)
    return found, run_world(4, run, timeout=timeout, environment={RANKS_PER_HOST: "2"})


def all_same(there: list[Any], here: list[Any]) -> bool:
    """Buffers are each rank's own."""
    return all(same(a, b, buffers=False) for a, b in zip(there, here, strict=True))


def of_two_hosts(module: Net) -> bool:
    return isinstance(module.trainer.strategy.engine.collectives, HierarchicalCollectives)  # type: ignore[attr-defined]


def test_numbers_are_those_of_one_host() -> None:
    """Norms too. With ``uneven``, ranks of one host use a block that those of the other one do not."""
    rows: list[tuple[dict[str, Any], bool]] = [({}, False), (ACCUMULATED, True), (CLIPPED, False), (CLIPPED, True)]

    def run(rank: int) -> list[Any]:
        modules = [fit(at, None, Net(seed=rank, uneven=uneven), **row) for row, uneven in rows for at in STAGES]
        assert all(of_two_hosts(module) is (RANKS_PER_HOST in os.environ) for module in modules)
        return [(whole(module), module.norms) for module in modules]

    for there, here in zip(*in_both(run), strict=True):
        assert all_same([weights for weights, _ in there], [weights for weights, _ in here])
        assert [norms for _, norms in there] == [norms for _, norms in here]


def test_ranks_of_a_host_read_one_anothers_memory_or_use_gloo() -> None:
    """Of four ranks on two hosts each reads half of what its host gathers and reduces, and no bit depends on it."""

    def moved(net: Net) -> list[int]:
        groups = net.trainer.strategy.engine.collectives.groups  # type: ignore[attr-defined]
        shared = groups._resources.get("shared_memory")
        return [transport.moved for transport in shared.transports] if shared is not None else []

    def run(rank: int) -> list[dict[str, Tensor]]:
        found, before = [], [0, 0]
        for stage in STAGES:
            steps = []
            for count in (3, 4):
                net = fit(stage, None, Net(), steps=count)
                steps.append([now - had for now, had in zip(moved(net), before, strict=False)])
                before = moved(net)
            traffic = net.trainer.strategy.engine.plan.expected_traffic()  # type: ignore[attr-defined]
            halves = [traffic.all_gather.nbytes // 2, traffic.reduce_scatter.nbytes // 2]
            reads = os.environ.get(SWITCH) != "0"
            assert [more - less for less, more in zip(*steps, strict=True)] == (halves if reads else [])
            assert net.trainer.strategy.engine.collectives.receives is not reads  # type: ignore[attr-defined]
            found.append(whole(net))
        return found

    ranks = {RANKS_PER_HOST: "2"}
    memory = run_world(4, run, timeout=120, environment=ranks)
    gloo = run_world(4, run, timeout=120, environment={**ranks, SWITCH: "0"})
    for there, here in zip(memory, gloo, strict=True):
        assert all_same(there, here)


@pytest.mark.timing
def test_a_rank_that_is_killed_ends_those_of_its_host_and_of_others() -> None:
    class Dies(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if batch_idx == 2 and self.global_rank == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().training_step(batch, batch_idx)

    for stage in (1, 3):
        begin = time.monotonic()
        with pytest.raises(WorldError) as raised:
            run_world(4, lambda rank: fit(stage, None, Dies()), timeout=60, environment={RANKS_PER_HOST: "2"})  # noqa: B023
        failures = raised.value.failures
        assert [failures[rank].type for rank in range(4)] == [*["CommunicationError"] * 3, "SIGKILL"]
        assert all(failures[rank].message.startswith(f"Rank {rank}: ") for rank in range(3))
        assert time.monotonic() - begin < 30


def test_other_precisions_an_optimizer_of_whole_parameters_writes_and_gradients() -> None:
    def run(rank: int) -> list[dict[str, Tensor]]:
        net = fit(3, None, Net(optimizer="adafactor"))
        found = [whole(net), *(fit(stage, None, Looks(), steps=2).seen for stage in STAGES)]
        for precision in ("bf16-mixed", "16-mixed", "bf16-true"):
            found += [whole(fit(stage, None, Net(), plugins=ZeroPrecision(precision))) for stage in STAGES]  # type: ignore[arg-type]
        with full_parameters(net), torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(float(rank))  # rank 0's counts
        assert all(bool((value == 0).all()) for name, value in whole(net).items() if "norm" not in name)
        return found

    for there, here in zip(*in_both(run), strict=True):
        assert all_same(there, here)


class Clears(Net):
    """Its gradients are looked at, and what one rank does to the whole ones is what the step takes."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with full_gradients(self):
            for name, parameter in self.named_parameters():
                if "blocks.1" in name and parameter.grad is not None:
                    parameter.grad.mul_(0.5)


def test_offload(tmp_path: Path) -> None:
    def run(rank: int) -> list[dict[str, Tensor]]:
        folder, found = tmp_path / f"files of {os.environ.get(RANKS_PER_HOST, '')}", []
        folder.mkdir(exist_ok=True)
        for stage in (2, 3):
            parts = {"optimizer": True, "parameters": stage == 3}
            for offload in (HostOffload(**parts), NvmeOffload(path=str(folder), **parts)):
                module = Clears()
                strategy = ZeroStrategy(stage=stage, units=["Sequential"], offload=offload)  # type: ignore[arg-type]
                with quiet():
                    make_trainer(strategy).fit(module, DataLoader(range(3), batch_size=None))  # type: ignore[arg-type]
                found.append(whole(module))
        return found

    for there, here in zip(*in_both(run), strict=True):
        assert all_same(there, here)


@pytest.mark.parametrize("optimizer", ["sgd", "adafactor"])
def test_checkpoints_go_to_another_topology(tmp_path: Path, optimizer: str) -> None:
    """A run that is resumed where ranks are elsewhere is the uninterrupted one, bit for bit."""

    def loader() -> DataLoader[Any]:
        return DataLoader(range(2), batch_size=None)  # type: ignore[arg-type]

    def run(rank: int) -> list[dict[str, Tensor]]:
        here = os.environ.get(RANKS_PER_HOST, "one")
        found = []
        for stage in (1, 3):
            net = fit(stage, None, Net(optimizer=optimizer), steps=2)
            net.trainer.save_checkpoint(tmp_path / f"{here}{stage}.ckpt")
            found.append(whole(fit(stage, None, Net(optimizer=optimizer), steps=2, max_epochs=2)))
        return found

    def resume(rank: int) -> list[dict[str, Tensor]]:
        there = "one" if RANKS_PER_HOST in os.environ else "2"
        found = []
        for stage in (1, 3):
            path = tmp_path / f"{there}{stage}.ckpt"
            resumed = Net(seed=5, optimizer=optimizer)
            with quiet():
                trainer = make_trainer(ZeroStrategy(stage=4 - stage, units=["Sequential"]), max_epochs=2)  # type: ignore[arg-type]
                trainer.fit(resumed, loader(), ckpt_path=path)
            found.append(whole(resumed))
            loaded, policy = Net(seed=6, optimizer=optimizer), CheckpointPolicy(initial_weights=str(path))
            with quiet():
                make_trainer(ZeroStrategy(stage=3, checkpoint=policy), max_steps=0).fit(loaded, loader())
            assert not same(whole(loaded), whole(resumed), buffers=False)
        return found

    unbroken, resumed = in_both(run), in_both(resume)
    for ranks in zip(*unbroken, *resumed, strict=True):
        assert all(all_same(ranks[0], other) for other in ranks[1:])


def test_fewer_ranks_go_on_from_what_two_hosts_have_saved(tmp_path: Path) -> None:
    """In the background, with shards cut by host."""

    def save(rank: int) -> None:
        strategy = ZeroStrategy(stage=3, units=["Sequential"], checkpoint=CheckpointPolicy(async_save=True))
        with quiet():
            trainer = make_trainer(strategy)
            trainer.fit(Net(optimizer="adafactor"), DataLoader(range(2), batch_size=None))  # type: ignore[arg-type]
            trainer.save_checkpoint(tmp_path / f"{os.environ[RANKS_PER_HOST]}.ckpt")
            strategy.teardown()

    def resume(rank: int, saved: str) -> dict[str, Tensor]:
        net = Net(seed=5, optimizer="adafactor")
        with quiet():
            trainer = make_trainer(ZeroStrategy(stage=3, units=["Sequential"]), max_epochs=2)
            trainer.fit(net, DataLoader(range(2), batch_size=None), ckpt_path=tmp_path / saved)  # type: ignore[arg-type]
        return whole(net)

    for ranks in ("4", "2"):
        run_world(4, save, environment={RANKS_PER_HOST: ranks})
    assert all_same(run_world(2, resume, "4.ckpt"), run_world(2, resume, "2.ckpt"))


def test_loaders_that_end_earlier_on_one_host() -> None:
    def run(rank: int) -> list[dict[str, Tensor]]:
        found = []
        for stage in (1, 3):
            module, policy = Net(), LoaderPolicy(training="stop")
            strategy = ZeroStrategy(stage=stage, units=["Sequential"], loaders=policy)  # type: ignore[arg-type]
            with quiet():
                make_trainer(strategy).fit(module, DataLoader(range(4 - rank // 2), batch_size=None))  # type: ignore[arg-type]
            found.append(whole(module))
        return found

    for there, here in zip(*in_both(run), strict=True):
        assert all_same(there, here)


@pytest.mark.timing
def test_an_error_of_one_rank_ends_all() -> None:
    begin = time.monotonic()
    with pytest.raises(WorldError) as raised:
        run_world(4, lambda rank: fit(3, None, Fails()), timeout=60, environment={RANKS_PER_HOST: "2"})
    failures = raised.value.failures
    assert failures.keys() == {0, 1, 2, 3}
    assert failures[3].type == "KeyError"
    assert all(failures[rank].message.startswith(f"Rank {rank}: ") for rank in range(3))
    assert time.monotonic() - begin < 30


class Validates(Net):
    """Two ranks, of different hosts, call the model once more than the others."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 2 and self.global_rank in (0, 3):
            with torch.no_grad():
                super().training_step(batch, batch_idx)
            dist.barrier()
        return super().training_step(batch, batch_idx)


@pytest.mark.timing
def test_ranks_that_can_never_go_on_are_told() -> None:
    begin = time.monotonic()
    with pytest.raises(WorldError, match="No rank can go on") as raised:
        run_world(4, lambda rank: fit(3, None, Validates()), timeout=60, environment={RANKS_PER_HOST: "2"})
    assert raised.value.failures.keys() == {0, 1, 2, 3}
    assert time.monotonic() - begin < 40


def test_a_long_transfer_is_no_deadlock() -> None:
    """Three ranks wait for a gather in two hops, the fourth one comes late: nobody is told anything."""

    def run(rank: int) -> None:
        comm = choose_collectives(Groups.create("gloo"), Streams(CPU), CPU)
        if rank == 2:
            time.sleep(4)
        full = torch.zeros(8)
        comm.own_range(full).fill_(comm.rank)
        comm.all_gather(full, "late").wait()
        assert torch.equal(full, torch.arange(4.0).repeat_interleave(2))

    run_world(4, run, timeout=60, environment={RANKS_PER_HOST: "2"})


def test_a_new_engine_does_not_wait_for_transfers_that_an_error_has_stopped() -> None:
    """Only where it waits for them by name, nobody waits unseen."""

    def run(rank: int) -> None:
        groups = Groups.create("gloo")
        comm = choose_collectives(groups, Streams(CPU), CPU)
        full = comm.allocate(8, torch.float32, CPU)
        stopped = [] if rank == 3 else [comm.all_gather(full, "stopped")]
        time.sleep(0.5)  # in which threads come to where they wait
        again = choose_collectives(groups, Streams(CPU), CPU)
        again.allocate(8, torch.float32, CPU)
        groups.control.barrier()
        stopped = stopped or [comm.all_gather(full, "stopped")]
        stopped[0].wait()

    run_world(4, run, timeout=60, environment={RANKS_PER_HOST: "2"})


def test_which_ranks_are_in_one_place() -> None:
    assert places_by_host([[0, 1], [2, 3]]) == [[0, 2], [1, 3]]
    assert places_by_host([[0, 2, 4], [1, 3, 5]]) == [[0, 1], [2, 3], [4, 5]], "numbered across hosts"
    for hosts in ([[0, 1, 2]], [[0], [1]], [[0, 1], [2]], [[0, 3], [1, 2]]):
        assert places_by_host(hosts) is None


def test_hosts_of_different_sizes_take_the_direct_way() -> None:
    def run(rank: int) -> None:
        net = fit(3, None, Net(), steps=2)
        assert not of_two_hosts(net)
        assert len(net.trainer.strategy.engine.collectives.groups.hosts) == 2  # type: ignore[attr-defined]

    run_world(3, run, environment={RANKS_PER_HOST: "2"})


def test_a_strange_number_of_ranks_is_an_error_on_all() -> None:
    def run(rank: int) -> None:
        os.environ[RANKS_PER_HOST] = "many" if rank == 1 else "2"
        fit(3, None, Net(), steps=1)

    with pytest.raises(WorldError, match=f"{RANKS_PER_HOST} must be a number of ranks, got 'many' on rank 1") as raised:
        run_world(2, run)
    assert len(raised.value.failures) == 2
