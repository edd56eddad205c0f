from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_zero.plan.plan import CollectiveTraffic, Traffic, build_plan
from tests.helpers.plan_models import Gpt, on_meta


def layers(count: int) -> nn.Module:
    """``count`` equal units of 64 x 64 elements, and nothing in the root."""
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(count)))


@pytest.mark.parametrize("prefetch", [0, 1, 2, 7])
def test_the_last_units_of_forward_are_still_resident_in_backward(prefetch: int) -> None:
    # 8 units, k slots: 8 gathers in forward and 8 - k in backward.
    traffic = build_plan(layers(8), world_size=2, prefetch=prefetch).expected_traffic()
    calls = 16 - (prefetch + 1)
    assert traffic.all_gather == CollectiveTraffic(calls, calls * 4096, calls * 4096 * 4)
    assert traffic.reduce_scatter == CollectiveTraffic(8, 8 * 4096, 8 * 4096 * 4)


def test_micro_steps_keep_what_is_resident() -> None:
    plan = build_plan(on_meta(Gpt), world_size=2)
    # Root once. Embedding and head have one slot, which a block in the middle uses too; two blocks have one, and the
    # last block one of its own. In backward the head and the last two blocks are still there, and the embedding is not
    # needed; in the next forward the first and the last block are there.
    assert plan.expected_traffic(micro_steps=1).all_gather.calls == 1 + 6 + 2
    assert plan.expected_traffic(micro_steps=3).all_gather.calls == 1 + 6 + 2 + 2 * (4 + 2)
    assert plan.expected_traffic(micro_steps=3).reduce_scatter == plan.expected_traffic().reduce_scatter.times(3)


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
