"""Whole parameters at owner ranks: optimizers that are not elementwise give one process's bits in every world."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.comm import Collectives, GlooCollectives, Groups, LocalCollectives, Pending, Streams
from lightning_zero.config import Tier
from lightning_zero.optim.whole import WholeParameters
from lightning_zero.plan.buckets import deal_out
from lightning_zero.plan.layout import FlatLayout, ParameterSpec, Rest
from lightning_zero.shards.slice import FlatParameters, Slice
from tests.helpers.rig import RowNormalised
from tests.helpers.world import run_world

MATRICES = {"a": (12, 8), "b": (5, 17), "c": (8, 12), "d": (3, 3)}
MIXED = {"matrix": (12, 8), "vector": (19,), "one": (1,), "kernel": (4, 3, 3, 3), "wide": (2, 31)}
STEPS = 20

Make = Callable[[Sequence[nn.Parameter]], Optimizer]


def muon(params: Sequence[nn.Parameter]) -> Optimizer:
    return torch.optim.Muon(params, lr=0.02)


def adafactor(params: Sequence[nn.Parameter]) -> Optimizer:
    return torch.optim.Adafactor(params, lr=0.02)


OPTIMIZERS: dict[str, tuple[Make, dict[str, tuple[int, ...]]]] = {
    "muon": (muon, MATRICES),
    "adafactor": (adafactor, MIXED),
    "third_party": (RowNormalised, {**MIXED, "empty": (0, 4)}),
}


def values(shapes: dict[str, tuple[int, ...]], seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes.values()]


def gradients(shapes: dict[str, tuple[int, ...]], step: int) -> list[Tensor | None]:
    """Of one step. Every third step one parameter, another one each time, has none."""
    found: list[Tensor | None] = [*values(shapes, 100 + step)]
    if step % 3 == 2:
        found[step % len(found)] = None
    return found


def make_collectives(rank: int, world_size: int) -> Collectives:
    return GlooCollectives(Groups.create(), Streams(torch.device("cpu"))) if world_size > 1 else LocalCollectives()


def make_entries(masters: dict[str, Tensor], rank: int, world_size: int) -> list[Slice]:
    """Half of the parameters in one layout each, the others in one for each dtype."""
    rest = Rest(master=Tier.DEVICE, weights=None, gradients=Tier.DEVICE, state=Tier.DEVICE)
    names = list(masters)
    layouts: dict[Any, list[str]] = {}
    for place, name in enumerate(names):
        layouts.setdefault(name if place % 2 else masters[name].dtype, []).append(name)
    found: dict[str, Slice] = {}
    for members in layouts.values():
        dtype = masters[members[0]].dtype
        specs = [ParameterSpec(name, (), tuple(masters[name].shape), dtype, True) for name in members]
        layout = FlatLayout.build(specs, world_size, compute_dtype=dtype, reduce_dtype=dtype)
        parameters = [nn.Parameter(masters[name].clone()) for name in members]
        master = torch.zeros(layout.shard_numel, dtype=dtype)
        flat = FlatParameters(layout, parameters, rank, master, [p.data for p in parameters], rest)
        found.update(zip(members, flat.shards, strict=True))
    for name, entry in found.items():
        entry.data.copy_(entry.of(masters[name]))
    return [found[name] for name in names]


def owned(whole: WholeParameters) -> list[nn.Parameter]:
    """With more ranks than parameters, an idle owner's optimizer gets an empty group, as in a real one."""
    return [parameter for entry in whole.places if (parameter := whole.owned(entry)) is not None]


def make_optimizer(make: Make, params: list[nn.Parameter]) -> Optimizer:
    optimizer = make([nn.Parameter(torch.zeros(1, 1))])
    optimizer.param_groups[0]["params"] = params
    return optimizer


def step_once(
    whole: WholeParameters,
    optimizer: Optimizer,
    entries: Sequence[Slice],
    full: Sequence[Tensor | None],
) -> None:
    for gradient, entry in zip(full, entries, strict=True):
        assert entry.parameter is not None
        entry.parameter.grad = None if gradient is None else entry.of(gradient).to(entry.data.dtype)
    whole.begin(entries)
    assert all(entry.gradient is None for entry in entries)
    optimizer.step()
    whole.publish()
    whole.leave()


