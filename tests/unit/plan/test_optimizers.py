from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from lightning_zero.extensions.planner.costs import OptimizerCost

NUMEL = 10_000
COUNT = 3

CASES: list[tuple[type, dict[str, Any]]] = [
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (torch.optim.Adam, {}),
    (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"amsgrad": True, "maximize": True}),
    (torch.optim.Adamax, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.NAdam, {"weight_decay": 0.1}),
    (torch.optim.RAdam, {"weight_decay": 0.1}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adadelta, {"weight_decay": 0.1}),
    (torch.optim.RMSprop, {}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True, "weight_decay": 0.1}),
    (torch.optim.Rprop, {}),
    (torch.optim.ASGD, {"weight_decay": 0.1}),
]


def made_by_a_step(optimizer: torch.optim.Optimizer) -> int:
    """Most bytes that a step has allocated at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        optimizer.step()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        most = max(most, alive)
    return most


WAYS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


@pytest.mark.parametrize(
    ("cls", "options", "way"),
    [
        pytest.param(cls, options, way, id=f"{cls.__name__}, {options}, {way}")
        for cls, options in CASES
        for way, how in WAYS.items()
        if how.keys() <= inspect.signature(cls).parameters.keys()
    ],
)
def test_what_torch_s_optimizers_keep_and_make(cls: type, options: dict[str, Any], way: str) -> None:
    parameters = [nn.Parameter(torch.ones(NUMEL)) for _ in range(COUNT)]
    for parameter in parameters:
        parameter.grad = torch.ones(NUMEL)
    optimizer = cls(parameters, lr=0.01, **options, **WAYS[way])
    optimizer.step()

    cost = OptimizerCost.of(optimizer)
    state = optimizer.state[parameters[0]].values()
    assert cost.way == way
    assert cost.state == sum(isinstance(value, torch.Tensor) and value.numel() == NUMEL for value in state)
    expected = cost.step_nbytes([4 * NUMEL] * COUNT, accelerator=False)
    # Rprop's foreach makes masks of a byte beside, so it is rounded up.
    slack = 0.6 * 4 * NUMEL * COUNT if cls is torch.optim.Rprop else 0.01 * 4 * NUMEL
    assert expected - slack <= made_by_a_step(optimizer) <= expected + 0.01 * 4 * NUMEL


def test_a_loop_holds_what_is_left_of_the_parameter_before() -> None:
    """AdamW makes two tensors for a parameter and leaves one of them."""
    adam = OptimizerCost.of("AdamW")
    assert adam.step_nbytes([100], accelerator=False) == 200
    assert adam.step_nbytes([10, 100, 50], accelerator=False) == 210
    assert adam.step_nbytes([100, 90], accelerator=False) == 280
    assert adam.step_nbytes([], accelerator=False) == 0


def test_torch_chooses_the_way_by_the_device() -> None:
    adam = OptimizerCost.of("AdamW")
    assert adam.step_nbytes([10, 100, 50], accelerator=True) == 160
    assert OptimizerCost.of("AdamW", fused=True).step_nbytes([10, 100], accelerator=True) == 0
    assert OptimizerCost.of("AdamW", foreach=False).step_nbytes([100], accelerator=True) == 200
    assert OptimizerCost.of("AdamW", foreach=True).step_nbytes([100], accelerator=False) == 100


@pytest.mark.parametrize(
    ("optimizer", "name", "state", "whole"),
    [
        ("AdamW", "AdamW", 2, False),
        ("torch.optim.SGD", "SGD", 0, False),
        (torch.optim.RMSprop, "RMSprop", 1, False),
        (torch.optim.Adafactor, "Adafactor", 0, True),
        (torch.optim.Muon, "Muon", 1, True),
        ("somebody.Lion", "Lion", 2, True),
        (type("Mine", (torch.optim.Adam,), {}), "Mine", 2, False),
        (type("Other", (torch.optim.Adam,), {"step": lambda self: None}), "Other", 2, True),
    ],
)
def test_optimizers_by_class_and_name(optimizer: Any, name: str, state: int, whole: bool) -> None:
    cost = OptimizerCost.of(optimizer)
    assert (cost.name, cost.state, cost.whole) == (name, state, whole)


def test_the_options_of_the_largest_group_count() -> None:
    small, large = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(30))
    groups = [{"params": [small]}, {"params": [large], "amsgrad": True}]
    assert OptimizerCost.of(torch.optim.Adam(groups)).state == 3
