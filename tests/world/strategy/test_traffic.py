"""Collectives of one step in steady state: what, how often, how large and in what order is what the plan computes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_zero import ZeroPrecision
from lightning_zero.plan.plan import CollectiveTraffic, Traffic
from tests.helpers.cases import Block, Case, Stack, case
from tests.helpers.models import ZOO
from tests.helpers.probe import Probe, fit
from tests.helpers.rows import Row, in_one_world
from tests.helpers.world import run_world

STAGES = (1, 2, 3)
STEPS = 4


def frozen_between() -> nn.Module:
    """A frozen unit that is still resident when the next step begins, and units that are frozen in part."""
    model = Stack(Block(), Block(), Block(), Block())
    model.stem.bias.requires_grad_(False)
    model.layers[1].requires_grad_(False)
    model.layers[2].up.requires_grad_(False)
    return model


MODELS = {name: ZOO[name] for name in ("gpt_tied", "nested_units", "shared_across_units", "odd_sizes")}
MODELS["frozen_between"] = case("frozen_between", frozen_between)


class Wire(pl.Callback):
    """All collectives of every optimizer step, and how many agreements of the control plane there were."""

    def __init__(self, accumulate: int) -> None:
        self.accumulate = accumulate
        self.steps: list[list[Any]] = []
        self.agreements: list[float] = []

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        trainer.strategy.engine.collectives.observers.append(lambda call: self.steps[-1].append(call))

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.accumulate == 0:
            self.steps.append([])
            self.agreements.append(self._sequence(trainer))

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % self.accumulate == 0:
            self.agreements[-1] = self._sequence(trainer) - self.agreements[-1]

    def _sequence(self, trainer: pl.Trainer) -> float:
        """Torch's own count of the group's messages, and the transport's: nothing can hide from both."""
        control = trainer.strategy.engine.control
        if control.process_group is None:
            return 0
        passed_by = 0 if control.shortcut is None else control.shortcut.__self__.exchanges
        messages = 2 * (control.world_size - 1).bit_length()  # of an agreement, on each rank: there and back
        return control.process_group._get_sequence_number_for_group() / messages + passed_by


def traffic(calls: list[Any]) -> Traffic:
    sums = {kind: CollectiveTraffic() for kind in ("all_gather", "reduce_scatter", "broadcast")}
    for call in calls:
        sums[call.kind] += CollectiveTraffic(1, call.numel, call.nbytes)
    return Traffic(**sums)


def observe(model: Case, stage: int, accumulate: int, precision: Any = None, **strategy: Any) -> dict[str, Any]:
    wire = Wire(accumulate)
    options = {"accumulate_grad_batches": accumulate, "plugins": precision or []}
    trainer = fit(
        Probe(model), stage=stage, micro_steps=STEPS * accumulate, callbacks=[wire], options=options, **strategy
    )
    plan = trainer.strategy.engine.plan
    gathers = [[call.what for call in calls if call.kind == "all_gather"] for calls in wire.steps]
    expected_order = []
    if plan.placement.shards_parameters:
        for index in plan.gathers(accumulate)[0]:
            unit = plan.units[index]
            expected_order += [f"parameters of unit '{unit.name or '(root)'}'"] * len(unit.layouts)
    return {
        "expected": plan.expected_traffic(micro_steps=accumulate),
        "steps": [traffic(calls) for calls in wire.steps],
        "expected_order": expected_order,
        "gathers": gathers,
        "agreements": wire.agreements,
        "trainable": sum(layout.parameter_numel for layout in plan.trainable_layouts),
        "padded": sum(layout.numel for unit in plan.units for layout in unit.layouts),
        "padded_trainable": sum(layout.numel for unit in plan.units for layout in unit.trainable_layouts),
    }


def check(found: dict[str, Any], stage: int, accumulate: int, where: str) -> None:
    # The first step records the order of units, and ends with nothing resident; from the second on all are alike, from
    # the third where frozen units may be left over from the step before.
    for step in range(2 if "frozen" in where else 1, STEPS):
        assert found["steps"][step] == found["expected"], f"{where}, step {step}"
        if stage == 3:
            assert found["gathers"][step] == found["expected_order"], f"{where}, step {step}"
    # Begin and end of each backward that reduces, the first with the end of the forward, the last with the step.
    agreements = 2 if stage == 1 else 2 * accumulate
    assert found["agreements"][1:] == [agreements] * (STEPS - 1), where
    total = found["expected"].total.numel
    if stage == 1:
        assert total == 2 * found["padded_trainable"], where
    elif accumulate == 1:
        assert total <= (2 if stage == 2 else 3) * found["padded"], where


Setting = tuple[Callable[[], dict[str, Any]], int, int]


def run_all(world_size: int, settings: dict[str, Setting]) -> None:
    def run(rank: int) -> dict[str, dict[str, Any]]:
        return {name: setting[0]() for name, setting in settings.items()}

    for rank, results in enumerate(run_world(world_size, run, timeout=200)):
        for name, (_, stage, accumulate) in settings.items():
            check(results[name], stage, accumulate, f"rank {rank} of {world_size}, {name}")