def one_process(make: Make, shapes: dict[str, tuple[int, ...]]) -> list[Tensor]:
    params = [nn.Parameter(value) for value in values(shapes, 0)]
    optimizer = make(params)
    for step in range(STEPS):
        for parameter, gradient in zip(params, gradients(shapes, step), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return [parameter.detach() for parameter in params]


# ---------------------------------------------------------------------------------------------------------------------
# Bits


@pytest.mark.parametrize(("world_size", "round_nbytes"), [(1, 2**26), (3, 100), (6, 2**26)])
def test_same_bits_as_one_process(world_size: int, round_nbytes: int) -> None:
    """In many rounds too, and with more ranks than parameters."""

    def train(rank: int) -> dict[str, list[Tensor]]:
        found, wire = {}, make_collectives(rank, world_size)
        for name, (make, shapes) in OPTIMIZERS.items():
            entries = make_entries(dict(zip(shapes, values(shapes, 0), strict=True)), rank, world_size)
            whole = WholeParameters(entries, wire, round_nbytes=round_nbytes)
            optimizer = make_optimizer(make, owned(whole))
            for step in range(STEPS):
                step_once(whole, optimizer, entries, gradients(shapes, step))
            assert all(parameter.grad is None for parameter in owned(whole)), name
            found[name] = [entry.data for entry in entries]
        return found

    ranks = run_world(world_size, train)
    for name, (make, shapes) in OPTIMIZERS.items():
        for index, expected in enumerate(one_process(make, shapes)):
            assert torch.equal(torch.cat([found[name][index] for found in ranks]), expected.reshape(-1)), name


# ---------------------------------------------------------------------------------------------------------------------
# Pieces


class Measured(LocalCollectives):
    """Rank ``rank`` of a world whose wire brings zeros, and notes what every call moves."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self.rank, self.world_size = rank, world_size
        self.sent: list[list[int]] = []
        self.received: list[list[int]] = []

    def _all_to_all(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], what: str
    ) -> Pending:
        assert (input.numel(), output.numel()) == (sum(input_splits), sum(output_splits))
        self.sent.append([n * input.element_size() for n in input_splits])
        self.received.append([n * input.element_size() for n in output_splits])
        output.zero_()
        return Pending(what)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("limit", [64, 4096])
def test_traffic(world_size: int, limit: int) -> None:
    """What one rank sends is what the other expects, all bytes travel once, and no rank ever gets more than the limit,
    or than one parameter."""
    shapes = {"big": (64, 32), **MIXED, **MATRICES}
    wires = [Measured(rank, world_size) for rank in range(world_size)]
    for rank, wire in enumerate(wires):
        WholeParameters(
            make_entries({n: torch.zeros(s) for n, s in shapes.items()}, rank, world_size), wire, round_nbytes=limit
        )
    calls = len(wires[0].sent)
    assert {len(wire.sent) for wire in wires} == {calls}
    for call, a, b in itertools.product(range(calls), range(world_size), range(world_size)):
        assert wires[a].sent[call][b] == wires[b].received[call][a]
    sizes = [4 * math.prod(shape) for shape in shapes.values()]
    assert max(sum(nbytes) for wire in wires for nbytes in wire.received) <= max(limit, *sizes)
    assert sum(sum(nbytes) for wire in wires for nbytes in wire.sent) == sum(sizes)


@pytest.mark.parametrize("world_size", range(1, 10))
def test_owners_are_balanced(world_size: int) -> None:
    sizes = [4096, 4096, 16384, 64, 64, 16384, 4096, 1, 0, 777] * 3
    owners = deal_out(sizes, world_size)
    loads = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == r) for r in range(world_size)]
    assert max(loads) - min(loads) <= max(sizes)
    assert deal_out(sizes, world_size) == owners


def test_owner_ties_follow_the_order() -> None:
    assert deal_out([5, 5, 5, 9], 2) == [1, 1, 0, 0]  # 9 -> 0, 5 -> 1, 5 -> 1 (5 < 9), 5 -> 0 (9 < 10)


def test_nothing_to_own() -> None:
    whole = WholeParameters([], LocalCollectives())
    whole.begin([])
    whole.publish()
    assert whole.state_to_slices([]) == []
    assert whole.state_from_slices([]) == []


# ---------------------------------------------------------------------------------------------------------------------
# Errors


def test_state_that_not_every_rank_expects() -> None:
    entries = make_entries({"w": torch.zeros(8)}, 0, 1)
    whole = WholeParameters(entries, LocalCollectives())
    with pytest.raises(RuntimeError, match="must not depend on the rank"):
        whole.to_slices([None], [torch.float32])


def test_dtypes_travel_apart_and_unchanged() -> None:
    def exchange(rank: int) -> list[Tensor]:
        masters = {
            f"{dtype}": values({"x": (7, 5)}, 3, dtype)[0] for dtype in (torch.float32, torch.bfloat16, torch.float64)
        }
        entries = make_entries(masters, rank, 3)
        whole = WholeParameters(entries, make_collectives(rank, 3), round_nbytes=64)
        for parameter in owned(whole):
            assert torch.equal(parameter, masters[f"{parameter.dtype}"])
            parameter.data.mul_(2)
        whole.publish()
        return [entry.data for entry in entries]

    ranks = run_world(3, exchange)
    for index, dtype in enumerate((torch.float32, torch.bfloat16, torch.float64)):
        expected = values({"x": (7, 5)}, 3, dtype)[0].mul(2).reshape(-1)
        assert torch.equal(torch.cat([shards[index] for shards in ranks]), expected)
