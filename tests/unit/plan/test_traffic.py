from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_zero.plan.plan import CollectiveTraffic, Traffic, build_plan
from tests.helpers.plan_models import Gpt, on_meta


def layers(count: int, *, frozen: int = 0) -> nn.Module:
    """``count`` equal units of 64 x 64 elements, the first ``frozen`` of them frozen, and nothing in the root."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(count)))
    for layer in model[:frozen]:
        layer.requires_grad_(False)
    return model


@pytest.mark.parametrize("prefetch", [0, 1, 2, 7])
def test_the_last_units_of_forward_are_still_resident_in_backward(prefetch: int) -> None:
    # 8 units, k slots: 8 gathers in forward and 8 - k in backward.
    traffic = build_plan(layers(8), world_size=2, prefetch=prefetch).expected_traffic()
    calls = 16 - (prefetch + 1)
    assert traffic.all_gather == CollectiveTraffic(calls, calls * 4096, calls * 4096 * 4)
    assert traffic.reduce_scatter == CollectiveTraffic(8, 8 * 4096, 8 * 4096 * 4)


def test_the_order_of_gathers() -> None:
    # Index 0 is the empty root. Units 1, 3, 5 share a slot and 2, 4 the other; 5 and 4 are resident after the forward.
    plan = build_plan(layers(5), world_size=2)
    assert plan.gathers()[0] == (1, 2, 3, 4, 5, 3, 2, 1)
    # Then 1 and 2 are resident; 3 evicts 1, 4 evicts 2, 5 evicts 3.
    assert plan.gathers(2)[0] == (1, 2, 3, 4, 5, 3, 2, 1, 3, 4, 5, 3, 2, 1)


def test_micro_steps_keep_what_is_resident() -> None:
    plan = build_plan(on_meta(Gpt), world_size=2)
    # Root once. Embedding and head have one slot, which a block in the middle uses too; two blocks have one, and the
    # last block one of its own. In backward the head and the last two blocks are still there, and the embedding is not
    # needed; in the next forward the first and the last block are there.
    assert plan.expected_traffic(micro_steps=1).all_gather.calls == 1 + 6 + 2
    assert plan.expected_traffic(micro_steps=3).all_gather.calls == 1 + 6 + 2 + 2 * (4 + 2)
    assert plan.expected_traffic(micro_steps=3).reduce_scatter == plan.expected_traffic().reduce_scatter.times(3)


def test_nested_units_are_gathered_after_those_around_them() -> None:
    plan = build_plan(on_meta(Gpt, blocks=2), world_size=2, units=["Block", "Linear"], prefetch=0)
    names = [plan.units[index].name for index in plan.gathers()[0]]
    forward = [
        "",
        "blocks.0",
        "blocks.0.mlp.0",
        "blocks.0.mlp.2",
        "blocks.1",
        "blocks.1.mlp.0",
        "blocks.1.mlp.2",
        "head",
    ]
    # The head and the last layer of blocks.1 are still resident.
    backward = ["blocks.1", "blocks.1.mlp.0", "blocks.0", "blocks.0.mlp.2", "blocks.0.mlp.0"]
    assert names == forward + backward


@pytest.mark.parametrize(("stage", "reductions"), [(1, 1), (2, 4)])
def test_replicated_parameters(stage: int, reductions: int) -> None:
    plan = build_plan(layers(4), world_size=2, stage=stage, bucket_mib=4096 * 4 / 2**20, param_dtype=torch.bfloat16)
    traffic = plan.expected_traffic(micro_steps=4)
    assert traffic.all_gather == CollectiveTraffic(4, 4 * 4096, 4 * 4096 * 2)
    assert traffic.reduce_scatter == CollectiveTraffic(4 * reductions, 4 * reductions * 4096, 4 * reductions * 4096 * 4)


def test_frozen_layouts_are_gathered_but_never_reduced() -> None:
    sharded = build_plan(layers(4, frozen=3), world_size=2).expected_traffic()
    # The first two, gathered last in backward, did not change: they are still resident in the next forward.
    assert sharded.all_gather.calls == 2 + 2
    assert sharded.reduce_scatter.calls == 1
    replicated = build_plan(layers(4, frozen=3), world_size=2, stage=2).expected_traffic()
    assert (replicated.all_gather.calls, replicated.reduce_scatter.calls) == (1, 1)


def test_a_unit_with_several_layouts_makes_one_call_for_each() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    traffic = build_plan(
        model, world_size=2, param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16
    ).expected_traffic()
    # 64 + 8 elements -> 128; 8 + 8 elements -> 128; the root stays resident between forward and backward.
    assert traffic.all_gather == CollectiveTraffic(2, 256, 128 * 2 + 128 * 4)
    assert traffic.reduce_scatter == CollectiveTraffic(2, 256, 128 * 2 + 128 * 2)
    running = 2 * 8 * 4 + 8  # of the batch norm, sent as bytes
    assert traffic.broadcast == CollectiveTraffic(1, running, running)
    assert traffic.total == CollectiveTraffic(5, 512 + running, 128 * 6 + 128 * 4 + running)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_one_rank_sends_nothing(stage: int) -> None:
    nothing = CollectiveTraffic(0, 0, 0)
    assert build_plan(layers(4), world_size=1, stage=stage).expected_traffic() == Traffic(nothing, nothing)


def test_two_or_three_times_the_model() -> None:
    model = layers(100)
    numel = 100 * 4096
    assert build_plan(model, world_size=2, stage=1).expected_traffic().total.numel == 2 * numel
    # All but two units are gathered twice.
    assert build_plan(model, world_size=2, stage=3).expected_traffic().total.numel == 3 * numel - 2 * 4096


def test_a_step_has_a_micro_step() -> None:
    with pytest.raises(ValueError, match="micro-step"):
        build_plan(layers(1), world_size=1).expected_traffic(micro_steps=0)
