"""What an accelerator keeps of buffers, and what goes back to its allocator, behind whom. Memory is the CPU's here."""

from __future__ import annotations

from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn

from lightning_zero import build_plan
from lightning_zero.comm import LocalCollectives, Streams
from lightning_zero.engine import pool as pools
from lightning_zero.engine.pool import BufferPool
from lightning_zero.plan.plan import kept_nbytes
from tests.helpers.plan_models import Gpt, on_meta

MIB = 2**20


class Cuda:
    """Streams that note what they wait for."""

    class Stream:
        def __init__(self, device: Any = None) -> None:
            self.waits: list[Any] = []

        def wait_event(self, event: Any) -> None:
            self.waits.append(event)

        wait_stream = wait_event

    def __init__(self) -> None:
        self.current = self.Stream()

    def current_stream(self, device: Any) -> Cuda.Stream:
        return self.current


def made() -> tuple[BufferPool, Cuda, dict[str, int]]:
    """A pool of a model whose embedding and head have 4 MB, and blocks 200 kB; six units and the root."""
    plan = build_plan(on_meta(Gpt, vocabulary=16_000, blocks=8), world_size=2)
    cuda = Cuda()
    streams = Streams(torch.device("cuda"), cuda=cuda)
    units = {unit.name: unit.index for unit in plan.units}
    of_embedding = next(unit for unit in plan.units if unit.name == "embedding")
    assert [unit.slot for unit in plan.units if unit.name in ("blocks.1", "head")] == [of_embedding.slot] * 2
    return (
        BufferPool(LocalCollectives(), torch.device("cpu"), streams, plan),
        cuda,
        units | {"slot": of_embedding.slot or 0},
    )


def test_a_slot_keeps_what_three_of_its_units_need() -> None:
    assert kept_nbytes([9 * MIB, 3 * MIB, 3 * MIB, 2 * MIB]) == 3 * MIB
    assert kept_nbytes([9 * MIB, 8 * MIB, MIB]) == MIB
    assert kept_nbytes([9 * MIB, 9 * MIB]) == 0
    assert kept_nbytes([9 * MIB, 9 * MIB, 9 * MIB, 1]) == 9 * MIB
    assert kept_nbytes([9 * MIB, MIB, 8 * MIB + 1]) == MIB
    assert kept_nbytes([MIB, MIB // 2, 1]) == MIB, "less than a MiB is not worth it"
    assert kept_nbytes([0]) == 0


def test_what_passes_goes_and_leaves_nothing_beside_it() -> None:
    pool, _, units = made()
    place = ("parameters", units["slot"])
    embedding = pool.take(place, units["embedding"])
    assert embedding.memory.numel() == 16_000 * 64 * 4
    memory = ref(embedding.memory.untyped_storage())
    pool.give(embedding)
    del embedding
    assert memory() is None
    block = pool.take(place, units["blocks.1"])
    pool.give(block)
    assert pool.take(place, units["blocks.3"]) is block, "what three units need is kept"
    pool.give(block)
    memory = ref(block.memory.untyped_storage())
    del block
    head = pool.take(place, units["head"])
    assert memory() is None
    assert list(pool) == [head]


def test_memory_that_goes_belongs_to_a_stream_that_waits_for_whoever_had_it() -> None:
    pool, cuda, units = made()
    place, home = ("parameters", units["slot"]), cuda.current
    buffer = pool.take(place, units["embedding"])
    buffer.free = "the last use"
    pool.give(buffer)
    assert home.waits == ["the last use"], "the same stream: nothing else to wait for"
    block = pool.take(place, units["blocks.1"])
    cuda.current = other = Cuda.Stream()
    pool.give(block)
    assert home.waits == ["the last use"], "it is kept"
    pool.take(place, units["head"])
    assert home.waits == ["the last use", other]
    extra = pool.take(place, units["embedding"])
    extra.free = "another use"
    pool.drop(extra)
    assert (home.waits, other.waits) == (["the last use", other], ["another use"])


@pytest.mark.parametrize("large", [True, False])
def test_large_buffers_for_gradients_go_after_a_backward(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "IDLE_NBYTES", 1000 if large else MIB)
    pool, _, units = made()
    buffer = pool.take(("gradients", units["slot"]), units["blocks.1"], lent=True)
    pool.give(buffer)
    assert list(pool) == [buffer], "another unit of this backward may take it"
    buffer = pool.take(buffer.place, units["blocks.3"], lent=True)
    pool.give(buffer, last=True)
    assert list(pool) == ([] if large else [buffer])


def test_a_cpu_keeps_the_largest_of_a_place_until_it_is_trimmed() -> None:
    plan = build_plan(nn.Sequential(*(nn.Linear(1024, 1024 * n, device="meta") for n in (1, 2))), world_size=2)
    pool = BufferPool(LocalCollectives(), torch.device("cpu"), Streams(torch.device("cpu")), plan)
    assert [pool.sizes["parameters", slot] for slot in range(len(plan.slots))] == list(plan.slots)


def test_units_that_are_alike_share_the_tensors_in_a_buffer() -> None:
    sizes = [(8, 32), (8, 32), (32, 8), (16, 16), (8, 16)]
    layers = nn.Sequential(*(nn.Linear(*size, bias=False) for size in sizes), nn.Linear(8, 32))
    plan = build_plan(layers, world_size=2, units=["Linear"])
    pool = BufferPool(LocalCollectives(), torch.device("cpu"), Streams(torch.device("cpu")), plan)
    units = {unit.name: unit for unit in plan.units}
    forms = [pool.forms[units[str(number)].index] for number in range(len(layers))]
    assert forms[0] is forms[1], "of equal shapes at equal places"
    assert len(set(map(id, forms))) == len(layers) - 1, "of other shapes, or more parameters"
    layouts = units["0"].layouts
    assert pool.form(layouts, [torch.float32]) is forms[0] is not pool.form(layouts, [torch.bfloat16])
    (rooms, views), count = forms[0](torch.zeros(4 * layouts[0].numel, dtype=torch.uint8))
    assert [view.shape for view in views] == [layers[0].weight.shape]
    assert count == len(views) + sum(1 + len(room.gaps) for room in rooms)
