"""In which order a rank issues gathers and reductions, in which groups, and on which streams; and whether all do alike.

There is no nccl where these tests run. Streams are simulated, collectives are seen where torch dispatches them, and
orders are those in which ranks over shared memory call their wire.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_zero import ActivationPolicy, Compression, build_plan
from lightning_zero.comm import (
    Collectives,
    ControlGroup,
    Exchange,
    Groups,
    NativeCollectives,
    ShardGroup,
    Streams,
    choose_collectives,
)
from lightning_zero.comm.collectives import CollectiveCall
from lightning_zero.comm.groups import RANKS_PER_HOST, order_launches, orders_differ
from lightning_zero.config import Placement, SessionSettings
from lightning_zero.engine import ZeroEngine
from lightning_zero.offload import MemoryTiers
from lightning_zero.session.session import ZeroSession
from tests.helpers.world import run_world

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
STEPS = 3
Call = tuple[str, str]


# ---------------------------------------------------------------------------------------------------------------------
# Who decides


def test_one_communicator_where_the_order_is_provably_the_same() -> None:
    cases = (CUDA, False), (CUDA, True), (CPU, False), (CPU, True)
    assert [orders_differ(*case) for case in cases] == [False, True, True, True]


def test_nccl_is_asked_to_begin_kernels_in_the_host_s_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT", raising=False)
    found = []
    for device, before in ((CPU, None), (CUDA, None), (CUDA, "0")):
        with monkeypatch.context() as patch:
            environment = {} if before is None else {"NCCL_LAUNCH_ORDER_IMPLICIT": before}
            patch.setattr("os.environ", environment)
            order_launches(device)
            found.append(environment.get("NCCL_LAUNCH_ORDER_IMPLICIT"))
    assert found == [None, "1", "0"]


def test_two_groups_if_any_rank_asks_for_two_and_no_more_than_needed() -> None:
    def run(rank: int) -> list[Any]:
        one = Groups.create("gloo", apart=False)
        first, control = one.one_order, one.control.process_group
        two = Groups.create("gloo", apart=rank == 1)  # a Trainer of another stage, with one rank of another mind
        names = two.gather.group_name, two.reduce.group_name  # type: ignore[union-attr]
        again = Groups.create("gloo", apart=False)
        return [
            first,
            two is one,
            two.one_order,
            names[0] != names[1],
            again is one,
            control is again.control.process_group,
        ]

    assert run_world(2, run) == [[True, True, False, True, True, True]] * 2


# ---------------------------------------------------------------------------------------------------------------------
# On which streams, in which groups


class SimulatedCuda:
    """What ``Streams`` asks of ``torch.cuda``: streams have a name, and know what they run behind."""

    def __init__(self, priorities: tuple[int, int] | None = (0, -5)) -> None:
        self.compute = SimulatedStream("compute")
        self._current = self.compute
        self.issued = 0
        names = iter(("gather", "transfer", "reduce", "average"))
        self.Stream: Any = lambda device, **options: SimulatedStream(next(names), **options)
        if priorities is not None:
            self.Stream.priority_range = lambda: priorities

    def Event(self, blocking: bool = False) -> SimulatedEvent:
        return SimulatedEvent()

    def current_stream(self, device: Any = None) -> SimulatedStream:
        return self._current

    @contextmanager
    def stream(self, stream: SimulatedStream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before


class SimulatedEvent:
    def __init__(self) -> None:
        self.behind: set[int] = set()

    def record(self, stream: SimulatedStream) -> None:
        assert not self.behind, "an event that somebody holds must not be recorded anew"
        self.behind = set(stream.behind)


class SimulatedStream:
    def __init__(self, name: str, **options: int) -> None:
        self.name = name
        self.options = options
        self.behind: set[int] = set()

    def wait_event(self, event: SimulatedEvent) -> None:
        self.behind |= event.behind

    def wait_stream(self, other: SimulatedStream) -> None:
        self.behind |= other.behind


class Seen(TorchDispatchMode):
    """Notes each collective: its kind, its group, the stream, whether the host is to wait, and what is known over."""

    def __init__(self, cuda: SimulatedCuda) -> None:
        super().__init__()
        self.cuda, self.first = cuda, cuda.issued
        self.calls: list[tuple[str, str, str, set[int]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            group = next(dist.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
            assert any(arg is False for arg in args), "as an asynchronous call it would run on a stream of the group's"
            stream = self.cuda.current_stream()
            kind = function.__name__.partition(".")[0].strip("_")
            behind = {number - self.first for number in stream.behind if number >= self.first}
            self.calls.append((kind, group.group_name, stream.name, behind))
            stream.behind.add(self.cuda.issued)
            self.cuda.issued += 1
        return function(*args, **(kwargs or {}))


class Alone(ControlGroup):
    """One rank of a fake world: the others say what it says."""

    def _rows(self, mine: bytes, sizes: Sequence[int] = ()) -> list[bytes]:
        return [mine] * self.world_size

    def any_of(self, flags: Tensor) -> Tensor:
        return flags


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, hidden), nn.Tanh(), nn.Linear(hidden, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class Net(nn.Module):
    def __init__(self, hidden: tuple[int, ...] = (16, 16, 16, 16)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(map(Block, hidden))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, skipped: int | None = None, unused: bool = False) -> Tensor:
        for index, block in enumerate(self.blocks):
            if index != skipped:
                y = block(x)
                x = x if unused and index == 2 else y
        return self.head(x)


def seen_in_a_fake_world(
    stage: int, one_order: bool, span: int | None = None, exchange: Exchange | None = None
) -> list[tuple[str, str, str, set[int]]]:
    """What one rank of eight, in shard groups of ``span``, issues in the third step; with an ``exchange``, on hosts."""
    cuda = SimulatedCuda()
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        size = span or 8
        gather = dist.new_group([*range(size)], backend="fake")
        reduce = gather if one_order else dist.new_group([*range(size)], backend="fake")
        control = Alone(None, 0, 8)
        groups = Groups(gather, reduce, control, control, ShardGroup(0, size), divisor=size)
        assert groups.one_order is one_order
        device: Any = SimpleNamespace(type="cuda")
        streams = Streams(device, groups.one_order, cuda=cuda)
        net = Net()
        placement = replace(Placement.from_stage(stage), span=span)
        plan = build_plan(net, placement=placement, world_size=8, units=["Block"], bucket_mib=0.001)
        wire = NativeCollectives(groups, streams)
        if exchange is not None and span is None:
            wire = choose_collectives(groups, streams, device, exchange)
        if span is not None:
            same = dist.new_group([*range(0, 8, size)], backend="fake")
            groups.across = Groups(same, same, control, control, ShardGroup(0, 8 // size), divisor=8 // size)
            wire = choose_collectives(groups, streams, device, exchange or Exchange())
        engine = ZeroEngine(net, plan, wire, control, MemoryTiers(CPU, streams))
        engine.prepare_training()
        for _ in range(STEPS):
            with Seen(cuda) as seen:
                with engine.step("training_step"):
                    loss = net(torch.zeros(2, 8)).square().mean()
                with engine.backward():
                    loss.backward()
                engine.before_optimizer_step("an optimizer")
                engine.after_optimizer_step({unit.index: unit.parameters for unit in engine.units})
        engine.detach()
        return seen.calls
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_in_one_order_there_is_one_group_and_one_stream(stage: int) -> None:
    calls = seen_in_a_fake_world(stage, one_order=True)
    assert {kind for kind, *_ in calls} == {"allgather_base", "reduce_scatter_base"}
    assert len({group for _, group, _, _ in calls}) == 1
    assert {stream for _, _, stream, _ in calls} == {"gather"}
    for number, (_, _, _, behind) in enumerate(calls):
        assert behind >= set(range(number))  # the device runs them as the host has issued them


def test_in_two_orders_kinds_keep_apart() -> None:
    calls = seen_in_a_fake_world(3, one_order=False)
    lanes = {(kind, group, stream) for kind, group, stream, _ in calls}
    assert sorted((kind, stream) for kind, _, stream in lanes) == [
        ("allgather_base", "gather"),
        ("reduce_scatter_base", "reduce"),
    ]
    assert len({group for _, group, _ in lanes}) == 2
    for number, (kind, _, _, behind) in enumerate(calls):
        assert behind >= {earlier for earlier in range(number) if calls[earlier][0] == kind}


@pytest.mark.parametrize(("stage", "one_order"), [(1, True), (2, True), (3, True), (3, False)])
def test_hops_are_in_the_order_of_their_kind(stage: int, one_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has one communicator, or two as the kinds have; what goes between hosts is in codes."""
    monkeypatch.setenv(RANKS_PER_HOST, "4")
    exchange = Exchange(Compression(weights="int8" if stage == 3 else None, gradients="int8"), stage == 3)
    calls = seen_in_a_fake_world(stage, one_order, exchange=exchange)
    lanes = dict.fromkeys((group, stream) for _, group, stream, _ in calls)
    assert len({group for group, _ in lanes}) == len(lanes) == (2 if one_order else 4)
    assert {stream for _, stream in lanes} == ({"gather"} if one_order else {"gather", "reduce"})
    reduced = [(kind, group) for kind, group, _, _ in calls if kind != "allgather_base"]
    assert [kind for kind, _ in reduced] == ["reduce_scatter_base", "alltoall_base"] * (len(reduced) // 2)
    assert len(reduced) >= 2 * 4
    assert len({group for _, group in reduced}) == 2
    for number, (_, _, stream, behind) in enumerate(calls):
        assert behind >= {earlier for earlier in range(number) if calls[earlier][2] == stream}


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("rounded", [False, True])
def test_averages_between_groups_run_beside_the_reductions(
    stage: int, rounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each behind the reduction of its bucket, which no other one waits for: one all-reduce, or two calls in codes."""
    monkeypatch.setenv(RANKS_PER_HOST, "4")
    calls = seen_in_a_fake_world(
        stage, one_order=False, span=4, exchange=Exchange(Compression(gradients="int8")) if rounded else None
    )
    reductions = [number for number, (_, _, stream, _) in enumerate(calls) if stream == "reduce"]
    averages = [number for number, (_, _, stream, _) in enumerate(calls) if stream == "average"]
    kinds = ["alltoall_base", "allgather_base"] if rounded else ["allreduce"]
    assert {calls[number][0] for number in reductions} == {"reduce_scatter_base"}
    assert [calls[number][0] for number in averages] == kinds * len(reductions)
    assert len(reductions) >= 5
    assert len({calls[number][1] for number in averages} - {calls[number][1] for number in reductions}) == 1
    for place, number in enumerate(averages):
        assert calls[number][3] >= {reductions[place // len(kinds)], *averages[:place]}
    assert not any(calls[number][3] & {*averages} for number in reductions)


@pytest.mark.parametrize(
    ("priorities", "expected"), [((0, -5), {"priority": -1}), ((1, -1), {"priority": -1}), ((0, 0), {}), (None, {})]
)
def test_transfers_go_before_what_waits_in_other_streams(
    priorities: tuple[int, int] | None, expected: dict[str, int]
) -> None:
    device: Any = SimpleNamespace(type="cuda")
    cuda = SimulatedCuda(priorities)
    for streams in (made := Streams(device, cuda=cuda)), made.apart():
        with streams.gathering():
            gathers = cuda.current_stream()
        with streams.reducing():
            reductions = cuda.current_stream()
        assert (gathers.options, reductions.options) == (expected, expected)
    with made.transferring():
        assert not cuda.current_stream().options


# ---------------------------------------------------------------------------------------------------------------------
# Whether all ranks issue the same


def issued(
    stage: int,
    loss_of: Callable[[Net, Tensor, int, int], Tensor],
    net: Callable[[], Net] = Net,
    accumulate: int = 1,
    activations: ActivationPolicy | None = None,
) -> list[list[Call]]:
    """What the ranks of this world issue in each step, by rank. Collective."""
    module, calls = net(), []
    groups = Groups.create("gloo")
    settings = SessionSettings(placement=Placement.from_stage(stage), units=["Block"], activations=activations)
    session = ZeroSession(settings, groups, CPU)
    session.checkpoints.begin(training=True)
    session.shard(module)
    session.begin(training=True)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    session.shard_optimizers([optimizer])
    wire: Collectives = session.engine.collectives

    def note(call: CollectiveCall) -> None:
        calls.append((call.kind, call.what))

    wire.observers.append(note)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(accumulate):
            with session.accumulating() if micro < accumulate - 1 else nullcontext():
                with session.step("training_step", training=True):
                    torch.manual_seed(100 * step + 10 * micro + wire.rank)
                    loss = loss_of(module, torch.randn(2, 8), wire.rank, step)
                with session.backward():
                    loss.backward()
        optimizer.step()
    session.rest()
    every: list[list[Call]] = groups.control.gather_objects(calls)
    return every


def plain(net: Net, x: Tensor, rank: int, step: int) -> Tensor:
    return net(x).square().mean()


def skipping(net: Net, x: Tensor, rank: int, step: int) -> Tensor:
    return net(x, skipped=2 if rank == 1 and step > 0 else None).square().mean()


def leaving_out(net: Net, x: Tensor, rank: int, step: int) -> Tensor:
    return net(x, unused=rank == 1 and step > 0).square().mean()


ALIKE: dict[str, dict[str, Any]] = {
    "uniform": {},
    "accumulation": {"accumulate": 3},
    "activation checkpointing": {"activations": ActivationPolicy(checkpointing="units")},
    "uneven units": {"net": lambda: Net((3, 70, 5, 24))},
}


def test_ranks_with_one_graph_issue_one_order() -> None:
    def run(rank: int) -> None:
        for name, options in ALIKE.items():
            for stage in (1, 3):
                first, *others = issued(stage, plain, **options)
                assert {kind for kind, _ in first} == {"all_gather", "reduce_scatter"}, f"{name}, stage {stage}"
                assert others == [first, first], f"{name}, stage {stage}"

    run_world(3, run)


def of(kind: str, calls: list[Call]) -> list[Call]:
    return [call for call in calls if call[0] == kind]


def test_ranks_that_use_other_units_have_one_order_only_where_parameters_are_replicated() -> None:
    """Why sharded ones have two communicators: each kind has one order, but how a backward mixes them is each
    rank's own."""

    def run(rank: int) -> None:
        for loss_of in (skipping, leaving_out):
            for stage in (1, 2):
                first, second = issued(stage, loss_of)
                assert second == first, f"{loss_of.__name__}, stage {stage}"
            first, second = issued(3, loss_of)
            assert of("all_gather", second) == of("all_gather", first), loss_of.__name__
            assert of("reduce_scatter", second) == of("reduce_scatter", first), loss_of.__name__
            assert second != first, loss_of.__name__

    run_world(2, run)
