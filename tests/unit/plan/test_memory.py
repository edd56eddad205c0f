from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero import ZeroPlan, build_plan
from lightning_zero.config import HostOffload, NvmeOffload, Offload
from lightning_zero.extensions.planner.costs import DiskBytes, HostBytes, Memory, OptimizerCost

# Four layers of 64 x 64 = 4,096 elements, the last one frozen, on 2 ranks.
LAYER = 4_096


# The same, of a width whose buffers are given back between steps on a CPU; those of the narrow one are not worth it.
WIDE = 512 * 512


def layers(width: int) -> nn.Sequential:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4)))
    model[3].requires_grad_(False)
    return model


@pytest.fixture
def model() -> nn.Module:
    return layers(64)


def test_sharded_parameters(model: nn.Module) -> None:
    """Between steps, slots have memory on a device; on the CPU only that of a layer that is frozen and still there."""
    plan = build_plan(model, world_size=2, param_dtype=torch.bfloat16)
    rest = plan.expected_memory()
    assert (rest.slots, rest.gradient_slots) == (2 * LAYER * 2, 2 * LAYER * 4), "small buffers stay"
    rest = build_plan(layers(512), world_size=2, param_dtype=torch.bfloat16).expected_memory()
    assert (rest.slots, rest.gradient_slots) == (0, 0)
    first = nn.Sequential(*reversed(layers(512)))
    assert build_plan(first, world_size=2, param_dtype=torch.bfloat16).expected_memory().slots == WIDE * 2
    assert plan.expected_memory(accelerator=True) == Memory(
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
    assert plan.expected_memory().gradient_slots == 2 * LAYER * 4, "small buffers stay"
    assert build_plan(layers(512), stage=2, world_size=2, bucket_mib=1.0).expected_memory().gradient_slots == 0
    assert plan.expected_memory(optimizer=OptimizerCost(name="one", state=1), accelerator=True) == Memory(
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


# ---------------------------------------------------------------------------------------------------------- offloading


def offloaded(
    model: nn.Module, offload: Offload, stage: int = 3, param_dtype: torch.dtype | None = torch.bfloat16
) -> ZeroPlan:
    """One bucket of 3 layers and one of the frozen layer; in stage 3 four units."""
    return build_plan(model, stage=stage, world_size=2, param_dtype=param_dtype, offload=offload)


def nvme(**settings: Any) -> NvmeOffload:
    return NvmeOffload(path="/never/looked/at", buffer_mib=2.0, **settings)


def test_host_offload_leaves_the_device_what_it_computes_with(model: nn.Module) -> None:
    """The frozen layer is computed in another dtype than its own, so its masters are offloaded like the others."""
    plan = offloaded(model, HostOffload())
    assert plan.expected_memory(accelerator=True) == Memory(
        parameters=0,
        weights=4 * LAYER // 2 * 2,
        masters=0,
        gradients=0,
        optimizer=0,
        slots=2 * LAYER * 2,
        gradient_slots=2 * LAYER * 4,
        transport=LAYER * 4,
    )
    assert plan.expected_host_memory() == HostBytes(
        weights=0,
        masters=4 * LAYER // 2 * 4,
        gradients=3 * LAYER // 2 * 4,
        optimizer=2 * 3 * LAYER // 2 * 4,
        buffers=0,
    )
    assert plan.expected_disk().total == 0


def test_offloaded_parameters_leave_the_device_slots_only(model: nn.Module) -> None:
    plan = offloaded(model, HostOffload(parameters=True))
    memory, host = plan.expected_memory(), plan.expected_host_memory()
    assert memory.total == memory.slots + memory.gradient_slots + memory.transport
    assert (host.weights, host.masters) == (4 * LAYER // 2 * 2, 4 * LAYER // 2 * 4)
    same = offloaded(model, HostOffload(parameters=True), param_dtype=None)
    assert same.expected_host_memory().weights == 0  # units are gathered from the masters
    assert same.expected_memory().weights == 0
    kept = offloaded(model, HostOffload(), param_dtype=None).expected_memory()
    assert kept.masters == LAYER // 2 * 4, "the frozen layer stays"


def test_parameters_alone_are_the_frozen_ones(model: nn.Module) -> None:
    plan = offloaded(model, HostOffload(optimizer=False, parameters=True))
    memory, host = plan.expected_memory(), plan.expected_host_memory()
    assert (memory.masters, memory.gradients, memory.optimizer) == (
        3 * LAYER // 2 * 4,
        3 * LAYER // 2 * 4,
        2 * 3 * LAYER // 2 * 4,
    )
    assert (host.weights, host.masters, host.gradients, host.optimizer) == (LAYER // 2 * 2, LAYER // 2 * 4, 0, 0)


@pytest.mark.parametrize(("stage", "device_gradients"), [(1, 3 * LAYER * 4), (2, 0)])
def test_offload_with_replicated_parameters(model: nn.Module, stage: int, device_gradients: int) -> None:
    """Float32 throughout: the frozen layer has no masters of its own, the trained ones have now."""
    plan = offloaded(model, HostOffload(), stage=stage, param_dtype=None)
    memory, host = plan.expected_memory(), plan.expected_host_memory()
    assert (memory.parameters, memory.weights, memory.masters) == (4 * LAYER * 4, 0, 0)
    assert memory.gradients == device_gradients
    assert (host.masters, host.gradients) == (3 * LAYER // 2 * 4, 3 * LAYER // 2 * 4)


def test_averaged_gradients_of_another_dtype_rest_on_the_host_alone(model: nn.Module) -> None:
    plan = build_plan(
        model, stage=1, world_size=2, param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, offload=HostOffload()
    )
    assert plan.expected_memory().gradients == 3 * LAYER * 2
    assert plan.expected_host_memory().gradients == 3 * LAYER // 2 * 4


def test_nvme_offload_keeps_gradients_and_one_pool_on_the_host(model: nn.Module) -> None:
    plan = offloaded(model, nvme(parameters=True))
    assert plan.expected_host_memory() == HostBytes(
        weights=0,
        masters=0,
        gradients=3 * LAYER // 2 * 4,
        optimizer=0,
        # The pool, two units' shards that are read ahead, and 8 bytes for each page of the files below.
        buffers=2 * 2**20 + 2 * LAYER // 2 * 2 + plan.expected_disk().total // 4096 * 8,
    )
    with pytest.raises(ValueError, match=r"NvmeOffload\.checksums must be true or false, got 'yes'"):
        nvme(checksums="yes")
    unchecked = offloaded(model, nvme(parameters=True, checksums=False))
    assert unchecked.expected_host_memory().buffers == 2 * 2**20 + 2 * LAYER // 2 * 2
    assert offloaded(layers(512), nvme(parameters=True)).fetch_nbytes == WIDE // 2 * 2, "one unit's shard"
    # 4,096 / 2 elements of 2 and of 4 bytes: whole pages.
    assert plan.expected_disk() == DiskBytes(
        weights=4 * LAYER // 2 * 2, masters=4 * LAYER // 2 * 4, optimizer=2 * 3 * LAYER // 2 * 4
    )
    assert plan.expected_disk() == plan.expected_disk(rank=1)
    assert plan.expected_memory().weights == 0


def test_an_accelerator_needs_buffers_for_what_travels(model: nn.Module) -> None:
    """On the host two gradient shards in float32 and two casts in bfloat16; on the device no more than without."""
    plan = offloaded(model, HostOffload(parameters=True))
    assert plan.expected_memory(accelerator=True).slots == 2 * LAYER * 2
    assert plan.expected_host_memory().buffers == 0
    assert plan.expected_host_memory(accelerator=True).buffers == 2 * LAYER // 2 * 4 + 2 * LAYER // 2 * 2
    plain = offloaded(model, HostOffload())
    assert plain.expected_memory(accelerator=True).slots == 2 * LAYER * 2


def test_regions_of_files_are_whole_pages() -> None:
    """64 + 8 elements: 128 in the buffer, 64 = 256 bytes on each rank; a page is 4,096."""
    plan = offloaded(nn.Linear(8, 8), nvme())
    assert plan.expected_disk(optimizer=OptimizerCost(name="some", state=3)) == DiskBytes(
        weights=0, masters=4096, optimizer=3 * 4096
    )


@pytest.mark.parametrize("world_size", [1, 3])
def test_optimizer_state_on_the_host_is_counted_without_padding(world_size: int) -> None:
    plan = build_plan(nn.Linear(7, 11), world_size=world_size, offload=HostOffload())
    counted = [
        plan.expected_host_memory(rank=rank, optimizer=OptimizerCost(name="some", state=1))
        for rank in range(world_size)
    ]
    assert sum(memory.optimizer for memory in counted) == (7 * 11 + 11) * 4


@pytest.mark.parametrize(
    ("stage", "offload"),
    [
        *((stage, offload) for stage in (1, 2, 3) for offload in (None, HostOffload(), nvme())),
        *((3, offload) for offload in (HostOffload(parameters=True), nvme(parameters=True))),
    ],
)
def test_every_kind_of_bytes_rests_somewhere(model: nn.Module, stage: int, offload: Offload | None) -> None:
    """Per rank: a master of every trained element, its gradient and two states, wherever they are."""
    plan = build_plan(model, stage=stage, world_size=2, param_dtype=torch.bfloat16, offload=offload)
    places = plan.expected_memory(), plan.expected_host_memory(), plan.expected_disk()
    assert sum(place.masters for place in places) == 4 * LAYER // 2 * 4
    assert sum(place.optimizer for place in places) == 2 * 3 * LAYER // 2 * 4


def test_a_rank_that_there_is_not(model: nn.Module) -> None:
    plan = build_plan(model, world_size=2)
    for ask in (plan.expected_memory, plan.expected_host_memory, plan.expected_disk):
        with pytest.raises(ValueError, match="no rank 2 in a shard group of 2"):
            ask(rank=2)
