"""One rank has nothing to share: it keeps whole parameters where its shard is what the module computes with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero import HostOffload, build_plan
from lightning_zero.comm import ControlGroup
from lightning_zero.comm.collectives import LocalCollectives
from lightning_zero.config import Placement
from lightning_zero.engine import ZeroEngine
from lightning_zero.offload import MemoryTiers
from lightning_zero.shards.binding import is_absent

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.linear.weight.dtype)
        return x + self.linear(x).tanh()


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), Block(), Block())


class Run:
    def __init__(self, **settings: Any) -> None:
        self.module = model()
        self.plan = build_plan(self.module, world_size=1, units=["Block"], **{"stage": 3, **settings})
        tiers = MemoryTiers(torch.device("cpu"))
        self.engine = ZeroEngine(self.module, self.plan, LocalCollectives(), ControlGroup(None), tiers)
        self.engine.prepare_training()

    def step(self) -> Tensor:
        with self.engine.step("training_step"):
            loss = self.module(torch.ones(2, WIDTH, dtype=self.module[0].weight.dtype)).square().mean()
        with self.engine.backward():
            loss.backward()
        return loss


def hooks(module: nn.Module) -> int:
    return len(module._forward_pre_hooks) + len(module._forward_hooks)


@pytest.mark.parametrize("stage", [1, 3])
def test_what_was_read_before_the_data_was_replaced_keeps_its_values(stage: int) -> None:
    """So averaged weights are evaluated: kept, replaced, used, and put back."""
    run = Run(stage=stage)
    run.step()
    parameter = run.module[1].linear.weight
    kept = parameter.data
    before = kept.clone()
    parameter.data = torch.full_like(kept, 0.5)
    run.step()
    assert torch.equal(kept, before)
    assert parameter.eq(0.5).all()
    parameter.data = kept
    run.step()
    assert torch.equal(parameter, before)


def test_parameters_stay_whole_and_blocks_have_no_hooks() -> None:
    run = Run()
    assert not run.plan.placement.shards_parameters
    assert run.plan.slots == ()
    assert run.plan.expected_memory().parameters == 4 * sum(la.numel for la in run.plan.layouts)
    for _ in range(2):
        run.step()
        assert not any(map(is_absent, run.module.parameters()))
        assert all(torch.equal(*pair) for pair in zip(run.module.parameters(), model().parameters(), strict=True))
    assert [hooks(block) for block in run.module[1:]] == [0, 0, 0]


@pytest.mark.parametrize(
    "settings",
    [
        {"param_dtype": torch.bfloat16},
        {"param_dtype": torch.bfloat16, "full_precision": ["Block"]},
        {"offload": HostOffload(optimizer=False, parameters=True)},
    ],
)
def test_what_is_computed_with_elsewhere_than_in_the_shard_is_gathered(settings: dict[str, Any]) -> None:
    run = Run(**settings)
    assert run.plan.placement.shards_parameters
    run.step()
    assert all(map(is_absent, run.module.parameters()))
    assert [hooks(block) for block in run.module[1:]] == [2, 2, 2]


@pytest.mark.parametrize("settings", [{}, {"param_dtype": torch.bfloat16}])
def test_gradients_take_no_slots(settings: dict[str, Any]) -> None:
    """They are collected where they are to be, and a device would keep what is never used."""
    run = Run(**settings)
    for _ in range(2):
        assert [buffer.place for buffer in run.engine.means.pool if buffer.unit is None] == []
        run.step()


@pytest.mark.parametrize("span", [None, 1, 2])
def test_a_shard_group_of_one_rank_is_alone_whatever_the_world(span: int | None) -> None:
    placement = replace(Placement.from_stage(3), span=span)
    plan = build_plan(model(), placement=placement, world_size=4)
    assert plan.placement.shards_parameters == (span != 1)
    assert plan.placement.shards_gradients
    assert plan.placement.span == span


def test_gradients_that_nobody_cleared_are_added_to() -> None:
    """Gradients are collected where their averages are to be, so what is there must not be written over."""
    run, plain = Run(), model()
    for step in range(5):
        run.step()
        plain(torch.ones(2, WIDTH)).square().mean().backward()
        for name, parameter in plain.named_parameters():
            shard = run.engine.shards[name].parameter
            assert torch.equal(shard.grad, parameter.grad.flatten()), f"{name} in step {step}"
            if step == 1 or (step == 3 and name.endswith("bias")):  # all of them, and some
                shard.grad = parameter.grad = None
