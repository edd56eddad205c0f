"""State that is cut for one engine, cut anew for another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.comm import Groups, Streams, choose_collectives
from lightning_zero.config import Tier
from lightning_zero.optim.whole import WholeState, resharded
from lightning_zero.plan import FlatLayout, ParameterSpec, Rest
from lightning_zero.shards.slice import FlatParameters, Slice
from tests.helpers.world import run_world

REST = Rest(master=Tier.DEVICE, weights=None, gradients=Tier.DEVICE, state=Tier.DEVICE)
SHAPES = [(70, 3), (130,), (), (0, 3), (1000,), (1,), (65,)]
CUTS = {"together": [range(7)], "one by one": [[i] for i in range(7)], "mixed": [[4, 2, 0], [1, 3], [6, 5]]}


def entries_of(cut: str, rank: int, world_size: int) -> list[Slice]:
    found: dict[int, Slice] = {}
    for unit, members in enumerate(CUTS[cut]):
        specs = [ParameterSpec(f"p{i}", (), SHAPES[i], torch.float32, True) for i in members]
        layout = FlatLayout.build(specs, world_size, compute_dtype=torch.float32, reduce_dtype=torch.float32)
        parameters = [nn.Parameter(torch.zeros(SHAPES[i])) for i in members]
        master = torch.zeros(layout.shard_numel)
        flat = FlatParameters(layout, parameters, rank, master, [p.data for p in parameters], REST, unit=unit)
        found.update(zip(members, flat.shards, strict=True))
    return [found[index] for index in range(len(SHAPES))]


def state_of(index: int, entry: Slice) -> WholeState:
    """Values that tell parameter, kind and element; some parameters have one kind only, or none."""
    numel, piece = entry.spec.numel, entry.place

    def cut(values: Tensor) -> Tensor:
        return values.narrow(0, piece.parameter_start if piece.numel else 0, piece.numel).clone()

    slices = {"exp_avg": cut(torch.arange(numel) + 10_000.0 * index)}
    if index % 2:
        slices["mask"] = cut(torch.arange(numel) % 3 == 0)
    values = {"step": torch.tensor(float(index)), "name": f"p{index}"}
    return WholeState() if index == 6 else WholeState(slices, values)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_element_finds_its_new_place(world_size: int) -> None:
    def play(rank: int) -> None:
        cpu = torch.device("cpu")
        collectives = choose_collectives(Groups.create("gloo"), Streams(cpu), cpu)
        for before in CUTS:
            for now in CUTS:
                old, new = (entries_of(cut, rank, world_size) for cut in (before, now))
                state = [state_of(index, entry) for index, entry in enumerate(old)]
                found = resharded(state, list(zip(old, new, strict=True)), collectives, cpu)
                for index, (entry, one) in enumerate(zip(new, found, strict=True)):
                    expected = state_of(index, entry)
                    assert one.values == expected.values
                    assert one.slices.keys() == expected.slices.keys()
                    for key, value in expected.slices.items():
                        assert one.slices[key].dtype is value.dtype
                        assert torch.equal(one.slices[key], value), (before, now, index, key)

    run_world(world_size, play)
