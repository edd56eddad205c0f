"""A 70B model is planned in seconds and megabytes, whatever the world size."""

from __future__ import annotations

import tracemalloc
from functools import partial

import pytest
import torch
from torch import nn

from lightning_zero import build_plan
from tests.helpers.counting import calls_of
from tests.helpers.plan_models import Llama70B, numel, on_meta

WORLDS = (8, 512, 4096)


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return on_meta(Llama70B)


def test_neither_calls_nor_memory_grow_with_the_world(llama: nn.Module) -> None:
    def planned(stage: int, world_size: int) -> None:
        plan = build_plan(llama, stage=stage, world_size=world_size, param_dtype=torch.bfloat16)
        plan.fingerprint()
        plan.describe()

    planned(1, 8)  # what is imported or kept by the first one
    for stage in (1, 3):
        few, many = (calls_of(partial(planned, stage, world_size)) for world_size in (min(WORLDS), max(WORLDS)))
        assert many < 1.1 * few, stage
    tracemalloc.start()
    try:
        planned(3, max(WORLDS))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 50 * 2**20


@pytest.mark.parametrize("world_size", WORLDS)
def test_the_plan_of_a_large_model(llama: nn.Module, world_size: int) -> None:
    plan = build_plan(llama, world_size=world_size, param_dtype=torch.bfloat16)
    whole = sum(spec.numel for spec in plan.parameters)
    assert whole == numel(llama) == 70_553_706_496
    assert len(plan.units) == 83
    # Root, embedding, 80 blocks on two slots, head in the blocks' pool (its size class is the same).
    assert len(plan.slots) == 3
    padded = sum(layout.numel for unit in plan.units for layout in unit.layouts)
    assert padded < whole * 1.0005
    # 2 x 83 less the root, the embedding and the two units that are resident at the end of forward.
    assert plan.expected_traffic().all_gather.calls == 2 * 83 - 4


def test_many_small_experts() -> None:
    """Mixtures of up to 1,000 experts: the cost of reading the tree grows as the number of modules, and no faster."""

    class Mixture(nn.Module):
        def __init__(self, experts: int) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(experts))

        def forward(self) -> None: ...

    def planned(experts: int) -> list[str]:
        with torch.device("meta"):
            model = nn.ModuleList(Mixture(experts) for _ in range(4))
        return [unit.name for unit in build_plan(model, world_size=64).units]

    assert planned(250) == ["", "0", "1", "2", "3"]
    few, many = calls_of(partial(planned, 250)), calls_of(partial(planned, 1000))
    assert many < 4.4 * few
