"""Neighbours are stepped on as one parameter, with the bits of each on its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

NUMELS = [64, 4096, 128, 100, 7, 64, 640, 65536, 192]


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(3)
    return [nn.Parameter(torch.randn(numel)) for numel in NUMELS]


OPTIMIZERS: dict[str, Callable[[list[Any]], Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, fused=True),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, fused=True),
}


class Shards:
    """Parameters side by side in one shard, as the engine keeps them, and the same ones apart."""

    def __init__(self, make: Callable[[list[Any]], Optimizer]) -> None:
        self.apart = parameters()
        self.reference = make(self.apart)
        starts, end = [], 0
        for numel in NUMELS:
            starts.append(end)
            end = -(-(end + numel) // 64) * 64
        self.master, self.gradient = torch.zeros(end), torch.zeros(end)
        self.together = []
        self.places = list(zip(starts, NUMELS, strict=True))
        for (start, numel), whole in zip(self.places, self.apart, strict=True):
            self.master[start : start + numel] = whole.detach()
            self.together.append(nn.Parameter(self.master[start : start + numel]))
        self.optimizer = make(self.together)
        self.memory: Any = None

    def members(self, missing: frozenset[int] = frozenset()) -> list[Any]:
        from lightning_zero.optim.pieces import Member

        class Slice:
            def __init__(self, start: int, numel: int) -> None:
                self.shard_start, self.numel = start, numel

        class Entry:
            flat = self.master

            def __init__(self, start: int, numel: int) -> None:
                self.slice = Slice(start, numel)

        found = []
        for index, ((start, numel), parameter) in enumerate(zip(self.places, self.together, strict=True)):
            if index not in missing:
                if parameter.grad is None:  # the same view in every step, as the engine's are
                    parameter.grad = self.gradient[start : start + numel]
                gradient = parameter.grad
                found.append(Member(Entry(start, numel), 0, parameter, gradient))  # type: ignore[arg-type]
        return found

    def step(self, seed: int, missing: frozenset[int] = frozenset()) -> int:
        """One step on both. Returns how many parameters were taken for another."""
        from lightning_zero.optim.bare import BareStep
        from lightning_zero.optim.memory_step import MemoryStep

        torch.manual_seed(seed)
        for index, ((start, numel), whole) in enumerate(zip(self.places, self.apart, strict=True)):
            value = torch.randn(numel)
            whole.grad = None if index in missing else value.clone()
            self.gradient[start : start + numel] = value
        self.reference.step()
        members = self.members(missing)
        if self.memory is None:
            self.memory = MemoryStep(self.optimizer, BareStep(self.optimizer), 2**18)
        self.memory.run(members, 1)
        _, runs = self.memory._runs._known[tuple(id(member.parameter) for member in members)]
        return sum(len(run.members) for run in runs)

    def differences(self) -> list[str]:
        found = []
        for index, (whole, part) in enumerate(zip(self.apart, self.together, strict=True)):
            if not torch.equal(whole.detach(), part.detach()):
                found.append(f"parameter {index}")
            expected, actual = self.reference.state[whole], self.optimizer.state[part]
            if expected.keys() != actual.keys():
                found.append(f"keys {index}")
                continue
            for key, value in expected.items():
                same = torch.equal(value, actual[key]) if isinstance(value, Tensor) else value == actual[key]
                if not same:
                    found.append(f"{key} {index}")
        return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_neighbours_in_one_go_have_the_bits_of_each_alone(name: str) -> None:
    shards = Shards(OPTIMIZERS[name])
    for step in range(4):
        assert shards.step(step) == 7, "64, 4096 and 128; 64, 640, 65536 and 192"
        assert not shards.differences()
    assert len(shards.optimizer.state) == len(NUMELS)  # nothing of the stand-ins is left


def test_a_parameter_without_a_gradient_falls_behind_and_out_of_the_run() -> None:
    shards = Shards(OPTIMIZERS["adamw"])
    shards.step(0)
    assert shards.step(1, missing=frozenset({6})) == 5  # 64, 4096, 128; 65536, 192
    assert not shards.differences()
    assert shards.step(2) == 5  # 640 has made one step less
    assert not shards.differences()


def test_state_from_elsewhere_is_brought_together() -> None:
    shards = Shards(OPTIMIZERS["adamw"])
    shards.step(0)
    for state in shards.optimizer.state.values():
        for key, value in state.items():
            state[key] = value.clone()
    assert shards.step(1) == 7
    assert not shards.differences()
    first, second = (shards.optimizer.state[shards.together[index]]["exp_avg"] for index in (0, 1))
    assert first.data_ptr() + first.nbytes == second.data_ptr()


def test_state_that_the_user_changes_between_steps_counts() -> None:
    """In place, in one parameter's counter and in one parameter's average; and by another tensor."""
    shards = Shards(OPTIMIZERS["adamw"])
    for step in range(3):
        shards.step(step)

    def change(what: Callable[[dict[str, Any]], None], index: int) -> None:
        what(shards.reference.state[shards.apart[index]])
        what(shards.optimizer.state[shards.together[index]])

    change(lambda state: state["exp_avg"].mul_(0.5), 1)
    assert shards.step(3) == 7
    assert not shards.differences()
    change(lambda state: state["step"].fill_(1.0), 0)
    assert shards.step(4) == 6  # its counter is another one now
    assert not shards.differences()
    change(lambda state: state.update(exp_avg=torch.ones_like(state["exp_avg"])), 6)
    shards.step(5)
    assert not shards.differences()
    change(lambda state: state.clear(), 7)
    shards.step(6)
    assert not shards.differences()


def test_a_step_that_raises_leaves_nothing_behind() -> None:
    shards = Shards(OPTIMIZERS["adamw"])
    shards.step(0)
    shards.optimizer.param_groups[0]["betas"] = "nonsense"
    with pytest.raises((TypeError, ValueError)):
        shards.step(1)
    assert len(shards.optimizer.state) == len(NUMELS)
