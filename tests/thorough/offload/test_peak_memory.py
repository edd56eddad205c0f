"""Bytes at the worst moment of a step: what the plan says, within 2 %.

What rests is counted as in ``test_memory``; what comes and goes in a step is counted by the allocator (torch's profiler
sees every allocation on the CPU, also those inside of an operation). The model is wide and its batches are single rows,
so that activations, which the plan leaves out, are next to nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_zero import HostOffload, NvmeOffload
from lightning_zero.config import Offload
from lightning_zero.extensions.planner.costs import OptimizerCost
from tests.helpers.allocator import Allocations
from tests.helpers.cases import Block, Case, case, features
from tests.helpers.counting import LiveTensors
from tests.helpers.probe import MakeOptimizer, Probe, adamw, fit
from tests.helpers.world import run_world
from tests.thorough.offload.test_memory import (
    PRECISIONS,
    categories,
    forget_the_past,
    keeps_receive_buffer,
    on_host,
    precision,
    storages,
)

pytestmark = pytest.mark.usefixtures("one_host")  # torch's profiler crashes beside the threads of gloo

STAGES = (1, 2, 3)
WIDE = 256


class Wide(nn.Module):
    """Blocks of unequal width around one large matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDE, WIDE)
        self.blocks = nn.ModuleList(Block(WIDE, hidden) for hidden in (320, 384, 320, 384))
        self.middle = nn.Linear(WIDE, 3 * WIDE)
        self.head = nn.Linear(3 * WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.middle(x))


class Tied(nn.Module):
    """Two layers with one weight, the first and the last to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDE, 3 * WIDE, bias=False)
        self.middle = nn.Linear(3 * WIDE, WIDE)
        self.blocks = nn.ModuleList(Block(WIDE, hidden) for hidden in (320, 384, 320, 384))
        self.head = nn.Linear(WIDE, 3 * WIDE, bias=False)
        self.head.weight = self.stem.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x).view(-1, 3, WIDE).sum(1)


def wide() -> Case:
    return case("wide", Wide, units=("Block", "Linear"), batch=features(WIDE, shape=(1,)))


def _in_common(strategy: Any) -> int:
    engine = strategy.engine
    return sum(engine.plan.gradient_slots) if engine.collectives.lend(1) is not None else 0


class Peak(pl.Callback):
    """What is given out in the second step, beyond what was there at its beginning: up to the optimizer, and there."""

    def __init__(self) -> None:
        self.forward, self.backward, self.update = Allocations(), Allocations(), Allocations()

    def most(self, strategy: Any) -> int:
        """At the worst moment, with buffers that other ranks read: of their pages the allocator does not know.

        They collect gradients, and are there from the backward on. Gradients of the step before are, in the forward.
        """
        left, most = 0, 0
        parts = (self.forward, 0), (self.backward, _in_common(strategy)), (self.update, 0)
        for part, in_common in parts:
            most = max(most, left + part.most + in_common)
            left += [0, *part.totals()][-1]
        return most

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            gc.collect()  # what an earlier step has left in a cycle would be counted as given back by this one
            self.forward.__enter__()

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_idx == 1:
            self.forward.__exit__()
            self.backward.__enter__()

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_idx == 1:
            self.backward.__exit__()
            self.update.__enter__()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.update.__exit__()


def scratch(name: str) -> int:
    """Bytes that kernels take for themselves in a product with the largest matrix; in 16 bits some processors' do."""
    dtype = torch.float32 if name == "32-true" else torch.bfloat16
    x, matrix = (torch.ones(rows, WIDE, dtype=dtype, requires_grad=True) for rows in (1, 3 * WIDE))
    result, given, live = nn.functional.linear(x, matrix).sum(), Allocations(), LiveTensors()
    with given, live:
        result.backward()
    return given.most - live.most


def measure(
    rank: int, name: str, stage: int, make: MakeOptimizer = adamw, model: Callable[[], Case] = wide, **settings: Any
) -> tuple[int, int, dict[str, int]]:
    """Bytes at peak: counted, and by the plan; and the plan's categories, with the scratch memory of kernels."""
    forget_the_past()  # so that there is little to collect
    watch = Peak()
    probe = Probe(model(), make)
    trainer = fit(
        probe,
        stage=stage,
        micro_steps=2,
        callbacks=[watch],
        options={"plugins": precision(name)},
        bucket_mib=0.5,
        **settings,
    )
    found = categories(trainer.strategy)
    engine = trainer.strategy.engine
    plan = engine.plan.expected_memory(
        rank=rank,
        optimizer=OptimizerCost.of(trainer.strategy.optimizers[0]),
        receive_buffer=keeps_receive_buffer(trainer.strategy),
        peak=True,
    )
    rest = sum(sum(part.values()) for part in found.values())
    return rest + watch.most(trainer.strategy), plan.total, {**dict(plan.items()), "scratch": scratch(name)}


