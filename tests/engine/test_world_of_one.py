"""One rank's shard is the whole unit: units compute in it, once the order of a phase is known, and gather nothing."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_zero import full_parameters
from lightning_zero._torch import storage_key
from lightning_zero.analysis import build_plan
from lightning_zero.comm import ControlGroup
from lightning_zero.comm.collectives import LocalCollectives
from lightning_zero.engine import ZeroEngine
from lightning_zero.engine.units.sharded import ShardedUnit
from lightning_zero.shards.binding import is_absent
from lightning_zero.storage.tiers import MemoryTiers

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.keeps = False  # what autograd saves, as it is
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.stale: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.stale = self.linear.weight.detach()
        if self.keeps:
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
                return x + self.linear(x).tanh()
        return x + self.linear(x).tanh()


class Run:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), Block(), Block())
        plan = build_plan(self.module, stage=3, world_size=1, units=["Block"])
        self.engine = ZeroEngine(
            self.module, plan, LocalCollectives(), ControlGroup(None), MemoryTiers(torch.device("cpu"))
        )
        self.engine.prepare_training()
        self.blocks = [unit for unit in self.engine.units if isinstance(unit, ShardedUnit) and unit.plan.module]

    def forward(self, name: str) -> Tensor:
        with self.engine.step(name):
            return self.module(torch.ones(2, WIDTH)).square().mean()

    def backward(self, loss: Tensor) -> dict[str, Tensor]:
        with self.engine.backward():
            loss.backward()
        found = {}
        for name, shard in self.engine.shards.items():
            if shard.parameter is not None and shard.parameter.grad is not None:
                found[name], shard.parameter.grad = shard.parameter.grad.clone(), None
        return found

    def is_left(self, block: Block) -> bool:
        """Whether what a block kept shows its weight, in memory that is no shard of ours."""
        shards = [flat.master for unit in self.engine.units for flat in unit.flats]
        apart = storage_key(block.stale) not in map(storage_key, shards)
        with full_parameters(self.module):
            return apart and torch.equal(block.stale, block.linear.weight)

    def masters(self) -> list[Tensor]:
        return [flat.master.clone() for unit in self.engine.units for flat in unit.flats]


def test_a_unit_computes_in_its_slot_until_the_order_is_known_and_then_in_its_shard() -> None:
    run = Run()
    first = run.backward(run.forward("training_step"))
    assert all(map(run.is_left, run.module[1:]))
    second = run.backward(run.forward("training_step"))
    assert all(unit.storage is unit.own is not None for unit in run.blocks)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(map(is_absent, run.module.parameters()))


def test_a_new_phase_after_known_ones_leaves_shards_as_they_are() -> None:
    run = Run()
    before = run.masters()
    first, second = (run.backward(run.forward("training_step")) for _ in range(2))
    with torch.no_grad():
        run.forward("validation_step")  # while the order is recorded: what it computed in is left to who has it
    assert all(torch.equal(left, right) for left, right in zip(before, run.masters(), strict=True))
    assert all(map(run.is_left, run.module[1:]))
    third = run.backward(run.forward("training_step"))
    assert all(torch.equal(first[name], second[name]) and torch.equal(first[name], third[name]) for name in first)


def test_backward_in_a_known_order_of_a_forward_in_a_new_one_and_the_other_way_round() -> None:
    run = Run()
    first = run.backward(run.forward("training_step"))
    run.forward("other_step")
    run.forward("other_step")
    known = run.backward(run.forward("other_step"))  # the forward is known by now, its backward is not
    run.engine._schedule._order._recorded.pop("forward 0 of other_step")
    new = run.backward(run.forward("other_step"))
    assert all(torch.equal(first[name], known[name]) and torch.equal(first[name], new[name]) for name in first)


def test_raw_views_of_a_slot_are_filled_again_by_the_backward_of_a_forward_in_a_new_order() -> None:
    run = Run()
    for block in run.module[1:]:
        block.keeps = True
    first = run.backward(run.forward("training_step"))
    run.backward(run.forward("training_step"))
    run.engine._schedule._order._recorded.pop("forward 0 of training_step")
    again = run.backward(run.forward("training_step"))
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_gradients_that_nobody_cleared_are_added_to() -> None:
    """Gradients are collected where their averages are to be, so what is there must not be written over."""
    run = Run()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), Block(), Block())
    for step in range(5):
        loss = run.forward("training_step")
        with run.engine.backward():
            loss.backward()
        plain(torch.ones(2, WIDTH)).square().mean().backward()
        for name, parameter in plain.named_parameters():
            shard = run.engine.shards[name].parameter
            assert torch.equal(shard.grad, parameter.grad.flatten()), f"{name} in step {step}"
            if step == 1 or (step == 3 and name.endswith("bias")):  # all of them, and some
                shard.grad = parameter.grad = None
