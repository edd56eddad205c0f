"""An optimizer's arithmetic without its hooks, and what is found out with it before training."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.extensions.nvme.step import probe_state
from lightning_zero.optim.stepper import RangeStep
from tests.world.optim.test_optimizers import ELEMENTWISE, FUSED

optim = torch.optim


def set_gradients(optimizer: Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(step + 1)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def test_only_the_stand_ins_are_stepped_on_and_groups_come_back_after_an_error() -> None:
    class Failing(torch.optim.SGD):
        def _init_group(self, group: dict[str, Any], *lists: Any) -> Any:
            raise ArithmeticError

    first, second, third = (nn.Parameter(torch.ones(3)) for _ in range(3))
    for cls in (torch.optim.SGD, Failing):
        optimizer = cls([{"params": [first]}, {"params": [second], "lr": 1.0}], lr=0.1)
        lists = [group["params"] for group in optimizer.param_groups]
        for parameter in (first, second, third):
            parameter.grad = torch.ones(3)
        third.data.fill_(1.0)
        step = RangeStep(optimizer).bare
        if cls is Failing:
            with pytest.raises(ArithmeticError):
                step([[], [third]])
        else:
            step([[], [third]])
            assert third.tolist() == [0.0] * 3  # one minus the second group's rate
        assert first.tolist() == second.tolist() == [1.0] * 3
        assert all(group["params"] is kept for group, kept in zip(optimizer.param_groups, lists, strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# What state there will be


def described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return id(value), value.clone().tolist()
    return copy.copy(value) if isinstance(value, (dict, list)) else value


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_probe_finds_what_a_step_makes_and_leaves_nothing(name: str) -> None:
    cls, options = ELEMENTWISE[name]
    for flag in ({}, {"foreach": True}, {"fused": True}):
        if flag == {"fused": True} and name not in FUSED:
            continue
        parameters = [nn.Parameter(torch.ones(5, 3)), nn.Parameter(torch.ones(()))]
        optimizer = cls([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.5}], **options, **flag)
        if options["lr"] != 1.0 and flag == {}:
            optimizer.param_groups[0]["lr"] = torch.tensor(options["lr"])
        before = {key: described(value) for key, value in vars(optimizer).items()}
        groups = [{key: described(value) for key, value in group.items()} for group in optimizer.param_groups]
        state = {key: dict(value) for key, value in optimizer.state.items()}
        found = [probe_state(optimizer, group, torch.float32) for group in range(2)]
        assert {key: described(value) for key, value in vars(optimizer).items()} == before
        assert [{k: described(v) for k, v in group.items()} for group in optimizer.param_groups] == groups
        assert {key: dict(value) for key, value in optimizer.state.items()} == state
        assert all(torch.equal(parameter, torch.ones_like(parameter)) for parameter in parameters)
        set_gradients(optimizer, 0)
        optimizer.step()
        expected = {k: v.dtype for k, v in optimizer.state[parameters[0]].items() if v is not None and v.dim() == 2}
        assert found == [expected, expected]