def setting(model: Case, stage: int, accumulate: int, *args: Any, **options: Any) -> Setting:
    return lambda: observe(model, stage, accumulate, *args, **options), stage, accumulate


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_step_sends_what_the_plan_says(world_size: int) -> None:
    """Whatever the prefetch, which changes only what stays resident, and in bytes under mixed precision."""
    settings = {}
    # Three ranks have other shards and padding, not other exchanges.
    for name in MODELS if world_size == 2 else ("gpt_tied", "odd_sizes"):
        for stage, accumulate in ((1, 1), (1, 3), (2, 3), (3, 1), (3, 3)):
            options = setting(MODELS[name], stage, accumulate, bucket_mib=0.004)
            settings[f"{name}, stage {stage}, {accumulate} micro-steps"] = options
    if world_size == 2:
        for name, prefetch, accumulate in itertools.product(("gpt_tied", "frozen_between"), (0, 2), (1, 3)):
            options = setting(MODELS[name], 3, accumulate, prefetch=prefetch)
            settings[f"{name}, prefetch {prefetch}, {accumulate} micro-steps"] = options
        for stage, dtype in itertools.product((1, 3), (None, "bfloat16")):
            precision = ZeroPrecision("bf16-mixed", reduce_dtype=dtype)
            settings[f"stage {stage}, averages in {dtype}"] = setting(ZOO["gpt_tied"], stage, 1, precision)
    run_all(world_size, settings)


def test_frozen_units_and_the_whole_of_a_model() -> None:
    """Ten equal blocks and a small root: 2, 2 and 3 times the elements, less what is still resident."""
    deep = case("deep", lambda: Stack(*(Block() for _ in range(10))))

    def run(rank: int) -> tuple[dict[str, Any], list[tuple[int, int]]]:
        results = [observe(deep, stage, 1) for stage in STAGES]
        totals = [(found["steps"][-1].total.numel, found["padded"]) for found in results]
        return observe(ZOO["frozen_mix"], 3, 1), totals

    for frozen, (first, second, third) in run_world(2, run):
        # A frozen unit without a backward is at most what the plan says.
        assert frozen["steps"][-1].reduce_scatter == frozen["expected"].reduce_scatter
        assert frozen["steps"][-1].all_gather.numel <= frozen["expected"].all_gather.numel
        assert first[0] == 2 * first[1]
        assert second[0] == 2 * second[1]
        # Root (2 x 20 x 21 elements: 1 gather) and two of ten blocks are not gathered again.
        assert 2.5 * third[1] < third[0] < 3 * third[1]


class Marked(Block):
    """Tells when its forward and its backward begin and end."""

    def __init__(self, index: int, events: list[str]) -> None:
        super().__init__()
        self.index, self.events = index, events

    def forward(self, x: Tensor) -> Tensor:
        self.events.append(f"forward {self.index}")
        x = Mark.apply(x, self.events, f"backward {self.index} ends")
        x = super().forward(x)
        self.events.append(f"forward {self.index} ends")
        return Mark.apply(x, self.events, f"backward {self.index}")


class Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, events: list[str], what: str) -> Tensor:
        ctx.events, ctx.what = events, what
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.events.append(ctx.what)
        return gradient, None, None


class MarkWire(pl.Callback):
    def __init__(self, events: list[str]) -> None:
        self.events = events

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        def note(call: Any) -> None:
            if call.kind == "all_gather":
                self.events.append("gather " + call.what.rpartition(".")[2].rstrip("'"))

        trainer.strategy.engine.collectives.observers.append(note)

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        self.events.clear()


COUNT = 6


def prefetch_is_ahead_of_compute(prefetch: int) -> Row:
    """With a prefetch of k the gather of unit i + k, and of no later one, is under way before the forward of unit i."""

    def run(rank: int) -> list[str]:
        events: list[str] = []
        model = case("marked", lambda: Stack(*(Marked(i, events) for i in range(COUNT))), units=("Marked",))
        fit(Probe(model), stage=3, micro_steps=4, callbacks=[MarkWire(events)], prefetch=prefetch)
        return list(events)

    for events in (yield run):
        place = {event: index for index, event in enumerate(events) if not event.startswith("gather")}
        gathers: dict[str, list[int]] = {}
        for index, event in enumerate(events):
            gathers.setdefault(event, []).append(index)
        for i in range(COUNT):
            ahead, beyond = min(i + prefetch, COUNT - 1), i + prefetch + 1
            assert gathers[f"gather {ahead}"][0] < place[f"forward {i}"], events
            if beyond < COUNT:
                assert gathers[f"gather {beyond}"][0] > place[f"forward {i} ends"], events
        # Backward: the last prefetch + 1 units are resident; the others come again, as far ahead as in the forward.
        again = range(COUNT - prefetch - 1)
        assert [len(gathers[f"gather {i}"]) for i in range(COUNT)] == [2 if i in again else 1 for i in range(COUNT)]
        for i in again:
            assert gathers[f"gather {i}"][1] > place[f"backward {COUNT - 1}"] - 2, events
            assert gathers[f"gather {i}"][1] < place[f"backward {i + prefetch}"], events
            if i + prefetch + 1 < COUNT:
                assert gathers[f"gather {i}"][1] > place[f"backward {i + prefetch + 1} ends"], events


def test_prefetch_is_ahead_of_compute() -> None:
    in_one_world(2, *map(prefetch_is_ahead_of_compute, (0, 1, 2)))