def measure_offloaded(rank: int, name: str, stage: int, offload: Offload) -> tuple[int, int, dict[str, int]]:
    """As ``measure``, of device and host together, which are the same memory here.

    The step on the host passes over pieces, for which AdamW makes two tensors each: next to nothing beside a model, but
    the worst moment of this small one where gradients have 16 bits. A half of its largest matrix is less than a piece.
    """
    forget_the_past()
    watch, probe = Peak(), Probe(wide())
    options = {"plugins": precision(name)}
    trainer = fit(
        probe, stage=stage, micro_steps=2, callbacks=[watch], options=options, bucket_mib=0.5, offload=offload
    )
    plan = trainer.strategy.engine.plan
    received = keeps_receive_buffer(trainer.strategy)
    rested, device = (plan.expected_memory(rank=rank, receive_buffer=received, peak=peak) for peak in (False, True))
    host = plan.expected_host_memory(rank=rank)
    most = max(device.total, rested.total + 2 * 4 * (3 * WIDE * WIDE // 2))
    held = [*categories(trainer.strategy).values(), *on_host(trainer.strategy).values()]
    rest = sum(sum(part.values()) for part in held)
    return rest + watch.most(trainer.strategy), most + host.total, {**dict(device.items()), "scratch": scratch(name)}


def assert_as_planned(found: dict[str, tuple[int, int, dict[str, int]]], where: str, chunk: int = 0) -> None:
    """``chunk``: what three ranks and more of a host take for a while to add up in, which no plan counts."""
    for name, (counted, expected, parts) in found.items():
        highest = 1.02 * expected + parts["scratch"] + chunk
        assert 0.98 * expected <= counted <= highest, f"{where}, {name}: {counted}, not {expected} of {parts}"


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_memory_at_peak_is_the_plan_s_formula(world_size: int) -> None:
    def every(rank: int) -> dict[str, Any]:
        return {f"{name}, stage {stage}": measure(rank, name, stage) for name in PRECISIONS for stage in STAGES}

    for rank, found in enumerate(run_world(world_size, every, timeout=150)):
        assert_as_planned(found, f"rank {rank} of {world_size}", chunk=2**19 * (world_size > 2))


def test_memory_at_peak_with_tied_weights() -> None:
    """Both layers are linear: the gradient of the second is made beside that of the first, and added to it."""

    def tied() -> Case:
        return case("tied", Tied, units=("Block",), batch=features(WIDE, shape=(1,)))

    def every(rank: int) -> dict[str, Any]:
        return {
            f"{name}, stage {stage}": measure(rank, name, stage, model=tied) for name in PRECISIONS for stage in STAGES
        }

    for rank, found in enumerate(run_world(2, every, timeout=150)):
        assert_as_planned(found, f"rank {rank}")
        two = 2 * 4 * 3 * WIDE * WIDE
        assert found["32-true, stage 1"][2]["raw_gradients"] == two


def test_memory_at_peak_with_offload(tmp_path: Path) -> None:
    files: dict[str, Any] = {"path": str(tmp_path), "buffer_mib": 1}
    policies: list[tuple[int, Offload]] = [(2, HostOffload()), (3, HostOffload()), (3, HostOffload(parameters=True))]
    policies += [(2, NvmeOffload(**files)), (3, NvmeOffload(parameters=True, **files))]

    def every(rank: int) -> dict[str, Any]:
        return {
            f"{name}, stage {stage}, {offload}": measure_offloaded(rank, name, stage, offload)
            for name in ("32-true", "bf16-mixed")
            for stage, offload in policies
        }

    for rank, found in enumerate(run_world(2, every, timeout=150)):
        assert_as_planned(found, f"rank {rank}")
        assert all(parts["temporaries"] == 0 for _, _, parts in found.values()), "the device does not step"


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD": lambda module: torch.optim.SGD(module.parameters(), lr=0.01),
    "SGD, decayed": lambda module: torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1),
    "Adam, amsgrad": lambda module: torch.optim.Adam(module.parameters(), lr=0.01, amsgrad=True),
    "AdamW, foreach": lambda module: torch.optim.AdamW(module.parameters(), lr=0.01, foreach=True),
    "AdamW, fused": lambda module: torch.optim.AdamW(module.parameters(), lr=0.01, fused=True),
}


def test_memory_at_peak_with_other_optimizers() -> None:
    """A fused step makes nothing, so that the worst moment is in the backward; foreach makes a tensor of all."""

    def every(rank: int) -> dict[str, Any]:
        return {
            f"{name}, stage {stage}": measure(rank, "32-true", stage, make)
            for stage in (2, 3)
            for name, make in OPTIMIZERS.items()
        }

    for rank, found in enumerate(run_world(2, every, timeout=150)):
        assert_as_planned(found, f"rank {rank}")
        assert found["AdamW, fused, stage 2"][2]["temporaries"] == 0
        assert found["AdamW, foreach, stage 2"][2]["temporaries"] > 0


@pytest.mark.parametrize("stage", STAGES)
def test_whole_parameters_rest_with_their_owner(stage: int) -> None:
    """For an optimizer that needs them: copies and state, within 2 %. Adafactor's state is rows and columns."""

    def run(rank: int) -> tuple[int, int]:
        probe = Probe(wide(), lambda module: torch.optim.Adafactor(module.parameters(), lr=0.01))
        trainer = fit(probe, stage=stage, micro_steps=1)
        (optimizer,) = trainer.strategy.optimizers
        states = trainer.strategy.adapter(optimizer).state
        owned = [parameter for parameter, state in states.items() if state]
        state = [value for parameter in owned for value in states[parameter].values()]
        plan = trainer.strategy.engine.plan.expected_memory(rank=rank, optimizer=OptimizerCost.of(optimizer))
        return sum(storages([*owned, *state]).values()), plan.optimizer

    for counted, expected in run_world(2, run):
        assert counted == pytest.approx(expected, rel=0.02)


def test_the_count_sees_what_is_made_in_a_step() -> None:
    """Its own check: a layer that makes 8 MB in its forward is above the plan by that much."""

    class Wasteful(Wide):
        def forward(self, x: Tensor) -> Tensor:
            torch.ones(2_000_000).sum()
            return super().forward(x)

    def run(rank: int) -> int:
        watch = Peak()
        fit(
            Probe(case("wasteful", Wasteful, units=("Block",), batch=features(WIDE, shape=(1,)))),
            stage=1,
            micro_steps=2,
            callbacks=[watch],
        )
        return watch.forward.most

    assert run_world(1, run)[0] == pytest.approx(8_000_000, rel=0.01)
