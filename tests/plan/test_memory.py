from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_zero.plan import Memory, build_plan

# Four layers of 64 x 64 = 4,096 elements, the last one frozen, on 2 ranks.
LAYER = 4_096


@pytest.fixture
def model() -> nn.Module:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    model[3].requires_grad_(False)
    return model


def test_sharded_parameters(model: nn.Module) -> None:
    plan = build_plan(model, world_size=2, param_dtype=torch.bfloat16)
    assert plan.expected_memory() == Memory(
        parameters=0,
        masters=4 * LAYER // 2 * 4,
        gradients=3 * LAYER // 2 * 4,
        optimizer=2 * 3 * LAYER // 2 * 4,
        slots=2 * LAYER * 2,
        gradient_slots=2 * LAYER * 4,
        transport=LAYER * 4,
    )


def test_replicated_parameters_sharded_gradients(model: nn.Module) -> None:
    plan = build_plan(model, stage=2, world_size=2, bucket_mib=LAYER * 4 / 2**20)
    assert plan.expected_memory(optimizer_tensors=1) == Memory(
        parameters=4 * LAYER * 4,
        masters=0,  # views of the parameters
        gradients=3 * LAYER // 2 * 4,
        optimizer=3 * LAYER // 2 * 4,
        slots=0,
        gradient_slots=2 * LAYER * 4,
        transport=LAYER * 4,
    )


def test_replicated_gradients(model: nn.Module) -> None:
    plan = build_plan(model, stage=1, world_size=2)
    assert plan.expected_memory().gradients == 3 * LAYER * 4
    assert plan.expected_memory().gradient_slots == 0
    half = build_plan(model, stage=1, world_size=2, param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    memory = half.expected_memory()
    assert memory.parameters == 4 * LAYER * 2
    assert memory.masters == 4 * LAYER // 2 * 4
    assert memory.gradients == 3 * LAYER * 2 + 3 * LAYER // 2 * 4
    # One bucket of three layers.
    assert memory.transport == 3 * LAYER * 2


def test_without_training_only_parameters_remain(model: nn.Module) -> None:
    memory = build_plan(model, world_size=2).expected_memory(training=False)
    assert (memory.gradients, memory.optimizer, memory.gradient_slots, memory.transport) == (0, 0, 0, 0)
    assert memory.total == memory.masters + memory.slots


def test_the_receive_buffer_is_optional_and_needs_a_wire(model: nn.Module) -> None:
    assert build_plan(model, world_size=2).expected_memory(receive_buffer=False).transport == 0
    assert build_plan(model, world_size=1).expected_memory().transport == 0


def test_one_receive_buffer_per_reduce_dtype() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.float64))
    # 64 + 8 elements in each: 128 on 2 ranks.
    assert build_plan(model, world_size=2).expected_memory().transport == 128 * 4 + 128 * 8


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_optimizer_state_is_counted_without_padding(stage: int, world_size: int) -> None:
    model = nn.Sequential(nn.Linear(7, 11), nn.Linear(11, 3))
    plan = build_plan(model, stage=stage, world_size=world_size)
    numel = 7 * 11 + 11 + 11 * 3 + 3
    assert sum(plan.expected_memory(rank=rank).optimizer for rank in range(world_size)) == 2 * numel * 4


def test_total_and_items(model: nn.Module) -> None:
    memory = build_plan(model, world_size=2).expected_memory()
    assert memory.total == sum(nbytes for _, nbytes in memory.items())
    assert dict(memory.items())["masters"] == memory.masters


@pytest.mark.parametrize(
    ("settings", "error"), [({"rank": 2}, "rank 2"), ({"optimizer_tensors": -1}, "optimizer_tensors")]
)
def test_settings_out_of_range(model: nn.Module, settings: dict[str, int], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        build_plan(model, world_size=2).expected_memory(**settings)
